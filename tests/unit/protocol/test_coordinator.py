"""What a shard does next: which round it opens or publishes again, and when its run may end."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.liveness import LivenessPolicy
from skerry.algorithm.schedule import Schedule
from skerry.protocol.clock import END_TIMEOUTS, ClockLimit, GlobalClock, LearnerTable
from skerry.protocol.contribution import Contribution, ContributionRules
from skerry.protocol.coordinator import (
    MOST_LAST_ROUNDS,
    Action,
    CommitVersion,
    CoordinatorSettings,
    EndRun,
    Publish,
    RoundCoordinator,
    RunEnd,
)
from skerry.protocol.messages import LearnerPhase, RefusalCause, Refused, Round
from skerry.protocol.rounds import RoundPolicy
from skerry.protocol.shard import PendingFragment, Shard, WeightRule
from skerry.settings.models import LivenessConfig
from tests.support.builders import header, manifest, pulse, round_

PLAN = plan([LeafSpec("w", (64, 256))], 2)
POLICY = RoundPolicy(1, 0.5, overlap_steps=1, room_steps=4.0, round_timeout_s=60.0)
STEPS = 100


def new_round(fragment: int, version: int, step: int, now_ns: int) -> Round:
    return round_(version, fragment, due_step=step, opened_ns=now_ns)


def coordinator(committed: int = 40, quorum: int = 1, **changes: Any) -> RoundCoordinator:
    """Return a shard of two fragments, H = 8, whose learner is 16 steps ahead at second 0."""
    states = [PendingFragment(f, manifest(2, f.index, step=committed)) for f in PLAN.fragments]
    shard = Shard.of("run", PLAN, WeightRule(4, 0.5), ContributionRules(), states)
    table = LearnerTable(LivenessPolicy(**LivenessConfig().model_dump()), 60.0)
    table.observe(pulse("a", committed + 16, **changes), 0.0)
    clock = GlobalClock(table, quorum, blocking=False, limit=ClockLimit(committed, 0.0, 16))
    policy = replace(POLICY, quorum=quorum)
    return RoundCoordinator(
        shard, clock, CoordinatorSettings(Schedule(2, 8, 1), policy, STEPS), new_round
    )


def test_an_open_round_is_published_again_in_case_the_broker_has_forgotten_it() -> None:
    held = coordinator()
    first, second = (held.decide(at_s, 0) for at_s in (0.0, 0.5))
    assert isinstance(first, Publish)
    again = [held.decide(at_s, 0) for at_s in (0.5, 1.9, 2.0, 2.0, 2.5)]
    assert again == [None, None, first, None, second]


@pytest.mark.parametrize(("quorum", "measured_s"), [(1, 5.0), (2, None)])
def test_only_a_round_that_had_its_quorum_says_how_long_one_takes(
    quorum: int, measured_s: float | None
) -> None:
    held = coordinator(quorum=quorum)
    opened = held.decide(0.0, 0)
    assert isinstance(opened, Publish)
    index = opened.round.fragment
    held.shard.fragments[index].arrived_s["a"] = 5.0
    closes = held.decide(60.0, 0)
    assert isinstance(closes, CommitVersion)
    held.committed(closes, manifest(3, index, step=56), 61.0)
    assert held.timings.quorum_s == measured_s


def test_an_answer_whose_learner_came_into_quarantine_is_none_of_the_quorum() -> None:
    held = coordinator()
    opened = held.decide(0.0, 0)
    assert isinstance(opened, Publish)
    index = opened.round.fragment
    held.shard.fragments[index].arrived_s["b"] = 5.0
    held.shard.quarantined = {"b"}
    assert not isinstance(held.decide(50.0, 0), CommitVersion)
    held.shard.fragments[index].arrived_s["a"] = 50.0
    closes = held.decide(50.0, 0)
    assert isinstance(closes, CommitVersion)
    assert closes.fragment == index


@pytest.mark.parametrize(("round_version", "behind_s"), [(3, 0.5), (2, None)])
def test_one_that_is_late_says_how_long_to_wait_if_it_missed_the_round_that_closed_last(
    round_version: int, behind_s: float | None
) -> None:
    held = coordinator()
    held.closed[0] = 3, 10.0
    held.timings = replace(held.timings, step_s=1.0)
    nothing: Any = None
    late = Contribution(header(round_version=round_version), "int4", nothing, 1, 1)
    held.arrived(late, 10.5)
    assert held.timings.behind_s == behind_s


def test_refusals_alone_ask_for_so_many_last_rounds() -> None:
    """A learner that goes on sending what is refused does not keep a run from ending."""
    shard, end = coordinator().shard, RunEnd(finals={0, 1})
    shard.fragments[0].refuse(Refused(RefusalCause.TOO_STALE, "a", 1, 1))
    end.last_rounds[0] = MOST_LAST_ROUNDS - 1
    assert end.left(shard) == [0]
    end.last_rounds[0] += 1
    assert end.left(shard) == []


def test_a_syncer_that_takes_over_at_the_last_step_does_not_wait_for_one_that_hangs() -> None:
    """No commit may come any more that would tell it that the clock is there."""
    held = coordinator(committed=STEPS, phase=LearnerPhase.FINISHED)
    held.end.finals = {0, 1}
    table, found = held.clock.learners, list[Action | None]()
    for at_s in range(0, int(END_TIMEOUTS * table.patience_s) + 2, 10):
        table.observe(pulse("a", STEPS, phase=LearnerPhase.FINISHED), at_s)
        table.observe(pulse("hangs", 7, phase=LearnerPhase.TRAINING), at_s)
        found.append(held.decide(at_s, 0))
    later = END_TIMEOUTS * table.patience_s + 1
    assert not any(isinstance(action, EndRun) for action in found)
    assert held.decide(later, 0) == EndRun()


def test_whether_the_run_may_end_is_asked_from_time_to_time() -> None:
    held = coordinator(committed=STEPS, phase=LearnerPhase.FINISHED)
    held.end.finals = {0, 1}
    assert [held.decide(at_s, 0) for at_s in (0.0, 1.9, 2.0)] == [EndRun(), None, EndRun()]
