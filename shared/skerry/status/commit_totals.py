"""What commits add up to: curves over a run, histograms and counts, all in bounded memory.

They are made from commits alone, so that a monitor that is started again draws the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from skerry.protocol.messages import CloseReason, Commit, RefusalCause, is_round
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Figure, Point, Spread

ACCEPTED, STALE, REFUSED = "accepted", "stale", "refused"
CAUSES = tuple(cause for cause in RefusalCause if cause is not RefusalCause.GENESIS)
"""Exported from the beginning, as 0: a rate sees the first refusal only after some other figure. A
second offer of initial parameters is no trouble, and not counted."""


@dataclass(frozen=True, slots=True)
class Bin:
    """What was committed within one stretch of time.

    ``tokens`` are those of the merged contributions, a fragment's share of them each, ``total`` all
    of them up to here; ``loss_sum`` is the sum of their losses (nats per token), each weighted by
    its tokens, whose sum is ``weight``. ``step`` is the highest global clock.
    """

    step: int = 0
    tokens: float = 0.0
    total: float = 0.0
    loss_sum: float = 0.0
    weight: float = 0.0
    rounds: int = 0

    def __add__(self, other: Bin) -> Bin:
        return Bin(
            max(self.step, other.step),
            self.tokens + other.tokens,
            max(self.total, other.total),
            self.loss_sum + other.loss_sum,
            self.weight + other.weight,
            self.rounds + other.rounds,
        )

    @property
    def loss(self) -> float | None:
        """Mean loss in nats per token, None where nothing was merged."""
        return self.loss_sum / self.weight if self.weight > 0 else None


@dataclass(slots=True)
class BinnedCurve:
    """At most ``most`` bins of ``width_s`` seconds, by their number since the epoch.

    A ``rolling`` curve forgets its oldest bins; any other one doubles its width instead and so
    always reaches back to the beginning.
    """

    width_s: float
    most: int = 720
    rolling: bool = False
    bins: dict[int, Bin] = field(default_factory=dict[int, Bin])

    def add(self, at_s: float, what: Bin) -> None:
        """Count what was committed at ``at_s`` (seconds since the epoch)."""
        newest = int(at_s // self.width_s)
        self.bins[newest] = self.bins.get(newest, Bin()) + what
        if self.rolling:
            for number in [n for n in self.bins if n <= newest - self.most]:
                del self.bins[number]
            while len(self.bins) > self.most:  # a clock was set back: what lies ahead goes first
                del self.bins[max(self.bins)]
            return
        while max(self.bins) - min(self.bins) >= self.most:
            self.width_s *= 2
            merged: dict[int, Bin] = {}
            for number, held in self.bins.items():
                merged[number // 2] = merged.get(number // 2, Bin()) + held
            self.bins = merged


@dataclass(slots=True)
class Curves:
    """The same commits at three scales: the whole run, the last day, the last hour.

    ``total`` counts all tokens, those too that were merged before this log: a restored fragment
    comes with them.
    """

    run: BinnedCurve = field(default_factory=lambda: BinnedCurve(1.0))
    day: BinnedCurve = field(default_factory=lambda: BinnedCurve(120.0, rolling=True))
    hour: BinnedCurve = field(default_factory=lambda: BinnedCurve(5.0, rolling=True))
    total: float = 0.0

    def add(self, at_s: float, what: Bin) -> None:
        """Count one commit."""
        self.total += what.tokens
        for curve in (self.run, self.day, self.hour):
            curve.add(at_s, replace(what, total=self.total))

    def by_name(self) -> dict[str, BinnedCurve]:
        return {"run": self.run, "day": self.day, "hour": self.hour}


class CommitTotals:
    """A fold over one run's commits."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._rounds: dict[CloseReason, Spread] = {}
        self._quorum = Spread(metrics.QUORUM_WAIT, (run,))
        self._grace = Spread(metrics.GRACE_WAIT, (run,))
        self._merge = Spread(metrics.MERGE_DURATION, (run,))
        self._staleness = Spread(metrics.STALENESS, (run,))
        begun = [(ACCEPTED, ""), (STALE, ""), *((REFUSED, cause.value) for cause in CAUSES)]
        self._outcomes = dict.fromkeys(begun, 0)

    def take(self, commit: Commit) -> None:
        """Count a commit, once; initial and restored parameters are no round."""
        if not is_round(commit) or commit.reason is None:
            return
        at_s, trace_id = commit.closed_ns / 1e9, commit.trace_id
        duration_s = max(0.0, (commit.closed_ns - commit.opened_ns) / 1e9)
        if commit.reason not in self._rounds:
            labels = self._run, commit.reason.value
            self._rounds[commit.reason] = Spread(metrics.ROUND_DURATION, labels)
        self._rounds[commit.reason].add(duration_s, trace_id=trace_id, at_s=at_s)
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
