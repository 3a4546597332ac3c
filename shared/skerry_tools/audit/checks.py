"""The promises of a run's log, checked record by record in ledger order.

Pure and incremental: feed the offers of the window, then members and commits as the ledger has
them, then ask what is left. Memory is bounded by learners times fragments, plus one small record
per contribution that the window holds.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.algorithm import weighting
from skerry.protocol.contribution import ContributionRules
from skerry.protocol.messages import (
    CommitOrigin,
    Consumed,
    ContributionKind,
    begins_history,
    is_from_checkpoint,
    why,
)
from skerry_tools.audit.account import Account, named
from skerry_tools.audit.offers import Waiting
from skerry_tools.audit.starts import Starts
from skerry_tools.audit.violations import Violation, What

if TYPE_CHECKING:
    from collections.abc import Iterator

    from skerry.protocol.messages import Commit, MemberRecord, Refused
    from skerry.settings.models import RunConfig
    from skerry_tools.audit.account import Found
    from skerry_tools.audit.offers import Offer

WEIGHT_TOLERANCE = 1e-6


def put_back(commit: Commit) -> bool:
    """Return True if a commit put a checkpoint back over what the log already had.

    One that consumes anything did not, whatever it says: it is held to all that holds for others.
    """
    nothing = not commit.consumed and not commit.refused
    return commit.origin is CommitOrigin.REPLACED and nothing


@dataclass(frozen=True, slots=True)
class Rules:
    """What of a run's settings the promises depend on.

    ``sequence_tokens`` are the tokens of one sequence of data, the unit of cursors; None where the
    two have nothing to do with each other. ``step_tokens`` are those of one step: learners claim
    whole steps, fewer than their data was enough for where some were skipped because the loss was
    not finite. ``counted`` says that learners number their
    contributions to a fragment 1, 2, 3 without leaving one out.
    """

    shards: int = 1
    sequence_tokens: int | None = None
    step_tokens: int | None = None
    max_staleness: int | None = None
    discount: float | None = None
    counted: bool = True

    @classmethod
    def of(cls, config: RunConfig) -> Rules:
        """Return the rules of a run of real learners."""
        sync, data = config.sync, config.data
        return cls(
            shards=sync.shards,
            sequence_tokens=data.seq_len,
            step_tokens=data.batch * data.seq_len,
            max_staleness=sync.max_staleness,
            discount=sync.staleness_discount,
        )

    @property
    def claims(self) -> ContributionRules:
        """What a contribution may claim: the rule by which a syncer refuses it on arrival."""
        if self.sequence_tokens is None:
            return ContributionRules()
        return ContributionRules(self.sequence_tokens, self.step_tokens)


@dataclass(slots=True)
class FragmentHistory:
    """One fragment up to its newest commit."""

    version: int = 0
    floor: int = 0
    accounts: dict[str, Account] = field(default_factory=dict[str, Account])
    waiting: Waiting = field(default_factory=Waiting)


@dataclass(slots=True)
class Checks:
    """``offer``, then ``member`` and ``commit`` in ledger order, then ``finish``."""

    rules: Rules
    histories: dict[int, FragmentHistory] = field(default_factory=dict[int, FragmentHistory])
    starts: dict[str, Starts] = field(default_factory=dict[str, Starts])
    fences: dict[int, int] = field(default_factory=dict[int, int])

    def history(self, fragment: int) -> FragmentHistory:
        """Return the history of a fragment."""
        return self.histories.setdefault(fragment, FragmentHistory())

    def accounts(self, learner: str) -> list[Account]:
        """Return the accounts of a learner, one for each fragment that has one."""
        return [
            history.accounts[learner]
            for history in self.histories.values()
            if learner in history.accounts
        ]

    def offer(self, offer: Offer) -> None:
        """Take a whole contribution of the window, before the first commit."""
        header = offer.header
        if header.kind is not ContributionKind.GENESIS:
            self.history(header.fragment).waiting.add(offer)

    def member(self, record: MemberRecord, sequence: int) -> list[Violation]:
        """Take a start of a learner."""
        starts = self._starts(record.learner)
        used = max((account.cursor for account in self.accounts(record.learner)), default=0)
        return list(starts.member(record, sequence, used))

    def commit(self, commit: Commit, sequence: int, at_ns: int) -> list[Violation]:
        """Take a commit that the broker stored at ``at_ns``, and return what is wrong with it."""
        history = self.history(commit.fragment)
        begins = not history.version and begins_history(commit)
        torn = not begins and commit.version != history.version + 1
        found = [*self._claims(history, commit, begins=begins)]
        found += [] if begins else self._sequel(history, commit)
        self._next(history, commit)
        if begins:
            self._begin(history, commit)
        elif not put_back(commit):
            found += [*self._resolved(history, commit), *_merge(commit, self.rules)]
        dropped = history.waiting.dropped(commit.contrib_floor, at_ns)
        if torn:
            _go_on(history, commit)
        elif not begins:
            found += (
                self._put_back(history, commit) if put_back(commit) else _table(history, commit)
            )
            found += (_below(offer, commit) for offer in dropped)
        return [
            Violation(what, _sentence(commit, learner, text), *_place(commit), learner, sequence)
            for what, learner, text in found
        ]

    def finish(self) -> list[Violation]:
        """Return what only the end of the ledger shows: gaps in data, and what was left out."""
        for history in self.histories.values():
            for (learner, number), offer in history.waiting.unresolved.items():
                self._know(learner, number[0], offer.header.cursor_to)
                if learner in history.accounts and offer.last > history.floor:
                    history.accounts[learner].holes.pop(number, None)
        gaps = [gap for starts in self.starts.values() for gap in starts.gaps()]
        return gaps + (self._left_out() if self.rules.counted else [])

    def _left_out(self) -> list[Violation]:
        found: list[Violation] = []
        for fragment, history in sorted(self.histories.items()):
            for learner, account in sorted(history.accounts.items()):
                if missing := account.missing():
                    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
                    text = (
                        f"Fragment {fragment}, version {history.version}, learner {learner}:"
                        f" {named(missing[0])} was neither consumed nor refused{more}."
                    )
                    found.append(
                        Violation(What.UNRESOLVED, text, fragment, history.version, learner)
                    )
        return found

    def _starts(self, learner: str) -> Starts:
        return self.starts.setdefault(learner, Starts(learner))

    def _claims(
        self, history: FragmentHistory, commit: Commit, *, begins: bool
    ) -> Iterator[tuple[What, str, str]]:
        """Check what a commit says of itself that was written from a checkpoint."""
        if not is_from_checkpoint(commit):
            return
        if number := len(commit.consumed) + len(commit.refused):
            text = f"was {why(commit)!r}, which resolves nothing, and names {number} contributions"
            yield What.PROGRESS, "", text
        if begins_history(commit) and not begins and commit.version == history.version + 1:
            text = f"was {why(commit)!r} as if nothing were before it, after {history.version}"
            yield What.VERSIONS, "", text

    def _sequel(self, history: FragmentHistory, commit: Commit) -> Iterator[tuple[What, str, str]]:
        """Check that a commit continues its fragment and that its writer held the fence.

        Fences are numbered by the stream that holds the state: one that was lost counts from 1, and
        what puts it back is the first to be written under its numbers.
        """
        if commit.version != history.version + 1:
            wanted = history.version + 1
            gone = "" if wanted > commit.version else f": {_range(wanted, commit.version - 1)}"
            yield (What.VERSIONS, "", f"came after version {history.version}{gone}")
        if commit.contrib_floor < history.floor:
            text = (
                f"has the floor {commit.contrib_floor} after {history.floor}: CONTRIB was begun"
                " again, and what waited in it is lost"
            )
            yield What.FLOOR, "", text
        fence = self.fences.get(commit.fragment % self.rules.shards, 0)
        if commit.fence < fence and not put_back(commit):
            yield (
                What.FENCE,
                "",
                (
                    f"was written by {commit.syncer!r} under the fence {commit.fence} after the"
                    f" shard had gone over to {fence}"
                ),
            )

    def _next(self, history: FragmentHistory, commit: Commit) -> None:
        self.fences[commit.fragment % self.rules.shards] = commit.fence
        history.version, history.floor = commit.version, commit.contrib_floor

    def _begin(self, history: FragmentHistory, commit: Commit) -> None:
        """Take the commit of a restored run as it stands: the log before it is another one's."""
        history.accounts = {row.learner: Account.of(row) for row in commit.progress}
        for row in commit.progress:
            self._know(row.learner, row.incarnation, row.cursor)

    def _put_back(
        self, history: FragmentHistory, commit: Commit
    ) -> Iterator[tuple[What, str, str]]:
        """Take the table of a checkpoint that was put back: it may go ahead, and never back.

        A row that is ahead tells of what a store that was rolled back has lost; one that is not
        forgives nothing.
        """
        rows = {row.learner: row for row in commit.progress}
        for learner, account in history.accounts.items():
            row = rows.get(learner)
            if account.last != (0, 0) and (row is None or account.ahead(row)):
                says = "nothing" if row is None else f"{row.tokens} tokens up to {row.cursor}"
                text = (
                    f"the table went back to {says}, though {account.tokens} up to"
                    f" {account.cursor} were counted with {named(account.last)} as the newest"
                )
                yield What.PROGRESS, learner, text
        for row in commit.progress:
            self._know(row.learner, row.incarnation, row.cursor)
            account = history.accounts.setdefault(row.learner, Account())
            if not account.agrees(row):
                account.put(row)

    def _resolved(
        self, history: FragmentHistory, commit: Commit
    ) -> Iterator[tuple[What, str, str]]:
        """Take what a commit consumed and refused, in the order in which it was numbered."""
        if commit.origin is CommitOrigin.GENESIS:
            for learner, starts in self.starts.items():
                account = history.accounts.setdefault(learner, Account())
                account.pardoned = max(0, starts.incarnation)
        items: list[Consumed | Refused] = [*commit.refused, *commit.consumed]
        for item in sorted(items, key=lambda i: (i.incarnation, i.identity)):
            account = history.accounts.setdefault(item.learner, Account())
            history.waiting.resolve(item.learner, (item.incarnation, item.identity))
            if item.identity:
                self._know(item.learner, item.incarnation, item.cursor_to)
            if isinstance(item, Consumed):
                for what, text in self._consume(account, item, commit):
                    yield what, item.learner, text
            else:
                begun = self._starts(item.learner).cursor_of(item.incarnation)
                account.refuse(item, begun=begun)

    def _consume(self, account: Account, item: Consumed, commit: Commit) -> Iterator[Found]:
        genesis = commit.origin is CommitOrigin.GENESIS
        begun = self._starts(item.learner).cursor_of(item.incarnation)
        yield from account.consume(item, genesis=genesis, begun=begun)
        number = (item.incarnation, item.identity)
        if text := self.rules.claims.contradiction(item):
            yield What.TOKENS, f"{named(number)} counts {text}"
        starts = self._starts(item.learner)
        if text := starts.late(item.incarnation, item.cursor_to):
            yield What.COUNTED_AGAIN, text
        if item.incarnation > starts.incarnation:
            yield What.MEMBER, f"{named(number)} was consumed before that incarnation had joined"

    def _know(self, learner: str, incarnation: int, cursor: int) -> None:
        self._starts(learner).know(incarnation, cursor)


