"""What if: the same contributions under another policy, and how far the result drifts.

What is kept: every contribution as it was sent, which round took it, and its base version. What a
learner would have computed from another global state is not known: this says what the *syncer*
would have made of the same answers, and its drift is a lower bound on how differently a run would
have gone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.algorithm.merge import largest
from skerry.algorithm.outer import Outer, adamw_of, make_outer
from skerry.errors import ConfigError, Diverged
from skerry.log.replay import FragmentFold
from skerry.protocol.commit import Batch, weigh, without
from skerry.protocol.containment import ContainmentRules, FragmentMemory, examine
from skerry.protocol.contribution import Contribution, ContributionRules
from skerry.protocol.messages import Commit, Manifest
from skerry.protocol.shard import PendingFragment, Shard, StalenessRule

if TYPE_CHECKING:
    from skerry.settings.models import RunConfig

    Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class WhatIfPolicy:
    """Another policy; what is None stays as the run had it.

    Nothing of the learner ``without`` is merged.
    """

    merge: str | None = None
    outer: str | None = None
    outer_lr: float | None = None
    outer_momentum: float | None = None
    max_staleness: int | None = None
    staleness_discount: float | None = None
    without: str | None = None

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
            adamw=adamw_of(config.train, plan),
        )


class Drift(NamedTuple):
    """How far a what-if is from what was committed, as squares and products to add up.

    ``difference`` and ``committed`` are squared norms; the others are of what each has moved since
    the version that the replay began with.
    """

    difference: float = 0.0
    committed: float = 0.0
    moved_product: float = 0.0
    moved: float = 0.0
    moved_other: float = 0.0

    @property
    def distance(self) -> float:
        """The distance over the norm of what was committed."""
        return math.sqrt(self.difference / self.committed) if self.committed else 0.0

    @property
    def cosine(self) -> float | None:
        """The cosine of the two movements; None where one has not moved."""
        both = self.moved * self.moved_other
        return self.moved_product / math.sqrt(both) if both else None

    def and_of(self, other: Drift) -> Drift:
        """Return the drift of two fragments together."""
        return Drift(*(mine + its for mine, its in zip(self, other, strict=True)))


@dataclass(slots=True)
class Branch:
    """One fragment under another policy; ``shard`` holds its rules.

    ``cold`` says that its outer optimizer began without the state of the run's own.
    """

    fold: FragmentFold
    shard: Shard
    origin: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    cold: bool = False
    memory: FragmentMemory = field(default_factory=FragmentMemory)
    without: str | None = None

    @classmethod
    def of(
        cls,
        run: str,
        plan: Plan,
        fold: FragmentFold,
        rule: StalenessRule,
        containment: ContainmentRules,
    ) -> Branch:
        shard = Shard.of(run, plan, rule, ContributionRules(), [])
        shard.containment = containment
        return cls(fold, shard)

    def begin(self, master: Vector, leaves: Mapping[str, Vector] | None) -> None:
        """Begin where the committed history begins; another optimizer's state begins cold."""
        self.origin = master
        try:
            self.fold.begin(master, leaves)
        except ConfigError:
            self.fold.begin(master, None)
            self.cold = True

    def round(self, commit: Commit, taken: Sequence[Contribution]) -> None:
        """Do with what a round took what the syncer would do under the other policy."""
        fold, before = self.fold, replace(commit, version=commit.version - 1)
        taken = [item for item in taken if item.header.learner != self.without]
        kept = tuple(item for item in commit.consumed if item.learner != self.without)
        state = PendingFragment(fold.fragment, Manifest(before, ()), memory=self.memory)
        scale = None if fold.outer.bare_gradients else fold.master
        rules = self.shard.containment
        found = examine(taken, fold.fragment, commit.version, rules, scale=scale, moved=None)
        weighed = weigh(self.shard, state, Batch(tuple(taken), 0), found)
        self.memory.take(replace(commit, consumed=kept))
        while weighed:
            gradients = [w.gradient for w in weighed]
            try:
                return fold.merge(gradients, [w.weight for w in weighed])
            except Diverged:
                worst = largest(gradients, fold.fragment)
                weighed = without(self.shard, state, weighed, worst)
        return None

    def drift(self, committed: Vector) -> Drift:
        """Return how far this is from what was committed."""
        there, here = committed.astype(np.float64), self.fold.master.astype(np.float64)
        moved, other = there - self.origin, here - self.origin
        pairs = ((here - there,) * 2, (there,) * 2, (moved, other), (moved,) * 2, (other,) * 2)
        return Drift(*(float(np.dot(*pair)) for pair in pairs))
