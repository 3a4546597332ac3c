"""What to set M, H, K and P to, each with its reason.

What is known of quality is the paper's (Decoupled DiLoCo, arXiv 2604.21428: P = 24, H = 24,
tau = 2, K = 1 with grace; ablations of M and K); what is known of feasibility is the plan's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry_tools.plan.fixes import MOST_H, least
from skerry_tools.plan.verdict import constraints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry_tools.plan.links import Workload
    from skerry_tools.plan.plan import Plan

PAPER_H = 24
MOST_LEARNERS = 8
"""Above it the paper's benchmark average fell: 54.4, 55.0, 55.4, 53.4 for M = 2, 4, 8, 16."""
SMALL_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class Advice:
    """What to set a letter to, and why."""

    letter: str
    say: str
    why: str


def advise(plan: Plan) -> list[Advice]:
    """Return advice on M, H, K and P."""
    return [
        _on_learners(plan),
        _on_h(plan),
        _on_quorum(plan),
        _on_fragments(plan),
        *_on_sites(plan),
    ]


def _on_learners(plan: Plan) -> Advice:
    count = plan.rounds.learners
    sweep = "the paper's average score was 54.4, 55.0, 55.4, 53.4 for M = 2, 4, 8, 16"
    if count == 1:
        return Advice("M", "1 learner", "there is nothing to synchronise: mode=single")
    if count > MOST_LEARNERS:
        say = f"join learners of one site until at most {MOST_LEARNERS} are left"
        return Advice("M", say, f"{count} learners now; {sweep}")
    return Advice("M", f"{count} is well", sweep)


def _on_h(plan: Plan) -> Advice:
    load = plan.rounds.load
    lowest = _least(plan, MOST_H, lambda n: replace(load, h_steps=n))
    if lowest is None:
        return Advice("H", "no H mends this", "something else binds: see the first line")
    if load.h_steps < lowest:
        return Advice("H", f"{lowest}", "the least with which every constraint holds")
    if lowest <= PAPER_H < load.h_steps:
        why = f"everything holds from H = {lowest} on, and quality was published with {PAPER_H}"
        return Advice("H", f"{PAPER_H}", why)
    why = f"everything holds from H = {lowest} on; fewer steps between rounds learn better"
    return Advice("H", f"{load.h_steps} is well", why)


def _on_quorum(plan: Plan) -> Advice:
    steps = [link.step_s for link in plan.rounds.links.values()]
    spread = max(steps) / min(steps)
    mixed = "the paper's mixed speeds: K = M 84 % goodput, K = 1 + grace 100 % and the same quality"
    load = plan.rounds.load
    if not load.overlap_steps:
        return Advice(
            "K", f"{load.quorum}", "learners that stop for a round must all be waited for"
        )
    if load.quorum == 1:
        return Advice("K", "1 with grace is well", mixed)
    why = f"steps differ by {spread:.2f} x between sites; {mixed}"
    return Advice("K", "1 with grace", why)


def _on_fragments(plan: Plan) -> Advice:
    load = plan.rounds.load
    if not load.overlap_steps:
        return Advice("P", f"{load.fragments}", "where learners stop, all is sent at once")
    most = max(1, min(load.h_steps, int(load.parameters)))
    lowest = _least(plan, most, lambda n: replace(load, fragments=n, shards=min(n, load.shards)))
    if load.fragments > load.h_steps:
        why = f"fragments beyond H = {load.h_steps} fall due together and gain nothing"
        return Advice("P", f"at most {load.h_steps}", why)
    if lowest is None:
        return Advice("P", "no P mends this", f"P up to H = {load.h_steps} was tried")
    if load.fragments < lowest:
        return Advice("P", f"{lowest}", "the least with which every round ends in its room")
    if load.h_steps % load.fragments:
        why = f"everything holds from P = {lowest} on; P that divides H = {load.h_steps} is even"
        return Advice("P", f"{load.fragments} will do", why)
    return Advice("P", f"{load.fragments} is well", f"everything holds from P = {lowest} on")


def _on_sites(plan: Plan) -> Iterator[Advice]:
    """Name sites that bind and bring little."""
    for name, link in plan.rounds.links.items():
        share = plan.fleet.tokens[name] * link.learners / link.step_s / plan.fleet.free_tokens_s
        broken = [c for c in plan.judged if c.what.startswith(f"site {name} ") and not c.holds]
        if broken and share < SMALL_SHARE and len(plan.rounds.links) > 1:
            yield Advice(
                "M", f"leave out site {name}", f"it binds and brings {share:.1%} of the tokens"
            )


def _least(plan: Plan, most: int, change: Callable[[int], Workload]) -> int | None:
    def works(load: Workload) -> bool:
        after = constraints(replace(plan.rounds, load=load), plan.limits)
        return all(item.holds for item in after)

    return least(0, most, works, change)
