"""Goodput under faults, against the same cluster without them.

A learner is *up* while its process runs and is not stopped: from its start on, so that importing,
compiling and catching up count as time that it had. Useful time is what learners' pulses report as
spent inside training steps, those that only replay left out, as in ``algorithm.goodput``: what a
kill took was counted when it was done the first time. With both summed over learners:

* share = useful time / time up, during the faults and in the quiet phases before and after them;
* goodput = share during the faults / share in the quiet phases: 1 means that faults cost nothing
  but the time for which they took learners away;
* rate = tokens that commits have counted / time up, and the rate's ratio likewise. A contribution
  counts in the phase in which it is merged. Survivors that share processors with the victims are
  faster while those are gone, so the ratio may be above 1.

docs/faults.md says what is not counted.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from skerry.protocol.messages import Commit, Pulse

if TYPE_CHECKING:
    from skerry_tools.chaos.drilled import DrilledService

SAMPLE_S = 0.1


class Phase(StrEnum):
    """What is going on: time that is neither quiet nor under faults is not measured."""

    QUIET = "quiet"
    FAULTS = "faults"
    OTHER = "other"


@dataclass(slots=True)
class PhaseTotals:
    """Seconds inside steps, tokens that were merged and seconds up, over all learners."""

    busy_s: float = 0.0
    replay_s: float = 0.0
    tokens: float = 0.0
    up_s: float = 0.0

    @property
    def share(self) -> float:
        return self.busy_s / self.up_s if self.up_s else 0.0

    @property
    def rate(self) -> float:
        return self.tokens / self.up_s if self.up_s else 0.0


@dataclass(frozen=True, slots=True)
class Goodput:
    """What was measured; shares and ratios in [0, 1] or a little above, rates in tokens/s."""

    goodput: float
    rate_ratio: float
    share_faults: float
    share_quiet: float
    rate_faults: float
    rate_quiet: float
    up_s: float
    quiet_s: float
    replay_s: float
    loss_first: float | None
    loss_last: float | None


@dataclass(slots=True)
class GoodputMeter:
    """Adds up what pulses say and which processes run, by phase."""

    phase: Phase = Phase.OTHER
    totals: dict[Phase, PhaseTotals] = field(
        default_factory=lambda: {phase: PhaseTotals() for phase in Phase}
    )
    training: set[str] = field(default_factory=set[str])
    _seen: dict[tuple[str, int], tuple[float, float]] = field(
        default_factory=dict[tuple[str, int], tuple[float, float]]
    )
    _merged: dict[int, dict[str, int]] = field(default_factory=dict[int, dict[str, int]])
    _losses: dict[str, float] = field(default_factory=dict[str, float])
    _loss_first: float | None = None

    def observe(self, pulse: Pulse) -> None:
        """Add what a learner did since its pulse before this one to the phase of now."""
        key = (pulse.learner, pulse.incarnation)
        busy_s, replay_s = self._seen.get(key, (0.0, 0.0))
        totals = self.totals[self.phase]
        totals.busy_s += max(0.0, pulse.busy_s - busy_s)
        totals.replay_s += max(0.0, pulse.replay_s - replay_s)
        self._seen[key] = (pulse.busy_s, pulse.replay_s)
        if pulse.steps:
            self.training.add(pulse.learner)
            if not math.isnan(pulse.loss):
                self._losses[pulse.learner] = pulse.loss

    def merged(self, commit: Commit, fragments: int) -> None:
        """Add the tokens that a commit has counted since the one before it of its fragment.

        A learner's tokens go through every fragment: each counts for its share of them. The first
        commit of a fragment that is seen says where counting starts.
        """
        now = {row.learner: row.tokens for row in commit.progress}
        before = self._merged.get(commit.fragment)
        if before is not None:
            more = sum(max(0, count - before.get(name, 0)) for name, count in now.items())
            self.totals[self.phase].tokens += more / fragments
        self._merged[commit.fragment] = now

    def sample(self, entries: Iterable[DrilledService], seconds: float) -> None:
        """Add the time since the last look for every learner that is up."""
        up = sum(entry.kind == "learner" and entry.alive and not entry.paused for entry in entries)
        self.totals[self.phase].up_s += up * seconds

    def enter(self, phase: Phase) -> None:
        """Begin a phase; the loss before the first one under faults is the one to compare with."""
        if phase is Phase.FAULTS and self._loss_first is None:
            self._loss_first = self.loss()
        self.phase = phase

    def loss(self) -> float | None:
        """Return the mean of the learners' newest losses in nats per token, None without any."""
        return sum(self._losses.values()) / len(self._losses) if self._losses else None

    def result(self) -> Goodput:
        """Return what has been measured so far."""
        faults, quiet = self.totals[Phase.FAULTS], self.totals[Phase.QUIET]
        return Goodput(
            goodput=faults.share / quiet.share if quiet.share else 0.0,
            rate_ratio=faults.rate / quiet.rate if quiet.rate else 0.0,
            share_faults=faults.share,
            share_quiet=quiet.share,
            rate_faults=faults.rate,
            rate_quiet=quiet.rate,
            up_s=faults.up_s,
            quiet_s=quiet.up_s,
            replay_s=faults.replay_s,
            loss_first=self._loss_first,
            loss_last=self.loss(),
        )

    async def watch(self, entries: Callable[[], Mapping[str, DrilledService]]) -> None:
        """Sample until cancelled."""
        now = asyncio.get_running_loop().time
        last = now()
        while True:
            await asyncio.sleep(SAMPLE_S)
            began, last = last, now()
            self.sample(entries().values(), last - began)
