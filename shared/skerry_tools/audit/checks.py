"""The promises of a run's log, checked record by record in ledger order.

Pure and incremental: feed the contributions of the window, say who has joined, then members and
commits by their time in the log, then ask what is left. Memory is bounded by learners times
fragments, plus one small record per contribution that the window holds. What a contribution may
claim, what it weighs and what a commit makes of the learners' progress is the protocol's own
definition.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.algorithm import weighting
from skerry.protocol.commit import progress_after
from skerry.protocol.contribution import Contribution, ContributionId, ContributionRules, id_of
from skerry.protocol.door import MOST_COUNT
from skerry.protocol.messages import (
    Commit,
    CommitOrigin,
    Consumed,
    ContributionKind,
    LearnerProgress,
    MemberRecord,
    Refused,
    begins_history,
    is_from_checkpoint,
    why,
)
from skerry.protocol.shard import WeightRule, weight_rule
from skerry_tools.audit.accounts import Account, Starts, Violation, What, named

if TYPE_CHECKING:
    from skerry.settings.models import RunConfig

WEIGHT_TOLERANCE = 1e-6

Found = tuple[What, str, str]
"""Which promise a commit breaks, the learner that it is about or none, and how."""


@dataclass(frozen=True, slots=True)
class Rules:
    """The settings of a run that the promises depend on.

    ``share`` is the setting ``contain.share``.
    """

    shards: int
    claims: ContributionRules
    staleness: WeightRule
    share: float = 0.0

    @classmethod
    def of(cls, config: RunConfig) -> Rules:
        """Return the rules of a run of real learners."""
        sync, data = config.sync, config.data
        return cls(
            sync.shards,
            ContributionRules(data.seq_len, data.batch * data.seq_len),
            weight_rule(config),
            share=config.contain.share,
        )


@dataclass(slots=True)
class FragmentHistory:
    """One fragment up to its newest commit: ``rows`` are what its progress table has to say.

    ``waiting`` are contributions of the window that no commit has resolved yet, in their order
    there; ``unnamed`` counts by learner those that commits refused and did not name.
    """

    version: int = 0
    floor: int = 0
    rows: dict[str, LearnerProgress] = field(default_factory=dict[str, LearnerProgress])
    accounts: dict[str, Account] = field(default_factory=dict[str, Account])
    waiting: dict[ContributionId, Contribution] = field(
        default_factory=dict["ContributionId", "Contribution"]
    )
    unnamed: Counter[str] = field(default_factory=Counter[str])

    def account(self, learner: str) -> Account:
        return self.accounts.setdefault(learner, Account(ContributionId(learner, 0, 0)))

    def row(self, learner: str) -> LearnerProgress:
        return self.rows.get(learner, LearnerProgress(learner, 0, 0, 0, 0))

    def drop(self, commit: Commit, at_ns: int) -> list[Contribution]:
        """Forget and return what waits at or below the floor of a commit stored at ``at_ns``.

        Nothing may wait there: a floor says that all of it is resolved, by name or, of a flood, by
        number. What was stored later than the commit lies in another stream than the one that its
        floor was counted in. A commit counts what was refused while it merged, too: that lies above
        its floor, and below the next one.
        """
        for more in commit.unnamed:
            self.unnamed[more.learner] += more.count
        passed: list[Contribution] = []
        for contribution in self.waiting.values():
            if contribution.sequence_last > commit.contrib_floor or contribution.time_ns > at_ns:
                break
            passed.append(contribution)
        below: list[Contribution] = []
        for contribution in passed:
            learner = contribution.id.learner
            del self.waiting[contribution.id]
            if self.unnamed[learner] > 0:
                self.unnamed[learner] -= 1
            else:
                below.append(contribution)
        return below


@dataclass(slots=True)
class Checks:
    """``offer``, then ``member`` and ``commit`` in ledger order, then ``finish``."""

    rules: Rules
    histories: dict[int, FragmentHistory] = field(default_factory=dict[int, FragmentHistory])
    starts: dict[str, Starts] = field(default_factory=dict[str, Starts])
    fences: dict[int, int] = field(default_factory=dict[int, int])

    def progress(self, learner: str) -> list[LearnerProgress]:
        """Return what is counted of a learner, one row for each fragment that has any."""
        rows = (history.rows.get(learner) for history in self.histories.values())
        return [row for row in rows if row is not None]

    def starts_of(self, learner: str) -> Starts:
        """Return what is known of a learner's starts."""
        return self.starts.setdefault(learner, Starts(learner))

    def offer(self, contribution: Contribution) -> None:
        """Take a whole contribution of the window, before the first commit."""
        header = contribution.header
        if header.kind is not ContributionKind.GENESIS:
            history = self.histories.setdefault(header.fragment, FragmentHistory())
            history.waiting.setdefault(contribution.id, contribution)
            self.starts_of(header.learner).know(header.incarnation, header.cursor_to)

    def offered(self, fragment: int, item: Consumed) -> bool:
        """Return True for a contribution of the window that no commit has resolved yet."""
        return fragment in self.histories and id_of(item) in self.histories[fragment].waiting

    def joined(self, record: MemberRecord) -> None:
        """Note that there is a record of a start, ahead of its place among the commits."""
        starts = self.starts_of(record.learner)
        starts.joined = max(starts.joined, record.incarnation)

    def spoiled(self, learner: str) -> None:
        """Note that a learner has written something else over its starts: none is missed."""
        self.starts_of(learner).joined = MOST_COUNT

    def member(self, record: MemberRecord, sequence: int) -> list[Violation]:
        """Take a start of a learner."""
        # Of others: it sends its first contributions while this record is on its way.
        rows = self.progress(record.learner)
        used = max((r.cursor for r in rows if r.incarnation < record.incarnation), default=0)
        return list(self.starts_of(record.learner).member(record, sequence, used))

    def commit(self, commit: Commit, sequence: int, at_ns: int) -> list[Violation]:
        """Take a commit that the broker stored at ``at_ns``, and return what is wrong with it."""
        history = self.histories.setdefault(commit.fragment, FragmentHistory())
        begins = not history.version and begins_history(commit)
        torn = not begins and commit.version != history.version + 1
        found = [*_claims(history, commit, begins=begins)]
        found += [] if begins else self._sequel(history, commit)
        self.fences[commit.fragment % self.rules.shards] = commit.fence
        history.version, history.floor = commit.version, commit.contrib_floor
        table = {row.learner: row for row in commit.progress}
        if not begins and not _replaces(commit):
            found += [
                *self._resolved(history, commit),
                *_merge(commit, self.rules.staleness, self.rules.share),
            ]
        below = history.drop(commit, at_ns)
        if begins or torn or _replaces(commit):
            if _replaces(commit) and not torn:
                found += _went_back(history, table)
            for row in commit.progress:
                # A log before this one is another one's; of one that has a hole, or that a store
                # has lost, the table is all that is left. One hole is one violation.
                self.starts_of(row.learner).know(row.incarnation, row.cursor)
                if torn or history.row(row.learner) != row:
                    history.account(row.learner).follow(row)
        else:
            genesis = commit.origin is CommitOrigin.GENESIS
            history.rows = progress_after(history.rows, commit.consumed, genesis=genesis)
            found += _table(history, table)
        history.rows |= table
        if not begins and not torn:
            for contribution in below:
                text = (
                    f"{named(contribution.id)} lies at {contribution.sequence_last} in CONTRIB,"
                    f" below the floor {commit.contrib_floor}, and was neither consumed nor refused"
                )
                found.append((What.UNRESOLVED, contribution.id.learner, text))
        return [_violation(commit, sequence, *one) for one in found]

    def finish(self) -> list[Violation]:
        """Return what only the end of the ledger shows: gaps in data, and what was left out."""
        found = [gap for starts in self.starts.values() for gap in starts.gaps()]
        for fragment, history in sorted(self.histories.items()):
            for learner, account in sorted(history.accounts.items()):
                missing = account.missing(history.waiting)
                if not missing:
                    continue
                more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                text = (
                    f"Fragment {fragment}, version {history.version}, learner {learner}:"
                    f" {named(missing[0])} was neither consumed nor refused{more}."
                )
                place = fragment, history.version, learner
                found.append(Violation(What.UNRESOLVED, text, *place))
        return found

    def _sequel(self, history: FragmentHistory, commit: Commit) -> Iterator[Found]:
        """Check that a commit continues its fragment and that its writer held the fence.

        Fences are numbered by the stream that holds the state. If that was lost, the new one counts
        from 1, and the commit that puts the state back is the first under its numbers.
        """
        wanted = history.version + 1
        if commit.version != wanted:
            gone = f": version {wanted} is missing" if commit.version > wanted else ""
            more = (
                f", and {commit.version - wanted - 1} more" if commit.version > wanted + 1 else ""
            )
            yield What.VERSIONS, "", f"came after version {history.version}{gone}{more}"
        if commit.contrib_floor < history.floor:
            text = (
                f"has the floor {commit.contrib_floor} after {history.floor}: CONTRIB was begun"
                " again, and what waited in it is lost"
            )
            yield What.FLOOR, "", text
        fence = self.fences.get(commit.fragment % self.rules.shards, 0)
        if commit.fence < fence and not _replaces(commit):
            text = (
                f"was written by {commit.syncer!r} under the fence {commit.fence} after the"
                f" shard had gone over to {fence}"
            )
            yield What.FENCE, "", text

    def _resolved(self, history: FragmentHistory, commit: Commit) -> Iterator[Found]:
        """Take what a commit consumed and refused, in the order in which it was numbered."""
        if commit.origin is CommitOrigin.GENESIS:
            for learner, starts in self.starts.items():
                history.account(learner).pardoned = max(0, starts.incarnation)
        for more in commit.unnamed:
            history.account(more.learner).unnamed += more.count
        items: list[Consumed | Refused] = [*commit.refused, *commit.consumed]
        rows = dict(history.rows)
        for item in sorted(items, key=lambda i: (i.incarnation, i.identity)):
            learner = item.learner
            account, starts = history.account(learner), self.starts_of(learner)
            if not item.identity:
                account.damage(item.sequence_first if isinstance(item, Consumed) else item.sequence)
                continue
            history.waiting.pop(id_of(item), None)
            starts.know(item.incarnation, item.cursor_to)
            before = rows.get(learner, history.row(learner))
            begun = starts.cursor_of(item.incarnation)
            if not isinstance(item, Consumed):
                account.resolve(item, max(before.cursor, begun))
                continue
            wrong = [*account.consume(item, before, begun), *starts.consume(item)]
            if text := self.rules.claims.contradiction(item):
                wrong.append((What.TOKENS, f"{named(id_of(item))} counts {text}"))
            yield from ((what, learner, text) for what, text in wrong)
            rows |= progress_after({learner: before}, [item], genesis=False)


