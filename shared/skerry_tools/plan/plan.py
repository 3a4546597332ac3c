"""A plan: what is judged, what would make it hold, what to choose where it is open.

Nothing but arithmetic: from a question to everything that its answer says.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import NamedTuple

from skerry.algorithm.presets import MOMENTUM_FROM_H
from skerry.log.streams import message_bytes
from skerry.protocol.parts import INITIAL_BYTES
from skerry.settings.modes import turns_are_even
from skerry_tools.plan.answer import shown
from skerry_tools.plan.baselines import TrainingMethod, methods
from skerry_tools.plan.measured import WIRE_BITS
from skerry_tools.plan.memory import contributions_bytes, learner_need, state_disk_bytes
from skerry_tools.plan.question import CHOICES, Question, check_plan
from skerry_tools.plan.traffic import Deployment, largest
from skerry_tools.plan.trained import deployment

SPARE, ENOUGH = 0.9, 1.01
"""Share of each limit that a choice may use, and the margin of amounts that a fix names."""
MOST_COMPARED, BETTER = 64, 0.98
"""Most sites for which choices are compared; most of a link that more fragments may need."""
MOST_H, MOST_P, MOST_CORES = 4096, 1024, 64
"""How far a fix is looked for."""
CHEAPER = ("int8", "int4")
"""Schemes that cost no quality worth naming, the finer one first."""
TOKENS_PER_PARAMETER = 20
"""Tokens to train on where the user does not say: Hoffmann et al. 2022, about."""


class Constraint(NamedTuple):
    """A need, and how much of it there is; ``more`` says how much is enough.

    Limits that are ``fixed`` (memory, messages) need no spare margin.
    """

    what: str
    need: float
    has: float
    unit: str
    why: str
    more: str = ""
    fixed: bool = False

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


class Variant(NamedTuple):
    """H, P and shards with which all holds, and the fastest link that a site then needs."""

    h_steps: int
    fragments: int
    shards: int
    link_bits_s: float

    def beats(self, other: Variant) -> bool:
        """Return True if it needs no more of anything than another one, and less of something."""
        fewer = self.h_steps <= other.h_steps and self.shards <= other.shards
        return self != other and fewer and BETTER * self.link_bits_s <= other.link_bits_s


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
    chosen: dict[str, int]
    way_out: dict[str, int]
    methods: tuple[TrainingMethod, ...]
    choices: tuple[Variant, ...]
    tokens: float

    @property
    def feasible(self) -> bool:
        return all(item.holds for item in self.judged)

    def speed_up(self, index: int) -> float:
        """Return how many times as fast the plan is as method ``index``, goodput included."""
        mine, other = self.methods[0], self.methods[index]
        return mine.tokens_s * mine.goodput / (other.tokens_s * other.goodput)


def make(asked: Question) -> RunPlan:
    """Work out a plan; ConfigError for a question that contradicts itself."""
    check_plan(asked)
    given = deployment(asked)
    chosen = choose(asked.open, given)
    at = changed(given, **chosen)
    judged = constraints(at)
    broken = [item for item in judged if not item.holds]
    tokens = at.tables.plan.tokens or at.run.train.tokens
    return RunPlan(
        question=asked,
        at=at,
        judged=tuple(judged),
        fixes=tuple(fixes(at, broken[0])) if broken else (),
        chosen=chosen,
        way_out=choose(CHOICES, at, (1.0,)) if broken and at.load.sync.overlap_steps else {},
        methods=methods(at),
        choices=tuple(pareto(given)) if asked.open else (),
        tokens=tokens or TOKENS_PER_PARAMETER * at.load.parameters,
    )


def changed(at: Deployment, **fields: int | str) -> Deployment:
    """Return the deployment with some settings of [sync], or the hub's cores, changed."""
    if "cores" in fields:
        return replace(at, hub=at.hub.model_copy(update=fields))
    return replace(at, load=at.load.changed(**fields))


def constraints(at: Deployment) -> list[Constraint]:
    """Return everything that is judged, the tightest first."""
    found = list(_limits(at))
    if at.load.sync.overlap_steps:
        found += [*_of_sites(at), *_of_hub(at)]
    return sorted(found, key=lambda item: -item.ratio)


