"""Every promise of a ledger: what holds passes, and one thing that is wrong is one finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from skerry.algorithm.planes import allocate
from skerry.protocol.contribution import Contribution, ContributionRules
from skerry.protocol.messages import (
    Commit,
    CommitOrigin,
    Consumed,
    ContributionHeader,
    ContributionKind,
    InnerState,
    LearnerProgress,
    RefusalCause,
    Refused,
    Unnamed,
)
from skerry.settings.models import DataConfig, RunConfig, SyncConfig
from skerry_tools.audit.accounts import Violation, What
from skerry_tools.audit.checks import Rules
from tests.support import builders
from tests.support.builders import consumed, member
from tests.support.learners import TOKENS as SEQUENCE
from tests.support.ledgers import RULES, TOKENS, Record, ledger_of, tabled, violations

seeds = pytest.mark.parametrize("seed", [1, 7, 13, 16, 22, 34])
"""Between them: learners that start again, late and refused contributions, up to four fences."""
Change = Callable[[Commit], Commit]


def item(identity: int, start: int, stop: int, **changes: Any) -> Consumed:
    """Return a contribution of ``a`` that lay at the place of its number."""
    sequences = stop - start
    place = {"sequence_first": identity, "sequence_last": identity}
    work = {"steps": sequences, "tokens": sequences * TOKENS}
    data = {"cursor_from": start, "cursor_to": stop}
    return replace(consumed("a", identity, base_version=0, **place, **work, **data), **changes)


def commit(version: int, *parts: Consumed | Refused, floor: int = 0, **changes: Any) -> Commit:
    """Return a commit of fragment 0 that resolves these; fresh ones are based on the one before."""
    fresh = (c for c in parts if isinstance(c, Consumed))
    fitting = tuple(c if c.staleness else replace(c, base_version=version - 1) for c in fresh)
    refused = tuple(c for c in parts if isinstance(c, Refused))
    given: dict[str, Any] = {"origin": CommitOrigin.ROUND, **changes}
    return builders.commit(version, consumed=fitting, refused=refused, contrib_floor=floor, **given)


def refused(identity: int, start: int, stop: int, cause: str = "diverged") -> Refused:
    tokens = (stop - start) * TOKENS
    return Refused(RefusalCause(cause), "a", 1, identity, tokens, start, stop)


def damaged(*places: int) -> tuple[Refused, ...]:
    return tuple(Refused(RefusalCause.CORRUPT, "a", sequence=place) for place in places)


def begun(incarnation: int, cursor: int, inner: InnerState = InnerState.COLD) -> Record:
    return replace(member(incarnation=incarnation), cursor=cursor, inner=inner)


def offer(identity: int, *, last: int, at_ns: int = 0) -> Contribution:
    """Return a whole contribution that waits in the window."""
    header = ContributionHeader(
        kind=ContributionKind.OUTER_GRADIENT,
        learner="a",
        incarnation=1,
        identity=identity,
        fragment=0,
        base_version=1,
        round_version=2,
        step=8,
        steps=4,
        tokens=4 * TOKENS,
        cursor_from=4,
        cursor_to=8,
        loss=1.0,
        captured_ns=1,
    )
    return Contribution(header, "int4", allocate("int4", 0), last, last, at_ns)


def found_in(*records: Record, offers: tuple[Contribution, ...] = ()) -> list[Violation]:
    """Return what is wrong with the ledger of ``a``, whose tables fit what was consumed."""
    return violations(tabled([member(), *records]), offers=offers)


FIRST = commit(1, item(1, 0, 4))
GENESIS = commit(1, origin=CommitOrigin.GENESIS)
SECOND = member(incarnation=2)
HOLDS = {
    "its learner took it back": [FIRST, commit(2, item(3, 4, 12))],
    "it was refused": [FIRST, commit(2, item(3, 8, 12), refused(2, 4, 8))],
    "its learner's place came to be known after it": [FIRST, begun(1, 0)],
    "an offer of initial parameters lost": [GENESIS, commit(2, item(2, 0, 4))],
    "a start behind data that is refused later": [
        *(FIRST, SECOND, begun(2, 7)),
        commit(2, refused(2, 4, 7, "superseded")),
    ],
}
BROKEN = {
    "left out": ([FIRST, commit(2, item(3, 8, 12))], What.UNRESOLVED, "contribution 2 of inc"),
    "counted twice": ([FIRST, commit(2, item(2, 3, 8))], What.OVERLAP, "[3, 4)"),
    "counted whole twice": ([FIRST, commit(2, item(2, 0, 8))], What.OVERLAP, "[0, 4)"),
    "start leaves data out": ([FIRST, SECOND, begun(2, 7)], What.GAP, "[4, 7)"),
    "start in counted data": ([FIRST, SECOND, begun(2, 3)], What.COUNTED_AGAIN, "up to 4"),
    "older incarnation behind the newer one's start": (
        [FIRST, SECOND, begun(2, 4), commit(2, item(2, 4, 9))],
        What.COUNTED_AGAIN,
        "incarnation 1 had data counted up to 9",
    ),
    "never joined": (
        [commit(1, item(1, 0, 4, incarnation=2))],
        What.MEMBER,
        "no record says that it joined",
    ),
    "incarnation goes back": ([member(incarnation=0), SECOND, member()], What.MEMBER, "after 2"),
    "learner changes its data": ([replace(SECOND, shard=4)], What.MEMBER, "data shard"),
    "too stale": (
        [FIRST, *map(commit, range(2, 8)), commit(8, item(2, 4, 8, base_version=1, staleness=6))],
        What.STALENESS,
        "6 versions behind",
    ),
}


@pytest.mark.parametrize("records", HOLDS.values(), ids=HOLDS)
def test_what_is_accounted_for_is_no_violation(records: list[Record]) -> None:
    assert found_in(*records) == []


def test_a_learner_whose_first_starts_the_log_has_dropped_breaks_no_promise() -> None:
    again = commit(2, item(1, 4, 8, incarnation=2))
    assert violations(tabled([FIRST, begun(2, 4), again])) == []


@pytest.mark.parametrize(("records", "what", "words"), BROKEN.values(), ids=BROKEN)
def test_broken_promise_is_one_violation_that_names_it(
    records: list[Record], what: What, words: str
) -> None:
    (found,) = found_in(*records)
    assert (found.what, found.learner) == (what, "a")
    assert words in found.sentence


def test_a_start_that_is_missing_is_found_once() -> None:
    after = [commit(n, item(n, 4 * (n - 1), 4 * n, incarnation=2)) for n in (1, 2, 3)]
    assert [found.what for found in found_in(*after)] == [What.MEMBER]


def test_contribution_consumed_behind_its_successor_is_out_of_order_and_not_twice() -> None:
    commits = [FIRST, commit(2, item(3, 8, 12)), commit(3, item(2, 4, 8))]
    kinds = {v.what for v in found_in(*commits)}
    assert What.ORDER in kinds
    assert What.TWICE not in kinds


@pytest.mark.parametrize(
    ("places", "missing"),
    [
        *(((2,), 1), ((3,), 1), ((2, 3), 0), ((2, 2), 1), ((2, 3, 3), 0)),
        *(((1,), 2), ((4,), 2), ((9,), 2), ((1, 4, 5, 6, 7, 8, 9), 2), ((), 2)),
    ],
)
@pytest.mark.parametrize("told_at", [2, 3])
def test_bytes_that_nobody_could_read_account_for_what_is_missing_where_they_lie(
    places: tuple[int, ...], missing: int, told_at: int
) -> None:
    """Contributions 1 and 4 were consumed at 1 and 4 of CONTRIB; 2 and 3 never came."""
    told = {told_at: damaged(*places)}
    found = found_in(
        FIRST, commit(2, item(4, 12, 16), *told.get(2, ())), commit(3, *told.get(3, ()))
    )
    assert [v.what for v in found] == [What.UNRESOLVED] * min(1, missing)
    assert [("contribution 3" in v.sentence, "1 more" in v.sentence) for v in found] == [
        (missing == 1, missing == 2)
    ] * min(1, missing)


def test_bytes_that_nobody_could_read_account_for_one_that_is_missing_once() -> None:
    """Contribution 2 lay at 2 and is damaged; 4 at 4 is nowhere."""
    third = commit(2, item(3, 8, 12), *damaged(2, 2, 2))
    (found,) = found_in(FIRST, third, commit(3, item(5, 16, 20)))
    assert found.what is What.UNRESOLVED
    assert "contribution 4" in found.sentence


@pytest.mark.parametrize(
    ("at_ns", "floor", "broken"), [(0, 3, False), (0, 9, True), (50, 9, False)]
)
def test_what_waits_above_the_floor_is_no_violation_and_below_it_is_one(
    at_ns: int, floor: int, *, broken: bool
) -> None:
    """What is newer than the commit lies in another stream than its floor was counted in."""
    first = replace(FIRST, contrib_floor=floor)
    found = found_in(first, offers=(offer(2, last=9, at_ns=at_ns),))
    assert [(v.what, v.version) for v in found] == [(What.UNRESOLVED, 1)] * broken


def test_contribution_that_waits_is_not_missing_behind_its_successor() -> None:
    commits = [replace(FIRST, contrib_floor=3), commit(2, item(3, 8, 12), floor=3)]
    assert found_in(*commits, offers=(offer(2, last=9),)) == []


@pytest.mark.parametrize(("learner", "count", "broken"), [("a", 2, 0), ("a", 1, 2), ("b", 2, 3)])
def test_contributions_that_a_commit_has_no_room_to_name_are_accounted_for_by_number(
    learner: str, count: int, broken: int
) -> None:
    """Contributions 2 and 3 lie below the floor; both were refused without their names."""
    unnamed = (Unnamed(learner, count),)
    flooded = commit(2, item(4, 12, 16), floor=9, unnamed=unnamed)
    found = found_in(FIRST, flooded, offers=(offer(2, last=2), offer(3, last=3)))
    assert [v.what for v in found] == [What.UNRESOLVED] * broken


def test_contributions_refused_while_a_commit_merged_are_below_the_floor_of_the_next() -> None:
    flooded = commit(2, item(4, 12, 16), floor=1, unnamed=(Unnamed("a", 2),))
    offers = (offer(2, last=2), offer(3, last=3))
    assert found_in(FIRST, flooded, commit(3, item(5, 16, 20), floor=9), offers=offers) == []


@pytest.mark.parametrize(
    ("steps", "sequences", "lies"),
    [
        *((24, 24, False), (20, 20, False), (24, 20, False), (0, 0, False)),
        *((25, 25, True), (20, 24, True)),
    ],
)
def test_steps_that_were_skipped_are_not_claimed_though_their_data_is_used(
    steps: int, sequences: int, *, lies: bool
) -> None:
    rules = replace(RULES, claims=ContributionRules(TOKENS, TOKENS))
    claimed = item(1, 0, 24, steps=steps, tokens=sequences * TOKENS)
    records = [member(), begun(1, 0, InnerState.NEW), commit(1, claimed)]
    assert [v.what for v in violations(tabled(records), rules)] == [What.TOKENS] * lies


# ledgers of runs that went through faults, of which one commit is changed


def merges(commit: Commit) -> bool:
    return commit.version > 2 and len(commit.consumed) > 1


def is_later(commit: Commit) -> bool:
    return commit.version > 1


def spoiled(
    seed: int, fits: Callable[[Commit], bool], change: Change
) -> tuple[Commit, list[Violation]]:
    """Change the last commit that fits, so that nothing follows; return it and what is found."""
    records, rules = ledger_of(seed)
    index, held = [(i, r) for i, r in enumerate(records) if isinstance(r, Commit) and fits(r)][-1]
    return held, violations([*records[:index], change(held), *records[index + 1 :]], rules)


def with_first(commit: Commit, **changes: Any) -> Commit:
    first, *others = commit.consumed
    return replace(commit, consumed=(replace(first, **changes), *others))


def with_row(commit: Commit, **changes: Any) -> Commit:
    first, *others = commit.progress
    return replace(commit, progress=(replace(first, **changes), *others))


def with_ghost(commit: Commit) -> Commit:
    return replace(commit, progress=(*commit.progress, LearnerProgress("ghost", 1, 1, 5, 5)))


def with_halves(commit: Commit) -> Commit:
    halves = (replace(c, weight=c.weight / 2) for c in commit.consumed)
    return replace(commit, consumed=tuple(halves))


SPOILED: dict[str, tuple[Callable[[Commit], bool], Change, What]] = {
    "row": (is_later, lambda c: with_row(c, tokens=c.progress[0].tokens + 1), What.PROGRESS),
    "ghost": (is_later, with_ghost, What.PROGRESS),
    "fence": (is_later, lambda c: replace(c, fence=0), What.FENCE),
    "floor": (is_later, lambda c: replace(c, contrib_floor=0), What.FLOOR),
    "weights": (merges, with_halves, What.WEIGHTS),
    "staleness": (
        merges,
        lambda c: with_first(c, staleness=c.consumed[0].staleness + 1),
        What.STALENESS,
    ),
}


@seeds
def test_history_in_which_every_promise_holds_has_no_violation(seed: int) -> None:
    assert violations(*ledger_of(seed)) == []


@seeds
@pytest.mark.parametrize("case", SPOILED)
def test_commit_with_one_lie_is_one_violation(case: str, seed: int) -> None:
    fits, change, what = SPOILED[case]
    held, (found,) = spoiled(seed, fits, change)
    assert (found.what, found.fragment, found.version) == (what, held.fragment, held.version)


@seeds
def test_tokens_that_are_not_those_of_the_data_are_a_violation(seed: int) -> None:
    held, found = spoiled(
        seed, merges, lambda c: with_first(c, tokens=c.consumed[0].tokens + SEQUENCE)
    )
    named = [v.what for v in found if (v.fragment, v.version) == (held.fragment, held.version)]
    assert named.count(What.TOKENS) == 1


@seeds
def test_missing_commit_is_one_violation_that_names_it(seed: int) -> None:
    records, rules = ledger_of(seed)
    commits = [r for r in records if isinstance(r, Commit)]
    last = {c.fragment: c for c in commits}
    for gone in commits:
        if gone.version > 1 and gone is not last[gone.fragment]:
            rest = [r for r in records if r is not gone]
            found = violations(rest, rules)
            (named,) = [v for v in found if v.what not in {What.GAP, What.UNRESOLVED}]
            missing = (What.VERSIONS, gone.fragment, gone.version + 1)
            assert (named.what, named.fragment, named.version) == missing
            assert f"version {gone.version} is missing" in named.sentence


@seeds
def test_contribution_that_is_consumed_again_is_a_violation(seed: int) -> None:
    records, rules = ledger_of(seed)
    held = [r for r in records if isinstance(r, Commit) and merges(r)][-1]
    later = records[records.index(held) + 1 :]
    rest = [r for r in records if r not in later or getattr(r, "fragment", None) != held.fragment]
    again = replace(held, version=held.version + 1, refused=())
    found = violations([*rest, again], rules)
    assert [v.what for v in found].count(What.TWICE) == len(held.consumed)


# checkpoints


def test_restored_run_begins_where_its_checkpoint_was() -> None:
    rows = (LearnerProgress("a", 0, 0, 4 * TOKENS, 4),)
    base = commit(7, origin=CommitOrigin.RESTORED, progress=rows)
    after = commit(8, item(1, 4, 8), progress=(LearnerProgress("a", 1, 1, 8 * TOKENS, 8),))
    assert violations([base, member(incarnation=0), member(), begun(1, 4), after]) == []


class TestACheckpointThatWasPutBack:
    """Version 1 took four sequences of ``a``; version 2 says that it was restored."""

    ROW = LearnerProgress("a", 1, 1, 4 * TOKENS, 4)
    AHEAD = LearnerProgress("a", 1, 3, 12 * TOKENS, 12)

    def put(
        self,
        row: LearnerProgress,
        *after: Record,
        origin: CommitOrigin = CommitOrigin.REPLACED,
        **changes: Any,
    ) -> list[What]:
        before = tabled([member(), replace(FIRST, contrib_floor=5)])
        put = replace(commit(2, floor=5, origin=origin, progress=(row,)), **changes)
        return [v.what for v in violations([*before, put, *after])]

    @pytest.mark.parametrize("row", [ROW, AHEAD], ids=["lost", "rolled_back"])
    def test_it_may_be_ahead_of_the_log(self, row: LearnerProgress) -> None:
        assert self.put(row) == []

    def test_what_comes_behind_it_is_counted_from_its_table(self) -> None:
        row = LearnerProgress("a", 1, 4, 16 * TOKENS, 16)
        assert self.put(self.AHEAD, commit(3, item(4, 12, 16), floor=6, progress=(row,))) == []

    def test_it_may_be_written_under_the_fence_of_a_state_that_was_begun_anew(self) -> None:
        assert self.put(self.ROW, fence=0) == []

    @pytest.mark.parametrize("version", [1, 3, 40])
    def test_its_version_is_the_next_one(self, version: int) -> None:
        assert self.put(self.ROW, version=version) == [What.VERSIONS]

    @pytest.mark.parametrize(
        "lost",
        [{"identity": 0}, {"incarnation": 0}, {"tokens": 0}, {"cursor": 3}, {"learner": "b"}],
    )
    def test_its_table_does_not_go_back(self, lost: dict[str, Any]) -> None:
        assert self.put(replace(self.ROW, **lost)) == [What.PROGRESS]

    def test_its_floor_does_not_go_back(self) -> None:
        assert self.put(self.ROW, contrib_floor=4) == [What.FLOOR]

    @pytest.mark.parametrize(("start", "broken"), [(4, set[What]()), (0, {What.OVERLAP})])
    def test_it_consumes_nothing(self, start: int, broken: set[What]) -> None:
        row = replace(self.ROW, identity=2, tokens=(12 - start) * TOKENS, cursor=8)
        merged = item(2, start, 8, base_version=1)
        assert set(self.put(row, consumed=(merged,))) == {What.PROGRESS} | broken

    def test_what_was_left_out_before_it_stays_left_out(self) -> None:
        row = LearnerProgress("a", 1, 3, 8 * TOKENS, 12)
        put = commit(3, origin=CommitOrigin.REPLACED, progress=(row,))
        before = tabled([member(), FIRST, commit(2, item(3, 8, 12))])
        assert [v.what for v in violations([*before, put])] == [What.UNRESOLVED]

    @pytest.mark.parametrize("version", [1, 2, 40])
    def test_a_history_does_not_begin_in_its_middle(self, version: int) -> None:
        origin = CommitOrigin.RESTORED
        assert self.put(self.ROW, origin=origin, version=version) == [What.VERSIONS]

    @pytest.mark.parametrize(("version", "broken"), [(1, False), (9, True)])
    def test_an_empty_log_is_put_back_as_version_one(self, version: int, *, broken: bool) -> None:
        put = commit(version, origin=CommitOrigin.REPLACED, progress=(self.ROW,))
        assert [v.what for v in violations([member(), put])] == [What.VERSIONS] * broken


def test_rules_of_a_config_take_its_own_numbers() -> None:
    config = RunConfig(data=DataConfig(seq_len=64), sync=SyncConfig(shards=3, max_staleness=7))
    rules = Rules.of(config)
    assert rules.claims == ContributionRules(64, 64 * config.data.batch)
    assert (rules.shards, rules.staleness.most) == (3, 7)