def _replaces(commit: Commit) -> bool:
    """Return True if a commit put a checkpoint back over what the log already had.

    One that consumes anything did not, whatever it says: it is held to all that holds for others.
    """
    return commit.origin is CommitOrigin.REPLACED and not (commit.consumed or commit.refused)


def _violation(commit: Commit, sequence: int, what: What, learner: str, text: str) -> Violation:
    sender = f", learner {learner}" if learner else ""
    sentence = f"Fragment {commit.fragment}, version {commit.version}{sender}: {text}."
    return Violation(what, sentence, commit.fragment, commit.version, learner, sequence)


def _claims(history: FragmentHistory, commit: Commit, *, begins: bool) -> Iterator[Found]:
    """Check what a commit that was written from a checkpoint says of itself."""
    if not is_from_checkpoint(commit):
        return
    if number := len(commit.consumed) + len(commit.refused):
        text = f"was {why(commit)!r}, which resolves nothing, and names {number} contributions"
        yield What.PROGRESS, "", text
    if begins_history(commit) and not begins and commit.version == history.version + 1:
        text = f"was {why(commit)!r} as if nothing were before it, after {history.version}"
        yield What.VERSIONS, "", text


def _merge(commit: Commit, rule: WeightRule, most: float) -> Iterator[Found]:
    """Check staleness and weights of what a commit merged."""
    work: list[float] = []
    for item in commit.consumed:
        late = commit.version - 1 - item.base_version
        allowed = rule.most, rule.discount
        discount, _ = weighting.discounted(item.base_version, commit.version - 1, *allowed)
        if item.staleness != late or late < 0:
            text = (
                f"a contribution to version {item.base_version} counts as {item.staleness}"
                f" behind version {commit.version - 1}"
            )
            yield What.STALENESS, item.learner, text
        elif discount is None:
            text = f"a contribution {late} versions behind was merged: {rule.most} may"
            yield What.STALENESS, item.learner, text
        else:
            counted = discount * (1.0 - item.uncounted)
            work.append(weighting.weight(item.tokens, item.steps, bare=rule.bare) * counted)
    if not commit.consumed:
        return
    total = sum(item.weight for item in commit.consumed)
    if abs(total - 1) > WEIGHT_TOLERANCE:
        yield What.WEIGHTS, "", f"the weights sum to {total:.6f} and not to 1"
    elif len(work) == len(commit.consumed):
        learners = [item.learner for item in commit.consumed]
        shares = weighting.shares(work, learners, most)
        for item, share in zip(commit.consumed, shares, strict=True):
            if abs(item.weight - share) > WEIGHT_TOLERANCE:
                text = f"was merged with the weight {item.weight:.6f} and not with {share:.6f}"
                yield What.WEIGHTS, item.learner, text