def _place(commit: Commit) -> tuple[int, int]:
    return commit.fragment, commit.version


def _sentence(commit: Commit, learner: str, text: str) -> str:
    """Return a finding about a commit as a sentence."""
    sender = f", learner {learner}" if learner else ""
    return f"Fragment {commit.fragment}, version {commit.version}{sender}: {text}."


def _range(first: int, last: int) -> str:
    return (
        f"version {first} is missing"
        if first == last
        else f"versions {first} to {last} are missing"
    )


def _merge(commit: Commit, rules: Rules) -> Iterator[tuple[What, str, str]]:
    """Check staleness and weights of what a commit merged."""
    for item in commit.consumed:
        late = commit.version - 1 - item.base_version
        if item.staleness != late or late < 0:
            yield (
                What.STALENESS,
                item.learner,
                (
                    f"a contribution to version {item.base_version} counts as {item.staleness}"
                    f" behind version {commit.version - 1}"
                ),
            )
        elif rules.max_staleness is not None and late > rules.max_staleness:
            text = f"a contribution {late} versions behind was merged: {rules.max_staleness} may"
            yield What.STALENESS, item.learner, text
    if not commit.consumed:
        return
    total = sum(item.weight for item in commit.consumed)
    if abs(total - 1) > WEIGHT_TOLERANCE:
        yield What.WEIGHTS, "", f"the weights sum to {total:.6f} and not to 1"
    elif rules.discount is not None:
        work = [
            weighting.weight(c.tokens, c.steps) * rules.discount**c.staleness
            for c in commit.consumed
        ]
        for item, share in zip(commit.consumed, weighting.normalised(work), strict=True):
            if abs(item.weight - share) > WEIGHT_TOLERANCE:
                text = f"was merged with the weight {item.weight:.6f} and not with {share:.6f}"
                yield What.WEIGHTS, item.learner, text


