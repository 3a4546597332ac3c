"""What the same chips and links could do otherwise, and what each way costs in time and money.

Every baseline gets the benefit of each assumption: gradients in bf16, an ideal ring between the
sites (Patarasuk and Yuan, JPDC 69, 2009), an all-reduce hidden by the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from skerry_tools.plan.traffic import Deployment

GB = 1e9
BACKWARD = 2 / 3
"""Share of a step that is its backward pass: twice the forward pass's operations."""


def halting(rate_s: float, pause_s: float) -> float:
    """Return the share of time that a learner runs which halts until nothing is broken.

    ``1 / (1 + rate * pause)``: one cycle is a run and a pause, of which only the mean counts.
    ``rate_s``: failures per second of the whole learner while it runs.
    """
    return 1.0 / (1.0 + rate_s * pause_s)


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


class TrainingMethod(NamedTuple):
    """How fast a way to train is without failures, and the ``goodput`` that is left of it.

    ``sent``: bits through each site's up-link while ``cycle_tokens`` are trained on, in H steps.
    """

    name: str
    convention: str
    tokens_s: float
    utilisation: float
    goodput: float
    cycle_tokens: float
    sent: Mapping[str, float]

    def wall_s(self, tokens: float) -> float:
        """Return seconds until so many tokens are trained on."""
        return tokens / (self.tokens_s * self.goodput)

    def chips_cost(self, at: Deployment, tokens: float) -> float | None:
        """Return what the chips cost until then; None where one of them has no price."""
        tables = [site.table for site in at.sites.values()]
        priced = [(one.price_chip_hour, one.chips * one.learners) for one in tables]
        hourly = [price * chips for price, chips in priced if price is not None]
        return self.wall_s(tokens) / 3600 * sum(hourly) if len(hourly) == len(priced) else None

    def egress_cost(self, at: Deployment, tokens: float) -> float | None:
        """Return what bytes that leave sites with a price cost until then; None without any."""
        priced = [(site.table.price_egress_gb, name) for name, site in at.sites.items()]
        cycle = [price * self.sent[name] / 8 / GB for price, name in priced if price is not None]
        return tokens / self.cycle_tokens * sum(cycle) if cycle else None


def methods(at: Deployment) -> tuple[TrainingMethod, ...]:
    """Return the plan itself, data-parallel, and blocking DiLoCo."""
    h_steps, sites = at.load.sync.h_steps, at.sites.values()
    chips = sum(site.table.chips * site.table.learners for site in sites)
    cycle_tokens = h_steps * sum(site.step_tokens * site.table.learners for site in sites)
    computing_s = h_steps * sum(site.step_s * site.table.learners for site in sites) / at.learners
    sent = {name: one.up_bits_s * at.period_s for name, one in at.site_rounds.items()}
    if at.hub.site:  # from there global fragments leave, and its own contributions do not
        sent[at.hub.site] = at.hub_round.egress_bits_s * at.period_s
    tokens_s, all_stop = sum(site.tokens_s for site in sites), _kept(at, chips)
    one_stops = sum(site.tokens_s * _kept(at, site.table.chips) for site in sites) / tokens_s
    own = "learners never wait", tokens_s, 1.0, one_stops, tokens_s * at.period_s, sent
    if not at.load.sync.overlap_steps:
        speed = cycle_tokens / at.cycle_s, at.utilisation, all_stop
        own = ("learners stop for rounds", *speed, cycle_tokens, sent)
    step_s, bits = _ring_step(at)
    how = f"ring all-reduce of {at.plan.gradient_bits:g}-bit gradients during the backward pass"
    ring = how, cycle_tokens / h_steps / step_s, at.slowest_s / step_s, all_stop, cycle_tokens
    # The whole model falls due at one step, in as many fragments as there are syncers to share it.
    whole = replace(at, load=at.load.changed(fragments=at.load.sync.shards, h_steps=1))
    whole_s = h_steps * at.slowest_s + max(one.round_s for one in whole.site_rounds.values())
    all_meet = "the same hub, schemes and H; the whole model at once, all stop until all have it"
    diloco = all_meet, cycle_tokens / whole_s, computing_s / whole_s, all_stop, cycle_tokens, sent
    return (
        TrainingMethod("this plan", *own),
        TrainingMethod("data-parallel", *ring, dict.fromkeys(sent, bits * h_steps)),
        TrainingMethod("blocking DiLoCo", *diloco),
    )


def _ring_step(at: Deployment) -> tuple[float, float]:
    """Return seconds of a data-parallel step, and the bits that a site sends in it."""
    sites, count, layers = at.sites.values(), at.learners, at.model.layers
    if count == 1:
        return at.slowest_s, 0.0
    bits = ring_bits(at.plan.gradient_bits, at.load.parameters, count)
    rate = min(min(site.rates) / site.table.learners for site in sites)
    hops_s = 2 * (count - 1) * max(site.table.rtt for site in sites) / 2
    return data_parallel_step_s(at.slowest_s, layers, bits / layers / rate, hops_s), bits


def _kept(at: Deployment, chips: int) -> float:
    mtbi_s = at.plan.chip_mtbi
    return at.plan.goodput * (1.0 if mtbi_s is None else halting(chips / mtbi_s, at.plan.recovery))
