"""What a syncer reports of its rounds: spans, metrics, and one log line for each."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field

import structlog
from opentelemetry.trace import Link, SpanContext

from skerry.log.run_records import Rejections
from skerry.protocol.contribution import Contribution, ContributionId, Refusal, id_of
from skerry.protocol.messages import Commit, Round, RunRecord, why
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.protocol.subjects import Subjects, contributor
from skerry.status.commit_totals import measured
from skerry.telemetry import instruments, metrics, spans, tracing
from skerry.telemetry.spans import FinishedSpan, Interval, Messages, SpanEvent, seconds

log = structlog.get_logger()

Origins = Mapping["ContributionId", str]
"""The trace parent of the span that sent each contribution, empty where that is not known."""


@dataclass(slots=True)
class CommitTimes:
    """When the newest round's merge began and ended, and when its commit was in the log; in ns."""

    began_ns: int = 0
    merged_ns: int = 0
    written_ns: int = 0

    @property
    def merge_s(self) -> float:
        return seconds(self.began_ns, self.merged_ns)

    @property
    def commit_s(self) -> float:
        return seconds(self.merged_ns, self.written_ns)


@dataclass(slots=True)
class RoundTelemetry:
    """Reports the rounds of one run that were committed.

    A round whose syncer was overtaken is reported by the next one.
    """

    run: RunRecord
    merge: str
    arriving: dict[str, int] = field(default_factory=dict[str, int])
    rejections: Rejections = field(default_factory=lambda: Rejections("contribution_refused"))

    def trace(self, fragment: int, version: int) -> str:
        """Return the id of the trace of a round."""
        return tracing.trace_id(self.run.run, fragment, version, self.run.created_ns)

    def chunk_arrived(self, subject: str, now_ns: int) -> None:
        """Note that a chunk of a contribution is here: the first one begins its arrival."""
        if tracing.on():
            self.arriving.setdefault(subject, now_ns)

    def settled(self, subject: str) -> None:
        """Note that nothing more is expected of the contribution on a subject."""
        self.arriving.pop(subject, None)

    def received(self, whole: Contribution, subject: str, now_ns: int) -> None:
        """Report that a contribution is complete: a span of the round that it was made for."""
        header = whole.header
        trace, known = self.trace(header.fragment, header.round_version), whole.id
        if not tracing.kept(trace):
            return
        root, origin = tracing.context(trace), tracing.parse(whole.trace_parent)
        message = _message_id(known, header.fragment)
        about: spans.Attributes = {spans.MESSAGING_MESSAGE_ID: message, spans.SCHEME: whole.scheme}
        tracing.emit(
            FinishedSpan(
                spans.RECEIVE,
                tracing.child(root, spans.RECEIVE, *known),
                root,
                Interval(self.arriving.get(subject, now_ns), now_ns),
                {spans.FRAGMENT: header.fragment, spans.LEARNER: header.learner},
                Messages(spans.CONTRIBUTION, subject, message),
                links=(Link(origin, about),) if origin is not None else (),
            )
        )

    def refused(self, got: Refusal) -> None:
        """Log a refusal, one a second at most, in the trace of the round that it was made for.

        If that round is known: a late one belongs to a round that is over, and not to the open one.
        """
        (fragment, learner), version = contributor(got.subject), got.round_version
        root = tracing.context(self.trace(fragment, version)) if version else None
        with tracing.within(root) if root else nullcontext():
            self.rejections.note(
                got.cause,
                fragment=fragment,
                version=version or None,
                learner=learner[:64],
                detail=got.detail[:200],
            )

    def committed(
        self, commit: Commit, opened: Round | None, origins: Origins, spent: CommitTimes
    ) -> None:
        """Report that a round is over: its line, its metrics and its spans.

        ``opened`` is None for genesis, which no round asked for.
        """
        root = tracing.context(commit.trace_id)
        with tracing.within(root):
            _log(commit, spent)
            if instruments.on():
                _measure(commit, spent)
        if root.trace_flags.sampled:
            shard = Subjects(commit.run).of_fragment(commit.fragment, self.run.shards)
            subject = shard.manifest(commit.fragment)
            _trace(commit, opened, root, origins, spent, self.merge, subject)


