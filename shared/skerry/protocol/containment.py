"""What a shard compares contributions with, and what it holds against learners.

The lengths, steps and contents that a contribution is compared with follow from the newest commits,
so a syncer that takes over judges as the one before did. A commit also records what its merge
multiplied each contribution by.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
import xxhash
from numpy.typing import NDArray

from skerry.algorithm import containment
from skerry.algorithm.containment import Effort
from skerry.algorithm.fragments import Fragment
from skerry.algorithm.merge import decoded_norms, sound
from skerry.algorithm.planes import Planes
from skerry.algorithm.weighting import LEAST_OTHERS
from skerry.protocol.contribution import Contribution, ContributionId, id_of
from skerry.protocol.messages import (
    Commit,
    ContributionHeader,
    Pulse,
    QuarantineReason,
    RefusalCause,
)

Vector = NDArray[np.float32]

WINDOW = 16
"""How many versions of a fragment, and how many newest outcomes of a learner, are remembered."""
OFTEN = WINDOW // 2
"""This many bad ones among a learner's newest outcomes are no accident."""
OVERLONG = 0.6
"""A contribution that would lose more of its length than this share is refused: it is over 2.5
times as long as allowed."""
MEAN_AGAINST, MOSTLY = -0.05, 14
"""A learner is opposed if at least MOSTLY of its newest alignments are negative, and the mean of
all is below MEAN_AGAINST."""


class ContainmentRules(NamedTuple):
    """The settings ``contain``; 0 and False are off."""

    clip: float = 0.0
    share: float = 0.0
    steps: float = 0.0
    repeats: bool = False
    opposed: bool = False
    quarantine: bool = False


def containment_rules(given: Any) -> ContainmentRules:
    """Return the rules of a run by its settings ``contain``."""
    return ContainmentRules(*(getattr(given, name) for name in ContainmentRules._fields))


class Measured(NamedTuple):
    """A syncer's measurements of a contribution; ``refusal``: why it cannot be merged by itself."""

    refusal: RefusalCause | None = None
    norm: float = 0.0
    digest: int = 0
    alignment: float = 0.0
    opposed: bool = False
    echo: bool = False


def examine(
    contributions: Iterable[Contribution],
    fragment: Fragment,
    version: int,
    rules: ContainmentRules,
    *,
    scale: Vector | None,
    moved: Vector | None,
) -> dict[ContributionId, Measured]:
    """Measure all that waits for a fragment's ``version``.

    ``scale`` f32 (padded_size,) is what it would be merged into, None for bare gradients; ``moved``
    f32 (n,) what the newest version changed in ``containment.sampled_blocks``, None if unknown.
    """
    found: dict[ContributionId, Measured] = {}
    usable: list[Contribution] = []
    for item in sorted(contributions, key=lambda c: c.id):
        if not sound(item.gradient, fragment, scale):
            found[item.id] = Measured(RefusalCause.DIVERGED)
        elif any(rules):
            norms = decoded_norms(item.gradient, fragment)
            true = containment.states_truly(item.header.norms, norms)
            cause = None if true else RefusalCause.IMPLAUSIBLE
            found[item.id] = Measured(cause, math.hypot(*norms), digest_of(item.planes))
            usable += [item] * true
        else:
            found[item.id] = Measured()
    if usable:
        blocks = containment.sampled_blocks(fragment, version)
        rows = containment.sample([item.gradient for item in usable], blocks)
        learners = [item.header.learner for item in usable]
        spans = [(item.sequence_first, item.sequence_last) for item in usable]
        alike = containment.compare(rows, learners, spans, moved)
        for item, aligned, opposed, echo in zip(usable, *alike, strict=True):
            held = found[item.id]
            found[item.id] = held._replace(alignment=aligned, opposed=opposed, echo=echo)
    return found


def digest_of(planes: Planes) -> int:
    """Return the digest of an outer gradient's codes and scales."""
    state = xxhash.xxh3_64(planes.codes.data)
    state.update(planes.scales.data)
    return state.intdigest()


@dataclass(slots=True)
class FragmentMemory:
    """What a fragment's newest commits merged, each with the version of its commit.

    ``newest`` is each learner's newest work, ``digests`` are those of all contents.
    """

    newest: dict[str, tuple[int, Effort]] = field(default_factory=dict[str, tuple[int, Effort]])
    digests: dict[int, int] = field(default_factory=dict[int, int])

    def take(self, commit: Commit) -> None:
        """Remember a commit, and forget what is too old."""
        for item in commit.consumed:
            if item.norm:
                work = Effort(item.norm, item.steps * (1.0 - item.uncounted))
                self.newest[item.learner] = commit.version, work
                self.digests[item.digest] = commit.version
        oldest = commit.version - WINDOW
        self.newest = {name: held for name, held in self.newest.items() if held[0] > oldest}
        self.digests = {digest: made for digest, made in self.digests.items() if made > oldest}


