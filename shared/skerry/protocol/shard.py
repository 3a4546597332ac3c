"""The contributions that wait to be merged into a shard's fragments, and the refused ones.

A syncer feeds every message of CONTRIB to a ``Shard`` in the stream's order; the log can rebuild
it at any instant.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from skerry.algorithm import weighting
from skerry.algorithm.fragments import Fragment, Plan
from skerry.protocol.containment import Conduct, ContainmentRules, FragmentMemory
from skerry.protocol.contribution import (
    Contribution,
    ContributionAssembler,
    ContributionId,
    ContributionRules,
    Refusal,
    id_of,
    refused_as,
)
from skerry.protocol.messages import (
    MOST_LEARNERS,
    ChunkHeader,
    Commit,
    ContributionKind,
    LearnerProgress,
    Manifest,
    Pulse,
    RefusalCause,
    Refused,
)
from skerry.protocol.records import StoredMessage
from skerry.protocol.subjects import contributor

MOST_PENDING = 4
"""Contributions of one learner that may wait for a fragment: late ones and one for its round."""
MOST_REFUSED = 1000
"""Refusals that one commit names; what a flood has beyond that is in the syncer's log alone."""
MOST_NAMED = 100
"""The most of them from one learner: its flood must not keep others' from being named."""
MOST_SETTLED = 4096
"""Contributions per fragment that are remembered as resolved; duplicates come sooner than that."""


class WeightRule(NamedTuple):
    """The most versions that a contribution may be behind, and the factor on its weight for each.

    ``bare``: contributions are gradients of single steps, see ``weighting.weight``.
    """

    most: int
    discount: float
    bare: bool = False


def weight_rule(config: Any) -> WeightRule:
    """Return the rule of a run by its config."""
    sync, bare = config.sync, config.train.inner == "gradient"
    return WeightRule(sync.max_staleness, sync.staleness_discount, bare)


@dataclass(slots=True)
class Refusals:
    """The refusals that a fragment's next commit names; ``unnamed`` counts the others by cause.

    ``beyond`` counts the contributions among the rest by learner: the audit misses none of them;
    ``named_of`` counts those that are named.
    Contributions come first: their learners and ``ledger verify`` look for them there. Bytes that
    tell of no contribution get the room that is left, so that no flood of them hides one.
    """

    contributions: list[Refused] = field(default_factory=list["Refused"])
    bytes_: list[Refused] = field(default_factory=list["Refused"])
    unnamed: Counter[RefusalCause] = field(default_factory=Counter[RefusalCause])
    beyond: Counter[str] = field(default_factory=Counter[str])
    named_of: Counter[str] = field(default_factory=Counter[str])

    @property
    def named(self) -> tuple[Refused, ...]:
        return (*self.contributions, *self.bytes_)[:MOST_REFUSED]

    def add(self, refused: Refused) -> None:
        """Note a refusal; one of a name that no learner can have is counted only."""
        learner, counts = refused.learner, bool(refused.identity)
        kept = self.contributions if counts else self.bytes_
        full = len(kept) >= MOST_REFUSED or (counts and self.named_of[learner] >= MOST_NAMED)
        if learner and not full:
            kept.append(refused)
            self.named_of[learner] += counts
            return
        self.unnamed[refused.cause] += 1
        if counts and (learner in self.beyond or len(self.beyond) < MOST_REFUSED):
            self.beyond[learner] += 1  # bounded, since a flood may make up names

    def close(self) -> Refusals:
        """Return all refusals for a commit, counting those that it has no room for; begin again."""
        named = self.named
        beyond = Counter(r.cause for r in self.bytes_[len(named) - len(self.contributions) :])
        kept = list(named[len(self.contributions) :])
        closed = Refusals(self.contributions, kept, self.unnamed + beyond, self.beyond)
        self.contributions, self.bytes_ = [], []
        self.unnamed, self.beyond, self.named_of = Counter(), Counter(), Counter()
        return closed


