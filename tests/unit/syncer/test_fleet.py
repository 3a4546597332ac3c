"""When training is over: only when nobody who was at work may still come back."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skerry.algorithm.liveness import LivenessPolicy
from skerry.protocol.messages import LearnerPhase
from skerry.settings.models import LivenessConfig
from skerry_syncer.fleet import Fleet
from tests.support.builders import pulse

PATIENCE_S = 60.0
PULSE = pulse("fast", 100, phase=LearnerPhase.FINISHED)


def fleet_of(phase: LearnerPhase, silent_s: float) -> Fleet:
    """Return a fleet whose other learner was last heard ``silent_s`` before now (1000 s)."""
    fleet = Fleet(LivenessPolicy(**LivenessConfig().model_dump()), PATIENCE_S)
    fleet.observe(replace(PULSE, learner="slow", phase=phase), 1000.0 - silent_s)
    fleet.observe(PULSE, 1000.0)
    return fleet


@pytest.mark.parametrize("phase", [LearnerPhase.TRAINING, LearnerPhase.CATCHING_UP])
def test_silence_of_one_that_was_at_work_is_no_end(phase: LearnerPhase) -> None:
    """A broker that was away lets whoever has finished be heard first."""
    fleet = fleet_of(phase, 10.0)
    assert "slow" not in fleet.working(1000.0)
    assert not fleet.finished(1000.0)


def test_run_ends_without_one_that_stays_away() -> None:
    assert fleet_of(LearnerPhase.TRAINING, PATIENCE_S + 1).finished(1000.0)


@pytest.mark.parametrize("phase", [LearnerPhase.FINISHED, LearnerPhase.STOPPED])
def test_run_does_not_wait_for_one_that_said_it_was_done(phase: LearnerPhase) -> None:
    assert fleet_of(phase, 10.0).finished(1000.0)
