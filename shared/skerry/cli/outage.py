"""What happened to the others, and to the learner itself, while one learner was away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.protocol.messages import Commit, CommitOrigin, LearnerPhase, Pulse

if TYPE_CHECKING:
    from skerry.status.sources import RunMessage


@dataclass(slots=True)
class Outage:
    """Follows the log from the moment a learner is killed; times in seconds since the epoch.

    ``started_s`` is when its new process was started, ``accepted_s`` when a commit first named a
    contribution of that process. ``compile_s`` is the time that its log gives for compilation, or
    else from its first pulse to the first in another phase than starting.
    """

    learner: str
    incarnation: int
    killed_s: float
    steps_before: dict[str, int] = field(default_factory=dict[str, int])
    steps_after: dict[str, int] = field(default_factory=dict[str, int])
    started_s: float | None = None
    accepted_s: float | None = None
    rounds: int = 0
    versions: tuple[int, ...] = ()
    log_compile_s: float | None = None
    first_alive_s: float | None = None
    compiled_alive_s: float | None = None

    def observe(self, message: RunMessage, at_s: float) -> None:
        """Take in a pulse or a commit that came at ``at_s``; other messages change nothing."""
        if isinstance(message, Pulse):
            self._pulse(message)
        elif isinstance(message, Commit) and message.origin is not CommitOrigin.GENESIS:
            self._commit(message, at_s)

    @property
    def back(self) -> bool:
        return self.accepted_s is not None

    @property
    def steps_of_others(self) -> int:
        """Return the steps of the others between the kill and the first accepted contribution."""
        return sum(
            self.steps_after.get(name, before) - before
            for name, before in self.steps_before.items()
            if name != self.learner
        )

    @property
    def wall_s(self) -> float | None:
        """Return the seconds from the new process to its first accepted contribution."""
        if self.accepted_s is None or self.started_s is None:
            return None
        return self.accepted_s - self.started_s

    @property
    def compile_s(self) -> float:
        if self.log_compile_s is not None:
            return self.log_compile_s
        if self.first_alive_s is None or self.compiled_alive_s is None:
            return 0.0
        return max(0.0, self.compiled_alive_s - self.first_alive_s)

    @property
    def recovery_s(self) -> float | None:
        """Return the same without compilation."""
        return None if self.wall_s is None else max(0.0, self.wall_s - self.compile_s)

    def _pulse(self, pulse: Pulse) -> None:
        if pulse.learner != self.learner:
            if not self.back:
                self.steps_before.setdefault(pulse.learner, pulse.steps)
                self.steps_after[pulse.learner] = pulse.steps
            return
        if pulse.incarnation <= self.incarnation:
            return
        if self.first_alive_s is None:
            self.first_alive_s = pulse.alive_s
        if pulse.phase is not LearnerPhase.STARTING and self.compiled_alive_s is None:
            self.compiled_alive_s = pulse.alive_s
        if not self.versions and pulse.versions and min(pulse.versions) > 0:
            self.versions = pulse.versions

    def _commit(self, commit: Commit, at_s: float) -> None:
        if self.back or at_s < self.killed_s:
            return
        self.rounds += 1
        if any(
            c.learner == self.learner and c.incarnation > self.incarnation for c in commit.consumed
        ):
            self.accepted_s = at_s
