"""What the same chips and links could do otherwise, and what each way costs in time and money.

Every baseline gets the benefit of each assumption: gradients in bf16, an ideal ring between the
sites (Patarasuk and Yuan, JPDC 69, 2009), an all-reduce hidden by the backward pass. Where
``chip_mtbi`` is given, one failure stops all in data-parallel and DiLoCo; in elastic data-parallel
it costs two resizes and one learner for a while, and in the plan that one learner only. These are
means; ``skerry simulate`` has distributions, rollback and quorum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from skerry_tools.plan.tables import FailureClock, ScenarioTables
from skerry_tools.plan.traffic import Deployment

GB = 1e9
BACKWARD = 2 / 3
"""Share of a step that is its backward pass: twice the forward pass's operations."""


def halting(rate_s: float, pause_s: float, clock: FailureClock) -> float:
    """Return the share of time that a learner runs which halts until nothing is broken.

    ``rate_s``: failures per second of the whole learner while it runs. Failures of what runs:
    ``1 / (1 + rate * pause)``, one cycle is a run and a pause. By the calendar: ``exp(-rate *
    pause)``, the chance that nothing broke within the last pause, as the idle share of infinitely
    many servers (Takacs, Introduction to the Theory of Queues, 1962). Of a pause that varies, only
    the mean counts in both.
    """
    if clock is FailureClock.RUNNING:
        return 1.0 / (1.0 + rate_s * pause_s)
    return math.exp(-rate_s * pause_s)


def ring_bits(bits: float, params: float, learners: int) -> float:
    """Return what each learner sends per step in a ring all-reduce: ``2 (1 - 1/M) b N`` bits."""
    return 2.0 * (1.0 - 1.0 / learners) * bits * params


def data_parallel_step_s(
    step_s: float, layers: int, layer_s: float, latency_s: float = 0.0
) -> float:
    """Return how long a step takes whose gradients are reduced layer by layer during it.

    A third of the step is forward, the rest backward; the last layer is sent first, each one takes
    ``layer_s``, and the step ends when the first layer has been reduced too (Streaming DiLoCo,
    arXiv 2501.18512, section 3.1).
    """
    backward = BACKWARD * step_s
    reduced = max(backward + layer_s, backward / layers + layers * layer_s)
    return step_s - backward + reduced + latency_s


@dataclass(frozen=True, slots=True)
class TrainingMethod:
    """How fast a way to train is without failures, and the ``goodput`` that failures leave.

    ``bits`` go through the busiest site's up-link in H steps.
    """

    name: str
    tokens_s: float
    utilisation: float
    goodput: float
    bits: float
    convention: str


@dataclass(frozen=True, slots=True)
class Bill:
    """Seconds to the last token and what it costs; None where prices are missing."""

    wall_s: float
    chips: float | None
    egress: float | None

    @property
    def total(self) -> float | None:
        return None if self.chips is None else self.chips + (self.egress or 0.0)


def methods(at: Deployment) -> tuple[TrainingMethod, ...]:
    """Return the plan itself, data-parallel, elastic data-parallel and blocking DiLoCo."""
    load, sites = at.load, at.sites.values()
    step_tokens = sum(site.step_tokens * site.learners for site in sites)
    computing_s = sum(site.step_s * site.learners for site in sites) / at.learners
    sent = max(one.up_bits_s for one in at.site_rounds.values()) * at.period_s
    all_chips = sum(site.table.chips * site.learners for site in sites)
    all_stop, one_stops = _kept(at, all_chips), _one_stops(at)
    mtbi = at.plan.chip_mtbi
    elastic = one_stops / (1 + (all_chips / mtbi * 2 * at.plan.resize if mtbi else 0.0))
    own = ("this plan", sum(site.tokens_s for site in sites), 1.0, one_stops, sent)
    how = "learners never wait"
    if not load.sync.overlap_steps:
        tokens_s = step_tokens * load.sync.h_steps / at.cycle_s
        own = ("this plan", tokens_s, at.utilisation, all_stop, sent)
        how = "learners stop for rounds"
    step_s, bits = _ring_step(at)
    ring = f"ring all-reduce of {at.plan.gradient_bits:g}-bit gradients during the backward pass"
    speed, bits = (step_tokens / step_s, at.slowest_s / step_s), bits * load.sync.h_steps
    whole_s = whole_model_cycle_s(at)
    diloco = (step_tokens * load.sync.h_steps / whole_s, load.sync.h_steps * computing_s / whole_s)
    one_away = "a failure pauses all for two resizes and takes one learner away"
    all_meet = "the same hub, schemes and H; the whole model at once, all stop until all have it"
    return (
        TrainingMethod(*own, how),
        TrainingMethod("data-parallel", *speed, all_stop, bits, ring),
        TrainingMethod("elastic data-parallel", *speed, elastic, bits, f"{ring}; {one_away}"),
        TrainingMethod("blocking DiLoCo", *diloco, all_stop, sent, all_meet),
    )