def _limits(at: Deployment) -> Iterator[Constraint]:
    more = "activations too" if at.load.arch else "activations come on top"
    held = f"parameters, moments, anchors, gradients, fragments in flight; {more}"
    for site in at.sites.values():
        need, has = learner_need(at, site).total, site.table.memory
        what = f"site {site.name} chip memory"
        more = f"{shown(ENOUGH * need / has, 'x')} the memory, in larger chips or in more of them"
        yield Constraint(what, need, has, "B", held, more, fixed=True)
    if "window_bytes" in at.run.log.model_fields_set:
        why = "log.window_bytes must hold the initial parameters, in f32"
        need, has = INITIAL_BYTES * at.load.parameters, int(at.window_bytes)
        more = f"log.window_bytes={math.ceil(need)}"
        yield Constraint("log window", need, has, "B", why, more, fixed=True)
    _, slices = largest(at.load.leaves, at.load.parameters, at.load.sync.fragments)
    need = message_bytes(at.load.sync.chunk_bytes, slices)
    if need > at.hub.max_payload:  # no matter of degree
        why = "hub.max_payload must hold a chunk and its header"
        more = f"hub.max_payload of {shown(ENOUGH * need, 'B')}"
        yield Constraint("broker message", need, at.hub.max_payload, "B", why, more, fixed=True)
    if not at.load.sync.overlap_steps:
        why, share = "learners stop for every round", at.utilisation
        more = "mode=decoupled, in which no learner stops"
        target = at.tables.plan.utilisation_target
        yield Constraint("utilisation", target, share, "share", why, more)


def _of_sites(at: Deployment) -> Iterator[Constraint]:
    for name, site in at.sites.items():
        one = at.site_rounds[name]
        if one.factor is None or site.local:
            why = f"a round of over {at.load.room_steps:.3g} steps holds up others"
            yield Constraint(f"site {name} round", one.round_s, at.deadline_s, "s", why)
        if not site.local:
            averages, factor = (one.up_bits_s, one.down_bits_s), one.factor or 0.0
            endless = site.table.model_copy(update={"up": math.inf, "down": math.inf})
            most = at.link(replace(site, table=endless))
            wider = min(rate / wide for rate, wide in zip(most, site.rates, strict=True))
            links = zip(("up", "down"), averages, at.link(site), site.rates, strict=True)
            for way, average, has, wide in links:
                whose = ", by what is on its way in a round trip" if has < wide else ""
                yield _rate(f"site {name} {way}-link", average, has, factor, whose, wider)


def _of_hub(at: Deployment) -> Iterator[Constraint]:
    hub = at.hub_round
    remote = (name for name, site in at.sites.items() if not site.local)
    left_s = (at.deadline_s - at.site_rounds[name].elsewhere_s for name in remote)
    factor = hub.transfer_s / min((left for left in left_s if left > 0), default=math.inf)
    if at.hub.down:
        whose = ", all contributions"
        yield _rate("hub ingress", hub.ingress_bits_s, at.hub.down, factor, whose)
    if at.hub.up:
        whose = ", all global fragments"
        yield _rate("hub egress", hub.egress_bits_s, at.hub.up, factor, whose)
    why = "contributions and committed state"
    more = f"hub.write of {shown(ENOUGH * hub.broker_most_bytes_s, 'B/s')}"
    yield Constraint("broker", hub.broker_most_bytes_s, at.hub.write, "B/s", why, more)
    if at.hub.disk:
        need, why = state_disk_bytes(at) + contributions_bytes(at), "state and contributions"
        less = ", or less log.window_s" if state_disk_bytes(at) < at.hub.disk else ""
        more = f"hub.disk of {shown(ENOUGH * need, 'B')}{less}"
        yield Constraint("broker disk", need, at.hub.disk, "B", why, more)
    why = "of its time: decode, merge, encode"
    yield Constraint("syncer of a shard", hub.busy_share, 1.0, "share", why)
    why = "of each syncer, for whole commits: hash, compress and store too"
    yield Constraint("syncer CPU", hub.busy_cores, at.hub.cores, "core", why)


def _rate(
    what: str, average: float, has: float, factor: float, whose: str, wider: float = math.inf
) -> Constraint:
    """Return a link's constraint; it gains by being up to ``wider`` times as wide."""
    bound = "throughput" if average >= has * factor else "deadline"
    need = max(average, has * factor)
    more = f"links {shown(ENOUGH * need / has, 'x')} as wide, up and down"
    more = more if ENOUGH * need / has <= wider else ""
    return Constraint(what, need, has, "bit/s", f"{bound} bound{whose}", more)


