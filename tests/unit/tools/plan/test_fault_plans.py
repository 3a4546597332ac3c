"""One fault plan for simulator and chaos tool: the same fault hits the same learner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind, choose, dumps, loads, random_plan
from skerry_tools.plan.failures import TimeUse
from skerry_tools.plan.fault_plans import faults_of, plan_of
from skerry_tools.plan.simulation import Setup, simulate
from skerry_tools.plan.simulation_answer import setup_of

SERVICES = {
    "learner-1": "learner", "learner-2": "learner", "learner-3": "learner",
    "syncer": "syncer", "checkpointer": "checkpointer", "health-monitor": "health-monitor",
}  # fmt: skip
WHOLE = [
    "fleet.chips=3", "fleet.slice_chips=1", "fleet.elastic=false", "sync.learners=3",
    "simulation.days=0.02", "simulation.rounds=0", "recovery.mean_s=20", "pauses.upscale_s=7",
]  # fmt: skip
ALLOCATED_S = 3 * 0.02 * 86400
KILL, PAUSE = Kind.KILL, Kind.PAUSE


@pytest.fixture(scope="module")
def calm() -> Setup:
    return setup_of("goodput-table", [*WHOLE, "failures.chip_mtbi=1e11"])


def plan(*faults: Fault) -> FaultPlan:
    return FaultPlan(0, faults)


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_a_learner_is_hit_where_the_chaos_tool_hits_it(seed: int) -> None:
    drawn = random_plan(seed, 10.0, 300.0, [KILL, PAUSE, Kind.PARTITION], ["learner"])
    found = faults_of(drawn, SERVICES)
    for index, fault in enumerate(drawn.faults):
        number = list(SERVICES).index(choose(drawn, index, {**SERVICES, "broker": "broker"}))
        if fault.kind is Kind.PARTITION:
            assert (fault.at_s, fault.end_s) in found.cut[number]
        else:
            own = [a for a in found.absences[number] if a.begin_s == fault.at_s]
            assert any(a.restart is (fault.kind is KILL) for a in own)


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_what_failed_in_a_simulation_can_be_repeated(calm: Setup, seed: int) -> None:
    sets = [*WHOLE, "failures.chip_mtbi=200 s", f"simulation.seed={seed}"]
    found = simulate(setup_of("goodput-table", sets))
    repeated = loads(dumps(plan_of(found)))
    assert len(repeated.faults) == found.failures
    again = simulate(calm, faults_of(repeated, SERVICES))
    assert again.goodput == pytest.approx(found.goodput, abs=1e-4)
    assert again.uptime == pytest.approx(found.uptime, abs=1e-4)


@pytest.mark.parametrize(
    ("faults", "lost_s", "away_s"),
    [
        ([(100.0, KILL, 30.0)], 37.0, 30.0),
        ([(100.0, PAUSE, 30.0)], 30.0, 30.0),
        ([(100.0, KILL, 30.0), (133.0, KILL, 10.0)], 30 + 3 + 10 + 7, 40.0),
    ],
    ids=["kill", "pause", "kill during a restart"],
)
def test_a_kill_costs_the_restart_too_and_a_pause_does_not(
    calm: Setup, faults: list[tuple[float, Kind, float]], lost_s: float, away_s: float
) -> None:
    faults_given = plan(*(Fault(at_s, kind, "learner:0", lasts) for at_s, kind, lasts in faults))
    found = simulate(calm, faults_of(faults_given, SERVICES))
    assert found.goodput == pytest.approx(1.0 - lost_s / ALLOCATED_S)
    assert found.split[TimeUse.OUTAGE] == pytest.approx(away_s / ALLOCATED_S)


def test_faults_without_cost_are_left_out_and_a_dead_syncer_or_broker_stalls_rounds() -> None:
    found = faults_of(
        plan(
            Fault(1.0, Kind.CORRUPT, "learner", 1.0, 0.5),
            Fault(2.0, Kind.SLOW, "learner", 1.0, 0.5),
            Fault(3.0, KILL, "syncer", 4.0),
            Fault(5.0, Kind.BROKER_KILL, "broker", 3.0),
        ),
        SERVICES,
    )
    assert found.absences == {}
    assert found.stalled == ((3.0, 9.0), (5.0, 8.0))


def test_a_target_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="learner:7"):
        faults_of(plan(Fault(1.0, KILL, "learner:7", 1.0)), SERVICES)


def test_a_learner_of_several_slices_makes_no_fault_plan() -> None:
    found = simulate(setup_of("goodput-table", ["simulation.days=0.01"]))
    with pytest.raises(ConfigError, match="slice_chips"):
        plan_of(found)
