"""What if: the same contributions under another policy, and how far the result drifts.

What is kept: every contribution as it was sent, the rounds that were opened and when, and the base
version of each contribution. What a learner would have computed from another global state, and
when it would then have answered, is not known: this says what the *syncer* would have made of the
same answers, and its drift is a lower bound on how differently a run would have gone.

Another quorum K closes each round again: at the arrival of the K-th answer to it (the broker's
time of its last chunk) plus the grace that was recorded, never later than the timeout and never
later than the next round of the fragment was opened, since what came then was made from the
version that this round had become. All that has arrived by then and was not merged earlier is
judged for staleness and merged; the rest waits for the next round. Rounds are timed by the syncer's
clock and arrivals by the broker's: how far the two are apart is taken from when the syncer had, by
its clock, what the broker had just stored.
"""

from __future__ import annotations

import asyncio
import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skerry.algorithm import weighting
from skerry.algorithm.adamw import AdamW
from skerry.algorithm.merge import largest, sound
from skerry.algorithm.outer import make_outer, merge_and_apply
from skerry.errors import ConfigError, Diverged
from skerry.protocol.messages import ContributionKind, RefusalCause

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.algorithm.merge_numpy import OuterGradient
    from skerry.algorithm.outer import Outer
    from skerry.protocol.messages import Commit
    from skerry.settings.models import RunConfig
    from skerry_tools.audit.payloads import Arrived, Key, Payloads

    Vector = NDArray[np.float32]

NANOSECONDS = 1_000_000_000
OUTER = "outer."
"""What the names of an outer optimizer's parts begin with."""


class Stored(NamedTuple):
    """A commit, and when the broker took its record into the ledger."""

    commit: Commit
    time_ns: int


@dataclass(frozen=True, slots=True)
class WhatIfPolicy:
    """Another policy; what is None stays as the run had it."""

    merge: str | None = None
    outer: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    quorum: int | None = None
    max_staleness: int | None = None
    staleness_discount: float | None = None

    def make_outer(self, config: RunConfig, plan: Plan) -> Outer:
        """Return the outer optimizer; another preset brings its own learning rate and momentum."""
        given, same = config.outer, self.outer is None
        return make_outer(
            self.outer or given.preset,
            lr=given.lr if self.outer_lr is None and same else self.outer_lr,
            momentum=(
                given.momentum if self.outer_momentum is None and same else self.outer_momentum
            ),
            h_steps=config.sync.h_steps,
            adamw=AdamW.of(config.train, plan),
        )


@dataclass(slots=True)
class FragmentFold:
    """One fragment, folded commit by commit: its master and the outer optimizer's state."""

    outer: Outer
    fragment: Fragment
    averaged: Sequence[bool]
    master: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    state: object = None

    def begin(self, master: Vector, leaves: Mapping[str, Vector] | None) -> None:
        """Begin with a master, and the outer optimizer's leaves where a checkpoint has them."""
        self.master = master
        self.state = self.outer.restore(master, leaves) if leaves else self.outer.init(master)

    def merge(self, merged: Sequence[OuterGradient], shares: Sequence[float], method: str) -> None:
        """Do what the syncer does in a round; Diverged if the result is not finite."""
        self.master, self.state, _ = merge_and_apply(
            self.outer,
            self.master,
            self.state,
            merged,
            shares,
            method,
            self.fragment,
            self.averaged,
        )


@dataclass(frozen=True, slots=True)
class DriftPoint:
    """One version: distance over the committed norm, and the cosine of both movements.

    ``cosine`` is between what each has moved since the base; None where one has not moved.
    ``merged`` contributions went into the what-if, ``refused`` were refused by its policy.
    """

    version: int
    distance: float
    cosine: float | None
    merged: int
    refused: int


@dataclass(frozen=True, slots=True)
class DriftCurve:
    """The drift of one fragment; the squares are of its last version, to add over fragments."""

    points: tuple[DriftPoint, ...]
    difference_square: float = 0.0
    committed_square: float = 0.0
    moved_dot: float = 0.0
    moved_square: float = 0.0
    other_square: float = 0.0
    cold: bool = False


