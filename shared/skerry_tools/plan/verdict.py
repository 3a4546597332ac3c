"""Feasible or not: every constraint of a plan, the tightest first."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry_tools.plan.costs import first_offers_bytes, learner_bytes
from skerry_tools.plan.figures import shown

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry_tools.plan.links import Link, Rounds


CHIP_MEMORY = "chip memory"


@dataclass(frozen=True, slots=True)
class Limits:
    """What is judged beside links: utilisation where learners stop, and by site its chips.

    ``chips`` are a site's name, how many chips a learner has there, and the bytes of one.
    """

    chips: tuple[tuple[str, int, float], ...] = ()
    window_bytes: float | None = None
    utilisation: float = 0.9


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


def cycle_s(rounds: Rounds) -> float:
    """Return how long H steps take learners that stop for rounds: P stops, for the slowest."""
    links = rounds.links.values()
    stop = max(rounds.round_s(link) for link in links)
    return rounds.load.h_steps * max(link.step_s for link in links) + rounds.load.fragments * stop


def utilisation(rounds: Rounds) -> float:
    """Return the share of time in which learners compute, on average: 1 unless they stop."""
    load = rounds.load
    if load.overlap_steps:
        return 1.0
    steps = sum(link.step_s * link.learners for link in rounds.links.values())
    return load.h_steps * steps / rounds.learners / cycle_s(rounds)


def constraints(rounds: Rounds, limits: Limits) -> list[Constraint]:
    """Return everything that is judged, the tightest first."""
    found = [
        *(item for link in rounds.links.values() for item in _of_link(rounds, link)),
        *_of_hub(rounds),
        *_of_limits(rounds, limits),
    ]
    return sorted(found, key=lambda item: -item.ratio)


def _of_link(rounds: Rounds, link: Link) -> Iterator[Constraint]:
    blocking = not rounds.load.overlap_steps
    if not blocking:
        factor = rounds.deadline_factor(link)
        if factor is None or link.local:
            need, has = rounds.round_s(link), rounds.deadline_s
            why = f"a round of over {rounds.room_steps:.3g} steps holds up others"
            yield Constraint(f"site {link.name} round", need, has, "s", why)
        if link.local:
            return
        directions = (
            ("up", link.up_bits_s, rounds.up_throughput(link)),
            ("down", link.down_bits_s, rounds.down_throughput(link)),
        )
        for way, has, throughput in directions:
            deadline = has * (factor or 0.0)
            bound = "throughput" if throughput >= deadline else "deadline"
            need = max(throughput, deadline)
            yield Constraint(f"site {link.name} {way}-link", need, has, "bit/s", f"{bound} bound")


def _of_hub(rounds: Rounds) -> Iterator[Constraint]:
    if not rounds.load.overlap_steps:
        return
    hub = rounds.hub
    rates = (
        ("hub ingress", rounds.ingress, hub.down_bits_s, "all contributions"),
        ("hub egress", rounds.egress, hub.up_bits_s, "all global fragments"),
    )
    for what, throughput, has, whose in rates:
        if has:
            deadline = has * rounds.hub_factor
            bound = "throughput" if throughput >= deadline else "deadline"
            need = max(throughput, deadline)
            yield Constraint(what, need, has, "bit/s", f"{bound} bound, {whose}")
    if hub.write_bytes_s:
        why = "contributions and committed state"
        yield Constraint("broker", rounds.broker_write, hub.write_bytes_s, "B/s", why)
    why = "of its time: decode, merge, encode"
    yield Constraint("syncer of a shard", rounds.syncer_busy, 1.0, "share", why)


def _of_limits(rounds: Rounds, limits: Limits) -> Iterator[Constraint]:
    for site, count, has in limits.chips:
        why = "parameters, anchors, AdamW and fragments in flight; activations come on top"
        need = learner_bytes(rounds.load) / count
        yield Constraint(f"site {site} {CHIP_MEMORY}", need, has, "B", why)
    if limits.window_bytes is not None:
        need = first_offers_bytes(rounds)
        why = "log.window_bytes must hold every learner's initial parameters, in f32"
        yield Constraint("log window", need, limits.window_bytes, "B", why)
    if not rounds.load.overlap_steps:
        share = utilisation(rounds)
        why = "learners stop for every round"
        yield Constraint("utilisation", limits.utilisation, share, "share", why)