@dataclass(slots=True)
class Comparison:
    """The newest work of each learner, with which the contributions to one merge are compared."""

    rules: ContainmentRules
    works: dict[str, Effort]

    @classmethod
    def of(
        cls,
        rules: ContainmentRules,
        memory: FragmentMemory,
        merged: Iterable[tuple[ContributionHeader, Measured]],
    ) -> Comparison:
        """Compare with what was merged lately, and with what is about to be."""
        works = {name: work for name, (_, work) in memory.newest.items()}
        works |= {h.learner: Effort(m.norm, h.steps) for h, m in merged}
        return cls(rules, works)

    def others(self, learner: str) -> list[Effort]:
        """Return the newest work of every other learner."""
        return [work for name, work in self.works.items() if name != learner]

    def refusal(
        self, header: ContributionHeader, measured: Measured, pulse: Pulse | None
    ) -> RefusalCause | None:
        """Return why a contribution is not to be merged, None if it is.

        A pulse may be older than the contribution: the steps since then may be as many as those of
        a whole contribution.
        """
        others = self.others(header.learner)
        known = sum(other.norm > 0 for other in others) >= LEAST_OTHERS
        trained = header.tokens and (not header.slice_tokens or any(header.slice_tokens))
        if self.rules.repeats and known and trained and (measured.echo or not measured.norm):
            return RefusalCause.FREE_RIDING
        if self.rules.opposed and measured.opposed:
            return RefusalCause.OPPOSED
        if self.cut(header, measured, self.uncounted(header)) > OVERLONG:
            return RefusalCause.OVERLONG
        if pulse is not None and pulse.incarnation == header.incarnation:
            beyond = max(0, header.steps - pulse.steps)
            if containment.uncounted(beyond, [o.steps for o in others], self.rules.steps):
                return RefusalCause.IMPLAUSIBLE
        return None

    def uncounted(self, header: ContributionHeader) -> float:
        """Return the share of a contribution's steps and tokens that does not count."""
        steps = [other.steps for other in self.others(header.learner)]
        return containment.uncounted(header.steps, steps, self.rules.steps)

    def cut(self, header: ContributionHeader, measured: Measured, uncounted: float) -> float:
        """Return the share of a contribution's length that is to be left out."""
        own = Effort(measured.norm, header.steps * (1.0 - uncounted))
        return containment.cut(own, self.others(header.learner), self.rules.clip)


def repeats(
    memory: FragmentMemory, items: Sequence[tuple[Contribution, Measured]]
) -> set[ContributionId]:
    """Return the contributions whose contents were merged before, or come earlier in ``items``.

    Zeros are no contents. With two learners nothing counts as repeated: an honest one may learn the
    same again.
    """
    found, seen = set[ContributionId](), set(memory.digests)
    if len(memory.newest.keys() | {item.header.learner for item, _ in items}) <= LEAST_OTHERS:
        return found
    for item, measured in sorted(items, key=lambda pair: pair[0].sequence_last):
        if measured.norm and measured.digest in seen:
            found.add(item.id)
        seen.add(measured.digest)
    return found


class Outcome(NamedTuple):
    """What became of one contribution: refused for a cause, or merged."""

    cause: RefusalCause | None = None
    alignment: float = 0.0


@dataclass(slots=True)
class Conduct:
    """The newest outcomes of each learner since this syncer serves, over a shard's fragments."""

    outcomes: dict[str, deque[Outcome]] = field(default_factory=dict[str, "deque[Outcome]"])

    def take(self, commit: Commit) -> None:
        """Note what a commit merged and refused."""
        for item in commit.consumed if commit.version > 1 else ():
            self._note(item.learner, Outcome(None, item.alignment))
        for refused in commit.refused:
            if refused.cause in _BAD and id_of(refused).identity:
                self._note(refused.learner, Outcome(refused.cause))

    def suspects(self, quarantined: Container[str]) -> Iterator[tuple[str, QuarantineReason]]:
        """Yield the learners that are to be put into quarantine, and forget what they did.

        What a learner did that is in quarantine already, by a rule or a person, is forgotten, too.
        """
        for learner in list(self.outcomes):
            reason = _suspicion(self.outcomes[learner])
            held = learner in quarantined
            if held or reason is not None:
                del self.outcomes[learner]
            if reason is not None and not held:
                yield learner, reason

    def _note(self, learner: str, outcome: Outcome) -> None:
        self.outcomes.setdefault(learner, deque(maxlen=WINDOW)).append(outcome)


_BAD = {
    RefusalCause.REPEATED: QuarantineReason.REPEATS,
    RefusalCause.FREE_RIDING: QuarantineReason.FREE_RIDES,
    RefusalCause.OVERLONG: QuarantineReason.OVERLONG,
    RefusalCause.OPPOSED: QuarantineReason.OPPOSED,
}


def _suspicion(outcomes: Sequence[Outcome]) -> QuarantineReason | None:
    bad = Counter(outcome.cause for outcome in outcomes if outcome.cause is not None)
    if bad.total() >= OFTEN:
        return _BAD[bad.most_common(1)[0][0]]
    against = [outcome.alignment for outcome in outcomes if outcome.alignment]
    mostly = sum(alignment < 0 for alignment in against) >= MOSTLY
    return QuarantineReason.OPPOSED if mostly and fmean(against) < MEAN_AGAINST else None
