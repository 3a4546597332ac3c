"""Where a learner is after a boundary, equal in all of its processes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from skerry.client.peer import Words


@dataclass(frozen=True, slots=True)
class Standing:
    """Where a learner is after a boundary."""

    done: bool
    fell_back: bool
    start: int
    shard: int
    cursor: int
    progress: float
    versions: tuple[int, ...]

    @classmethod
    def read(cls, words: Words) -> Standing:
        """Return what ``DONE`` says."""
        done, fell_back, start, shard, cursor, progress, versions = words
        return cls(done, fell_back, start, shard, cursor, progress, tuple(versions))


class StandingView(ABC):
    """The properties by which a training loop reads where its learner is."""

    @property
    @abstractmethod
    def _now(self) -> Standing: ...

    @property
    def shard(self) -> int:
        """The number of this learner's part of the data: no other learner of the run has it."""
        return self._now.shard

    @property
    def start(self) -> int:
        """The cursor, in sequences, at which this learner's data goes on.

        All before it is in the global state.
        """
        return self._now.start

    @property
    def cursor(self) -> int:
        """How far this learner has used its data, in sequences."""
        return self._now.cursor

    @property
    def progress(self) -> float:
        """How much of the run is done, in [0, 1]: for schedules."""
        return self._now.progress

    @property
    def versions(self) -> tuple[int, ...]:
        """The adopted version of each fragment."""
        return self._now.versions

    @property
    def fell_back(self) -> bool:
        """True if the last step replaced values that were not finite by the global state.

        The optimizer's state must then start afresh.
        """
        return self._now.fell_back

    @property
    def done(self) -> bool:
        """True once the run is over; for all processes of a learner after the same step."""
        return self._now.done