def _table(history: FragmentHistory, table: dict[str, LearnerProgress]) -> Iterator[Found]:
    """Compare a commit's progress table with the fold of all that was consumed."""
    for learner, row in history.rows.items():
        if table.get(learner) != row:
            text = (
                f"the table tells of {_counts(table.get(learner))}, what was consumed adds up to"
                f" {_counts(row)}"
            )
            yield What.PROGRESS, learner, text
    for learner in table.keys() - history.rows.keys():
        yield What.PROGRESS, learner, "the table has a row for a learner that nothing came from"


def _went_back(history: FragmentHistory, table: dict[str, LearnerProgress]) -> Iterator[Found]:
    """Check the table of a checkpoint that was put back: it may go ahead, and never back.

    A row that is ahead tells of what a store that was rolled back has lost.
    """
    for learner, held in history.rows.items():
        row = table.get(learner)
        if row is None or (
            id_of(row) < id_of(held) or row.tokens < held.tokens or row.cursor < held.cursor
        ):
            text = f"the table went back to {_counts(row)}, though {_counts(held)} were counted"
            yield What.PROGRESS, learner, text


def _counts(row: LearnerProgress | None) -> str:
    if row is None:
        return "nothing"
    return f"{row.tokens} tokens up to {row.cursor} with {named(id_of(row))} as the newest"
