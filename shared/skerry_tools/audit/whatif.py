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

from skerry.algorithm.fragments import Fragment, Plan
from skerry.algorithm.merge import largest
from skerry.algorithm.outer import outer_of
from skerry.errors import ConfigError, Diverged
from skerry.log.replay import FragmentFold
from skerry.protocol.commit import Batch, weigh, without
from skerry.protocol.containment import FragmentMemory, containment_rules, examine
from skerry.protocol.contribution import Contribution, ContributionRules
from skerry.protocol.messages import Commit, Manifest
from skerry.protocol.shard import PendingFragment, Shard, weight_rule
from skerry.settings.models import OuterConfig, RunConfig

if TYPE_CHECKING:
    from skerry_tools.audit.log import RunLog

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

    def applied(self, config: RunConfig) -> RunConfig:
        """Return a run's settings with these in place of its own, unchecked.

        Another outer preset brings its own learning rate and momentum.
        """
        sync: dict[str, object] = {
            "merge": self.merge,
            "max_staleness": self.max_staleness,
            "staleness_discount": self.staleness_discount,
        }
        outer: dict[str, object] = {
            "preset": self.outer,
            "lr": self.outer_lr,
            "momentum": self.outer_momentum,
        }
        held = config.outer if self.outer is None else OuterConfig()
        return config.model_copy(
            update={
                "sync": config.sync.model_copy(update=_given(sync)),
                "outer": held.model_copy(update=_given(outer)),
            }
        )


def _given(values: dict[str, object]) -> dict[str, object]:
    return {name: value for name, value in values.items() if value is not None}


def fold_of(config: RunConfig, plan: Plan, fragment: Fragment) -> FragmentFold:
    """Return the fold of a fragment by a run's settings, which has not begun."""
    return FragmentFold.of(outer_of(config, plan), plan, fragment, config.sync.merge)


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
    def of(cls, log: RunLog, fragment: Fragment, policy: WhatIfPolicy) -> Branch:
        """Return a fragment of a run under another policy, which has not begun."""
        config = policy.applied(log.config)
        stale = weight_rule(config)
        shard = Shard.of(log.run, log.plan, stale, ContributionRules(), [])
        shard.containment = containment_rules(config.contain)
        return cls(fold_of(config, log.plan, fragment), shard, without=policy.without)

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