def whole_model_cycle_s(at: Deployment) -> float:
    """Return how long H steps take where all stop until all have exchanged the whole model.

    It falls due at one step, in as many fragments as there are syncers to share it.
    """
    whole = replace(at, load=at.load.changed(fragments=at.load.sync.shards, h_steps=1))
    stop_s = max(one.round_s for one in whole.site_rounds.values())
    return at.load.sync.h_steps * at.slowest_s + stop_s


def _ring_step(at: Deployment) -> tuple[float, float]:
    """Return seconds of a data-parallel step, and the bits that a site sends in it."""
    sites, count = at.sites.values(), at.learners
    if count == 1:
        return at.slowest_s, 0.0
    bits = ring_bits(at.plan.gradient_bits, at.load.parameters, count)
    rate = min(min(site.up_bits_s, site.down_bits_s) / site.learners for site in sites)
    hops_s = 2 * (count - 1) * max(site.table.rtt for site in sites) / 2
    return data_parallel_step_s(at.slowest_s, at.layers, bits / at.layers / rate, hops_s), bits


def _one_stops(at: Deployment) -> float:
    """Return the goodput where a failure stops one learner: the mean, by the tokens of each."""
    kept = sum(site.tokens_s * _kept(at, site.table.chips) for site in at.sites.values())
    return kept / sum(site.tokens_s for site in at.sites.values())


def _kept(at: Deployment, chips: int) -> float:
    if at.plan.chip_mtbi is None:
        return 1.0
    return halting(chips / at.plan.chip_mtbi, at.plan.recovery, FailureClock.RUNNING)


def bill(method: TrainingMethod, at: Deployment, prices: ScenarioTables, tokens: float) -> Bill:
    """Return time and money until ``tokens`` are trained on in this way."""
    wall_s = tokens / (method.tokens_s * method.goodput * at.plan.goodput)
    hours, sites, chips = wall_s / 3600, prices.sites.values(), None
    if all(site.price_chip_hour is not None for site in sites):
        each = (site.chips * site.learners * (site.price_chip_hour or 0.0) for site in sites)
        chips = hours * ((prices.hub.price_hour or 0.0) + sum(each))
    return Bill(wall_s, chips, _egress(method, at, prices, tokens))


def _egress(
    method: TrainingMethod, at: Deployment, prices: ScenarioTables, tokens: float
) -> float | None:
    """Price what leaves each site, and, where there is a hub in it, what leaves that."""
    ring = "data-parallel" in method.name
    step_tokens = sum(site.step_tokens * site.learners for site in at.sites.values())
    cycles = tokens / step_tokens / at.load.sync.h_steps
    if method.utilisation == 1.0 and not ring:  # none waits: rounds follow the clock
        cycles = tokens / method.tokens_s / at.period_s
    rounds, found = at.site_rounds, list[float]()
    for name, site in prices.sites.items():
        if site.price_egress_gb is not None:
            bits = rounds[name].up_bits_s * at.period_s
            found.append((method.bits if ring else bits) * site.price_egress_gb)
    if prices.hub.price_egress_gb is not None and not ring:
        egress = at.hub_round.egress_bits_s * at.period_s
        found.append(egress * prices.hub.price_egress_gb)
    return sum(found) / 8 / GB * cycles if found else None
