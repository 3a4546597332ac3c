"""What a syncer tells of its rounds: spans, metrics, and one log line for each."""

from __future__ import annotations

from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.protocol.subjects import Subjects, contributor
from skerry.status.view import GENESIS
from skerry.telemetry import ids as tracing
from skerry.telemetry import instruments, metrics, spans, tracer
from skerry.telemetry.spans import Event, Kind, Link, Span, messaging, messaging_name

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.log.contributions import Contribution, Refusal
    from skerry.protocol.messages import Commit, Consumed, Round, RunRecord
    from skerry.telemetry.ids import SpanContext

log = structlog.get_logger()

Mark = tuple[str, int, int]
"""Learner, incarnation and identity of a contribution."""


@dataclass(slots=True)
class Spent:
    """When the newest round's merge began and ended, and when its commit was in the log; in ns."""

    began_ns: int = 0
    merged_ns: int = 0
    written_ns: int = 0

    @property
    def merge_s(self) -> float:
        return _seconds(self.began_ns, self.merged_ns)

    @property
    def commit_s(self) -> float:
        return _seconds(self.merged_ns, self.written_ns)


@dataclass(slots=True)
class Teller:
    """Tells of the rounds of one run.

    Only of rounds that were committed: one whose syncer was overtaken is told of by the next.
    """

    run: RunRecord
    merge: str
    arriving: dict[str, int] = field(default_factory=dict[str, int])

    def trace(self, fragment: int, version: int) -> str:
        """Return the id of the trace of a round."""
        return tracing.trace_id(self.run.run, fragment, version, self.run.created_ns)

    def root(self, fragment: int, version: int) -> SpanContext:
        """Return the round's own place in its trace."""
        return tracer.context(self.trace(fragment, version))

    def heard(self, subject: str, now_ns: int) -> None:
        """Note that a chunk of a contribution is here: the first one begins its arrival."""
        if tracer.on():
            self.arriving.setdefault(subject, now_ns)

    def settled(self, subject: str) -> None:
        """Note that nothing more is expected of the contribution on a subject."""
        self.arriving.pop(subject, None)

    def received(self, whole: Contribution, subject: str, now_ns: int) -> None:
        """Tell that a contribution has come: a span of the round that it was made for."""
        if not tracer.on():
            return
        root = self.root(whole.header.fragment, whole.header.round_version)
        if not root.sampled:
            return
        began_ns = self.arriving.get(subject, now_ns)
        mark = mark_of(whole)
        link = [Link(whole.origin, _about(whole))] if whole.origin is not None else []
        tracer.tell(
            Span(
                name=messaging_name(spans.RECEIVE, spans.CONTRIBUTION),
                kind=Kind.CLIENT,
                context=tracer.context(root.trace_id, spans.RECEIVE, *mark),
                parent=root,
                start_ns=began_ns,
                end_ns=now_ns,
                attributes={
                    **messaging(spans.RECEIVE, subject, spans.CONTRIBUTION),
                    spans.FRAGMENT: whole.header.fragment,
                    spans.LEARNER: whole.header.learner,
                },
                links=tuple(link),
            )
        )

    def refused(self, got: Refusal) -> None:
        """Log a refusal, in the trace of the round that was contributed to if that is known.

        A late one belongs to a round that is long over, and not to the one that is in the air.
        """
        fragment, learner = contributor(got.subject)
        version = got.round_version
        place = tracer.within(self.root(fragment, version)) if version else nullcontext()
        with place:
            log.warning(
                "contribution_refused",
                fragment=fragment,
                version=version or None,
                learner=learner,
                cause=got.cause,
                detail=got.detail,
            )

    def committed(
        self,
        commit: Commit,
        opened: Round | None,
        origins: Mapping[Mark, SpanContext | None],
        spent: Spent,
    ) -> None:
        """Tell that a round is over, in every way there is."""
        root = tracer.context(commit.trace_id)
        with tracer.within(root):
            self._log(commit, spent)
            if instruments.on():
                self._measure(commit, opened, spent)
        if root.sampled:
            self._trace(commit, opened, root, origins, spent)

    def _log(self, commit: Commit, spent: Spent) -> None:
        """Write the one canonical line of a round."""
        log.info(
            "round_committed",
            fragment=commit.fragment,
            version=commit.version,
            step=commit.step,
            reason=commit.reason,
            learners=[c.learner for c in commit.consumed],
            staleness=[c.staleness for c in commit.consumed],
            quorum_s=round(commit.quorum_s, 4),
            grace_s=round(commit.grace_s, 4),
            merge_s=round(spent.merge_s, 4),
            commit_s=round(spent.commit_s, 4),
            refused=[f"{r.cause} {r.learner}" for r in commit.refused],
        )

    def _measure(self, commit: Commit, opened: Round | None, spent: Spent) -> None:
        run = {metrics.RUN: commit.run}
        record = instruments.record
        if opened is not None:  # nobody asked for genesis, or waited for it
            lasted_s = _seconds(commit.opened_ns, commit.closed_ns)
            record(metrics.ROUND_DURATION, lasted_s, {**run, metrics.REASON: commit.reason})
            if commit.reason not in WITHOUT_QUORUM:
                record(metrics.QUORUM_WAIT, commit.quorum_s, run)
                record(metrics.GRACE_WAIT, commit.grace_s, run)
            record(metrics.MERGE_DURATION, spent.merge_s, run)
        record(metrics.COMMIT_DURATION, spent.commit_s, run)
        fragment = {**run, metrics.FRAGMENT: str(commit.fragment)}
        record(metrics.FRAGMENT_VERSION, commit.version, fragment)
        if opened is None:
            return
        for merged in commit.consumed:
            record(metrics.STALENESS, merged.staleness, run)
        for (outcome, cause), many in _outcomes(commit).items():
            record(
                metrics.CONTRIBUTIONS, many, {**run, metrics.OUTCOME: outcome, metrics.CAUSE: cause}
            )

    def _trace(
        self,
        commit: Commit,
        opened: Round | None,
        root: SpanContext,
        origins: Mapping[Mark, SpanContext | None],
        spent: Spent,
    ) -> None:
        process = tracer.context(root.trace_id, spans.PROCESS)
        about: dict[str, spans.Value] = {
            spans.FRAGMENT: commit.fragment,
            spans.VERSION: commit.version,
        }
        tracer.tell(_round(commit, opened, root, about, spent))
        tracer.tell(
            Span(
                name=messaging_name(spans.PROCESS, spans.CONTRIBUTION),
                kind=Kind.CONSUMER,
                context=process,
                parent=root,
                start_ns=spent.began_ns,
                end_ns=spent.written_ns,
                attributes={
                    **messaging(spans.PROCESS, "", spans.CONTRIBUTION),
                    spans.MESSAGING_BATCH_MESSAGE_COUNT: len(commit.consumed),
                    **about,
                },
                links=_links(commit.fragment, commit.consumed, origins),
            )
        )
        tracer.tell(
            Span(
                name=spans.MERGE,
                kind=Kind.INTERNAL,
                context=tracer.context(root.trace_id, spans.MERGE),
                parent=process,
                start_ns=spent.began_ns,
                end_ns=spent.merged_ns,
                attributes={**about, spans.MERGE_METHOD: self.merge},
            )
        )
        manifest = Subjects(commit.run).manifest(commit.fragment)
        tracer.tell(
            Span(
                name=messaging_name(spans.COMMIT, spans.GLOBAL_FRAGMENT),
                kind=Kind.PRODUCER,
                context=tracer.context(root.trace_id, spans.COMMIT),
                parent=process,
                start_ns=spent.merged_ns,
                end_ns=spent.written_ns,
                attributes={
                    **messaging(spans.COMMIT, manifest, spans.GLOBAL_FRAGMENT),
                    spans.FENCE: commit.fence,
                    **about,
                },
            )
        )