@dataclass(slots=True)
class Branch:
    """One fragment under another policy."""

    policy: WhatIfPolicy
    config: RunConfig
    fold: FragmentFold
    origin: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    points: list[DriftPoint] = field(default_factory=list[DriftPoint])
    squares: tuple[float, float, float, float, float] = (0.0, 0.0, 0.0, 0.0, 0.0)
    cold: bool = False
    used: set[Key] = field(default_factory=set["Key"])

    def begin(self, master: Vector, leaves: Mapping[str, Vector] | None) -> None:
        """Begin where the committed history begins; another optimizer's state begins cold."""
        self.origin = master
        try:
            self.fold.begin(master, leaves)
        except ConfigError:
            self.fold.begin(master, None)
            self.cold = True

    async def round(
        self,
        stored: Stored,
        following: Stored | None,
        inputs: Sequence[Arrived],
        source: Payloads,
        committed: Vector,
    ) -> None:
        """Fold one round of the history again, and measure how far it is from ``committed``."""
        commit = stored.commit
        if self.policy.quorum is None:
            taken = [*inputs, *await self._stale(commit, source)]
            source.forget(commit.contrib_floor)
        else:
            taken = await self._closed_again(stored, following, inputs, source)
            source.forget(commit.contrib_floor, self.used)
        merged = await asyncio.to_thread(self._merge, commit, taken)
        counts = (merged, len(taken) - merged)
        await asyncio.to_thread(self._measure, commit.version, committed, *counts)

    def curve(self) -> DriftCurve:
        """Return the drift up to the newest version."""
        return DriftCurve(tuple(self.points), *self.squares, cold=self.cold)

    async def _stale(self, commit: Commit, source: Payloads) -> list[Arrived]:
        """Return what this commit refused as too stale: another bound may take it."""
        keys = _refused_keys(commit, stale=True)
        found = [await source.fetch(key, commit.contrib_floor) for key in keys]
        return [item for item in found if item is not None]

    async def _closed_again(
        self,
        stored: Stored,
        following: Stored | None,
        inputs: Sequence[Arrived],
        source: Payloads,
    ) -> list[Arrived]:
        """Return what has arrived when the round closes under the other quorum."""
        commit, ahead_ns = stored.commit, clocks_apart_ns(stored, inputs)
        opened_ns = commit.opened_ns + ahead_ns
        close = opened_ns + int(self.config.sync.round_timeout_s * NANOSECONDS)
        refused = {*_refused_keys(commit, stale=False)}
        if following is not None:
            same = following.commit.syncer == commit.syncer
            apart_ns = ahead_ns if same else clocks_apart_ns(following, ())
            close = min(close, following.commit.opened_ns + apart_ns)
            refused |= {*_refused_keys(following.commit, stale=False)}
        close = max(close, opened_ns)
        await source.until(close)
        answers = sorted(
            item.time_ns
            for item in source.held.values()
            if item.header.round_version == commit.version
        )
        quorum = self.policy.quorum or 1
        if len(answers) >= quorum:
            close = min(close, answers[quorum - 1] + int(commit.grace_s * NANOSECONDS))
        taken = [
            item
            for key, item in source.held.items()
            if item.time_ns <= close
            and key not in refused
            and key not in self.used
            and item.header.base_version < commit.version
        ]
        self.used.update(item.key for item in taken)
        return taken

    def _merge(self, commit: Commit, taken: Sequence[Arrived]) -> int:
        """Merge what counts, as the syncer does; return how many were merged."""
        kept, shares = self._weigh(commit.version - 1, taken)
        while kept:
            try:
                self.fold.merge(kept, shares, self.policy.merge or self.config.sync.merge)
            except Diverged:
                worst = largest(kept, self.fold.fragment)
                kept = [k for number, k in enumerate(kept) if number != worst]
                rest = [s for number, s in enumerate(shares) if number != worst]
                shares = list(weighting.normalised(rest))
            else:
                break
        return len(kept)

    def _weigh(
        self, version: int, taken: Sequence[Arrived]
    ) -> tuple[list[OuterGradient], list[float]]:
        sync, policy = self.config.sync, self.policy
        bound = sync.max_staleness if policy.max_staleness is None else policy.max_staleness
        factor = policy.staleness_discount or sync.staleness_discount
        scale = None if self.fold.outer.bare_gradients else self.fold.master
        kept: list[OuterGradient] = []
        work: list[float] = []
        for item in sorted(taken, key=lambda arrived: arrived.key):
            header = item.header
            discount, _ = weighting.discounted(header.base_version, version, bound, factor)
            if discount is None or header.kind is ContributionKind.GENESIS:
                continue
            if sound(item.merged, self.fold.fragment, scale):
                kept.append(item.merged)
                work.append(weighting.weight(header.tokens, header.steps) * discount)
        return kept, list(weighting.normalised(work))

    def _measure(self, version: int, committed: Vector, merged: int, refused: int) -> None:
        difference, norm = _square(self.fold.master - committed), _square(committed)
        moved, branched = committed - self.origin, self.fold.master - self.origin
        dot = float(np.dot(moved.astype(np.float64), branched.astype(np.float64)))
        self.squares = (difference, norm, dot, _square(moved), _square(branched))
        distance = math.sqrt(difference / norm) if norm else 0.0
        alike = cosine(dot, *self.squares[3:])
        self.points.append(DriftPoint(version, distance, alike, merged, refused))


def clocks_apart_ns(stored: Stored, inputs: Sequence[Arrived]) -> int:
    """Return by how much the broker's clock was ahead of the syncer's at a commit.

    ``inputs`` are what it consumed: the syncer had each of them no sooner than the broker, so the
    quickest is the best bound. Without one that is dated, the time of the merge is counted in.
    """
    commit = stored.commit
    dated = {
        (c.learner, c.incarnation, c.identity): c.arrived_ns
        for c in commit.consumed
        if c.arrived_ns > commit.opened_ns  # what was there before the round came at no known time
    }
    apart = [item.time_ns - dated[item.key] for item in inputs if item.key in dated]
    most = stored.time_ns - commit.closed_ns
    return min(max(apart), most) if apart else most


@dataclass(frozen=True, slots=True)
class Drift:
    """How far the what-if is from what was committed: distance over the norm, and cosine."""

    distance: float
    cosine: float | None


def overall(curves: Sequence[DriftCurve]) -> Drift:
    """Return the drift of all fragments together, each at its last version."""
    difference = sum(c.difference_square for c in curves)
    norm = sum(c.committed_square for c in curves)
    dot = sum(c.moved_dot for c in curves)
    moved, other = sum(c.moved_square for c in curves), sum(c.other_square for c in curves)
    return Drift(math.sqrt(difference / norm) if norm else 0.0, cosine(dot, moved, other))


def cosine(dot: float, first: float, second: float) -> float | None:
    """Return a cosine from a dot product and two squares; None where one of them is zero."""
    return dot / math.sqrt(first * second) if first and second else None


def _square(vector: Vector) -> float:
    return float(np.dot(vector.astype(np.float64), vector.astype(np.float64)))


def _refused_keys(commit: Commit, *, stale: bool) -> list[Key]:
    """Return what a commit refused as too stale, or for a reason that no policy changes."""
    return [
        (r.learner, r.incarnation, r.identity)
        for r in commit.refused
        if (r.cause is RefusalCause.TOO_STALE) is stale
    ]
