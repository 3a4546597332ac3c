"""Timelines added up: goodput and what took the rest, share of time running, uptime(K).

Three quantities that are never mixed:

* **goodput**: work that lasts over the time given to the run, by chips. Half an island away for an
  hour and a whole one away for half an hour are the same.
* **running**: the share of its time that an island trains at all, however many of its slices.
* **uptime(K)**: the share of time that at least K islands run.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from skerry_tools.plan.process import Use

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from skerry_tools.plan.process import Timeline

BATCHES = 30
STUDENT_95 = 2.045
"""The 97.5 % point of Student's law with BATCHES - 1 degrees of freedom."""


def spent(timeline: Timeline) -> NDArray[np.float64]:
    """Return seconds by use, in island-time: shape [len(Use)], its sum is the timeline's length."""
    lengths = timeline.lengths
    sums = np.bincount(
        timeline.uses, weights=lengths * (1.0 - timeline.shares), minlength=len(Use)
    ).astype(np.float64)
    undone = float(timeline.undone.sum())
    sums[Use.TRAIN] += float(lengths @ timeline.shares) - undone
    sums[Use.ROLLBACK] += undone
    return sums


def work_by(timeline: Timeline, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the work that lasts, done up to each of these times, in seconds of the whole island.

    Work that is lost again counts until it is lost, so that the last value is what remains.
    """
    ends = np.append(timeline.times, timeline.end_s)
    done = np.concatenate([[0.0], np.cumsum(timeline.lengths * timeline.shares)])
    held: NDArray[np.float64] = np.interp(edges, ends, done)
    if timeline.undone.size:
        lost = np.concatenate([[0.0], np.cumsum(timeline.undone)])
        held -= lost[np.searchsorted(timeline.undone_at, edges, side="right")]
    return held


def given_by(timeline: Timeline, edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the time given to the run up to each of these times: all but what was preempted."""
    ends = np.append(timeline.times, timeline.end_s)
    kept = np.where(timeline.uses == Use.PREEMPTED, 0.0, timeline.lengths)
    given: NDArray[np.float64] = np.interp(edges, ends, np.concatenate([[0.0], np.cumsum(kept)]))
    return given


def running_share(timeline: Timeline) -> float:
    """Return the share of its time that the island trains, with however many slices."""
    return float(timeline.lengths[timeline.shares > 0].sum() / timeline.end_s)


def goodput(timelines: Sequence[Timeline], chips: Sequence[int]) -> tuple[float, float]:
    """Return goodput and half the width of its 95 % confidence interval.

    By the means of BATCHES stretches of equal length, which are as good as independent once they
    are much longer than a recovery.
    """
    end_s = timelines[0].end_s
    edges = np.linspace(0.0, end_s, BATCHES + 1)
    weights = np.array(chips, dtype=np.float64)
    done = np.array([np.diff(work_by(t, edges)) for t in timelines])
    given = np.array([np.diff(given_by(t, edges)) for t in timelines])
    useful, whole = weights @ done, weights @ given
    total = float(whole.sum())
    if total <= 0:
        return 0.0, 0.0
    means = useful[whole > 0] / whole[whole > 0]
    spread = float(means.std(ddof=1)) if means.size > 1 else 0.0
    return float(useful.sum()) / total, STUDENT_95 * spread / math.sqrt(max(means.size, 1))


def split(timelines: Sequence[Timeline], chips: Sequence[int]) -> dict[Use, float]:
    """Return each use's share of the time given to the run, by chips; TRAIN's is the goodput."""
    sums = np.array(chips, dtype=np.float64) @ np.array([spent(t) for t in timelines])
    sums[Use.PREEMPTED] = 0.0
    whole = float(sums.sum())
    return {use: float(sums[use]) / whole if whole > 0 else 0.0 for use in Use}


def running_at_once(timelines: Sequence[Timeline]) -> NDArray[np.float64]:
    """Return the share of time that exactly n islands run, for n from 0: shape [M + 1]."""
    times = np.concatenate([t.times for t in timelines])
    steps = np.concatenate([
        np.diff((t.shares > 0).astype(np.int64), prepend=0) for t in timelines
    ])  # fmt: skip
    changes = steps != 0
    times, steps = times[changes], steps[changes]
    order = np.argsort(times, kind="stable")
    end_s = timelines[0].end_s
    edges = np.concatenate([[0.0], times[order], [end_s]])
    count = np.concatenate([[0], np.cumsum(steps[order])])
    lasting = np.bincount(count, weights=np.diff(edges), minlength=len(timelines) + 1)
    return lasting / end_s


def uptime(at_once: NDArray[np.float64]) -> list[float]:
    """Return the share of time at least K run, for K from 1 to M, from ``running_at_once``."""
    tail = np.cumsum(at_once[::-1])[::-1]
    return [min(1.0, float(share)) for share in tail[1:]]
