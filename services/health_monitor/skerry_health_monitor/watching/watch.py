"""What the monitor knows: a fold over the log, and who was last seen in which state."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from skerry.algorithm.fragments import plan
from skerry.algorithm.liveness import Liveness, LivenessReason, policy_from
from skerry.status.report import doubted, report
from skerry.status.view import (
    Frame,
    RunView,
    committed,
    disconnected,
    fold,
    peek,
    peek_evaluation,
    seen_s,
)
from skerry_health_monitor.watching.history import History
from skerry_health_monitor.watching.sums import Sums
from skerry_health_monitor.watching.timeline import set_right

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.protocol.messages import Commit, Evaluation, MemberRecord, Round, RunRecord
    from skerry.settings.models import RunConfig
    from skerry.status.report import LearnerRow
    from skerry.status.view import Message

log = structlog.get_logger()

EVENTS = {
    Liveness.SUSPECT: "learner_suspect",
    Liveness.GONE: "learner_gone",
    Liveness.ALIVE: "learner_back",
}


class Watch:
    """The newest view of one run and the liveness that was last told of each learner.

    ``clock_s`` gives seconds since the epoch; silence is judged by arrivals on it. ``told`` is the
    report that ``judge`` judged by, ``sizes`` are the parameters of each fragment, ``sums`` what
    its commits add up to.
    """

    def __init__(
        self, record: RunRecord, config: RunConfig, clock_s: Callable[[], float] = time.time
    ) -> None:
        frame = Frame(
            run=record.run,
            fragments=record.fragments,
            quorum=config.sync.quorum,
            steps=config.train.steps,
            duration_s=config.train.duration_s,
            liveness=policy_from(
                **config.liveness.model_dump(), blocking=not config.sync.overlap_steps
            ),
        )
        self._clock_s = clock_s
        self._told: dict[str, Liveness] = {}
        self._known_to = 0
        self._starts_to = 0
        self.record = record
        self.config = config
        self.history = History(record.fragments)
        self.sums = Sums(record.run)
        self.sizes = [f.size for f in plan(record.leaves, record.fragments).fragments]
        self.view = fold(RunView(frame), record, clock_s())
        self.told = report(self.view, clock_s())

    def take(self, message: Message) -> None:
        """Fold one message of the log in; what was seen before changes nothing.

        Starts and commits have their own ways in: how old they are is for the broker to say.
        """
        now_s = self._clock_s()
        self.view = fold(self.view, message, now_s)
        self.history.take(message, now_s)

    def know_starts(self, sequence: int) -> None:
        """Take note of how far the ledger's starts went when we began to watch."""
        self._starts_to = sequence

    def joined(self, member: MemberRecord, sequence: int, stored_ns: int) -> None:
        """Fold a learner's start in, with its place in the ledger and when the broker had it.

        Twice changes nothing. Incarnation 0 is a name that a restored run keeps a data shard for:
        nobody to miss yet.
        """
        if member.incarnation == 0:
            return
        at_s = seen_s(self._clock_s(), stored_ns, sequence, self._starts_to)
        self.view = fold(self.view, member, at_s)
        self.history.joined(member, at_s)

    def committed(self, commit: Commit, sequence: int, stored_ns: int) -> None:
        """Fold a commit in, with its place in the ledger and when the broker had it.

        One that comes while we watch is as old as its arrival, as silence is everywhere here: no
        two clocks need to agree.
        """
        at_s = seen_s(self._clock_s(), stored_ns, sequence, self._known_to)
        commit = set_right(commit, stored_ns, self.record.created_ns)
        self.view = committed(self.view, commit, at_s)
        self.history.committed(commit, sequence, stored_ns / 1e9, at_s)
        self.sums.take(commit)

    def opened(self, told: Round) -> None:
        """Take note of a round that is in the air."""
        self.history.timeline.opened(told)

    def know(self, newest: Commit, sequence: int, stored_ns: int) -> None:
        """Take note of a fragment's newest commit ahead of the history that leads to it."""
        self._known_to = max(self._known_to, sequence)
        commit = set_right(newest, stored_ns, self.record.created_ns)
        self.view = peek(self.view, commit, min(self._clock_s(), stored_ns / 1e9))

    def know_evaluation(self, newest: Evaluation) -> None:
        """Take note of the newest evaluation ahead of those before it."""
        self.view = peek_evaluation(self.view, newest)

    def closed(self, ago_s: Mapping[str, float]) -> None:
        """Take note of whose connection was closed how long ago."""
        now_s = self._clock_s()
        self.view = disconnected(self.view, {name: now_s - s for name, s in ago_s.items()})

    def doubted(self) -> list[str]:
        """Return the learners whose silence the broker may be able to explain."""
        return [] if self.view.finished else doubted(self.view, self._clock_s())

    def judge(self) -> list[tuple[str, str]]:
        """Log each learner that has become suspect, gone or alive again; return event and name.

        A run that is finished falls silent by itself, which is nobody's trouble.
        """
        now_s = self._clock_s()
        self.told = report(self.view, now_s)
        if self.view.finished:
            return []
        changed: list[tuple[str, str]] = []
        self.history.judged(self.told.learners, now_s)
        for row in self.told.learners:
            before = self._told.get(row.name, Liveness.ALIVE)
            self._told[row.name] = row.liveness
            if row.liveness is not before:
                changed.append((EVENTS[row.liveness], row.name))
                self._tell(row)
        return changed

    def _tell(self, row: LearnerRow) -> None:
        expected = row.liveness is Liveness.ALIVE or row.reason is LivenessReason.STOPPED
        (log.info if expected else log.warning)(
            EVENTS[row.liveness],
            run=self.view.frame.run,
            learner=row.name,
            incarnation=row.incarnation,
            reason=row.reason,
            step=row.step,
            seen_s_ago=round(row.seen_s_ago, 3),
        )
