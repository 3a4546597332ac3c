"""A plan that fails keeps only the faults that it needs for that."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from skerry_tools.chaos.plan import DRAWN, FaultPlan, random_plan
from tests.support.simulation.shrink import shrink

TARGETS = ("learner", "syncer", "broker")


def long_plan(seed: int) -> FaultPlan:
    return random_plan(seed, 0.5, 20.0, DRAWN, TARGETS)


@given(seed=st.integers(0, 300), first=st.integers(0, 100), second=st.integers(0, 100))
def test_the_two_faults_that_matter_are_what_is_left(seed: int, first: int, second: int) -> None:
    plan = long_plan(seed)
    wanted = {plan.faults[n % len(plan.faults)].kind for n in (first, second)}
    small = shrink(plan, lambda p: wanted <= {f.kind for f in p.faults}, most_trials=2_000)
    assert sorted(f.kind for f in small.faults) == sorted(wanted)


def test_a_plan_that_does_not_fail_stays_as_it_is() -> None:
    plan = long_plan(1)
    assert shrink(plan, lambda _: False) == plan


def test_what_fails_without_any_fault_needs_none() -> None:
    assert shrink(long_plan(1), lambda _: True).faults == ()


def test_trials_are_bounded() -> None:
    ran: list[FaultPlan] = []

    def fails(plan: FaultPlan) -> bool:
        ran.append(plan)
        return len(plan.faults) > 3

    shrink(long_plan(3), fails, most_trials=10)
    assert len(ran) == 10
