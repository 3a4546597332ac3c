"""Which learners are alive, judged by the rhythm of each.

Source: N. Hayashibara, X. Defago, R. Yared, T. Katayama, "The phi accrual failure detector",
SRDS 2004: suspicion ``phi(t) = -log10(P_later(t))``, where ``P_later(t)`` is the chance that a
pulse comes more than t after the last, under a normal distribution with the mean and variance of
the intervals so far. phi = 3 is thus wrong once in a thousand pauses, phi = 8 once in 10^8.

Skerry adds three rules. The standard deviation is never taken to be below the mean, which is that
of a memoryless sender. A learner whose pulses go on while its steps do not is judged by its steps.
A learner that has lost its connection is gone after a shorter silence.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

WINDOW = 100
"""Intervals in the mean: enough to know a variance to sqrt(2 / 100), 14 %."""
OUTAGE_SIGMAS = 6.0
"""An interval this far out has a chance below 1e-9: an outage counts as this long."""
STARTS_S = 10.0
"""A learner that has joined makes its model first: its first pulse is expected after this time."""
CLOSED_PHI = 1.0
"""The phi at which a learner without a connection is gone: one in ten pauses is that long."""


class Liveness(StrEnum):
    """The state of a learner as its pulses show it."""

    ALIVE = "alive"
    SUSPECT = "suspect"
    GONE = "gone"


class LivenessReason(StrEnum):
    """Why a learner is in that state."""

    PULSING = "pulsing"
    SILENT = "silent"
    """Its pulses do not come."""
    DISCONNECTED = "disconnected"
    """Its pulses do not come, and it has lost its connection."""
    STALLED = "stalled"
    """It pulses and says that it trains, but its step does not advance."""
    STOPPED = "stopped"
    """It said goodbye."""


class Activity(StrEnum):
    """What a learner says it is doing; its steps must advance only while it trains."""

    WAITING = "waiting"
    TRAINING = "training"
    FINISHED = "finished"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class LivenessPolicy:
    """The interval between a learner's pulses, and the levels of phi for suspect and gone.

    ``blocking`` learners stop for each other, so their steps are not judged.
    """

    pulse_s: float
    suspect_phi: float
    gone_phi: float
    blocking: bool = False


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """When the last pulse came, and mean and variance of ``count`` intervals, in seconds."""

    last_s: float
    mean_s: float
    variance: float
    count: int


@dataclass(frozen=True, slots=True)
class StepProgress:
    """The newest step, when it was first seen, and how long one takes (0: not measured yet)."""

    step: int
    advanced_s: float
    step_time_s: float


def first_heartbeat(now_s: float, policy: LivenessPolicy) -> Heartbeat:
    """Return the heartbeat at the first pulse, which knows only the interval of the policy."""
    return Heartbeat(now_s, policy.pulse_s, 0.0, 0)


def joined_heartbeat(now_s: float, policy: LivenessPolicy) -> Heartbeat:
    """Return the heartbeat of a learner that has joined and makes its model before it pulses."""
    return Heartbeat(now_s, max(policy.pulse_s, STARTS_S), 0.0, 0)


def observe(heartbeat: Heartbeat, now_s: float) -> Heartbeat:
    """Return the heartbeat after a pulse at ``now_s``.

    Mean and variance cover all intervals until there are WINDOW, then decay exponentially over that
    many; the policy's interval counts as the first. An outage counts as OUTAGE_SIGMAS at most.
    """
    longest = heartbeat.mean_s + OUTAGE_SIGMAS * _deviation_s(heartbeat, heartbeat.mean_s)
    interval = min(max(0.0, now_s - heartbeat.last_s), longest)
    share = 1.0 / min(heartbeat.count + 2, WINDOW)
    off = interval - heartbeat.mean_s
    return Heartbeat(
        last_s=now_s,  # may be earlier: a clock that was set back hides no silence
        mean_s=heartbeat.mean_s + share * off,
        variance=(1.0 - share) * (heartbeat.variance + share * off * off),
        count=heartbeat.count + 1,
    )


def advance(progress: StepProgress, step: int, now_s: float, step_time_s: float) -> StepProgress:
    """Return the progress after a pulse; only a higher step is an advance."""
    if step > progress.step:
        return StepProgress(step, now_s, step_time_s)
    return replace(progress, step_time_s=step_time_s)


def phi(heartbeat: Heartbeat, now_s: float, expected_s: float) -> float:
    """Return the suspicion at ``now_s``: ``-log10`` of the chance of so long a silence.

    ``expected_s`` is an interval known to be normal now, such as a step that has become longer;
    the learnt mean counts where it is larger. 0 at the moment of a pulse; grows with silence.
    """
    mean_s = max(heartbeat.mean_s, expected_s)
    silent_s = now_s - heartbeat.last_s
    if silent_s <= 0:
        return 0.0
    z = (silent_s - mean_s) / _deviation_s(heartbeat, mean_s)
    if z < 30.0:
        return -math.log10(0.5 * math.erfc(z / math.sqrt(2.0)))
    density = z * z / 2.0 + 0.5 * math.log(2.0 * math.pi)  # where the tail underflows
    return (density + math.log(z + 1.0 / z)) / math.log(10.0)


def stalled_phi(progress: StepProgress, now_s: float, expected_s: float) -> float:
    """Return the suspicion that training has stopped although pulses go on.

    Steps are seen only through pulses, too coarsely to learn their variance, so the distribution is
    the memoryless one: ``t / mean * log10(e)``, with a mean of one step or ``expected_s``, the
    interval of pulses, whichever is longer. A. Lakshman, P. Malik, "Cassandra", 2010, section on
    failure detection, uses this distribution for phi. 0 until a step time is known.
    """
    if progress.step_time_s <= 0:
        return 0.0
    mean_s = max(progress.step_time_s, expected_s)
    return max(0.0, now_s - progress.advanced_s) / mean_s * math.log10(math.e)


def judge(
    heartbeat: Heartbeat,
    now_s: float,
    policy: LivenessPolicy,
    *,
    activity: Activity = Activity.WAITING,
    progress: StepProgress | None = None,
    closed: bool = False,
) -> tuple[Liveness, LivenessReason]:
    """Return whether a learner is alive, and why; ``closed``: it has lost its connection since.

    A learner that has finished training need not step, but must pulse. So must a learner that waits
    in a blocking mode: its training loop itself sends pulses meanwhile.
    """
    if activity is Activity.STOPPED:
        return Liveness.GONE, LivenessReason.STOPPED
    step_s = progress.step_time_s if progress is not None else 0.0
    silent = phi(heartbeat, now_s, max(policy.pulse_s, step_s))
    stalled = (
        stalled_phi(progress, now_s, max(policy.pulse_s, heartbeat.mean_s))
        if progress is not None and activity is Activity.TRAINING and not policy.blocking
        else 0.0
    )
    if closed and silent >= CLOSED_PHI:
        return Liveness.GONE, LivenessReason.DISCONNECTED
    for level, state in ((policy.gone_phi, Liveness.GONE), (policy.suspect_phi, Liveness.SUSPECT)):
        if silent >= level:
            return state, LivenessReason.SILENT
        if stalled >= level:
            return state, LivenessReason.STALLED
    return Liveness.ALIVE, LivenessReason.PULSING


def _deviation_s(heartbeat: Heartbeat, mean_s: float) -> float:
    return max(math.sqrt(heartbeat.variance), mean_s)
