"""What commits add up to: curves over a run, histograms and counts, all in bounded memory.

They are made from commits alone, so that a monitor that is started again draws the same ones.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from skerry.protocol.messages import Commit, RefusalCause, is_round, refusals
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Figure, Metric, Point, Spread
from skerry.telemetry.spans import seconds

ACCEPTED, STALE, REFUSED = "accepted", "stale", "refused"
CAUSES = tuple(cause for cause in RefusalCause if cause is not RefusalCause.GENESIS)
"""Causes exported as 0 from the start: a rate needs an earlier value to see the first refusal.
GENESIS, a second offer of initial parameters, is no trouble and not counted."""


@dataclass(frozen=True, slots=True)
class Bin:
    """What was committed within one stretch of time.

    ``tokens`` are those of merged contributions, each over the number of fragments; ``total``
    counts them from the beginning. ``loss_sum`` is the sum of their losses (nats per token), each
    weighted by its tokens, whose sum is ``weight``. ``step`` is the highest global clock.
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


def measured(commit: Commit) -> Iterator[tuple[Metric, float, tuple[str, ...]]]:
    """Yield what a commit adds to metrics of rounds: each with a value and its labels behind run.

    Initial and restored parameters are no round, and add nothing.
    """
    if not is_round(commit) or commit.reason is None:
        return
    lasted_s = seconds(commit.opened_ns, commit.closed_ns)
    yield metrics.ROUND_DURATION, lasted_s, (commit.reason.value,)
    if commit.reason not in WITHOUT_QUORUM:
        yield metrics.QUORUM_WAIT, commit.quorum_s, ()
        yield metrics.GRACE_WAIT, commit.grace_s, ()
    if commit.merge_s > 0:  # syncers of earlier releases do not say
        yield metrics.MERGE_DURATION, commit.merge_s, ()
    for consumed in commit.consumed:
        yield metrics.STALENESS, consumed.staleness, ()
        yield metrics.CONTRIBUTIONS, 1, (STALE if consumed.staleness else ACCEPTED, "")
    for cause in refusals(commit):
        yield metrics.CONTRIBUTIONS, 1, (REFUSED, cause.value)


class CommitTotals:
    """A fold over one run's commits; each is to be taken once."""

    def __init__(self, run: str) -> None:
        self._run = run
        begun = (metrics.QUORUM_WAIT, metrics.GRACE_WAIT, metrics.MERGE_DURATION, metrics.STALENESS)
        self._spreads: dict[tuple[Metric, tuple[str, ...]], Spread] = {
            (metric, ()): Spread(metric, (run,)) for metric in begun
        }
        outcomes = [(ACCEPTED, ""), (STALE, ""), *((REFUSED, cause.value) for cause in CAUSES)]
        self._outcomes: dict[tuple[str, ...], float] = dict.fromkeys(outcomes, 0)

    def take(self, commit: Commit) -> None:
        """Count a commit."""
        for metric, value, labels in measured(commit):
            if metric is metrics.CONTRIBUTIONS:
                self._outcomes[labels] += value
                continue
            if (metric, labels) not in self._spreads:
                self._spreads[metric, labels] = Spread(metric, (self._run, *labels))
            # No examples of staleness: contributions are many.
            trace_id = "" if metric is metrics.STALENESS else commit.trace_id
            at_s = commit.closed_ns / 1e9
            self._spreads[metric, labels].add(value, trace_id=trace_id, at_s=at_s)

    def figures(self) -> Iterator[Figure]:
        """Yield what has been counted."""
        yield from self._spreads.values()
        for outcome, count in self._outcomes.items():
            yield Point(metrics.CONTRIBUTIONS, count, (self._run, *outcome))
