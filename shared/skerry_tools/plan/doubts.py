"""Where a plan leaves what its models were checked on, and which of its figures that touches."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry_tools.plan.figures import Figure, Kind, shown
from skerry_tools.plan.measured import ENCODE_B_S, MERGE_CHECKED, MERGE_EACH

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry_tools.plan.plan import Plan

TIMES = 10
"""Far outside is ten times beyond what was checked."""
PARAMETERS = (1e9 / TIMES, 100e9 * TIMES)
STEP_S = (0.1 / TIMES, 4.9 * TIMES)
RATE_BITS_S = (0.1e9 / TIMES, 1000e9 * TIMES)
"""Streaming DiLoCo's table: 1B to 100B, 0.1 to 4.9 s, 0.1 to 1000 Gbit/s."""
MOST_LEARNERS = 16
MOST_H = 1000
"""Decoupled DiLoCo has M up to 16; H up to 500 is published in DiLoCo."""


@dataclass(frozen=True, slots=True)
class Doubts:
    """Why figures are extrapolated, by what they rest on: links, CPU time, tokens of a step."""

    of_links: tuple[str, ...]
    of_cpu: tuple[str, ...]
    of_tokens: tuple[str, ...] = ()

    @property
    def reasons(self) -> tuple[str, ...]:
        """One sentence each."""
        return (*self.of_links, *self.of_cpu, *self.of_tokens)

    def links(self, value: float | None, unit: str, convention: str) -> Figure:
        """Return a figure that rests on the models of links and utilisation."""
        return Figure(value, unit, _kind(self.of_links), convention)

    def cpu(self, value: float | None, unit: str, convention: str) -> Figure:
        """Return a figure that rests on measured CPU time."""
        return Figure(value, unit, _kind(self.of_cpu), convention)

    def tokens(self, value: float | None, unit: str, convention: str) -> Figure:
        """Return a figure that rests on the tokens of a step too."""
        return Figure(value, unit, _kind(self.of_links + self.of_tokens), convention)


def doubts(plan: Plan) -> Doubts:
    """Return where this plan leaves what was checked."""
    return Doubts(tuple(_of_links(plan)), tuple(_of_cpu(plan)), tuple(_of_tokens(plan)))


def _kind(reasons: tuple[str, ...]) -> Kind:
    return Kind.EXTRAPOLATED if reasons else Kind.DERIVED


def _of_links(plan: Plan) -> Iterator[str]:
    load = plan.rounds.load
    if not PARAMETERS[0] <= load.parameters <= PARAMETERS[1]:
        yield f"extrapolated: {shown(load.parameters, 'param')}; the models were checked on 1B-100B"
    if plan.rounds.learners > MOST_LEARNERS:
        yield f"extrapolated: {plan.rounds.learners} learners; at most 16 are published"
    if load.h_steps > MOST_H:
        yield f"extrapolated: H = {load.h_steps}; at most 500 is published"
    for name, link in plan.rounds.links.items():
        if not STEP_S[0] <= link.step_s <= STEP_S[1]:
            took = shown(link.step_s, "s")
            yield f"extrapolated: steps of {took} at {name}; checked on 0.1-4.9 s"
        rates = (link.up_bits_s, link.down_bits_s)
        if not all(RATE_BITS_S[0] <= rate <= RATE_BITS_S[1] for rate in rates):
            yield f"extrapolated: the link of {name}; checked on 0.1-1000 Gbit/s"


def _of_cpu(plan: Plan) -> Iterator[str]:
    load, learners = plan.rounds.load, plan.rounds.learners
    if learners not in MERGE_CHECKED:
        yield f"extrapolated: merging {learners} contributions was not measured, 4 and 8 were"
    if load.up_scheme not in MERGE_EACH or load.down_scheme not in ENCODE_B_S:
        yield "extrapolated: the syncer's time; it was measured for int4, int8 and bf16"
    cores = [site.cores for site in plan.request.scene.sites.values()]
    if max(plan.request.scene.hub.cores, *cores) > 1:
        yield "extrapolated: encoding on several cores; one core was measured"


def _of_tokens(plan: Plan) -> Iterator[str]:
    if plan.request.bare_tokens:
        yield (
            f"extrapolated: tokens a second, time and cost; nobody said the tokens of a learner's "
            f"step (--step-tokens), and {plan.request.run.data.seq_len} x "
            f"{plan.request.run.data.batch} were taken"
        )
