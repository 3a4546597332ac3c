"""What a syncer holds in memory: its fragments as last committed, and what waits to be merged."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.algorithm import weighting
from skerry.log.contributions import Contribution, Inbox, Mark, Refusal, refusal
from skerry.protocol.messages import ContributionKind, LearnerProgress, RefusalCause, Refused
from skerry.protocol.subjects import contributor

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.log.base import Record
    from skerry.protocol.messages import Commit, Manifest
    from skerry.settings.models import SyncConfig

MOST_REFUSED = 1000
"""Refusals that one commit names; what a flood has beyond that is in the syncer's log alone."""
MOST_SETTLED = 4096
"""Contributions per fragment that are remembered as resolved; duplicates come sooner than that."""


@dataclass(slots=True)
class Refusals:
    """What the next commit of a fragment names as refused; ``unnamed`` counts, by cause, the rest.

    Contributions come first: their learners and ``ledger verify`` look for them there. Bytes that
    tell of no contribution get the room that is left, so that no flood of them hides one.
    """

    contributions: list[Refused] = field(default_factory=list[Refused])
    bytes_: list[Refused] = field(default_factory=list[Refused])
    unnamed: Counter[RefusalCause] = field(default_factory=Counter[RefusalCause])

    @property
    def named(self) -> tuple[Refused, ...]:
        return (*self.contributions, *self.bytes_)[:MOST_REFUSED]

    def add(self, refused: Refused) -> None:
        kept = self.contributions if refused.identity else self.bytes_
        if len(kept) < MOST_REFUSED:
            kept.append(refused)
        else:
            self.unnamed[refused.cause] += 1

    def close(self) -> Refusals:
        """Return all of it for a commit, with what that has no room for counted; begin anew."""
        named = self.named
        beyond = Counter(r.cause for r in self.bytes_[len(named) - len(self.contributions) :])
        closed = Refusals(
            self.contributions, list(named[len(self.contributions) :]), self.unnamed + beyond
        )
        self.contributions, self.bytes_, self.unnamed = [], [], Counter()
        return closed


@dataclass(slots=True)
class FragmentState:
    """One fragment: its committed state and the contributions that wait for its next round.

    ``floor`` is the CONTRIB sequence up to which its contributions are resolved; ``settled`` are
    those that were merged or refused lately, so that none is counted twice.
    """

    fragment: Fragment
    manifest: Manifest | None = None
    master: NDArray[np.float32] | None = None
    outer: object = None
    pending: list[Contribution] = field(default_factory=list[Contribution])
    arrived_s: dict[str, float] = field(default_factory=dict[str, float])
    refused: Refusals = field(default_factory=Refusals)
    settled: dict[tuple[str, Mark], None] = field(default_factory=dict[tuple[str, Mark], None])
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

    def drop(self, done: Sequence[Contribution]) -> None:
        """Forget the oldest waiting contributions: ``done``, which a batch took.

        What came meanwhile was made for the round that has closed: it will be merged as a late
        one and says nothing about who has answered the next round.
        """
        self.pending = self.pending[len(done) :]
        self.arrived_s = {}

    def refuse(self, refused: Refused) -> None:
        """Have the next commit name a refusal."""
        if refused.identity:
            self.settle(refused.learner, (refused.incarnation, refused.identity))
        self.refused.add(refused)

    def settle(self, learner: str, mark: Mark) -> None:
        """Remember that a contribution has been merged or refused."""
        self.settled[learner, mark] = None
        if len(self.settled) > MOST_SETTLED:
            del self.settled[next(iter(self.settled))]

    def settle_all(self, commit: Commit) -> None:
        """Remember all that a commit has merged or refused."""
        for merged in commit.consumed:
            self.settle(merged.learner, (merged.incarnation, merged.identity))
        for refused in commit.refused:
            if refused.identity:
                self.settle(refused.learner, (refused.incarnation, refused.identity))

    def waits(self, learner: str, mark: Mark) -> bool:
        """Tell whether this contribution waits already.

        Its learner sends it again when an acknowledgement was lost, and a broker that was away for
        longer than it remembers message ids stores it again.
        """
        return (learner, mark) in ((c.header.learner, mark_of(c)) for c in self.pending)

    def resolved(self, contribution: Contribution) -> bool:
        """Tell whether a commit has merged or refused this contribution already.

        One of an older incarnation than the newest that was merged has been before it: it lies
        before that one's ``Start``, and so was seen first.
        """
        told, mark = contribution.header, mark_of(contribution)
        row = self.progress.get(told.learner)
        counted = row is not None and mark <= (row.incarnation, row.identity)
        settled = (told.learner, mark) in self.settled
        return counted or settled or contribution.sequence_last <= self.floor

    def accounted(self, refused: Refused, sequence: int) -> bool:
        """Tell whether a refusal is about a contribution that was merged, refused or still waits.

        Late chunks of one say nothing new. ``sequence`` is where the last of them lies.
        """
        if not refused.identity:
            return False
        mark, row = (refused.incarnation, refused.identity), self.progress.get(refused.learner)
        merged = row is not None and row.incarnation == mark[0] and mark[1] <= row.identity
        settled = (refused.learner, mark) in self.settled
        return merged or settled or sequence <= self.floor or self.waits(refused.learner, mark)


