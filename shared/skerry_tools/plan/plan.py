"""The plan: from a request to an answer, with nothing but arithmetic in between."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry.algorithm.presets import PRESETS, resolved
from skerry_tools.plan import costs
from skerry_tools.plan.baselines import Fleet, others, ours
from skerry_tools.plan.fixes import fixes
from skerry_tools.plan.links import HubLimits, Link, Rounds, Workload
from skerry_tools.plan.models import size_of
from skerry_tools.plan.sites import OPEN
from skerry_tools.plan.verdict import CHIP_MEMORY, Constraint, Limits, constraints

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from skerry_tools.plan.baselines import Pace
    from skerry_tools.plan.costs import Bill
    from skerry_tools.plan.sites import Request, Site

H_CHOICES = (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)
P_CHOICES = (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
SHARD_CHOICES = (1, 2, 4, 8, 16, 32, 64)
SPARE = 0.9
"""What is chosen leaves a tenth of every limit free."""
ADAM_VECTORS = 2


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything a plan worked out; ``chosen`` are the settings that the user had left open.

    ``fixes`` mend what binds, one each; ``way_out`` are H, P and shards with which all would hold,
    with a tenth to spare; both are empty for a plan that is feasible.
    """

    request: Request
    rounds: Rounds
    fleet: Fleet
    limits: Limits
    judged: tuple[Constraint, ...]
    fixes: tuple[str, ...]
    chosen: Mapping[str, int]
    way_out: Mapping[str, int]
    paces: tuple[Pace, ...]
    bills: tuple[Bill, ...]
    tokens: float

    @property
    def feasible(self) -> bool:
        return all(item.holds for item in self.judged)

    @property
    def binding(self) -> Constraint | None:
        """What is tightest; None where nothing limits."""
        return self.judged[0] if self.judged else None


def make(request: Request) -> Plan:
    """Work out a plan; raises ConfigError for a request that contradicts itself."""
    rounds, limits = _rounds(request), _limits(request)
    chosen = _choose(request.open, rounds, limits)
    rounds = replace(rounds, load=_with(rounds.load, chosen))
    judged = constraints(rounds, limits)
    broken = [item for item in judged if not item.holds]
    overlapping = broken and rounds.load.overlap_steps
    fleet = _fleet(request, rounds)
    table = request.scene.plan
    tokens = table.tokens or costs.TOKENS_PER_PARAMETER * rounds.load.parameters
    paces = (ours(rounds, fleet, table), *others(rounds, fleet, table))
    return Plan(
        request=request,
        rounds=rounds,
        fleet=fleet,
        limits=limits,
        judged=tuple(judged),
        fixes=tuple(fixes(rounds, limits, broken[0])) if broken else (),
        chosen=chosen,
        way_out=_choose(frozenset(OPEN), rounds, limits) if overlapping else {},
        paces=paces,
        bills=tuple(costs.bill(pace, fleet, rounds, request.scene, tokens) for pace in paces),
        tokens=tokens,
    )


def step_s(request: Request, site: Site, active: float) -> float:
    """Return a site's step time: as given, or 6 operations per active parameter and token."""
    if site.step_time is not None:
        return site.step_time
    speed = (site.flops_per_chip or 1.0) * site.chips * site.utilisation
    return 6 * active * step_tokens(request, site) / speed


def step_tokens(request: Request, site: Site) -> float:
    """Return the tokens of one step of one of the site's learners."""
    data = request.run.data
    own = site.tokens_per_step or request.scene.plan.tokens_per_step
    return own or float(data.seq_len * data.batch)


def outer_vectors(request: Request) -> int:
    """Return how many f32 vectors of outer state a parameter has: one of momentum, or Adam's."""
    outer = request.run.outer
    if outer.preset == "adamw":
        return ADAM_VECTORS
    if outer.preset not in PRESETS:  # somebody's own: a guess
        return 1
    _, sgd = resolved(outer.preset, request.run.sync.h_steps)
    return int((sgd.momentum if outer.momentum is None else outer.momentum) > 0)


