"""Every promise of a ledger: what holds passes, and one thing that is wrong is one finding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

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
)
from skerry_tools.audit.checks import Checks, Rules
from skerry_tools.audit.offers import Offer
from skerry_tools.audit.violations import What
from tests.support.builders import commit, consumed, member
from tests.support.imagined import RULES, TOKENS, Record, history, tabled, violations

SEEDS = st.integers(0, 10_000)
PICKS = st.randoms(use_true_random=False)


def last_commit(records: list[Record], fits: Callable[[Commit], bool]) -> int:
    """Return the index of the last commit that fits, so that nothing follows from its change."""
    return max(i for i, r in enumerate(records) if isinstance(r, Commit) and fits(r))


def changed(records: list[Record], index: int, **changes: object) -> list[Record]:
    record = records[index]
    return [*records[:index], replace(record, **changes), *records[index + 1 :]]  # type: ignore[arg-type]


def commit_at(records: list[Record], index: int) -> Commit:
    record = records[index]
    assert isinstance(record, Commit)
    return record


def with_first(commit: Commit, **changes: object) -> tuple[Consumed, ...]:
    return replace(commit.consumed[0], **changes), *commit.consumed[1:]  # type: ignore[arg-type]


def merged(commit: Commit) -> bool:
    return commit.version > 2 and len(commit.consumed) > 1


@settings(max_examples=60)
@given(SEEDS)
def test_history_in_which_every_promise_holds_has_no_violation(seed: int) -> None:
    assert violations(history(seed)) == []


@settings(max_examples=40)
@given(SEEDS, PICKS)
def test_missing_commit_is_one_violation_that_names_it(seed: int, rng: object) -> None:
    records = history(seed)
    inner = [
        i
        for i, r in enumerate(records)
        if isinstance(r, Commit)
        and r.version > 1
        and any(isinstance(s, Commit) and s.fragment == r.fragment for s in records[i + 1 :])
    ]
    index = rng.choice(inner)  # type: ignore[attr-defined]
    gone = commit_at(records, index)
    rules = replace(RULES, counted=False)
    found = [
        v
        for v in violations([*records[:index], *records[index + 1 :]], rules)
        if v.what != What.GAP
    ]
    assert [(v.what, v.fragment, v.version) for v in found] == [
        (What.VERSIONS, gone.fragment, gone.version + 1)
    ]
    assert f"version {gone.version} is missing" in found[0].sentence


@settings(max_examples=40)
@given(SEEDS)
def test_row_of_progress_that_lies_is_one_violation(seed: int) -> None:
    records = history(seed)
    index = last_commit(records, lambda c: len(c.progress) > 0)
    rows = commit_at(records, index).progress
    wrong = (replace(rows[0], tokens=rows[0].tokens + 1), *rows[1:])
    (found,) = violations(changed(records, index, progress=wrong))
    assert (found.what, found.learner) == (What.PROGRESS, rows[0].learner)


def test_row_of_a_learner_that_nothing_came_from_is_a_violation() -> None:
    records = history(1)
    index = last_commit(records, lambda _: True)
    rows = (*commit_at(records, index).progress, LearnerProgress("ghost", 1, 1, 5, 5))
    (found,) = violations(changed(records, index, progress=rows))
    assert (found.what, found.learner) == (What.PROGRESS, "ghost")


@settings(max_examples=40)
@given(SEEDS)
def test_tokens_that_are_not_those_of_the_data_are_a_violation(seed: int) -> None:
    records = history(seed)
    rules = replace(RULES, discount=None)
    index = last_commit(records, merged)
    commit = commit_at(records, index)
    first = commit.consumed[0]
    rows = tuple(
        replace(r, tokens=r.tokens + TOKENS) if r.learner == first.learner else r
        for r in commit.progress
    )
    lying = changed(
        records, index, consumed=with_first(commit, tokens=first.tokens + TOKENS), progress=rows
    )
    found = [v for v in violations(lying, rules) if v.sequence == index + 1]
    assert [v.what for v in found] == [What.TOKENS]
    plain = replace(rules, sequence_tokens=None)
    assert not [v for v in violations(lying, plain) if v.sequence == index + 1]


@pytest.mark.parametrize(
    ("steps", "sequences", "lies"),
    [
        *((24, 24, False), (20, 20, False), (0, 0, False)),
        *((25, 25, True), (24, 20, True), (20, 24, True)),
    ],
)
def test_steps_that_were_skipped_are_not_claimed_though_their_data_is_used(
    steps: int, sequences: int, *, lies: bool
) -> None:
    rules = replace(RULES, step_tokens=TOKENS)
    item = replace(_consumed(1, 0, 24), steps=steps, tokens=sequences * TOKENS)
    row = LearnerProgress("a", 1, 1, item.tokens, 24)
    begun = replace(_commit(1, ()), origin=CommitOrigin.RESTORED)
    merged = replace(_commit(2, (item,)), progress=(row,))
    records: list[Record] = [begun, member(), replace(member(), inner=InnerState.NEW), merged]
    assert [v.what for v in violations(records, rules)] == [What.TOKENS] * lies


@settings(max_examples=40)
@given(SEEDS)
def test_contribution_that_is_consumed_again_is_a_violation(seed: int) -> None:
    records = history(seed)
    index = last_commit(records, merged)
    commit = commit_at(records, index)
    again = replace(commit, version=commit.version + 1, refused=())
    later = [
        r
        for r in records[index + 1 :]
        if not (isinstance(r, Commit) and r.fragment == commit.fragment)
    ]
    found = violations([*records[: index + 1], *later, again])
    assert [v.what for v in found].count(What.TWICE) == len(commit.consumed)


def test_contribution_that_is_consumed_behind_its_successor_is_a_violation() -> None:
    first, second = _consumed(1, 0, 4), _consumed(3, 8, 12)
    late = _consumed(2, 4, 8)
    commits = [_commit(1, (first,)), _commit(2, (second,)), _commit(3, (late,))]
    found = violations(tabled([member(), *commits]))
    assert What.ORDER in {v.what for v in found}
    assert What.TWICE not in {v.what for v in found}


def test_contribution_that_was_left_out_is_a_violation_that_names_it() -> None:
    commits = [_commit(1, (_consumed(1, 0, 4),)), _commit(2, (_consumed(3, 8, 12),))]
    (found,) = violations(tabled([member(), *commits]))
    assert found.what is What.UNRESOLVED
    assert "contribution 2 of incarnation 1" in found.sentence
    assert found.learner == "a"


def test_contribution_that_its_learner_took_back_is_accounted_for() -> None:
    commits = [_commit(1, (_consumed(1, 0, 4),)), _commit(2, (_consumed(3, 4, 12),))]
    assert violations(tabled([member(), *commits])) == []


def test_contribution_that_was_refused_is_accounted_for() -> None:
    refused = Refused(RefusalCause.DIVERGED, "a", 1, 2, 4 * TOKENS, 4, 8)
    commits = [_commit(1, (_consumed(1, 0, 4),)), _commit(2, (_consumed(3, 8, 12),), (refused,))]
    assert violations(tabled([member(), *commits])) == []


def test_refusal_without_numbers_accounts_for_one_that_is_missing() -> None:
    commits = [
        _commit(1, (_consumed(1, 0, 4),)),
        _commit(2, (_consumed(3, 8, 12),), (Refused(RefusalCause.CORRUPT, "a"),)),
    ]
    assert violations(tabled([member(), *commits])) == []


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
    damaged = tuple(Refused(RefusalCause.CORRUPT, "a", sequence=place) for place in places)
    told = {2: ((), damaged), 3: (damaged, ())}[told_at]
    commits = [
        _commit(1, (_consumed(1, 0, 4),)),
        _commit(2, (_consumed(4, 12, 16),), told[1]),
        _commit(3, (), told[0]),
    ]
    found = violations(tabled([member(), *commits]))
    assert [v.what for v in found] == [What.UNRESOLVED] * min(1, missing)
    assert [("contribution 3" in v.sentence, "1 more" in v.sentence) for v in found] == [
        (missing == 1, missing == 2)
    ] * min(1, missing)


def test_bytes_that_nobody_could_read_account_for_one_that_is_missing_once() -> None:
    """Contribution 2 lay at 2 and is damaged; 4 at 4 is nowhere."""
    commits = [
        _commit(1, (_consumed(1, 0, 4),)),
        _commit(2, (_consumed(3, 8, 12),), (Refused(RefusalCause.CORRUPT, "a", sequence=2),) * 3),
        _commit(3, (_consumed(5, 16, 20),)),
    ]
    (found,) = violations(tabled([member(), *commits]))
    assert found.what is What.UNRESOLVED
    assert "contribution 4" in found.sentence


def test_offer_of_initial_parameters_that_lost_is_accounted_for() -> None:
    genesis = replace(_commit(1, ()), origin=CommitOrigin.GENESIS)
    assert violations(tabled([member(), genesis, _commit(2, (_consumed(2, 0, 4),))])) == []


def test_contribution_that_still_waits_is_no_violation() -> None:
    commits = [
        _commit(1, (_consumed(1, 0, 4),), floor=3),
        _commit(2, (_consumed(3, 8, 12),), floor=3),
    ]
    assert violations(tabled([member(), *commits]), offers=[_offer(2, last=9)]) == []


def test_contribution_below_the_floor_that_is_unresolved_is_a_violation() -> None:
    records = tabled([member(), _commit(1, (_consumed(1, 0, 4),), floor=9)])
    (found,) = violations(records, offers=[_offer(2, last=9)])
    assert (found.what, found.version, found.learner) == (What.UNRESOLVED, 1, "a")


def test_floor_of_another_stream_says_nothing_about_what_came_later() -> None:
    records = tabled([member(), _commit(1, (_consumed(1, 0, 4),), floor=9)])
    assert violations(records, offers=[_offer(2, last=9, at_ns=50)]) == []


@pytest.mark.parametrize("start", [3, 0])
def test_data_that_is_counted_twice_is_a_violation(start: int) -> None:
    commits = [_commit(1, (_consumed(1, 0, 4),)), _commit(2, (_consumed(2, start, 8),))]
    (found,) = violations(tabled([member(), *commits]))
    assert found.what is What.OVERLAP
    assert f"[{start}, 4)" in found.sentence


def test_data_that_was_trained_on_and_not_offered_is_counted_as_discarded() -> None:
    refused = Refused(RefusalCause.DIVERGED, "a", 1, 2, 2 * TOKENS, 4, 6)
    commits = [_commit(1, (_consumed(1, 0, 4),)), _commit(2, (_consumed(3, 9, 12),), (refused,))]
    checks = Checks(RULES)
    for sequence, record in enumerate(tabled(commits), 1):
        assert isinstance(record, Commit)
        checks.commit(record, sequence, sequence)
    assert checks.histories[0].accounts["a"].discarded == 3


def test_start_behind_data_that_nobody_offered_is_a_gap() -> None:
    begun = replace(member(incarnation=2), cursor=7, inner=InnerState.COLD)
    (found,) = violations(
        tabled([member(), _commit(1, (_consumed(1, 0, 4),)), member(incarnation=2), begun])
    )
    assert (found.what, found.learner) == (What.GAP, "a")
    assert "[4, 7)" in found.sentence


def test_start_behind_data_that_is_refused_later_is_no_gap() -> None:
    begun = replace(member(incarnation=2), cursor=7, inner=InnerState.COLD)
    refused = Refused(RefusalCause.SUPERSEDED, "a", 1, 2, 3 * TOKENS, 4, 7)
    records: list[Record] = [
        member(),
        _commit(1, (_consumed(1, 0, 4),)),
        member(incarnation=2),
        begun,
    ]
    assert violations(tabled([*records, _commit(2, (), (refused,))])) == []


def test_start_in_data_that_was_counted_is_a_violation() -> None:
    begun = replace(member(incarnation=2), cursor=3, inner=InnerState.WARM)
    (found,) = violations(
        tabled([member(), _commit(1, (_consumed(1, 0, 4),)), member(incarnation=2), begun])
    )
    assert found.what is What.COUNTED_AGAIN


def test_data_of_an_older_incarnation_behind_the_newer_ones_start_is_a_violation() -> None:
    begun = replace(member(incarnation=2), cursor=4, inner=InnerState.WARM)
    records: list[Record] = [
        member(),
        _commit(1, (_consumed(1, 0, 4),)),
        member(incarnation=2),
        begun,
    ]
    (found,) = violations(tabled([*records, _commit(2, (_consumed(2, 4, 9),))]))
    assert found.what is What.COUNTED_AGAIN


def test_contribution_of_an_incarnation_that_never_joined_is_a_violation() -> None:
    (found,) = violations(
        tabled([member(), _commit(1, (replace(_consumed(1, 0, 4), incarnation=2),))])
    )
    assert found.what is What.MEMBER


def test_incarnation_that_goes_back_is_a_violation() -> None:
    (found,) = violations([member(incarnation=2), member(incarnation=1)])
    assert found.what is What.MEMBER


def test_learner_that_changes_its_data_is_a_violation() -> None:
    (found,) = violations([member(), replace(member(incarnation=2), shard=4)])
    assert found.what is What.MEMBER


@settings(max_examples=40)
@given(SEEDS)
def test_commit_of_a_syncer_that_had_lost_its_shard_is_a_violation(seed: int) -> None:
    records = history(seed)
    index = last_commit(records, lambda c: c.version > 1)
    (found,) = violations(changed(records, index, fence=0))
    assert (found.what, found.fragment) == (What.FENCE, commit_at(records, index).fragment)


@settings(max_examples=40)
@given(SEEDS)
def test_floor_that_goes_back_is_a_violation(seed: int) -> None:
    records = history(seed)
    index = last_commit(records, lambda c: c.version > 1)
    (found,) = violations(changed(records, index, contrib_floor=0))
    assert found.what is What.FLOOR


@settings(max_examples=40)
@given(SEEDS)
def test_weights_that_are_not_those_of_the_work_are_a_violation(seed: int) -> None:
    records = history(seed)
    index = last_commit(records, merged)
    commit = commit_at(records, index)
    half = tuple(replace(c, weight=c.weight / 2) for c in commit.consumed)
    (found,) = violations(changed(records, index, consumed=half))
    assert found.what is What.WEIGHTS


@settings(max_examples=40)
@given(SEEDS)
def test_staleness_that_is_not_the_distance_of_versions_is_a_violation(seed: int) -> None:
    records = history(seed)
    rules = replace(RULES, discount=None)
    index = last_commit(records, merged)
    commit = commit_at(records, index)
    lying = with_first(commit, staleness=commit.consumed[0].staleness + 1)
    (found,) = violations(changed(records, index, consumed=lying), rules)
    assert found.what is What.STALENESS


def test_contribution_that_was_too_stale_to_be_merged_is_a_violation() -> None:
    rules = replace(RULES, max_staleness=0)
    late = replace(_consumed(2, 4, 8), base_version=1, staleness=1)
    first = _commit(1, (_consumed(1, 0, 4),))
    records: list[Record] = [member(), first, _commit(2, ()), _commit(3, (late,))]
    (found,) = violations(tabled(records), rules)
    assert found.what is What.STALENESS


def test_restored_run_begins_where_its_checkpoint_was() -> None:
    rows = (LearnerProgress("a", 0, 0, 4 * TOKENS, 4),)
    base = replace(_commit(7, ()), origin=CommitOrigin.RESTORED, progress=rows)
    item = replace(_consumed(1, 4, 8), base_version=7)
    after = replace(_commit(8, (item,)), progress=(LearnerProgress("a", 1, 1, 8 * TOKENS, 8),))
    begun = replace(member(), cursor=4, inner=InnerState.COLD)
    assert violations([base, replace(member(), incarnation=0), member(), begun, after]) == []


class TestACheckpointThatWasPutBack:
    """Version 1 took four sequences of ``a``; version 2 says that it was restored."""

    ROW = LearnerProgress("a", 1, 1, 4 * TOKENS, 4)
    AHEAD = LearnerProgress("a", 1, 3, 12 * TOKENS, 12)

    def history(
        self, origin: CommitOrigin, row: LearnerProgress, **changes: object
    ) -> list[Record]:
        before = tabled([member(), _commit(1, (_consumed(1, 0, 4),), floor=5)])
        put = replace(_commit(2, (), floor=5), origin=origin, progress=(row,))
        return [*before, replace(put, **changes)]  # type: ignore[arg-type]

    def put(self, row: LearnerProgress, **changes: object) -> list[What]:
        records = self.history(CommitOrigin.REPLACED, row, **changes)
        return [v.what for v in violations(records)]

    @pytest.mark.parametrize("row", [ROW, AHEAD], ids=["lost", "rolled_back"])
    def test_it_may_be_ahead_of_the_log(self, row: LearnerProgress) -> None:
        assert self.put(row) == []

    def test_what_comes_behind_it_is_counted_from_its_table(self) -> None:
        after = replace(
            _commit(3, (_consumed(4, 12, 16),), floor=6),
            progress=(LearnerProgress("a", 1, 4, 16 * TOKENS, 16),),
        )
        records = self.history(CommitOrigin.REPLACED, self.AHEAD)
        assert violations([*records, after]) == []

    def test_it_may_be_written_under_the_fence_of_a_state_that_was_begun_anew(self) -> None:
        assert self.put(self.ROW, fence=0) == []

    @pytest.mark.parametrize("version", [1, 3, 40])
    def test_its_version_is_the_next_one(self, version: int) -> None:
        assert self.put(self.ROW, version=version) == [What.VERSIONS]

    @pytest.mark.parametrize(
        "row",
        [
            replace(ROW, identity=0),
            replace(ROW, incarnation=0),
            replace(ROW, tokens=3 * TOKENS),
            replace(ROW, cursor=3),
            replace(ROW, learner="b"),
        ],
    )
    def test_its_table_does_not_go_back(self, row: LearnerProgress) -> None:
        assert self.put(row) == [What.PROGRESS]

    def test_its_floor_does_not_go_back(self) -> None:
        assert self.put(self.ROW, contrib_floor=4) == [What.FLOOR]

    def test_it_consumes_nothing(self) -> None:
        item = replace(_consumed(2, 4, 8), base_version=1)
        row = replace(self.ROW, identity=2, tokens=8 * TOKENS, cursor=8)
        assert self.put(row, consumed=(item,)) == [What.PROGRESS]
        assert What.OVERLAP in self.put(row, consumed=(replace(item, cursor_from=0),))

    def test_what_was_left_out_before_it_stays_left_out(self) -> None:
        left = [_commit(1, (_consumed(1, 0, 4),)), _commit(2, (_consumed(3, 8, 12),))]
        before = tabled([member(), *left])
        row = LearnerProgress("a", 1, 3, 8 * TOKENS, 12)
        put = replace(_commit(3, ()), origin=CommitOrigin.REPLACED, progress=(row,))
        assert [v.what for v in violations([*before, put])] == [What.UNRESOLVED]

    @pytest.mark.parametrize("version", [1, 2, 40])
    def test_a_history_does_not_begin_in_its_middle(self, version: int) -> None:
        records = self.history(CommitOrigin.RESTORED, self.ROW, version=version)
        assert [v.what for v in violations(records)] == [What.VERSIONS]

    def test_an_empty_log_is_put_back_as_version_one(self) -> None:
        put = replace(_commit(1, ()), origin=CommitOrigin.REPLACED, progress=(self.ROW,))
        assert violations([member(), put]) == []
        assert [v.what for v in violations([member(), replace(put, version=9)])] == [What.VERSIONS]


def test_rules_of_a_config_take_its_own_numbers() -> None:
    from skerry.settings.models import DataConfig, RunConfig, SyncConfig

    config = RunConfig(data=DataConfig(seq_len=64), sync=SyncConfig(shards=3, max_staleness=7))
    rules = Rules.of(config)
    assert (rules.sequence_tokens, rules.shards, rules.max_staleness) == (64, 3, 7)
    assert rules.step_tokens == 64 * config.data.batch


def _consumed(identity: int, start: int, stop: int) -> Consumed:
    return consumed(
        identity=identity,
        sequence_first=identity,
        sequence_last=identity,
        base_version=0,
        steps=stop - start,
        tokens=(stop - start) * TOKENS,
        cursor_from=start,
        cursor_to=stop,
    )


def _commit(
    version: int,
    consumed: tuple[Consumed, ...],
    refused: tuple[Refused, ...] = (),
    floor: int = 0,
) -> Commit:
    """Return a commit of fragment 0 whose base versions and table fit those made before it."""
    fitting = tuple(
        replace(c, base_version=c.base_version if c.staleness else version - 1) for c in consumed
    )
    merged: dict[str, Any] = {"consumed": fitting, "refused": refused, "contrib_floor": floor}
    return commit(version, origin=CommitOrigin.ROUND, **merged)


def _offer(identity: int, *, last: int, at_ns: int = 0) -> Offer:
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
    return Offer(header, last, last, at_ns)
