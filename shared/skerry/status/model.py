"""What is known of one run: a fold over its log that every viewer reads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import structlog

from skerry.algorithm.fragments import plan
from skerry.algorithm.goodput import data_parallel_bytes
from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    LearnerPhase,
    MemberRecord,
    Round,
    RunRecord,
)
from skerry.status.alert_table import Alert
from skerry.status.alerts import Situation, StreamStore, alerts
from skerry.status.commit_totals import CommitTotals
from skerry.status.history import History
from skerry.status.report import RunReport, report, unconfirmed
from skerry.status.sources import RunMessage, Seen
from skerry.status.timeline import corrected
from skerry.status.view import RunView

if TYPE_CHECKING:
    from skerry.settings.models import RunConfig

log = structlog.get_logger()

EVENTS = {
    Liveness.SUSPECT: "learner_suspect",
    Liveness.GONE: "learner_gone",
    Liveness.ALIVE: "learner_back",
}
MOST_LINES = 8
"""Changes logged at a time; the rest are counted in one line."""


@dataclass(frozen=True, slots=True)
class RunSnapshot:
    """A run at one moment, as viewers show it: its report, its alerts and the model behind them."""

    model: RunModel
    now_s: float
    report: RunReport
    alerts: Sequence[Alert] = ()

    def loss(self) -> float | None:
        """Return the newest loss in nats per token: that of pulses, or else that of commits."""
        bins = self.model.history.curves.run.bins.values()
        losses = (*(held.loss for held in bins), self.report.run.loss)
        return next((loss for loss in reversed(losses) if loss is not None), None)


class RunModel:
    """The newest view of one run, its history, and the liveness last judged of each learner.

    ``clock_s`` gives seconds since the epoch; silence is judged by arrivals on it. ``sizes`` are
    the parameters of each fragment.
    """

    def __init__(
        self,
        record: RunRecord,
        config: RunConfig,
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._clock_s = clock_s
        self._liveness: dict[str, Liveness] = {}
        self.record = record
        self.config = config
        self.history = History(record.fragments)
        self.totals = CommitTotals(record.run)
        cut = plan(record.leaves, record.fragments, record.shards)
        self.sizes = [fragment.size for fragment in cut.fragments]
        self.parameters = cut.parameters
        self.view = RunView(record.run, record.fragments, config)
        self.view.take(record, clock_s())

    @property
    def gap_s(self) -> float | None:
        """The interval of recent commits in seconds, None for too few of them.

        While a long ledger is being read, its rounds say nothing of how often they come.
        """
        return None if self.view.counting else self.history.timeline.interval_s()

    def take(self, seen: Seen[RunMessage]) -> None:
        """Fold in one message of the log; a repeated one changes nothing."""
        message, at_s = seen.message, seen.at_s
        match message:
            case Round():
                self.history.timeline.opened(message)
            case MemberRecord(incarnation=0):
                pass  # a name that a restored run keeps a data shard for
            case Commit():
                if message.version > self.view.counted.get(message.fragment, 0):
                    commit = corrected(message, seen.stored_ns, self.record.created_ns)
                    self.view.take(commit, at_s)
                    self.history.committed(commit, seen.sequence, seen.stored_ns / 1e9, at_s)
                    self.totals.take(commit)
            case _:
                if isinstance(message, CheckpointRecord):  # its writer's clock may be off by hours
                    message = replace(message, written_ns=int(at_s * 1e9))
                self.view.take(message, at_s)
                self.history.take(message, at_s)

    def peek(self, seen: Seen[RunMessage]) -> None:
        """Take note of a newest message ahead of the history that leads to it."""
        match seen.message:
            case Commit():
                commit = corrected(seen.message, seen.stored_ns, self.record.created_ns)
                self.view.peek(commit, seen.at_s)
            case Evaluation():
                self.view.peek(seen.message, seen.at_s)
            case _:
                self.take(seen)

    def bytes_data_parallel(self) -> int:
        """Return what all-reducing the steps taken would have sent, in f32."""
        steps, learners = self.view.steps_by_learner(), self.config.sync.learners
        return data_parallel_bytes(self.parameters, steps, learners)

    def closed(self, ago_s: Mapping[str, float]) -> None:
        """Note how many seconds ago each learner's connection was closed."""
        now_s = self._clock_s()
        self.view.disconnected({name: now_s - s for name, s in ago_s.items()})

    def unconfirmed(self) -> list[str]:
        """Return the learners whose silence the broker may be able to explain."""
        return [] if self.view.finished else unconfirmed(self.view, self._clock_s())

    def snapshot(
        self,
        stores: Sequence[StreamStore] = (),
        away_s: float | None = None,
        malformed: int = 0,
        *,
        at_rest: bool = False,
    ) -> RunSnapshot:
        """Return the run as of now; one ``at_rest``, where no service runs, has no alerts.

        ``stores`` say how full the broker's stores are, ``away_s`` for how long it has not
        answered: the run is shown as it was then, since no learner can be heard meanwhile.
        ``malformed`` counts the messages of the last RECENT_S that were left out.
        """
        now_s, view = self._clock_s() - (away_s or 0.0), self.view
        now = report(view, now_s)
        if at_rest:  # pulses end with their broker, and none is at work
            phase = LearnerPhase.FINISHED if now.run.finished else LearnerPhase.STOPPED
            resting = tuple(replace(row, phase=phase) for row in now.learners)
            return RunSnapshot(self, now_s, replace(now, learners=resting))
        wrong = alerts(
            Situation(
                now_s=now_s,
                now=now,
                lately=self.history.lately,
                gap_s=self.gap_s,
                config=self.config,
                stores=stores,
                broker_away_s=away_s,
                malformed=malformed,
                evaluating=view.evaluations.incomplete,
            )
        )
        return RunSnapshot(self, now_s, now, wrong)

    def judge(self, now: RunReport) -> list[tuple[str, str]]:
        """Log each learner that has become suspect, gone or alive again; return event and name.

        A run that is finished falls silent by itself, which is no trouble.
        """
        if self.view.finished:
            return []
        self.history.judged(now.learners, self._clock_s())
        changed = [
            row
            for row in now.learners
            if row.liveness is not self._liveness.get(row.name, Liveness.ALIVE)
        ]
        self._liveness |= {row.name: row.liveness for row in changed}
        for row in changed[:MOST_LINES]:
            expected = row.liveness is Liveness.ALIVE or row.reason is LivenessReason.STOPPED
            (log.info if expected else log.warning)(
                EVENTS[row.liveness],
                run=self.record.run,
                learner=row.name,
                incarnation=row.incarnation,
                reason=row.reason,
                step=row.step,
                seen_s_ago=round(row.seen_s_ago, 3),
            )
        if more := Counter(EVENTS[row.liveness] for row in changed[MOST_LINES:]):
            log.warning("more_learners_changed", run=self.record.run, **more)
        return [(EVENTS[row.liveness], row.name) for row in changed]
