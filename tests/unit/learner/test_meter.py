"""A learner accounts for its own time: what did not go into steps went somewhere."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from skerry.algorithm.goodput import Cause, split
from skerry.client.meter import Meter
from skerry.client.telemetry import LearnerIdentity
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import LearnerPhase, Pulse
from skerry.status.view import spent_in


@dataclass
class Clock:
    now_s: float = 100.0

    def __call__(self) -> float:
        return self.now_s


def pulse(meter: Meter) -> Pulse:
    return meter.pulse(LearnerIdentity("r", "a", 1), TrainingProgress(0, 0, 0, 0))


def test_starting_and_catching_up_are_told_while_they_last_and_after() -> None:
    clock = Clock()
    meter = Meter(clock(), clock)
    clock.now_s += 7
    assert pulse(meter).compile_s == 7
    meter.enter(LearnerPhase.CATCHING_UP)
    clock.now_s += 2
    meter.enter(LearnerPhase.TRAINING)
    clock.now_s += 50
    told = pulse(meter)
    assert (told.compile_s, told.recover_s, told.alive_s) == (7, 2, 59)


def test_steps_on_data_that_was_seen_before_are_no_useful_training() -> None:
    clock = Clock()
    meter = Meter(clock(), clock)
    for replayed in (True, False):
        meter.trained(0.3, replayed=replayed)
        meter.stepped(0.5)
    told = pulse(meter)
    assert (told.busy_s, told.replay_s) == (0.3, 0.3)
    assert meter.step_time_s == 0.5


def test_waiting_for_others_is_told_apart_from_idling() -> None:
    clock = Clock()
    meter = Meter(clock(), clock)
    meter.enter(LearnerPhase.TRAINING)
    clock.now_s += 10
    meter.wait_s += 4
    meter.trained(5)
    told = split(spent_in(pulse(meter)), 10)
    assert (told[Cause.WAIT], told[Cause.IDLE], told[Cause.DOWN]) == (4, pytest.approx(1), 0)