def _rounds(request: Request) -> Rounds:
    sync, hub, size = request.run.sync, request.scene.hub, size_of(request)
    load = Workload(
        size=size,
        fragments=sync.fragments,
        h_steps=sync.h_steps,
        overlap_steps=sync.overlap_steps,
        quorum=sync.quorum,
        shards=sync.shards,
        up_scheme=sync.contribution_scheme,
        down_scheme=sync.global_scheme,
        outer_vectors=outer_vectors(request),
    )
    active = request.scene.plan.active_parameters or size.parameters
    links = {
        name: Link(
            name=name,
            learners=site.learners,
            up_bits_s=site.up_bits_s,
            down_bits_s=site.down_bits_s,
            rtt_s=site.rtt,
            step_s=step_s(request, site, active),
            cores=site.cores,
            local=name == hub.site,
        )
        for name, site in request.scene.sites.items()
    }
    return Rounds(load, links, HubLimits(hub.down, hub.up, hub.write, hub.cores))


def _limits(request: Request) -> Limits:
    log = request.run.log
    given = "window_bytes" in log.model_fields_set
    return Limits(
        chips=tuple(
            (name, site.chips, site.memory)
            for name, site in request.scene.sites.items()
            if site.memory is not None
        ),
        window_bytes=float(log.window_bytes) if given else None,
        utilisation=request.scene.plan.utilisation_target,
    )


def _fleet(request: Request, rounds: Rounds) -> Fleet:
    sites = request.scene.sites
    return Fleet(
        tokens={name: step_tokens(request, site) for name, site in sites.items()},
        chips={name: site.chips for name, site in sites.items()},
        links=rounds.links,
    )


def _choose(paths: frozenset[str], rounds: Rounds, limits: Limits) -> dict[str, int]:
    """Return H, P and shards, as far as they are open: the least H that works, then P, then shards.

    Rounds that are over within tau steps come before those that only hold up no others: a result
    that comes later is of less use. Memory of chips needs nothing to spare, and where no choice
    fits it, what is best without it is chosen. Nothing is chosen where nothing works: then the
    defaults are what the verdict is about.
    """
    for within_tau, roomy in ((True, False), (False, False), (True, True), (False, True)):
        for found in _choices(paths, rounds.load):
            load = _with(rounds.load, found)
            after = replace(rounds, load=load, within_tau=within_tau)
            if all(_spares(item, roomy=roomy) for item in constraints(after, limits)):
                return {path: value for path, value in found.items() if path in paths}
    return {}


def _spares(item: Constraint, *, roomy: bool) -> bool:
    """Tell whether a choice leaves enough of this; ``roomy``: whatever chips can hold."""
    if item.what.endswith(CHIP_MEMORY):
        return roomy or item.holds
    return item.ratio <= SPARE


def _choices(paths: frozenset[str], load: Workload) -> Iterator[dict[str, int]]:
    def among(path: str, choices: tuple[int, ...], now: int) -> tuple[int, ...]:
        return tuple(n for n in choices if n >= now) if path in paths else (now,)

    for h in among("sync.h_steps", H_CHOICES, load.h_steps):
        for p in among("sync.fragments", P_CHOICES, load.fragments):
            for shards in among("sync.shards", SHARD_CHOICES, load.shards):
                if p <= max(h, load.fragments) and shards <= p <= load.parameters:
                    yield {"sync.h_steps": h, "sync.fragments": p, "sync.shards": shards}


def _with(load: Workload, chosen: Mapping[str, int]) -> Workload:
    return replace(
        load,
        h_steps=chosen.get("sync.h_steps", load.h_steps),
        fragments=chosen.get("sync.fragments", load.fragments),
        shards=chosen.get("sync.shards", load.shards),
    )
