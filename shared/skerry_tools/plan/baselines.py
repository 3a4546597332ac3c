"""What the same chips and links could do otherwise, and what each way costs in time and money.

Every baseline gets the benefit of each assumption: gradients in bf16, an ideal ring between the
sites (Patarasuk and Yuan, JPDC 69, 2009), an all-reduce hidden by the backward pass.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from skerry.algorithm.goodput import ring_share
from skerry_tools.plan.goodput import hardware, time_shares, together
from skerry_tools.plan.traffic import Deployment

GB = 1e9
BACKWARD = 2 / 3
"""Share of a step that is its backward pass: twice the forward pass's operations."""


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

    ``sent``: bits that leave each site, and the hub ("" where it is at none), while
    ``cycle_tokens`` are trained on, in H steps. They are paid for where they leave.
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

    def costs(self, at: Deployment, tokens: float) -> dict[str, float | None]:
        """Return what chips, and bytes that leave sites or the hub, cost until then, and both.

        None is what chips cost if one of them has no price, and bytes if none of them has one.
        """
        tables = [site.table for site in at.sites.values()]
        priced = [(one.price_chip_hour, one.chips * one.learners) for one in tables]
        hourly = [price * chips for price, chips in priced if price is not None]
        chips = self.wall_s(tokens) / 3600 * sum(hourly) if len(hourly) == len(priced) else None
        prices = {name: site.table.price_egress_gb for name, site in at.sites.items()}
        prices.setdefault(at.hub.site, at.hub.price_egress_gb)
        paid = [(price, self.sent.get(name, 0.0)) for name, price in prices.items()]
        cycle = [price * bits / 8 / GB for price, bits in paid if price is not None]
        egress = tokens / self.cycle_tokens * sum(cycle) if cycle else None
        both = None if chips is None else chips + (egress or 0.0)
        return {"chips_cost": chips, "egress_cost": egress, "cost": both}


def methods(at: Deployment) -> tuple[TrainingMethod, ...]:
    """Return the plan itself, data-parallel over the links, and all chips in one region."""
    h_steps, sites = at.load.sync.h_steps, at.sites.values()
    chips = sum(site.table.chips * site.table.learners for site in sites)
    cycle_tokens = h_steps * sum(site.step_tokens * site.table.learners for site in sites)
    computing_s = h_steps * sum(site.step_s * site.table.learners for site in sites) / at.learners
    sent = {name: one.up_bits_s * at.period_s for name, one in at.site_rounds.items()}
    sent[at.hub.site] = at.hub_round.egress_bits_s * at.period_s  # of contributions it sends none
    tokens_s = sum(site.tokens_s for site in sites)
    shares = {n: time_shares(hardware(at.tables, one.table.chips)) for n, one in at.sites.items()}
    # What all chips keep that train in step: without what failed, or halting, whichever is more.
    fleet = (hardware(at.tables, chips, elastic=elastic) for elastic in (True, False))
    all_stop = max(time_shares(one).goodput for one in fleet)
    one_stops = sum(site.tokens_s * shares[name].goodput for name, site in at.sites.items())
    own = "learners never wait", tokens_s, 1.0, one_stops / tokens_s, tokens_s * at.period_s, sent
    if not at.load.sync.overlap_steps:
        speed = cycle_tokens / at.cycle_s, at.utilisation
        each = [shares[name] for name, site in at.sites.items() for _ in range(site.table.learners)]
        met = together(each, h_steps * at.slowest_s / min(h_steps, at.load.sync.fragments))
        own = ("learners stop for rounds", *speed, met, cycle_tokens, sent)
    step_s, bits = _ring_step(at)
    how = f"a ring of {at.tables.plan.gradient_bits:g}-bit gradients during the backward pass"
    ring = how, cycle_tokens / h_steps / step_s, at.slowest_s / step_s, all_stop, cycle_tokens
    in_step = "the same chips in step in one region, with no link in the way"
    speed = cycle_tokens / h_steps / at.slowest_s, computing_s / h_steps / at.slowest_s
    region = in_step, *speed, all_stop, cycle_tokens
    return (
        TrainingMethod("this plan", *own),
        TrainingMethod("data-parallel", *ring, dict.fromkeys(at.sites, bits * h_steps)),
        TrainingMethod("one region", *region, dict.fromkeys(at.sites, 0.0)),
    )


def _ring_step(at: Deployment) -> tuple[float, float]:
    """Return seconds of a data-parallel step, and the bits that a site sends in it.

    Learners of a site are neighbours in the ring: one of them sends to the next site.
    """
    sites, layers = at.sites.values(), at.load.layers
    bits = ring_share(len(sites)) * at.tables.plan.gradient_bits * at.load.parameters
    rate = min(min(site.rates) for site in sites)
    hops_s = 2 * (len(sites) - 1) * max(site.table.rtt for site in sites) / 2
    return data_parallel_step_s(at.slowest_s, layers, bits / layers / rate, hops_s), bits
