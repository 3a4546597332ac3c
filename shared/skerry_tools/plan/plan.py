"""A plan: what is judged, what would make it hold, what to choose where it is open.

Nothing but arithmetic: from a question to everything that its answer says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from skerry.algorithm.presets import state_vectors
from skerry.models.sizes import leaf_specs_of, sizes_of
from skerry_tools.plan.baselines import Bill, TrainingMethod, bill, methods
from skerry_tools.plan.figures import shown
from skerry_tools.plan.measured import WIRE_BITS
from skerry_tools.plan.question import OPEN, Question, check_plan, refuse
from skerry_tools.plan.tables import SiteTable
from skerry_tools.plan.traffic import Deployment, HubRound, PlannedSite, SiteRound, SyncLoad

if TYPE_CHECKING:  # imports numpy
    from skerry.algorithm.fragments import LeafSpec

CHIP_MEMORY = "chip memory"
CHOICES = {
    "h_steps": (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024),
    "fragments": (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "shards": (1, 2, 4, 8, 16, 32, 64),
}
SPARE = 0.9
"""What is chosen leaves a tenth of every limit free."""
MOST_H, MOST_P, MOST_CORES = 4096, 1024, 64
"""How far a fix is looked for."""
CHEAPER = ("int8", "int4")
"""Schemes that cost no quality worth naming, the finer one first."""
TOKENS_PER_PARAMETER = 20
"""Tokens to train on where the user does not say: Hoffmann et al. 2022, about."""


@dataclass(frozen=True, slots=True)
class Constraint:
    """One thing that is needed, and how much of it there is."""

    what: str
    need: float
    has: float
    unit: str
    why: str

    @property
    def ratio(self) -> float:
        """Need over what there is; above 1 the plan does not work."""
        return self.need / self.has

    @property
    def holds(self) -> bool:
        return self.ratio <= 1 + 1e-9

    @property
    def text(self) -> str:
        """The sentence without its fix."""
        need, has = shown(self.need, self.unit), shown(self.has, self.unit)
        return f"{self.what} needs {need}, has {has} ({self.why})"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Everything a plan worked out; ``chosen`` are the settings that the user had left open.

    ``fixes`` are single changes, each enough for what binds; ``way_out`` are H, P and shards with
    which all would hold, with a tenth to spare. Both are empty for a plan that is feasible.
    """

    question: Question
    at: Deployment
    judged: tuple[Constraint, ...]
    fixes: tuple[str, ...]
    chosen: Mapping[str, int]
    way_out: Mapping[str, int]
    methods: tuple[TrainingMethod, ...]
    bills: tuple[Bill, ...]
    tokens: float

    @property
    def feasible(self) -> bool:
        return all(item.holds for item in self.judged)

    def speed_up(self, index: int) -> float:
        """Return how many times as fast the plan is as method ``index``, goodput included."""
        mine, other = self.methods[0], self.methods[index]
        return 1.0 if not index else mine.tokens_s * mine.goodput / (other.tokens_s * other.goodput)


def make(asked: Question) -> RunPlan:
    """Work out a plan; ConfigError for a question that contradicts itself."""
    check_plan(asked)
    at = deployment(asked)
    chosen = choose(asked.open, at)
    at = replace(at, load=at.load.changed(**_fields(chosen)))
    judged = constraints(at)
    broken = [item for item in judged if not item.holds]
    tokens = at.plan.tokens or TOKENS_PER_PARAMETER * at.load.parameters
    ways = methods(at)
    return RunPlan(
        question=asked,
        at=at,
        judged=tuple(judged),
        fixes=tuple(fixes(at, broken[0])) if broken else (),
        chosen=chosen,
        way_out=choose(OPEN, at) if broken and at.load.sync.overlap_steps else {},
        methods=ways,
        bills=tuple(bill(way, at, asked.tables, tokens) for way in ways),
        tokens=tokens,
    )


def deployment(asked: Question) -> Deployment:
    """Return what is to be judged, with nothing left open but H, P and shards.

    Raises ConfigError for a model of the user's own without plan.parameters.
    """
    tables, log = asked.tables, asked.run.log
    load, layers = sync_load(asked)
    active = tables.plan.active_parameters or load.parameters
    sites = {
        name: PlannedSite(name, site, step_s(asked, site, active), step_tokens(asked, site), local)
        for name, site in tables.sites.items()
        for local in (name == tables.hub.site,)
    }
    window = float(log.window_bytes) if "window_bytes" in log.model_fields_set else None
    return Deployment(load, sites, tables.hub, tables.plan, layers, window)


