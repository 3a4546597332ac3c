"""What else could be done with the same chips and links: a step's time, and so tokens a second.

Every baseline gets the better of any doubt: gradients in bf16, an ideal ring between the sites, an
all-reduce hidden behind the backward pass. A ring sends ``2 (1 - 1/M) b N`` bits each way through
every site and step (Patarasuk and Yuan, 2009), over its slowest link, in ``2 (M - 1)`` hops.

Failures, where ``chip_mtbi`` is given, at rate ``lambda`` while running, R to recover::

    data-parallel, DiLoCo   1 / (1 + lambda_all R)                     one failure stops all
    elastic                 1 / (1 + lambda_all 2 resize) * 1 / (1 + lambda_one R)
    ours                    1 / (1 + lambda_one R)                     one failure stops one learner

These are means; ``skerry simulate`` has distributions, rollback and quorum.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry_tools.plan.closed import Clock, halting, ring_bits
from skerry_tools.plan.utilisation import Island, data_parallel_step_s
from skerry_tools.plan.verdict import cycle_s, utilisation

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry_tools.plan.links import Link, Rounds
    from skerry_tools.plan.sites import PlanTable


@dataclass(frozen=True, slots=True)
class Pace:
    """How fast a method is without failures, and the ``goodput`` that failures leave.

    ``bits`` go through the busiest site's up-link in H steps.
    """

    name: str
    tokens_s: float
    utilisation: float
    goodput: float
    bits: float
    convention: str


@dataclass(frozen=True, slots=True)
class Fleet:
    """Learners one by one: tokens of a step, chips and link, by site."""

    tokens: Mapping[str, float]
    chips: Mapping[str, int]
    links: Mapping[str, Link]

    @property
    def learners(self) -> int:
        return sum(link.learners for link in self.links.values())

    @property
    def all_chips(self) -> int:
        return sum(self.chips[name] * link.learners for name, link in self.links.items())

    @property
    def step_tokens(self) -> float:
        """Tokens of one step of every learner."""
        return sum(self.tokens[name] * link.learners for name, link in self.links.items())

    @property
    def free_tokens_s(self) -> float:
        """Tokens a second where nobody waits for anybody."""
        return sum(
            self.tokens[name] * link.learners / link.step_s for name, link in self.links.items()
        )

    @property
    def slowest_s(self) -> float:
        return max(link.step_s for link in self.links.values())


def ours(rounds: Rounds, fleet: Fleet, table: PlanTable) -> Pace:
    """Return the pace of the plan itself."""
    up = max(rounds.up_throughput(link) for link in rounds.links.values()) * rounds.period_s
    if not rounds.load.overlap_steps:
        good, words = _all_stop(fleet, table), "learners stop for rounds"
        return Pace("this plan", _stopping(rounds, fleet), utilisation(rounds), good, up, words)
    good, words = _one_stops(fleet, table), "learners never wait"
    return Pace("this plan", fleet.free_tokens_s, 1.0, good, up, words)


def _stopping(rounds: Rounds, fleet: Fleet) -> float:
    return fleet.step_tokens * rounds.load.h_steps / cycle_s(rounds)


def others(rounds: Rounds, fleet: Fleet, table: PlanTable) -> list[Pace]:
    """Return data-parallel, blocking DiLoCo and elastic data-parallel."""
    load = rounds.load
    step_s, bits = ring_step_s(rounds, fleet, table)
    tokens_s = fleet.step_tokens / step_s
    share = fleet.slowest_s / step_s
    ring = f"ring all-reduce of {table.gradient_bits:g}-bit gradients behind the backward pass"
    blocking_s = blocking_cycle_s(rounds, fleet)
    computing = sum(link.step_s * link.learners for link in fleet.links.values()) / fleet.learners
    return [
        Pace("data-parallel", tokens_s, share, _all_stop(fleet, table), bits * load.h_steps, ring),
        Pace(
            "elastic data-parallel",
            tokens_s,
            share,
            _elastic(fleet, table),
            bits * load.h_steps,
            f"{ring}; a failure pauses all for two resizes and takes one learner away",
        ),
        Pace(
            "blocking DiLoCo",
            fleet.step_tokens * load.h_steps / blocking_s,
            load.h_steps * computing / blocking_s,
            _all_stop(fleet, table),
            max(rounds.up_throughput(link) for link in rounds.links.values()) * rounds.period_s,
            "the same hub, schemes and H; the whole model at once, all stop until all have it",
        ),
    ]


def blocking_cycle_s(rounds: Rounds, fleet: Fleet) -> float:
    """Return how long H steps take where all stop until all have met over the whole model.

    It falls due at one step, in as many fragments as there are syncers to share it.
    """
    load = rounds.load
    whole = replace(rounds, load=replace(load, fragments=load.shards, h_steps=1))
    stop = max(whole.round_s(link) for link in whole.links.values())
    return load.h_steps * fleet.slowest_s + stop


def ring_step_s(rounds: Rounds, fleet: Fleet, table: PlanTable) -> tuple[float, float]:
    """Return seconds of a data-parallel step, and the bits that a site sends in it."""
    count = fleet.learners
    bits = ring_bits(table.gradient_bits, rounds.load.parameters, count)
    if count == 1:
        return fleet.slowest_s, 0.0
    rate = min(
        min(link.up_bits_s, link.down_bits_s) / link.learners for link in fleet.links.values()
    )
    hops = 2 * (count - 1) * max(link.rtt_s for link in fleet.links.values()) / 2
    layers = rounds.load.size.layers
    island = Island(fleet.slowest_s, layers, bits / layers)
    return data_parallel_step_s(island, rate, hops), bits


def _all_stop(fleet: Fleet, table: PlanTable) -> float:
    if table.chip_mtbi is None:
        return 1.0
    return halting(fleet.all_chips / table.chip_mtbi, table.recovery, Clock.RUNNING)


def _one_stops(fleet: Fleet, table: PlanTable) -> float:
    """Return the mean over learners, by the tokens that each would make."""
    if table.chip_mtbi is None:
        return 1.0
    mtbi = table.chip_mtbi
    kept = sum(
        fleet.tokens[name]
        * link.learners
        / link.step_s
        * halting(fleet.chips[name] / mtbi, table.recovery, Clock.RUNNING)
        for name, link in fleet.links.items()
    )
    return kept / fleet.free_tokens_s


def _elastic(fleet: Fleet, table: PlanTable) -> float:
    if table.chip_mtbi is None:
        return 1.0
    pauses = fleet.all_chips / table.chip_mtbi * 2 * table.resize
    return _one_stops(fleet, table) / (1 + pauses)
