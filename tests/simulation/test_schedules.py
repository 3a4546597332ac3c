"""Thousands of clusters, each with faults of its own, and nothing is lost or counted twice.

A seed that fails is saved; put the file, without the faults that it does not need, into
``schedules/`` to have it replayed.
A default run takes 40 seeds, ``-m drill`` 200 others, ``-m soak`` the other 9,800.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path

import pytest

from skerry_tools.chaos.plan import DRAWN, FaultPlan, Kind, dumps, load
from tests.support.simulation.scenario import draw_plan
from tests.support.simulation.schedule import simulate

SEEDS = [range(30, 70), *(range(first, first + 100) for first in range(70, 10_070, 100))]
"""Of each test: enough that every fault strikes."""
DEFAULT, DRILL = 1, 3
"""Tests of ``make test`` and, with those, of a drill."""
FAILED = Path(tempfile.gettempdir()) / "skerry-schedules"
SAVED = sorted((Path(__file__).parent / "schedules").glob("*.json"))

CASES = [
    *SEEDS[:DEFAULT],
    *(pytest.param(seeds, marks=pytest.mark.drill) for seeds in SEEDS[DEFAULT:DRILL]),
    *(pytest.param(seeds, marks=pytest.mark.soak) for seeds in SEEDS[DRILL:]),
]


def explain(plan: FaultPlan, violations: tuple[str, ...]) -> str:
    """Save a plan for a test to replay, and return where and how it fails."""
    FAILED.mkdir(parents=True, exist_ok=True)
    path = FAILED / f"seed-{plan.seed}.json"
    path.write_text(dumps(plan))
    return f"seed {plan.seed}, saved as {path}: {'; '.join(violations)}"


@pytest.mark.parametrize("seeds", CASES, ids=lambda seeds: f"{seeds[0]}-{seeds[-1]}")
def test_no_schedule_breaks_a_promise(seeds: range) -> None:
    fired: Counter[Kind] = Counter()
    for seed in seeds:
        plan = draw_plan(seed)
        outcome = simulate(plan)
        assert not outcome.violations, explain(plan, outcome.violations)
        fired += outcome.fired
    silent = set(DRAWN) - set(fired)
    assert not silent, f"these faults never struck anything: {sorted(silent)}"


@pytest.mark.parametrize("path", SAVED, ids=[path.stem for path in SAVED])
def test_a_schedule_that_once_failed_passes(path: Path) -> None:
    assert simulate(load(path)).violations == ()


def test_a_seed_gives_the_same_trace_each_time_and_other_seeds_others() -> None:
    first, second = ([simulate(draw_plan(seed)) for seed in (3, 14, 159)] for _ in range(2))
    assert [one.trace for one in first] == [one.trace for one in second]
    assert [one.fired for one in first] == [one.fired for one in second]
    assert len({one.trace for one in first}) == 3
