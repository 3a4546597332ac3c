"""Goodput: the share of the time given to a run that went into training, and what took the rest.

Source: Decoupled DiLoCo (arXiv 2604.21428), evaluation: useful training time over allocated time,
summed over learners. The time in which a learner that has joined is down counts as allocated, since
its machine waits for it: losing learners must not raise a run's goodput. Nor must training on the
same data twice after its result was lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import astuple, dataclass
from enum import StrEnum
from operator import add

TRAIN = "train"
"""The one use of time that is goodput."""
FLOAT32_BYTES = 4


class Cause(StrEnum):
    """Uses of allocated time that are lost: badput."""

    COMPILE = "compile"
    """Starting and compiling."""
    RECOVER = "recover"
    """Catching up with the log, before the first step."""
    WAIT = "wait"
    """Standing still at a due step until its round is over: blocking modes only."""
    REPLAY = "replay"
    """Steps on data that an earlier incarnation trained on, before its work was lost."""
    IDLE = "idle"
    """A live process that does none of these."""
    DOWN = "down"
    """No process."""


USES: tuple[str, ...] = (TRAIN, *(cause.value for cause in Cause))
"""All uses of time."""


@dataclass(frozen=True, slots=True)
class Spent:
    """How the processes of one learner spent their own time, in seconds.

    ``alive_s`` is all time since each of them started; the rest of it was idle.
    """

    train_s: float = 0.0
    compile_s: float = 0.0
    recover_s: float = 0.0
    wait_s: float = 0.0
    replay_s: float = 0.0
    alive_s: float = 0.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*map(add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Share:
    """One learner's time in seconds: inside training steps, and since it joined."""

    busy_s: float
    allocated_s: float


def allocated_s(joined_s: float, now_s: float, ended_s: float | None = None) -> float:
    """Return the seconds from a learner's joining until its end, or until now."""
    return max(0.0, (now_s if ended_s is None else ended_s) - joined_s)


def goodput(shares: Iterable[Share]) -> float:
    """Return busy over allocated time, summed over learners, in [0, 1]; 0 before any time passed.

    Busy time above the allocated (two clocks never agree exactly) does not count.
    """
    busy = allocated = 0.0
    for share in shares:
        allocated += max(0.0, share.allocated_s)
        busy += min(max(0.0, share.busy_s), max(0.0, share.allocated_s))
    return busy / allocated if allocated > 0 else 0.0


def split(spent: Spent, allocated_s: float) -> dict[str, float]:
    """Return the allocated seconds by use.

    The parts add up to ``allocated_s``: the time that the learner did not count is down time, and
    the time that it counted too much (two clocks never agree exactly) is dropped, idle time first.
    """
    counted = {
        TRAIN: spent.train_s,
        Cause.REPLAY.value: spent.replay_s,
        Cause.COMPILE.value: spent.compile_s,
        Cause.RECOVER.value: spent.recover_s,
        Cause.WAIT.value: spent.wait_s,
    }
    counted[Cause.IDLE.value] = spent.alive_s - sum(counted.values())
    left, found = max(0.0, allocated_s), dict.fromkeys(USES, 0.0)
    for use, seconds in counted.items():
        found[use] = min(max(0.0, seconds), left)
        left -= found[use]
    found[Cause.DOWN.value] = left
    return found


def ratios(splits: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Return each use's share of all time in ``splits``; they add up to 1, or are 0 without time.

    The share of TRAIN is the goodput.
    """
    sums = dict.fromkeys(USES, 0.0)
    for parts in splits:
        for use, seconds in parts.items():
            sums[use] += seconds
    total = sum(sums.values())
    return {use: seconds / total if total > 0 else 0.0 for use, seconds in sums.items()}


def ring_share(workers: int) -> float:
    """Return how many times its gradient each worker sends in a ring all-reduce: ``2 (M - 1) / M``.

    Patarasuk and Yuan, JPDC 69, 2009.
    """
    return 2.0 * (1.0 - 1.0 / workers)


def data_parallel_bytes(params: int, steps_by_learner: Mapping[str, int], learners: int) -> int:
    """Return the bytes that a ring all-reduce of f32 gradients would have sent for the same steps.

    ``learners`` is M, the number that a run is planned for (``sync.learners``), not the number of
    names in its log, some of which replaced others.
    """
    steps = sum(steps_by_learner.values())
    return round(ring_share(learners) * params * FLOAT32_BYTES * steps)
