"""What would mend a constraint that does not hold: one change at a time."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from skerry_tools.plan.figures import shown
from skerry_tools.plan.measured import WIRE_BITS
from skerry_tools.plan.verdict import constraints

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from collections.abc import Set as AbstractSet

    from skerry_tools.plan.links import Rounds, Workload
    from skerry_tools.plan.verdict import Constraint, Limits

MOST_H, MOST_P, MOST_CORES = 4096, 1024, 64
"""How far a fix is looked for."""
CHEAPER = ("int8", "int4")
"""Schemes that cost no quality worth naming, the finer one first."""

T = TypeVar("T")


def fixes(rounds: Rounds, limits: Limits, broken: Constraint) -> list[str]:
    """Return single changes that would mend this constraint, those that mend all others first."""
    mended: list[tuple[bool, str]] = []
    for label, after in _candidates(rounds, limits, broken):
        mended.append((all(item.holds for item in constraints(after, limits)), label))
    own = _own_fix(broken)
    found = [label for _, label in sorted(mended, key=lambda item: not item[0])]
    return found + ([own] if own else [])


def least(
    now: int, most: int, works: Callable[[T], bool], change: Callable[[int], T]
) -> int | None:
    """Return the least count above ``now`` that works, by doubling and halving; None if none."""
    low, high = now, now
    while high < most:
        low, high = high, min(most, max(high * 2, high + 1))
        if works(change(high)):
            break
    else:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if works(change(middle)) else (middle, high)
    return high


def first(
    now: int, most: int, works: Callable[[T], bool], change: Callable[[int], T]
) -> int | None:
    """Return the least count above ``now`` that works, where more may work less; None if none."""
    return next((n for n in range(now + 1, most + 1) if works(change(n))), None)


def _own_fix(broken: Constraint) -> str:
    """Return more of what there is too little of, where that can be had."""
    if broken.what == "utilisation":
        return "mode=decoupled, in which nobody stops"
    if broken.unit == "bit/s":
        return f"a link of {shown(broken.need, broken.unit)}"
    if broken.what == "broker":
        return f"hub.write of {shown(broken.need, broken.unit)}"
    if broken.what == "log window":
        return f"log.window_bytes={math.ceil(broken.need)}"
    if broken.what.endswith("chip memory"):
        return f"{shown(broken.ratio, 'x')} as many chips"
    return ""


def _candidates(rounds: Rounds, limits: Limits, broken: Constraint) -> Iterator[tuple[str, Rounds]]:
    """Yield single changes that mend ``broken``, with the words for each."""
    others = {item.what for item in constraints(rounds, limits) if not item.holds} - {broken.what}
    works = partial(_mends, limits, others)
    for kind, now, scheme_changed in _schemes(rounds.load):
        for scheme in CHEAPER:
            after = replace(rounds, load=scheme_changed(scheme))
            if WIRE_BITS[scheme] < WIRE_BITS[now] and works(after):
                yield f"{scheme} {kind}", after
                break
    for name, count, most, change in _counts(rounds):
        search = first if name == "shards" else least  # more of them take more of chips' memory
        found = search(count, most, works, change)
        if found is not None:
            yield f"{name} >= {found}", change(found)


def _schemes(load: Workload) -> Iterator[tuple[str, str, Callable[[str], Workload]]]:
    yield "contributions", load.up_scheme, lambda scheme: replace(load, up_scheme=scheme)
    yield "global fragments", load.down_scheme, lambda scheme: replace(load, down_scheme=scheme)


def _counts(rounds: Rounds) -> Iterator[tuple[str, int, int, Callable[[int], Rounds]]]:
    """Yield what can be counted up: its name, where it is, how far it goes, and how.

    Learners that stop, for all at once, are what such a mode is about: P and tau stay, and so does
    the H = 1 of data-parallel. Fragments beyond H come in bundles and gain nothing.
    """
    load = rounds.load

    def loaded(change: Callable[[int], Workload]) -> Callable[[int], Rounds]:
        return lambda n: replace(rounds, load=change(n))

    if load.overlap_steps or load.h_steps > 1:
        yield "H", load.h_steps, MOST_H, loaded(lambda n: replace(load, h_steps=n))
    if load.overlap_steps:
        most = min(load.h_steps, int(load.parameters), MOST_P)
        yield "P", load.fragments, most, loaded(lambda n: replace(load, fragments=n))
        most = load.h_steps - 1
        yield "tau", load.overlap_steps, most, loaded(lambda n: replace(load, overlap_steps=n))
    yield "shards", load.shards, load.fragments, loaded(lambda n: replace(load, shards=n))
    yield "hub.cores", rounds.hub.cores, MOST_CORES, partial(_with_cores, rounds)


def _with_cores(rounds: Rounds, cores: int) -> Rounds:
    return replace(rounds, hub=replace(rounds.hub, cores=cores))


def _mends(limits: Limits, others: AbstractSet[str], after: Rounds) -> bool:
    """Tell whether everything holds then but what does not hold now for ``others``' reasons."""
    return all(item.holds for item in constraints(after, limits) if item.what not in others)