@dataclass(slots=True)
class PendingFragment:
    """One fragment as last committed, and the contributions that wait for its next round.

    ``arrived_s`` is when each learner's answer to the open round was whole. ``floor`` is the
    CONTRIB sequence up to which its contributions are resolved; ``settled`` are those that were
    merged or refused lately, so that none is counted twice. ``launched_step`` is the step that the
    newest round was opened for.
    """

    fragment: Fragment
    manifest: Manifest | None = None
    pending: dict[ContributionId, Contribution] = field(
        default_factory=dict["ContributionId", "Contribution"]
    )
    arrived_s: dict[str, float] = field(default_factory=dict[str, float])
    refused: Refusals = field(default_factory=Refusals)
    settled: dict[ContributionId, None] = field(default_factory=dict["ContributionId", None])
    memory: FragmentMemory = field(default_factory=FragmentMemory)
    launched_step: int = 0
    floor: int = 0

    @property
    def version(self) -> int:
        return self.manifest.commit.version if self.manifest else 0

    @property
    def step(self) -> int:
        """The global clock at the newest commit."""
        return self.manifest.commit.step if self.manifest else 0

    @property
    def last_due_step(self) -> int:
        """The step that the newest round was for."""
        return max(self.step, self.launched_step)

    @property
    def progress(self) -> dict[str, LearnerProgress]:
        rows = self.manifest.commit.progress if self.manifest else ()
        return {row.learner: row for row in rows}

    def waiting(self, learner: str) -> int:
        """Return how many contributions of a learner wait."""
        return sum(1 for known in self.pending if known.learner == learner)

    def commit(self, manifest: Manifest, done: Iterable[ContributionId], floor: int) -> None:
        """Take a version that was committed from ``done``.

        What came meanwhile was made for the round that has closed: it will be merged as a late
        one and says nothing about who has answered the next round.
        """
        self.manifest, self.floor, self.arrived_s = manifest, floor, {}
        for known in done:
            self.pending.pop(known, None)
        self.settle_all(manifest.commit)

    def refuse(self, refused: Refused) -> None:
        """Have the next commit name a refusal."""
        if refused.identity:
            self.settle(id_of(refused))
        self.refused.add(refused)

    def settle(self, known: ContributionId) -> None:
        """Remember that a contribution has been merged or refused."""
        self.settled[known] = None
        if len(self.settled) > MOST_SETTLED:
            del self.settled[next(iter(self.settled))]

    def settle_all(self, commit: Commit) -> None:
        """Remember all that a commit has merged or refused; commits come in their order."""
        self.memory.take(commit)
        for merged in commit.consumed:
            self.settle(id_of(merged))
        for refused in commit.refused:
            if refused.identity:
                self.settle(id_of(refused))

    def resolved(self, contribution: Contribution) -> bool:
        """Return True if a commit has merged or refused this contribution already.

        A contribution of an older incarnation than the newest one merged lies before that one's
        ``Start``, and so was seen first.
        """
        known = contribution.id
        row = self.progress.get(known.learner)
        counted = row is not None and known[1:] <= (row.incarnation, row.identity)
        return counted or known in self.settled or contribution.sequence_last <= self.floor

    def accounted(self, refused: Refused, sequence: int) -> bool:
        """Return True if a refusal is about a contribution that was merged, refused or waits.

        Late chunks of one say nothing new. ``sequence`` is where the last of them lies.
        """
        if not refused.identity:
            return False
        known, row = id_of(refused), self.progress.get(refused.learner)
        same = row is not None and row.incarnation == known.incarnation
        merged = same and row is not None and known.identity <= row.identity
        return merged or known in self.settled or known in self.pending or sequence <= self.floor


