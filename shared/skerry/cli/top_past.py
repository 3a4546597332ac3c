"""What ``skerry top`` remembers beside a view: rounds of late, how the loss went, steps taken."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, fields
from math import isfinite
from typing import TYPE_CHECKING

from skerry.protocol.messages import Commit, Evaluation, MemberRecord, Pulse, RunRecord, is_round
from skerry.protocol.records import believable
from skerry.status.recent import Recent, interval_s

if TYPE_CHECKING:
    from skerry.status.view import Message

MOST_ROUNDS = 200
MOST_LOSSES = 480
"""Above this many, each two neighbours become their mean: the curve keeps its shape."""


@dataclass(slots=True)
class Past:
    """A fold over a run's messages, bounded; twice the same message changes nothing.

    A record of another run of that name ends all that was remembered: its log was begun anew.
    """

    rounds: deque[Commit] = field(default_factory=lambda: deque[Commit](maxlen=MOST_ROUNDS))
    closed_s: dict[int, float] = field(default_factory=dict[int, float])
    losses: list[float] = field(default_factory=list[float])
    steps: dict[tuple[str, int], int] = field(default_factory=dict[tuple[str, int], int])
    lately: Recent = field(default_factory=Recent)
    written: Evaluation | None = None
    """The newest evaluation for which the model has written something."""
    _created_ns: int = 0
    _seen: dict[int, int] = field(default_factory=dict[int, int])
    _every: int = 1
    _waiting: list[float] = field(default_factory=list[float])

    def take(self, message: Message, at_s: float = 0.0) -> None:
        """Remember what a message that came at ``at_s`` says, if that matters here."""
        if isinstance(message, RunRecord):
            self._belongs_to(message.created_ns)
        elif isinstance(message, Pulse):
            self.steps[message.learner, message.incarnation] = message.steps
            self.lately.pulsed(message, at_s)
        elif isinstance(message, MemberRecord):
            self.lately.joined(message, at_s)
        elif isinstance(message, Evaluation):
            newest = 0 if self.written is None else self.written.evaluated_ns
            if message.sample and message.evaluated_ns > newest:
                self.written = message
        elif isinstance(message, Commit) and message.version > self._seen.get(message.fragment, 0):
            self._seen[message.fragment] = message.version
            if not believable(message):
                return
            self.closed_s[message.fragment] = message.closed_ns / 1e9
            self.lately.committed(message, at_s)
            if is_round(message):
                self.rounds.append(message)
                self._note(message)

    def _belongs_to(self, created_ns: int) -> None:
        """Forget everything where what came so far was said of another run."""
        if self._created_ns not in {0, created_ns}:
            new = Past()
            for one in fields(self):
                setattr(self, one.name, getattr(new, one.name))
        self._created_ns = created_ns

    def interval_s(self) -> float | None:
        """Return how often rounds of late were committed; None for too few of them."""
        return interval_s(commit.closed_ns / 1e9 for commit in self.rounds)

    def steps_by_learner(self) -> dict[str, int]:
        """Return the steps that each learner has told of, all its incarnations together."""
        sums: dict[str, int] = {}
        for (learner, _), steps in self.steps.items():
            sums[learner] = sums.get(learner, 0) + steps
        return sums

    def _note(self, commit: Commit) -> None:
        """Add the round's mean loss to the curve, weighted by tokens; NaN says nothing."""
        told = [(c.loss, c.tokens) for c in commit.consumed if isfinite(c.loss) and c.tokens]
        tokens = sum(weight for _, weight in told)
        if not tokens:
            return
        self._waiting.append(sum(loss * weight for loss, weight in told) / tokens)
        if len(self._waiting) < self._every:
            return
        self.losses.append(sum(self._waiting) / len(self._waiting))
        self._waiting.clear()
        if len(self.losses) > MOST_LOSSES:
            pairs = zip(self.losses[::2], self.losses[1::2], strict=False)
            self.losses = [(a + b) / 2 for a, b in pairs]
            self._every *= 2