def sync_load(asked: Question) -> tuple[SyncLoad, int]:
    """Return what is synchronised, of plan.parameters or else [model], and the model's layers."""
    table, sync = asked.tables.plan, asked.run.sync
    parameters, layers = table.parameters, table.layers
    leaves: tuple[LeafSpec, ...] = ()
    if parameters is None:
        if asked.run.model.factory:
            text = "is missing: a plan does not build a model of your own; give --params 12e9."
            refuse("plan.parameters", text)
        sizes = sizes_of(asked.run.model)
        layers, leaves = sizes.layers, leaf_specs_of(sizes)
        parameters = sum(leaf.size for leaf in leaves)
    elif sync.fragments > parameters:
        text = f"is {sync.fragments} but the model has {parameters:.0f} parameters: lower it."
        refuse("sync.fragments", text)
    outer = asked.run.outer
    vectors = state_vectors(outer.preset, sync.h_steps, outer.momentum)
    return SyncLoad(sync, parameters, leaves, vectors), layers


def step_tokens(asked: Question, site: SiteTable) -> float:
    """Return the tokens of one step of one of the site's learners."""
    own = site.tokens_per_step or asked.tables.plan.tokens_per_step
    return own or float(asked.run.data.seq_len * asked.run.data.batch)


def step_s(asked: Question, site: SiteTable, active: float) -> float:
    """Return a site's step time: as given, or 6 operations per active parameter and token."""
    if site.step_time is not None:
        return site.step_time
    speed = (site.flops_per_chip or 1.0) * site.chips * site.utilisation
    return 6 * active * step_tokens(asked, site) / speed


def constraints(at: Deployment) -> list[Constraint]:
    """Return everything that is judged, the tightest first."""
    found = list(_of_limits(at))
    if at.load.sync.overlap_steps:
        hub, rounds = at.hub_round, at.site_rounds
        for name, site in at.sites.items():
            found += _of_site(at, site, rounds[name])
        left_s = (
            at.deadline_s - rounds[s.name].elsewhere_s for s in at.sites.values() if not s.local
        )
        factor = hub.transfer_s / min((left for left in left_s if left > 0), default=math.inf)
        found += _of_hub(at, hub, factor)
    return sorted(found, key=lambda item: -item.ratio)


def _of_site(at: Deployment, site: PlannedSite, one: SiteRound) -> Iterator[Constraint]:
    if one.factor is None or site.local:
        why = f"a round of over {at.load.room_steps:.3g} steps holds up others"
        yield Constraint(f"site {site.name} round", one.round_s, at.deadline_s, "s", why)
    if not site.local:
        factor = one.factor or 0.0
        yield _rate(f"site {site.name} up-link", one.up_bits_s, site.up_bits_s, factor)
        yield _rate(f"site {site.name} down-link", one.down_bits_s, site.down_bits_s, factor)


def _rate(what: str, average: float, has: float, factor: float, whose: str = "") -> Constraint:
    bound = "throughput" if average >= has * factor else "deadline"
    return Constraint(what, max(average, has * factor), has, "bit/s", f"{bound} bound{whose}")


def _of_hub(at: Deployment, hub: HubRound, factor: float) -> Iterator[Constraint]:
    rates = (
        ("hub ingress", hub.ingress_bits_s, at.hub.down, ", all contributions"),
        ("hub egress", hub.egress_bits_s, at.hub.up, ", all global fragments"),
    )
    yield from (_rate(what, need, has, factor, whose) for what, need, has, whose in rates if has)
    if at.hub.write:
        why = "contributions and committed state"
        yield Constraint("broker", hub.broker_bytes_s, at.hub.write, "B/s", why)
    why = "of its time: decode, merge, encode"
    yield Constraint("syncer of a shard", hub.busy_share, 1.0, "share", why)


def _of_limits(at: Deployment) -> Iterator[Constraint]:
    why = "parameters, anchors, AdamW and fragments in flight; activations come on top"
    for site in at.sites.values():
        if site.table.memory is not None:
            need = at.load.learner_bytes / site.table.chips
            yield Constraint(f"site {site.name} {CHIP_MEMORY}", need, site.table.memory, "B", why)
    if at.window_bytes is not None:
        why = "log.window_bytes must hold every learner's initial parameters, in f32"
        yield Constraint("log window", at.initial_bytes, at.window_bytes, "B", why)
    if not at.load.sync.overlap_steps:
        why, share = "learners stop for every round", at.utilisation
        yield Constraint("utilisation", at.plan.utilisation_target, share, "share", why)


def choose(open_paths: Collection[str], at: Deployment) -> dict[str, int]:
    """Return H, P and shards where they are open: the least H that works, then P, then shards.

    Rounds that end within tau steps come first: a result that comes later is of less use. Memory of
    chips needs nothing to spare, and where no choice fits it, what is best without it is chosen.
    Nothing is chosen where nothing works: then the defaults are judged.
    """
    for within_tau, any_memory in ((True, False), (False, False), (True, True), (False, True)):
        for found in _choices(open_paths, at.load):
            after = replace(at, load=at.load.changed(**_fields(found)), within_tau=within_tau)
            if all(_spares(item, any_memory=any_memory) for item in constraints(after)):
                return found
    return {}