def _log(commit: Commit, spent: CommitTimes) -> None:
    """Write the one canonical line of a round."""
    log.info(
        "round_committed",
        fragment=commit.fragment,
        version=commit.version,
        step=commit.step,
        reason=why(commit),
        learners=[c.learner for c in commit.consumed],
        staleness=[c.staleness for c in commit.consumed],
        quorum_s=round(commit.quorum_s, 4),
        grace_s=round(commit.grace_s, 4),
        merge_s=round(spent.merge_s, 4),
        commit_s=round(spent.commit_s, 4),
        refused=[f"{r.cause} {r.learner}" for r in commit.refused],
    )


def _measure(commit: Commit, spent: CommitTimes) -> None:
    run, fragment = {metrics.RUN: commit.run}, {metrics.FRAGMENT: str(commit.fragment)}
    instruments.record(metrics.COMMIT_DURATION, spent.commit_s, run)
    instruments.record(metrics.FRAGMENT_VERSION, commit.version, run | fragment)
    for metric, value, labels in measured(commit):
        about = dict(zip(metric.attributes, (commit.run, *labels), strict=True))
        instruments.record(metric, value, about)


def _trace(
    commit: Commit,
    opened: Round | None,
    root: SpanContext,
    origins: Origins,
    spent: CommitTimes,
    merge: str,
    subject: str,
) -> None:
    about: spans.Attributes = {spans.FRAGMENT: commit.fragment, spans.VERSION: commit.version}
    quorum_ns = commit.opened_ns + round(commit.quorum_s * 1e9)
    events = [SpanEvent("closed", commit.closed_ns)] if opened is not None else []
    if opened is not None and commit.reason not in WITHOUT_QUORUM:
        events.insert(0, SpanEvent("quorum_reached", min(quorum_ns, commit.closed_ns)))
    closed: spans.Attributes = {
        **about,
        spans.STEP: commit.step,
        spans.REASON: why(commit),
        spans.ATTEMPT: opened.attempt if opened is not None else 0,
        spans.FINAL: commit.final,
        spans.QUORUM_S: commit.quorum_s,
        spans.GRACE_S: commit.grace_s,
        spans.CONTRIBUTIONS: len(commit.consumed),
        spans.REFUSED: len(commit.refused),
        spans.SYNCER: commit.syncer,
    }
    lasted = Interval(commit.opened_ns, spent.written_ns)
    tracing.emit(FinishedSpan(spans.ROUND, root, None, lasted, closed, events=tuple(events)))
    process, links = tracing.child(root, spans.PROCESS), _links(commit, origins)
    took = Interval(spent.began_ns, spent.written_ns)
    batch = Messages(spans.CONTRIBUTION, batch=len(commit.consumed))
    tracing.emit(FinishedSpan(spans.PROCESS, process, root, took, about, batch, links))
    place, took = tracing.child(root, spans.MERGE), Interval(spent.began_ns, spent.merged_ns)
    method = {**about, spans.MERGE_METHOD: merge}
    tracing.emit(FinishedSpan(spans.MERGE, place, process, took, method))
    place, took = tracing.child(root, spans.COMMIT), Interval(spent.merged_ns, spent.written_ns)
    sent = Messages(spans.GLOBAL_FRAGMENT, subject, f"{commit.fragment}/{commit.version}")
    fence = {**about, spans.FENCE: commit.fence}
    tracing.emit(FinishedSpan(spans.COMMIT, place, process, took, fence, sent))


def _links(commit: Commit, origins: Origins) -> tuple[Link, ...]:
    """Return a link to the sender of each contribution; a late one leads into an earlier trace."""
    found: list[Link] = []
    for merged in commit.consumed:
        known = id_of(merged)
        origin = tracing.parse(origins.get(known, ""))
        if origin is not None:
            about: spans.Attributes = {
                spans.MESSAGING_MESSAGE_ID: _message_id(known, commit.fragment),
                spans.LEARNER: merged.learner,
                spans.STALENESS: merged.staleness,
                spans.WEIGHT: merged.weight,
            }
            found.append(Link(origin, about))
    return tuple(found)


def _message_id(known: ContributionId, fragment: int) -> str:
    """Return what the message ids of all chunks of a contribution begin with."""
    learner, incarnation, identity = known
    return f"{learner}/{incarnation}/{fragment}/{identity}"
