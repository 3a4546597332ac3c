"""One tape drives the simulator and the chaos harness: the same fault strikes the same learner."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind, choose, dumps, loads, random_plan
from skerry_tools.plan import scenario, tape
from skerry_tools.plan.process import Use
from skerry_tools.plan.simulate import simulate

SERVICES = {
    "learner-1": "learner", "learner-2": "learner", "learner-3": "learner",
    "syncer": "syncer", "checkpointer": "checkpointer", "health-monitor": "health-monitor",
}  # fmt: skip
WHOLE = [
    "fleet.chips=3", "fleet.slice_chips=1", "fleet.elastic=false", "sync.learners=3",
    "simulation.days=0.02", "simulation.rounds=0", "recovery.mean_s=20", "pauses.upscale_s=7",
]  # fmt: skip
CALM = "failures.chip_mtbi=1e11"


def plan(*faults: Fault) -> FaultPlan:
    return FaultPlan(0, tuple(sorted(faults, key=lambda fault: fault.at_s)))


@settings(max_examples=25)
@given(st.integers(0, 10**6))
def test_a_learner_is_struck_where_the_harness_strikes_it(seed: int) -> None:
    drawn = random_plan(seed, 10.0, 300.0, [Kind.KILL, Kind.PAUSE, Kind.PARTITION], ["learner"])
    struck = tape.read(drawn, SERVICES)
    order = [name for name, kind in SERVICES.items() if kind == "learner"]
    known = {**SERVICES, "broker": "broker"}
    for index, fault in enumerate(drawn.faults):
        number = order.index(choose(drawn, index, known))
        if fault.kind is Kind.PARTITION:
            assert (fault.at_s, fault.end_s) in struck.cut[number]
        else:
            found = [a for a in struck.absences[number] if a.begin_s == fault.at_s]
            assert any(a.restart is (fault.kind is Kind.KILL) for a in found)


@settings(max_examples=10)
@given(st.integers(0, 1000))
def test_what_failed_in_a_simulation_can_be_played_again(seed: int) -> None:
    failing = scenario.read(
        "goodput-table", [*WHOLE, "failures.chip_mtbi=200 s", f"simulation.seed={seed}"]
    )
    calm = scenario.read("goodput-table", [*WHOLE, CALM])
    found = simulate(failing)
    played = loads(dumps(tape.of(found, seed)))
    assert len(played.faults) == found.failures
    services = {name: kind for name, kind in SERVICES.items() if kind == "learner"}
    again = simulate(calm, tape.read(played, services))
    assert again.goodput == pytest.approx(found.goodput, abs=1e-4)
    assert again.uptime == pytest.approx(found.uptime, abs=1e-4)


def test_a_kill_costs_the_restart_and_a_pause_does_not() -> None:
    calm = scenario.read("goodput-table", [*WHOLE, CALM])
    allocated = 3 * 0.02 * 86400
    kill, pause = (Fault(100.0, kind, "learner:0", 30.0) for kind in (Kind.KILL, Kind.PAUSE))
    for fault, lost in ((kill, 37.0), (pause, 30.0)):
        found = simulate(calm, tape.read(plan(fault), SERVICES))
        assert found.goodput == pytest.approx(1.0 - lost / allocated)
        assert found.split[Use.OUTAGE] == pytest.approx(30.0 / allocated)


def test_faults_that_cost_no_time_are_named() -> None:
    many = plan(
        Fault(1.0, Kind.CORRUPT, "learner", 1.0, 0.5),
        Fault(2.0, Kind.SLOW, "learner", 1.0, 0.5),
        Fault(3.0, Kind.KILL, "syncer", 4.0),
        Fault(5.0, Kind.BROKER_KILL, "broker", 3.0),
    )
    struck = tape.read(many, SERVICES, take_over_s=2.0)
    assert tape.without_time(many) == {"corrupt": 1, "slow": 1}
    assert struck.absences == {}
    assert struck.stalled == ((3.0, 9.0), (5.0, 8.0))


def test_a_target_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="learner:7"):
        tape.read(plan(Fault(1.0, Kind.KILL, "learner:7", 1.0)), SERVICES)


def test_half_a_learner_cannot_be_killed() -> None:
    found = simulate(scenario.read("goodput-table", ["simulation.days=0.01"]))
    with pytest.raises(ConfigError, match="slice_chips"):
        tape.of(found)


def test_a_kill_during_a_restart_begins_it_anew() -> None:
    calm = scenario.read("goodput-table", [*WHOLE, CALM])
    allocated = 3 * 0.02 * 86400
    twice = plan(
        Fault(100.0, Kind.KILL, "learner:0", 30.0), Fault(133.0, Kind.KILL, "learner:0", 10.0)
    )
    found = simulate(calm, tape.read(twice, SERVICES))
    assert found.goodput == pytest.approx(1.0 - (30 + 3 + 10 + 7) / allocated)