def _spares(item: Constraint, *, any_memory: bool) -> bool:
    if item.what.endswith(CHIP_MEMORY):
        return any_memory or item.holds
    return item.ratio <= SPARE


def _choices(open_paths: Collection[str], load: SyncLoad) -> Iterator[dict[str, int]]:
    def among(name: str, now: int) -> list[int]:
        return [n for n in CHOICES[name] if n >= now] if f"sync.{name}" in open_paths else [now]

    for h in among("h_steps", load.sync.h_steps):
        for p in among("fragments", load.sync.fragments):
            for shards in among("shards", load.sync.shards):
                if p <= max(h, load.sync.fragments) and shards <= p <= load.parameters:
                    found = {"sync.h_steps": h, "sync.fragments": p, "sync.shards": shards}
                    yield {path: n for path, n in found.items() if path in open_paths}


def _fields(settings: Mapping[str, int]) -> dict[str, int]:
    return {path.removeprefix("sync."): value for path, value in settings.items()}


def least(now: int, most: int, works: Callable[[int], bool]) -> int | None:
    """Return the least count above ``now`` that works, where more never work less; None if none."""
    found = now + 1 + bisect_left(range(now + 1, most + 1), x=True, key=works)
    return found if found <= most else None


def fixes(at: Deployment, broken: Constraint) -> list[str]:
    """Return single changes that make this constraint hold, those that make all hold first.

    None of them breaks a constraint that holds now.
    """
    broken_too = {c.what for c in constraints(at) if not c.holds} - {broken.what}

    def works(after: Deployment) -> bool:
        return all(c.holds for c in constraints(after) if c.what not in broken_too)

    def all_hold(found: tuple[str, Deployment]) -> bool:
        return all(c.holds for c in constraints(found[1]))

    found = sorted(_changes(at, works), key=all_hold, reverse=True)
    own = _more_of(broken)
    return [label for label, _ in found] + ([own] if own else [])


def _more_of(broken: Constraint) -> str:
    """Return more of what there is too little of, where that can be had."""
    need = shown(broken.need, broken.unit)
    if broken.unit == "bit/s":
        return f"a link of {need}"
    if broken.what.endswith(CHIP_MEMORY):
        return f"{shown(broken.ratio, 'x')} as many chips"
    return {
        "utilisation": "mode=decoupled, in which no learner stops",
        "broker": f"hub.write of {need}",
        "log window": f"log.window_bytes={math.ceil(broken.need)}",
    }.get(broken.what, "")


def _changes(
    at: Deployment, works: Callable[[Deployment], bool]
) -> Iterator[tuple[str, Deployment]]:
    """Yield single changes that work: cheaper schemes, then what can be counted up."""
    ways = (("contributions", "contribution_scheme"), ("global fragments", "global_scheme"))
    for kind, field in ways:
        bits = WIRE_BITS[getattr(at.load.sync, field)]
        cheaper = ((s, changed(at, field, s)) for s in CHEAPER if WIRE_BITS[s] < bits)
        found = next((one for one in cheaper if works(one[1])), None)
        if found:
            yield f"{found[0]} {kind}", found[1]
    for label, field, now, most in _counts(at):
        at_count = partial(changed, at, field)
        if field == "shards":  # more of them take more of chips' memory
            counts = range(now + 1, most + 1)
            count = next((n for n in counts if works(at_count(n))), None)
        else:
            count = least(now, most, _composed(works, at_count))
        if count is not None:
            yield f"{label} >= {count}", at_count(count)


def _composed(
    works: Callable[[Deployment], bool], change: Callable[[int], Deployment]
) -> Callable[[int], bool]:
    return lambda count: works(change(count))


def _counts(at: Deployment) -> Iterator[tuple[str, str, int, int]]:
    """Yield what can be counted up: label, field, where it is, how far it goes.

    Where learners stop, P and tau stay, and so does the H = 1 of data-parallel. Fragments beyond H
    come in bundles and gain nothing.
    """
    load = at.load
    if load.sync.overlap_steps or load.sync.h_steps > 1:
        yield "H", "h_steps", load.sync.h_steps, MOST_H
    if load.sync.overlap_steps:
        most = min(load.sync.h_steps, int(load.parameters), MOST_P)
        yield "P", "fragments", load.sync.fragments, most
        yield "tau", "overlap_steps", load.sync.overlap_steps, load.sync.h_steps - 1
    yield "shards", "shards", load.sync.shards, load.sync.fragments
    yield "hub.cores", "cores", at.hub.cores, MOST_CORES


def changed(at: Deployment, field: str, value: int | str) -> Deployment:
    """Return the deployment with one of its settings, or the hub's cores, changed."""
    if field == "cores":
        return replace(at, hub=at.hub.model_copy(update={field: value}))
    return replace(at, load=at.load.changed(**{field: value}))