def choose(
    open_settings: Collection[str], at: Deployment, limits: Sequence[float] = (1.0, math.inf)
) -> dict[str, int]:
    """Return H, P and shards where they are open: the least H that works, then P, then shards.

    Rounds that end within tau steps come first: a result that comes later is of less use. Fixed
    limits need no spare margin; ``limits`` are the shares of them that may be needed, tried in
    turn, so that a choice is made even if none fits memory. If nothing works, nothing is chosen and
    the defaults are judged.
    """
    for limit, within_tau in product(limits, (True, False)):
        for found, _ in _working(open_settings, replace(at, within_tau=within_tau), limit):
            return {name: count for name, count in found.items() if name in open_settings}
    return {}


def pareto(at: Deployment) -> list[Variant]:
    """Return the choices of H, P and shards that no other one beats in H, shards and links.

    A lower H costs less loss, fewer shards fewer machines. Of several P the least.
    """
    best: dict[tuple[int, int], Variant] = {}
    for found, after in _working(CHOICES, at) if len(at.sites) <= MOST_COMPARED else ():
        need = max((c.need for c in after if "link" in c.what), default=0.0)
        key = found["h_steps"], found["shards"]
        if key not in best or need < BETTER * best[key].link_bits_s:
            best[key] = Variant(**found, link_bits_s=need)
    return [one for one in best.values() if not any(other.beats(one) for other in best.values())]


def _working(
    settings: Collection[str], at: Deployment, limit: float = 1.0
) -> Iterator[tuple[dict[str, int], list[Constraint]]]:
    """Yield H, P and shards with which all holds, from the present ones on, and the constraints.

    ``limit`` is the share of fixed limits that may be needed.
    """
    now = {name: int(getattr(at.load.sync, name)) for name in CHOICES}
    among = (
        [count for count in counts if count >= now[name]] if name in settings else [now[name]]
        for name, counts in CHOICES.items()
    )
    for h, p, shards in product(*among):
        fits = p <= max(h, now["fragments"]) and shards <= p <= at.load.parameters
        if fits and turns_are_even(at.run.mode, h, p):
            found = {"h_steps": h, "fragments": p, "shards": shards}
            after = constraints(changed(at, **found))
            if all(c.ratio <= (limit if c.fixed else SPARE) for c in after):
                yield found, after


def fixes(at: Deployment, broken: Constraint) -> list[str]:
    """Return single changes that make this constraint hold, those that make all hold first.

    A setting has the value that was judged, and none breaks a constraint that holds now.
    """
    broken_too = {c.what for c in constraints(at) if not c.holds} - {broken.what}
    found = dict[str, int | str]()

    def works(but: Collection[str], field: str, value: int | str) -> bool:
        after = constraints(changed(at, **{field: value}))
        return all(c.holds for c in after if c.what not in but)

    for field, values in _changes(at):
        enough = partial(works, broken_too, field)
        if field in {"h_steps", "fragments", "overlap_steps", "cores"}:  # more hardly breaks more
            index = bisect_left(values, x=True, key=enough)
        else:
            index = next((n for n, value in enumerate(values) if enough(value)), len(values))
        if index < len(values):
            found.setdefault(field, values[index])
    first = sorted(found, key=lambda field: not works((), field, found[field]))
    named = [f"{'hub.' * (field == 'cores')}{field}={found[field]}" for field in first]
    return named + ([broken.more] if broken.more else [])


def _changes(at: Deployment) -> Iterator[tuple[str, Sequence[int | str]]]:
    """Yield what can be changed: settings, values in order.

    Where learners stop, P and tau stay, and so does the H = 1 of data-parallel. Fragments beyond H
    come in bundles and gain nothing. Less H is of use only where it ends outer momentum.
    """
    sync, even = at.load.sync, partial(turns_are_even, at.run.mode)
    yield "contribution_scheme", [s for s in CHEAPER if WIRE_BITS[s] < at.load.up_bits]
    yield "delta_scheme", [s for s in CHEAPER if WIRE_BITS[s] < at.load.down_bits]
    if sync.overlap_steps or sync.h_steps > 1:
        more, begins = sync.h_steps + 1, MOMENTUM_FROM_H
        less = range(min(sync.h_steps, begins) - 1, sync.overlap_steps, -1)[:1]
        for some in (range(more, begins), range(max(more, begins), MOST_H + 1), less):
            yield "h_steps", [h for h in some if even(h, sync.fragments)]
    if sync.overlap_steps:
        most = min(sync.h_steps, int(at.load.parameters), MOST_P)
        several = range(sync.fragments + 1, most + 1)
        yield "fragments", [p for p in several if even(sync.h_steps, p)]
        yield "overlap_steps", range(sync.overlap_steps + 1, sync.h_steps)
    yield "shards", range(sync.shards + 1, sync.fragments + 1)
    yield "cores", range(at.hub.cores + 1, MOST_CORES + 1)