@dataclass(slots=True)
class Shard:
    """All fragments of a shard; the log can rebuild it at any instant.

    ``again``: by fragment, how often its next round counts as opened before, where contributions
    to it may have left the log: who has answered that round looks whether his is still there.
    """

    run: str
    plan: Plan
    config: SyncConfig
    fragments: dict[int, FragmentState]
    inbox: Inbox
    seen_sequence: int = 0
    again: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def resume_after(self) -> int:
        """The CONTRIB sequence up to which every fragment's contributions are resolved."""
        return min(state.floor for state in self.fragments.values())

    def take(self, record: Record, now_s: float) -> Refusal | Contribution | None:
        """Feed one record; a contribution that is new waits in its fragment afterwards."""
        self.seen_sequence = max(self.seen_sequence, record.sequence)
        got = self.inbox.feed(record)
        self._note_replaced(record.sequence)
        if isinstance(got, Refusal):
            return self._refuse(got)
        if got is None or (state := self.fragments.get(got.header.fragment)) is None:
            return None
        if state.resolved(got) or state.waits(got.header.learner, mark_of(got)):
            return None
        discount = judge(got, state.version, self.config)
        if isinstance(discount, RefusalCause):
            refused = refusal(discount, got.header.learner, got.header)
            detail, towards = f"base {got.header.base_version}", got.header.round_version
            whole = Refusal(refused, detail, record.sequence, record.subject, towards)
            return self._refuse(whole)
        state.pending.append(got)
        if got.header.round_version == state.version + 1:
            state.arrived_s.setdefault(got.header.learner, now_s)
        return got

    def expire(self, state: FragmentState) -> None:
        """Refuse unfinished contributions that are too stale to be merged once they are whole."""
        oldest_base = weighting.oldest_base(state.version, self.config.max_staleness)
        for refused in self.inbox.expire(state.fragment.index, oldest_base):
            if not state.accounted(refused, self.seen_sequence):
                state.refuse(refused)

    def give_up(self, parts: Iterable[tuple[int, str]]) -> None:
        """Refuse what learners have begun to send to fragments: its rest does not come any more."""
        for fragment, learner in parts:
            refused = self.inbox.open.pop((fragment, learner)).refused(
                RefusalCause.INCOMPLETE, learner
            )
            state = self.fragments.get(fragment)
            if state is not None and not state.accounted(refused, self.seen_sequence):
                state.refuse(refused)

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

    def _note_replaced(self, sequence: int) -> None:
        while self.inbox.replaced:
            fragment, refused = self.inbox.replaced.pop()
            state = self.fragments.get(fragment)
            if state is not None and not state.accounted(refused, sequence):
                state.refuse(refused)

    def floor_of(self, fragment: int) -> int:
        """Return up to where this fragment's contributions are resolved once all pending are."""
        unfinished = self.inbox.unfinished_from(fragment)
        return self.seen_sequence if unfinished is None else unfinished - 1


def judge(contribution: Contribution, version: int, config: SyncConfig) -> float | RefusalCause:
    """Return the factor on a contribution's weight, or why it can never be merged.

    Genesis makes version 1 and nothing else: it is no gradient of anything.
    """
    told = contribution.header
    genesis = told.kind is ContributionKind.GENESIS
    if genesis or version == 0:
        fits = genesis and version == 0 and contribution.scheme == "f32"
        return 1.0 if fits else RefusalCause.GENESIS
    discount, reason = weighting.discounted(
        told.base_version, version, config.max_staleness, config.staleness_discount
    )
    return RefusalCause(reason) if discount is None else discount


def mark_of(contribution: Contribution) -> Mark:
    """Return what tells a contribution from its learner's other ones to the same fragment."""
    return contribution.header.incarnation, contribution.header.identity