def _below(offer: Offer, commit: Commit) -> tuple[What, str, str]:
    text = (
        f"{named(offer.number)} lies at {offer.last} in CONTRIB, below the floor"
        f" {commit.contrib_floor}, and was neither consumed nor refused"
    )
    return What.UNRESOLVED, offer.header.learner, text


def _go_on(history: FragmentHistory, commit: Commit) -> None:
    """Go on from the table of a commit whose predecessor is missing: one hole is one violation."""
    for row in commit.progress:
        fresh = Account.of(row)
        held = history.accounts.get(row.learner, fresh)
        fresh.contributions, fresh.discarded = held.contributions, held.discarded
        history.accounts[row.learner] = fresh


def _table(history: FragmentHistory, commit: Commit) -> Iterator[tuple[What, str, str]]:
    """Compare the progress table with the fold of all that was consumed."""
    rows = {row.learner: row for row in commit.progress}
    for learner, account in history.accounts.items():
        row = rows.pop(learner, None)
        if row is None and account.last == (0, 0):
            continue  # nothing of it has ever been consumed
        if row is None or not account.agrees(row):
            says = "nothing" if row is None else f"{row.tokens} tokens up to {row.cursor}"
            yield (
                What.PROGRESS,
                learner,
                (
                    f"the table tells of {says}, what was consumed adds up to {account.tokens}"
                    f" up to {account.cursor} with {named(account.last)} as the newest"
                ),
            )
            if row is not None:
                account.follow(row)
    for learner in rows:
        yield What.PROGRESS, learner, "the table has a row for a learner that nothing came from"
