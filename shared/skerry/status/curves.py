"""Curves over a run, in bounded memory: bins of time, coarser the longer the run has lasted.

They are made from commits alone, so that a monitor that is started again draws the same ones.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace


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
    most: int
    rolling: bool = False
    bins: dict[int, Bin] = field(default_factory=dict[int, Bin])

    def add(self, at_s: float, what: Bin) -> None:
        """Count what was committed at ``at_s`` (seconds since the epoch)."""
        number = int(at_s // self.width_s)
        held = self.bins.get(number)
        self.bins[number] = what if held is None else held + what
        if held is None:
            self._bound(number)

    def _bound(self, newest: int) -> None:
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
                other = merged.get(number // 2)
                merged[number // 2] = held if other is None else other + held
            self.bins = merged


@dataclass(slots=True)
class Curves:
    """The same commits at three scales: the whole run, the last day, the last hour."""

    run: BinnedCurve = field(default_factory=lambda: BinnedCurve(1.0, 720))
    day: BinnedCurve = field(default_factory=lambda: BinnedCurve(120.0, 720, rolling=True))
    hour: BinnedCurve = field(default_factory=lambda: BinnedCurve(5.0, 720, rolling=True))
    total: float = 0.0

    def begin(self, tokens: float) -> None:
        """Count what was merged before this log: the tokens that a restored fragment comes with."""
        self.total += tokens

    def add(self, at_s: float, what: Bin) -> None:
        """Count one commit."""
        self.total += what.tokens
        dated = replace(what, total=self.total)
        for curve in (self.run, self.day, self.hour):
            curve.add(at_s, dated)

    def by_name(self) -> dict[str, BinnedCurve]:
        return {"run": self.run, "day": self.day, "hour": self.hour}
