"""When a learner answers a round and adopts a fragment."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.protocol.learner import (
    DoorReason,
    LearnerDoor,
    LearnerFragment,
    LearnerPolicy,
    TrainingProgress,
    claimed,
    supersedes,
)
from skerry.settings.models import SyncConfig
from tests.support.builders import commit, round_

Method = Literal["overwrite", "blend", "rebase"]


def at(step: int) -> TrainingProgress:
    return TrainingProgress(step=step, steps=step, tokens=10 * step, cursor=2 * step)


def policy(method: Method = "rebase", *, tau: int = 2) -> LearnerPolicy:
    return LearnerPolicy.of(SyncConfig(fragments=4, h_steps=8, overlap_steps=tau, adoption=method))


@pytest.mark.parametrize(
    ("before", "after", "claim"),
    [((0, 0), (24, 0), (24, 240)), ((0, 0), (24, 4), (20, 200)), ((24, 4), (48, 28), (0, 0)),
     ((24, 0), (24, 0), (0, 0)), ((24, 0), (24, 1), (0, 0))],
)  # fmt: skip
def test_what_was_skipped_is_not_claimed(
    before: tuple[int, int], after: tuple[int, int], claim: tuple[int, int]
) -> None:
    origin, now = (replace(at(steps), skipped=skipped) for steps, skipped in (before, after))
    assert claimed(origin, now) == claim


@pytest.mark.parametrize(("shards", "room"), [(1, 2), (2, 4), (4, 8), (8, 8)])
def test_there_is_room_for_what_all_shards_keep_open(shards: int, room: int) -> None:
    sync = SyncConfig(fragments=8, h_steps=24, overlap_steps=2, shards=shards)
    assert LearnerPolicy.of(sync).room == room


IDLE = LearnerFragment(0, at(0), version=3, answered=3)
FLYING = IDLE.after_capture(4, at(5))


@pytest.mark.parametrize(
    ("state", "version", "step", "in_flight", "reason"),
    [
        (IDLE, 4, 5, 0, "open"),
        (IDLE, 3, 5, 0, "answered"),
        (LearnerFragment(0, at(0), version=3), 3, 5, 0, "closed"),
        (IDLE, 5, 5, 0, "behind"),
        (FLYING, 4, 6, 0, "answered"),
        (LearnerFragment(0, at(0), version=3, captured=at(1)), 4, 5, 0, "in_flight"),
        (IDLE, 4, 0, 0, "no_steps"),
        (IDLE, 4, 5, 2, "no_room"),
    ],
)
def test_a_round_is_answered_once_and_from_its_own_base(
    state: LearnerFragment, version: int, step: int, in_flight: int, reason: str
) -> None:
    answer = state.may_answer(
        round_(version), at(step), in_flight=in_flight, idle=False, policy=policy()
    )
    assert answer == (reason == "open", reason)


def test_a_capture_that_could_not_leave_frees_its_round_and_its_identity() -> None:
    state = FLYING.after_never_sent(FLYING.identity)
    assert (state.captured, state.answered, state.identity) == (None, 3, IDLE.identity)


def test_a_capture_made_since_one_that_could_not_leave_stays() -> None:
    newer = replace(FLYING, version=4, captured=None).after_capture(5, at(6))
    assert newer.after_never_sent(FLYING.identity) == newer


def test_a_learner_that_has_ended_answers_without_steps() -> None:
    answer, _ = IDLE.may_answer(round_(4), at(0), in_flight=0, idle=True, policy=policy())
    assert answer


@pytest.mark.parametrize(
    ("state", "version", "step", "idle", "reason"),
    [
        (FLYING, 4, 6, False, "overlap"),
        (FLYING, 4, 7, False, "due"),
        (FLYING, 9, 7, False, "due"),
        (FLYING, 4, 5, True, "due"),
        (FLYING, 3, 9, False, "known"),
        (IDLE, 4, 5, False, "due"),
    ],
)
def test_adoption_waits_tau_steps_after_a_contribution_only(
    state: LearnerFragment, version: int, step: int, *, idle: bool, reason: str
) -> None:
    decision = state.may_adopt(version, at(step), idle=idle, policy=policy())
    assert decision == (reason == "due", reason)


@pytest.mark.parametrize(
    ("method", "state", "origin"),
    [
        ("overwrite", FLYING, 9),
        ("overwrite", IDLE, 9),
        ("rebase", FLYING, 5),
        ("blend", FLYING, 5),
        ("rebase", IDLE, 0),
    ],
)
def test_the_next_contribution_starts_where_local_progress_does(
    method: Method, state: LearnerFragment, origin: int
) -> None:
    after = state.after_adoption(4, 8, at(9), policy(method))
    assert (after.version, after.commit_step, after.captured) == (4, 8, None)
    assert after.origin == at(origin)


def test_the_first_adoption_starts_from_now() -> None:
    after = LearnerFragment(0, at(0)).after_adoption(7, 8, at(0), policy())
    assert (after.version, after.origin) == (7, at(0))


def test_a_round_that_went_by_for_lack_of_room_is_told_apart() -> None:
    short = LearnerFragment(0, at(0), version=3, answered=3, short=4)
    assert short.has_lapsed(4)
    assert not short.after_capture(4, at(5)).has_lapsed(4)
    assert not IDLE.has_lapsed(4)


@pytest.mark.parametrize(
    ("state", "version", "attempt", "missing"),
    [
        (FLYING, 4, 0, False),
        (FLYING, 4, 1, True),
        (FLYING, 5, 1, False),
        (IDLE, 3, 1, False),
        (IDLE.after_capture(4, at(5), attempt=1), 4, 1, False),
        (IDLE.after_capture(4, at(5), attempt=1), 4, 2, True),
    ],
)
def test_round_asked_for_again_asks_once_whether_its_answer_is_missing(
    state: LearnerFragment, version: int, attempt: int, *, missing: bool
) -> None:
    assert state.may_be_missing(round_(version, attempt=attempt)) is missing


def test_what_is_given_up_is_in_the_next_contribution() -> None:
    again = FLYING.after_giving_up()
    answer, _ = again.may_answer(
        round_(4, attempt=1), at(9), in_flight=0, idle=False, policy=policy()
    )
    assert answer
    assert (again.origin, again.captured) == (IDLE.origin, None)
    assert again.after_capture(4, at(9)).identity == FLYING.identity + 1


@pytest.mark.parametrize(("step", "held"), [(7, False), (8, True)])
def test_a_blocking_mode_holds_the_learner_when_its_fragment_is_due(
    step: int, *, held: bool
) -> None:
    assert IDLE.must_wait(at(step), policy(tau=0)) is held
    assert not IDLE.must_wait(at(step), policy(tau=1))


@settings(max_examples=60)
@given(st.lists(st.sampled_from(["step", "round", "commit"]), max_size=60))
def test_under_rebase_every_step_is_contributed_once_and_in_order(events: list[str]) -> None:
    rule, state, step, version = policy(), LearnerFragment(0, at(0), version=1), 0, 1
    sent: list[tuple[int, int]] = []
    for event in events:
        step += event == "step"
        version += event == "commit"
        if state.may_adopt(version, at(step), idle=False, policy=rule)[0]:
            state = state.after_adoption(version, 0, at(step), rule)
        call = round_(version + 1)
        if (
            event == "round"
            and state.may_answer(call, at(step), in_flight=0, idle=False, policy=rule)[0]
        ):
            sent.append((state.origin.cursor, at(step).cursor))
            state = state.after_capture(call.version, at(step))
    edges = [0, *(stop for _, stop in sent)]
    assert [start for start, _ in sent] == edges[:-1]
    assert state.identity == len(sent)


def test_a_round_that_overtakes_its_manifest_comes_in_with_it() -> None:
    door = LearnerDoor(2, 100)
    early = round_(3, 1)
    assert door.take_round(early) is DoorReason.EARLY
    assert door.rounds == ()
    assert door.take_manifest(commit(2, 1)) is None
    assert (door.rounds, sum(door.refused.values())) == ((early,), 0)


@pytest.mark.parametrize("how", ["steps", "final commit", "own end"])
def test_a_final_round_comes_in_once_the_run_is_at_its_end(how: str) -> None:
    door = LearnerDoor(1, 100)
    door.take_manifest(commit(1, step=50))
    last = round_(2, due_step=100, final=True)
    assert door.take_round(last) is DoorReason.NOT_OVER
    if how == "own end":
        door.end()
    else:
        door.take_manifest(commit(1, step=100 if how == "steps" else 60, final=how != "steps"))
    assert door.rounds == (last,)


def test_a_round_beyond_a_manifest_that_turns_out_older_is_dropped() -> None:
    door = LearnerDoor(1, 100)
    door.take_manifest(commit(9))
    assert door.take_round(round_(10)) is None
    door.take_manifest(commit(2))
    assert door.rounds == ()
    assert door.take_round(round_(3)) is None


@pytest.mark.parametrize(
    ("incarnation", "believed"), [(5, False), (6, True), (69, True), (70, False), (2**64, False)]
)
def test_only_so_many_starts_may_have_been_missed(incarnation: int, *, believed: bool) -> None:
    assert supersedes(incarnation, 5) is believed
