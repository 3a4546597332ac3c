"""What commits add up to, round by round: the histograms and counts that a view does not keep."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.protocol.messages import CloseReason, RefusalCause, is_round
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.telemetry import metrics
from skerry.telemetry.points import Point, Spread

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.protocol.messages import Commit
    from skerry.telemetry.points import Figure

ACCEPTED, STALE, REFUSED = "accepted", "stale", "refused"
CAUSES = tuple(cause for cause in RefusalCause if cause is not RefusalCause.GENESIS)
"""Exported from the beginning, as 0: a rate sees the first refusal only after some other figure. A
second offer of initial parameters is no trouble, and not counted."""


class CommitTotals:
    """A fold over one run's commits, each fragment's in order; twice the same changes nothing."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._counted: dict[int, int] = {}
        self._rounds: dict[CloseReason, Spread] = {}
        self._quorum = Spread(metrics.QUORUM_WAIT, (run,))
        self._grace = Spread(metrics.GRACE_WAIT, (run,))
        self._merge = Spread(metrics.MERGE_DURATION, (run,))
        self._staleness = Spread(metrics.STALENESS, (run,))
        begun = [(ACCEPTED, ""), (STALE, ""), *((REFUSED, cause.value) for cause in CAUSES)]
        self._outcomes = dict.fromkeys(begun, 0)

    def take(self, commit: Commit) -> None:
        """Count one commit; initial and restored parameters are no round."""
        if commit.version <= self._counted.get(commit.fragment, 0):
            return
        self._counted[commit.fragment] = commit.version
        if not is_round(commit) or commit.reason is None:
            return
        at_s, trace_id = commit.closed_ns / 1e9, commit.trace_id
        duration_s = max(0.0, (commit.closed_ns - commit.opened_ns) / 1e9)
        self._round(commit.reason).add(duration_s, trace_id=trace_id, at_s=at_s)
        if commit.reason not in WITHOUT_QUORUM:
            self._quorum.add(commit.quorum_s, trace_id=trace_id, at_s=at_s)
            self._grace.add(commit.grace_s, trace_id=trace_id, at_s=at_s)
        if commit.merge_s > 0:  # syncers of earlier releases do not say
            self._merge.add(commit.merge_s, trace_id=trace_id, at_s=at_s)
        for consumed in commit.consumed:
            self._staleness.add(consumed.staleness)
            self._outcomes[STALE if consumed.staleness else ACCEPTED, ""] += 1
        for refused in commit.refused:
            if refused.cause is not RefusalCause.GENESIS:
                self._outcomes[REFUSED, refused.cause.value] += 1

    def figures(self) -> Iterator[Figure]:
        """Yield what has been counted."""
        yield from self._rounds.values()
        yield from (self._quorum, self._grace, self._merge, self._staleness)
        for outcome, count in self._outcomes.items():
            yield Point(metrics.CONTRIBUTIONS, count, (self._run, *outcome))

    def _round(self, reason: CloseReason) -> Spread:
        made = Spread(metrics.ROUND_DURATION, (self._run, reason.value))
        return self._rounds.setdefault(reason, made)