def _seconds(began_ns: int, ended_ns: int) -> float:
    """Return the time between two looks at a clock that somebody may have set meanwhile."""
    return max(0, ended_ns - began_ns) / 1e9


def _outcomes(commit: Commit) -> Counter[tuple[str, str]]:
    """Return how many contributions a round had of each outcome and cause."""
    found = Counter(("stale" if merged.staleness else "accepted", "") for merged in commit.consumed)
    # A second offer of initial parameters is nobody's trouble.
    found.update(("refused", r.cause) for r in commit.refused if r.cause != GENESIS)
    return found


def mark_of(contribution: Contribution) -> Mark:
    """Return what tells a contribution from every other one to its fragment."""
    told = contribution.header
    return told.learner, told.incarnation, told.identity


def _round(
    commit: Commit,
    opened: Round | None,
    root: SpanContext,
    about: Mapping[str, spans.Value],
    spent: Spent,
) -> Span:
    quorum_ns = commit.opened_ns + round(commit.quorum_s * 1e9)
    reached = Event("quorum_reached", min(quorum_ns, commit.closed_ns))
    events = (
        *([] if commit.reason in WITHOUT_QUORUM else [reached]),
        Event("closed", commit.closed_ns),
    )
    return Span(
        name=spans.ROUND,
        kind=Kind.INTERNAL,
        context=root,
        parent=None,
        start_ns=commit.opened_ns,
        end_ns=spent.written_ns,
        attributes={
            **about,
            spans.STEP: commit.step,
            spans.REASON: commit.reason,
            spans.ATTEMPT: opened.attempt if opened is not None else 0,
            spans.FINAL: commit.final,
            spans.QUORUM_S: commit.quorum_s,
            spans.GRACE_S: commit.grace_s,
            spans.CONTRIBUTIONS: len(commit.consumed),
            spans.REFUSED: len(commit.refused),
            spans.SYNCER: commit.syncer,
        },
        events=events if opened is not None else (),
    )


def _links(
    fragment: int, consumed: Sequence[Consumed], origins: Mapping[Mark, SpanContext | None]
) -> tuple[Link, ...]:
    """Return a link to whoever sent each contribution; a late one leads into an earlier trace."""
    found: list[Link] = []
    for merged in consumed:
        mark = merged.learner, merged.incarnation, merged.identity
        origin = origins.get(mark)
        if origin is None:
            continue
        found.append(
            Link(
                origin,
                {
                    spans.MESSAGING_MESSAGE_ID: _message_id(mark, fragment),
                    spans.LEARNER: merged.learner,
                    spans.STALENESS: merged.staleness,
                    spans.WEIGHT: merged.weight,
                },
            )
        )
    return tuple(found)


def _about(whole: Contribution) -> dict[str, spans.Value]:
    """Return what is true of one message; nothing in it is a number that its sender made up."""
    return {
        spans.MESSAGING_MESSAGE_ID: _message_id(mark_of(whole), whole.header.fragment),
        spans.SCHEME: whole.scheme,
    }


def _message_id(mark: Mark, fragment: int) -> str:
    """Return what the message ids of all chunks of a contribution begin with."""
    learner, incarnation, identity = mark
    return f"{learner}/{incarnation}/{fragment}/{identity}"