@dataclass(slots=True)
class Shard:
    """All fragments of a shard, by index.

    ``again`` says by fragment how often its next round counts as opened before, if contributions
    to it may have left the log: learners that have answered that round look whether theirs is
    still there. ``quarantined`` are the learners whose contributions are not merged; ``pulse_of``
    returns a learner's newest pulse, if one is known.
    """

    plan: Plan
    staleness: WeightRule
    fragments: dict[int, PendingFragment]
    assembler: ContributionAssembler
    seen_sequence: int = 0
    again: dict[int, int] = field(default_factory=dict[int, int])
    containment: ContainmentRules = field(default_factory=ContainmentRules)
    conduct: Conduct = field(default_factory=Conduct)
    quarantined: Collection[str] = ()
    pulse_of: Callable[[str], Pulse | None] = lambda _: None

    @classmethod
    def of(
        cls,
        run: str,
        plan: Plan,
        staleness: WeightRule,
        rules: ContributionRules,
        fragments: Sequence[PendingFragment],
    ) -> Shard:
        """Return a shard that has read nothing of CONTRIB yet."""
        assembler = ContributionAssembler(run, plan, rules)
        shard = cls(plan, staleness, {f.fragment.index: f for f in fragments}, assembler)
        assembler.screen = shard.screen
        return shard

    @property
    def resume_after(self) -> int:
        """The CONTRIB sequence up to which every fragment's contributions are resolved."""
        return min(fragment.floor for fragment in self.fragments.values())

    def screen(self, header: ChunkHeader) -> RefusalCause | None:
        """Return why the contribution of a first chunk is refused before memory is spent on it."""
        state = self.fragments.get(header.fragment)
        if state is None:
            return None
        if header.sender in self.quarantined:
            return RefusalCause.QUARANTINED
        if header.version > state.version:
            return RefusalCause.BASE_IN_FUTURE
        if state.waiting(header.sender) >= MOST_PENDING:
            return RefusalCause.TOO_MANY
        rows = state.progress
        full = len(rows) >= MOST_LEARNERS and header.sender not in rows
        return RefusalCause.TOO_MANY if full else None

    def take(self, stored: StoredMessage, now_s: float) -> Refusal | Contribution | None:
        """Feed one message; a contribution that is new waits in its fragment afterwards."""
        self.seen_sequence = max(self.seen_sequence, stored.sequence)
        got = self.assembler.feed(stored)
        while self.assembler.replaced:
            self._refuse_incomplete(*self.assembler.replaced.pop())
        if isinstance(got, Refusal):
            return self._refuse(got)
        if got is None or (state := self.fragments.get(got.header.fragment)) is None:
            return None
        if state.resolved(got) or got.id in state.pending:
            # Its learner sends it again when an acknowledgement was lost, and a broker that was
            # away for longer than it remembers message ids stores it again.
            return None
        discount = judge(got, state.version, self.staleness)
        if isinstance(discount, RefusalCause):
            refused = refused_as(discount, got.header)
            detail, version = f"base {got.header.base_version}", got.header.round_version
            return self._refuse(Refusal(refused, detail, stored.sequence, stored.subject, version))
        state.pending[got.id] = got
        if got.header.round_version == state.version + 1:
            state.arrived_s.setdefault(got.header.learner, now_s)
        return got

    def expire(self, state: PendingFragment) -> None:
        """Refuse incomplete contributions that are too stale to be merged once they are whole."""
        oldest_base = weighting.oldest_base(state.version, self.staleness.most)
        for refused in self.assembler.expire(state.fragment.index, oldest_base):
            self._refuse_incomplete(state.fragment.index, refused)

    def give_up(self, parts: Iterable[tuple[int, str]]) -> None:
        """Refuse incomplete contributions by (fragment, learner): their rest will not come."""
        for key in parts:
            self._refuse_incomplete(key[0], self.assembler.give_up(key))

    def floor_of(self, fragment: int) -> int:
        """Return the sequence up to which contributions are resolved once all pending ones are."""
        incomplete = self.assembler.incomplete_from(fragment)
        return self.seen_sequence if incomplete is None else incomplete - 1

    def _refuse(self, got: Refusal) -> Refusal | None:
        """Have the next commit name a refusal; None where that would count it twice."""
        fragment, _ = contributor(got.subject)
        state = self.fragments.get(fragment)
        if state is None:
            return got
        if state.accounted(got.refused, got.sequence):
            return None
        state.refuse(got.refused)
        return got

    def _refuse_incomplete(self, fragment: int, refused: Refused) -> None:
        state = self.fragments.get(fragment)
        if state is not None and not state.accounted(refused, self.seen_sequence):
            state.refuse(refused)


def judge(contribution: Contribution, version: int, rule: WeightRule) -> float | RefusalCause:
    """Return the factor on a contribution's weight, or why it can never be merged.

    Genesis makes version 1 and nothing else: it is no gradient of anything.
    """
    header = contribution.header
    genesis = header.kind is ContributionKind.GENESIS
    if genesis or version == 0:
        fits = genesis and version == 0
        return 1.0 if fits else RefusalCause.GENESIS
    discount, reason = weighting.discounted(header.base_version, version, rule.most, rule.discount)
    return RefusalCause(reason) if discount is None else discount
