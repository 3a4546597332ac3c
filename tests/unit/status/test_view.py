"""The fold over pulses and ledger records says who is alive, how far the run is, and how well."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import reduce
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.liveness import Liveness, LivenessPolicy
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    CommitOrigin,
    Consumed,
    Evaluation,
    LearnerPhase,
    MemberRecord,
    Pulse,
    RefusalCause,
    Refused,
    RunRecord,
    RunState,
)
from skerry.status.report import RunReport, report, to_json, unconfirmed
from skerry.status.view import (
    MOST_EVALUATIONS,
    TEXTS_OF_LATE,
    RunShape,
    RunView,
    committed,
    disconnected,
    fold,
    peek,
    peek_evaluation,
)
from tests.support.builders import (
    commit,
    consumed,
    evaluation,
    member,
    ns,
    progress,
    pulse,
    refused,
)

if TYPE_CHECKING:
    from skerry.status.view import Message

T0 = 1_000_000.0
EMPTY = RunView(RunShape("r", 2, 1, 100, None, LivenessPolicy(0.5, 3.0, 8.0)))


def at_ns(at_s: float) -> int:
    return ns(T0 + at_s)


def joined(name: str = "a", incarnation: int = 1, at_s: float = 0.0) -> MemberRecord:
    return member(name, incarnation, joined_ns=at_ns(at_s))


def beat(at_s: float, steps: int, name: str = "a", incarnation: int = 1) -> Pulse:
    """A learner that started at 0 with 0.1 s and 1000 tokens a step, busy all the time."""
    return pulse(
        name,
        steps,
        incarnation=incarnation,
        sent_ns=at_ns(at_s),
        tokens=1000 * steps,
        alive_s=at_s,
        bytes_up=10 * steps,
        bytes_down=20 * steps,
    )


def merged(name: str, staleness: int) -> Consumed:
    return consumed(name, staleness=staleness)


def closed(fragment: int, version: int, at_s: float, *, tokens: int = 0, **changes: Any) -> Commit:
    times = {"opened_ns": at_ns(at_s), "closed_ns": at_ns(at_s)}
    rows = (progress(tokens=tokens),) if tokens else ()
    base = {"origin": CommitOrigin.ROUND, "step": 0, "progress": rows, **times}
    return commit(version, fragment, **(base | changes))


def seen(*messages: tuple[float, Message]) -> RunView:
    return reduce(lambda view, item: fold(view, item[1], T0 + item[0]), messages, EMPTY)


def training(until_s: float, name: str = "a", incarnation: int = 1) -> list[tuple[float, Message]]:
    """A pulse each half second, as it arrives."""
    count = int(until_s / 0.5)
    return [(0.5 * i, beat(0.5 * i, 5 * i, name, incarnation)) for i in range(1, count + 1)]


def test_a_learner_that_pulses_is_alive() -> None:
    (row,) = report(seen((0, joined()), *training(10)), T0 + 10.4).learners
    assert (row.liveness, row.reason, row.step) == (Liveness.ALIVE, "pulsing", 100)


def test_a_learner_that_fell_silent_is_suspect_and_then_gone() -> None:
    view = seen((0, joined()), *training(10))
    states = [report(view, T0 + at_s).learners[0].liveness for at_s in (12.6, 15.0)]
    assert states == [Liveness.SUSPECT, Liveness.GONE]


def test_whoever_lost_its_connection_is_gone_sooner_until_it_pulses_again() -> None:
    view = seen((0, joined()), *training(10))
    now_s = T0 + 11.3
    assert unconfirmed(view, T0 + 10.4) == []
    assert unconfirmed(view, now_s) == ["a"]
    lost = disconnected(view, {"a": T0 + 10.1, "b": T0 + 10.1})
    (row,) = report(lost, now_s).learners
    assert (row.liveness, row.reason) == (Liveness.GONE, "disconnected")
    assert unconfirmed(lost, now_s) == [], "it is gone: nothing more to ask"
    (back,) = report(fold(lost, beat(11.4, 110), T0 + 11.4), T0 + 12.6).learners
    assert back.liveness is Liveness.ALIVE


def test_a_connection_that_ended_before_the_last_pulse_says_nothing() -> None:
    view = seen((0, joined()), *training(10))
    earlier = disconnected(view, {"a": T0 + 8.0})
    assert report(earlier, T0 + 11.3).learners[0].liveness is Liveness.ALIVE


def test_whoever_stopped_or_is_gone_is_not_asked_for() -> None:
    view = seen((0, joined()), *training(10))
    assert unconfirmed(view, T0 + 60) == []
    goodbye = replace(beat(10.5, 100), phase=LearnerPhase.STOPPED)
    assert unconfirmed(fold(view, goodbye, T0 + 10.5), T0 + 11.9) == []


def test_pulses_without_steps_give_a_dead_trainer_away() -> None:
    stuck = [(10 + 0.5 * i, beat(10 + 0.5 * i, 100)) for i in range(1, 41)]
    (row,) = report(seen(*training(10), *stuck), T0 + 30.1).learners
    assert (row.liveness, row.reason) == (Liveness.GONE, "stalled")


def test_a_learner_that_joined_and_never_pulsed_is_gone_after_a_while() -> None:
    view = seen((0, joined()))
    assert report(view, T0 + 1).learners[0].liveness is Liveness.ALIVE
    assert report(view, T0 + 60).learners[0].liveness is Liveness.GONE


def test_a_name_is_as_old_as_the_log_says_its_first_start_is_in_any_order() -> None:
    starts = [(5 * n, joined(incarnation=n, at_s=-86_400.0)) for n in (1, 2, 3)]
    told = (20, beat(20, 5, incarnation=3))
    for messages in (
        [*starts, told],
        [starts[2], told, *starts],
        [told, *starts],
        [*starts[:2], told, starts[2]],
    ):
        (row,) = report(seen(*messages), T0 + 25).learners
        assert row.joined_s_ago == 20.0
    (unread,) = report(seen(told), T0 + 25).learners
    assert unread.joined_s_ago is None


def test_an_old_pulse_read_back_from_the_stream_proves_no_life() -> None:
    (row,) = report(seen((3600, beat(10, 100))), T0 + 3600).learners
    assert row.liveness is Liveness.GONE


def test_a_sender_whose_clock_is_behind_is_alive_from_its_second_pulse() -> None:
    view = seen((500, beat(0.5, 5)), (500.5, beat(1.0, 10)))
    assert report(view, T0 + 500.6).learners[0].liveness is Liveness.ALIVE


def test_a_sender_whose_clock_was_set_back_is_still_heard() -> None:
    fast = replace(beat(2.0, 20), sent_ns=at_ns(3602.0))
    view = seen((1.0, beat(1.0, 10)), (2.0, fast), (3.0, beat(3.0, 30)))
    held = view.learners["a"].pulse
    assert held is not None
    assert held.steps == 30


def test_a_repeated_pulse_shows_that_its_sender_lives() -> None:
    again = replace(beat(1.0, 10), sent_ns=at_ns(1.5))
    view = seen((1.0, beat(1.0, 10)), (1.5, again))
    assert view.learners["a"].heartbeat.last_s == T0 + 1.5


def test_a_restart_adds_up_what_both_incarnations_did() -> None:
    view = seen((0, joined()), *training(10), (20, joined(incarnation=2, at_s=20)))
    view = fold(view, replace(beat(1.0, 10, incarnation=2), sent_ns=at_ns(21)), T0 + 21)
    (row,) = report(view, T0 + 21).learners
    assert (row.incarnation, row.tokens, row.bytes_up, row.bytes_down) == (2, 110_000, 1100, 2200)


def test_what_took_the_time_is_told_of_all_incarnations_and_the_pause_between_them() -> None:
    first = replace(beat(10, 60), compile_s=3.0, recover_s=1.0)
    again = replace(beat(4, 10, incarnation=2), sent_ns=at_ns(20), replay_s=1.0)
    view = seen((0, joined()), (10, first), (16, joined(incarnation=2, at_s=16)), (20, again))
    told = report(view, T0 + 20).run.time
    assert {use: round(share * 20, 6) for use, share in told.items()} == {
        "train": 7,
        "compile": 3,
        "recover": 1,
        "wait": 0,
        "replay": 1,
        "idle": 2,
        "down": 6,
    }


def test_a_late_pulse_of_an_older_incarnation_changes_nothing() -> None:
    view = seen((0, joined()), *training(2), (3, joined(incarnation=2, at_s=3)))
    assert fold(view, beat(3.5, 40, incarnation=1), T0 + 3.5) is view


def test_down_time_after_joining_lowers_goodput() -> None:
    view = seen((0, joined()), *training(10))
    assert report(view, T0 + 10.2).run.goodput == pytest.approx(1.0)
    assert report(view, T0 + 20).run.goodput == pytest.approx(0.5)


def test_time_after_a_learner_finished_is_not_allocated() -> None:
    done = replace(beat(10, 100), phase=LearnerPhase.FINISHED)
    view = seen((0, joined()), (10, done), (10.5, replace(done, sent_ns=at_ns(10.5))))
    assert report(view, T0 + 500).learners[0].goodput == pytest.approx(1.0)


def test_goodput_is_summed_over_learners() -> None:
    idle = [(at_s, replace(p, busy_s=0.0)) for at_s, p in training(10, "b") if isinstance(p, Pulse)]
    view = seen((0, joined("a")), (0, joined("b")), *training(10, "a"), *idle)
    assert report(view, T0 + 10).run.goodput == pytest.approx(0.5)


def test_who_catches_up_tells_for_how_long() -> None:
    caught_up = replace(beat(9, 0), recover_s=7.5)
    waiting = replace(caught_up, phase=LearnerPhase.CATCHING_UP)
    told = [report(seen((9, one)), T0 + 9).learners[0].waited_s for one in (caught_up, waiting)]
    assert told == [0.0, 7.5]


def test_genesis_is_no_round() -> None:
    view = seen((0, closed(0, 1, 0, origin=CommitOrigin.GENESIS)), (5, closed(0, 2, 5)))
    assert (view.rounds, view.started_s) == (1, T0)
    assert report(view, T0 + 9).run.versions == (2, 0)


@pytest.mark.parametrize("origin", [CommitOrigin.GENESIS, CommitOrigin.RESTORED])
def test_what_a_fragment_begins_with_is_no_round_and_begins_the_run(origin: CommitOrigin) -> None:
    view = seen((0, closed(0, 40, 0, origin=origin)), (0, closed(1, 41, 0, origin=origin)))
    assert (view.rounds, view.merged, view.started_s) == (0, 0, T0)
    timed = replace(view, frame=replace(view.frame, duration_s=50.0))
    assert report(timed, T0 + 20).run.eta_s == pytest.approx(30.0)


def test_parameters_put_back_are_no_round_and_begin_nothing() -> None:
    began = closed(0, 1, 0, origin=CommitOrigin.GENESIS)
    put_back = closed(0, 3, 9, origin=CommitOrigin.REPLACED)
    view = seen((0, began), (5, closed(0, 2, 5)), (9, put_back))
    assert (view.rounds, view.started_s) == (1, T0)


def test_a_commit_that_was_seen_changes_nothing() -> None:
    view = seen((5, closed(0, 2, 5, consumed=(merged("a", 1),), refused=(refused(learner="b"),))))
    assert fold(view, closed(0, 2, 5), T0 + 6) is view


def test_staleness_is_averaged_over_merged_contributions() -> None:
    run = report(
        seen(
            (
                1,
                closed(
                    0,
                    2,
                    1,
                    consumed=(
                        merged("a", 0),
                        merged("b", 3),
                    ),
                ),
            ),
            (2, closed(1, 2, 2, consumed=(merged("a", 0),))),
        ),
        T0 + 3,
    ).run
    assert (run.staleness_mean, run.staleness_max, run.contributions) == (1.0, 3, 3)


def test_refusals_are_counted_by_reason() -> None:
    view = seen(
        (
            1,
            closed(
                0,
                2,
                1,
                refused=(refused(learner="a"), Refused(RefusalCause.DIVERGED, "b")),
            ),
        ),
        (2, closed(0, 3, 2, refused=(refused(learner="b"),))),
    )
    assert report(view, T0 + 3).run.refused == {"too_stale": 2, "diverged": 1}


def test_merged_tokens_count_even_where_the_pulses_are_lost() -> None:
    view = seen((1, closed(0, 2, 1, tokens=5000)), (2, joined()))
    assert report(view, T0 + 2).run.tokens == 5000


def test_loss_and_speed_come_from_who_is_training() -> None:
    fast = [(at_s, replace(p, loss=1.0)) for at_s, p in training(2, "a") if isinstance(p, Pulse)]
    slow = [
        (at_s, replace(p, loss=3.0, step_time_s=0.3))
        for at_s, p in training(2, "b")
        if isinstance(p, Pulse)
    ]
    run = report(seen(*fast, *slow), T0 + 2).run
    assert run.loss == pytest.approx(1.5)
    assert run.tokens_per_s == pytest.approx(10_000 + 10_000 / 3)


def test_a_blocking_learner_that_takes_no_step_has_no_speed_and_is_at_work() -> None:
    policy = replace(EMPTY.frame.liveness, blocking=True)
    blocking = replace(EMPTY, frame=replace(EMPTY.frame, liveness=policy))

    def told(*messages: tuple[float, Message]) -> RunReport:
        view = reduce(lambda v, item: fold(v, item[1], T0 + item[0]), messages, blocking)
        return report(view, T0 + messages[-1][0])

    moving = [(at_s, p) for at_s, p in training(20) if isinstance(p, Pulse)]
    going = told(*moving)
    still = told(*((at_s, replace(p, step=3)) for at_s, p in moving))
    assert [going.run.tokens_per_s > 0, still.run.tokens_per_s > 0] == [True, False]
    assert still.learners[0].liveness is Liveness.ALIVE
    assert [still.learners[0].at_work, still.learners[0].takes_steps] == [True, True]
    assert still.run.eta_s is not None


def test_the_clock_is_that_of_the_quorum_and_never_behind_a_commit() -> None:
    two = replace(EMPTY, frame=replace(EMPTY.frame, quorum=2))
    both = [*training(2, "a"), (2.0, beat(2, 12, "b"))]
    view = reduce(lambda v, item: fold(v, item[1], T0 + item[0]), both, two)
    assert report(view, T0 + 2).run.step == 12
    assert report(fold(view, closed(0, 2, 2, step=18), T0 + 2), T0 + 2).run.step == 18


def test_the_eta_is_what_ends_first() -> None:
    view = seen((0, closed(0, 1, 0, origin=CommitOrigin.GENESIS)), *training(4))
    assert report(view, T0 + 4).run.eta_s == pytest.approx(6.0)
    timed = replace(view, frame=replace(view.frame, duration_s=5.0))
    assert report(timed, T0 + 4).run.eta_s == pytest.approx(1.0)


def test_the_eta_is_unknown_before_the_first_step() -> None:
    assert report(seen((0, joined())), T0 + 1).run.eta_s is None


def test_a_finished_run_stands_still() -> None:
    record = RunRecord("r", "{}", (), 2, 1, at_ns(0), "0", state=RunState.FINISHED)
    view = seen((0, joined()), *training(10), (10, closed(0, 2, 10)), (10, record))
    run = report(view, T0 + 999).run
    assert (run.finished, run.eta_s) == (True, 0.0)
    assert run.wall_s == pytest.approx(10.0)
    assert run.goodput == pytest.approx(1.0)


def test_the_newest_checkpoint_is_told() -> None:
    older, newer = (
        CheckpointRecord("r", p, "d", (), 7, 1, at_ns(t), 9) for p, t in (("x", 1), ("y", 2))
    )
    run = report(seen((2, newer), (3, older)), T0 + 5).run
    assert run.checkpoint == "y"
    assert run.checkpoint_s_ago == pytest.approx(3.0)


def test_figures_beyond_all_bounds_are_no_infinities() -> None:
    """All of them are numbers that a message may tell."""
    view = seen((0, closed(0, 1, 0, origin=CommitOrigin.GENESIS)), *training(4))
    assert report(view, T0 + 4).run.tokens_per_s > 0
    sick = [replace(beat(4, 40, name), step_time_s=1e-300) for name in ("b", "c")]
    sad = [replace(beat(4, 40, name), loss=1.7e308) for name in ("d", "e")]
    for odd in (sick, sad, [replace(one, phase=LearnerPhase.STARTING) for one in sad]):
        now = to_json(seen(*((4, one) for one in odd)), T0 + 4)
        assert json.dumps(now, allow_nan=False)
    endless = replace(view, frame=replace(view.frame, duration_s=math.inf))
    assert report(endless, T0 + 4).run.eta_s == pytest.approx(6.0)


def test_a_checkpoint_lacks_commits_since_the_first_that_it_does_not_hold() -> None:
    written = CheckpointRecord("r", "x", "d", (2, 1), 7, 1, at_ns(3), 9)
    before = [(1, closed(0, 1, 1)), (1, closed(1, 1, 1)), (2, closed(0, 2, 2)), (3, written)]
    later = [(60, closed(0, 3, 60)), (61, closed(0, 4, 61)), (62, closed(1, 2, 62))]
    lacks_s = [report(seen(*before, *later[:n]), T0 + 65).run.checkpoint_lacks_s for n in range(4)]
    assert lacks_s == [0.0, 5.0, 5.0, 5.0]
    caught_up = replace(written, versions=(4, 1), written_ns=at_ns(63))
    assert report(seen(*before, *later, (63, caught_up)), T0 + 65).run.checkpoint_lacks_s == 3.0
    ahead = seen(before[-1])
    for at_s, newest in (later[1], later[2]):
        ahead = peek(ahead, newest, T0 + at_s)
    assert report(ahead, T0 + 65).run.checkpoint_lacks_s == 4.0
    for at_s, told in [*before, *later]:
        ahead = fold(ahead, told, T0 + at_s)
    assert report(ahead, T0 + 65).run.checkpoint_lacks_s == 5.0


def test_what_the_newest_checkpoint_lacks_is_counted() -> None:
    commits = [(n, closed(0, n, n)) for n in (1, 2, 3)]
    written = CheckpointRecord("r", "x", "d", (2,), 7, 1, at_ns(2), 9)
    assert report(seen(*commits), T0 + 5).run.checkpoint_lacks == 3
    assert report(seen(*commits, (3, written)), T0 + 5).run.checkpoint_lacks == 1
    ahead = replace(written, versions=(3, 1))
    assert report(seen(*commits, (3, ahead)), T0 + 5).run.checkpoint_lacks == 0


def judged(version: int, loss: float = 2.0, *, by: str = "e", text: int = 7) -> Evaluation:
    return evaluation(
        10 * version,
        evaluator=by,
        tokens=1000 * version,
        versions=(version, version),
        loss=loss,
        perplexity=math.exp(loss),
        bits_per_byte=loss / math.log(2),
        text_digest=text,
        evaluated_ns=at_ns(version),
    )


def test_the_newest_state_that_was_evaluated_is_told_with_its_history() -> None:
    quick, slow = judged(3, 1.5, by="quick"), judged(2, 1.8, by="slow")
    told = report(seen((1, judged(1)), (3, quick), (4, slow)), T0 + 5)
    assert told.run.held_out is not None
    assert (told.run.held_out.loss, told.run.held_out.step) == (1.5, 30)
    assert told.run.held_out.s_ago == pytest.approx(2.0)
    assert told.run.held_out.bits_per_byte == pytest.approx(1.5 / math.log(2))
    assert [row.loss for row in told.evaluations] == [2.0, 1.5, 1.8]
    assert told.run.held_out_texts == 1


def test_a_run_that_nobody_evaluates_has_no_held_out_loss() -> None:
    run = report(EMPTY, T0).run
    assert (run.held_out, run.held_out_texts) == (None, 0)


def test_evaluations_on_different_texts_are_counted() -> None:
    view = seen((1, judged(1)), (1, judged(1, by="other", text=8)))
    assert report(view, T0 + 1).run.held_out_texts == 2


def test_an_evaluator_that_was_given_the_right_text_is_no_trouble_any_more() -> None:
    said = [judged(1), judged(1, by="other", text=8), judged(2, by="other")]
    assert report(seen(*((1.0, one) for one in said)), T0 + 1).run.held_out_texts == 1


def test_an_evaluator_that_was_replaced_is_no_trouble_any_more() -> None:
    later = [judged(n, by="other", text=8) for n in range(2, 2 + TEXTS_OF_LATE)]
    told = [
        report(seen((1, judged(1)), *((2.0, e) for e in some)), T0 + 3)
        for some in (later[:-1], later)
    ]
    assert [one.run.held_out_texts for one in told] == [2, 1]


def test_an_evaluator_that_was_replaced_stays_no_trouble_where_a_history_thins_out() -> None:
    said = [judged(n, by="other", text=8) for n in range(1, 2 * MOST_EVALUATIONS)]
    last = MOST_EVALUATIONS - TEXTS_OF_LATE - 8
    said.insert(last, judged(last))
    over = last + TEXTS_OF_LATE + 1
    view = seen(*((1.0, one) for one in said[:over]))
    for one in said[over:]:
        assert report(view, T0 + 3).run.held_out_texts == 1
        view = fold(view, one, T0)


def test_two_evaluators_that_take_turns_are_two_where_a_history_thins_out() -> None:
    said = [
        one
        for n in range(1, MOST_EVALUATIONS)
        for one in (judged(n), judged(n, by="other", text=8))
    ]
    view = seen(*((1.0, one) for one in said[:MOST_EVALUATIONS]))
    for one in said[MOST_EVALUATIONS:]:
        assert report(view, T0 + 3).run.held_out_texts == 2
        view = fold(view, one, T0)


def test_a_long_history_of_evaluations_thins_out_and_keeps_both_ends() -> None:
    last = 5 * MOST_EVALUATIONS
    said = [(float(n), judged(n)) for n in range(1, last + 1)]
    kept = seen(*said).evaluations
    assert MOST_EVALUATIONS // 2 <= len(kept) <= MOST_EVALUATIONS
    assert (kept[0].versions, kept[-1].versions) == ((1, 1), (last, last))
    assert seen(*said, *said).evaluations == kept


def test_the_newest_evaluation_may_be_known_before_those_that_led_to_it() -> None:
    said = [judged(n) for n in (1, 2, 3)]
    ahead = peek_evaluation(EMPTY, said[2])
    assert (ahead.evaluating, ahead.evaluations) == (True, ())
    assert report(ahead, T0).run.held_out is not None
    half = fold(ahead, said[0], T0)
    assert (half.evaluating, half.judged) == (True, said[2])
    whole = reduce(lambda view, one: fold(view, one, T0), said[1:], half)
    assert (whole.evaluating, whole.evaluations) == (False, tuple(said))


def test_json_is_strict_even_with_an_evaluation_that_diverged() -> None:
    told = to_json(seen((1, judged(1, math.inf))), T0 + 2)
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    assert told["evaluations"] != []


def test_json_is_strict_even_with_a_diverged_loss() -> None:
    diverged = replace(beat(2, 20), loss=math.nan)
    told = to_json(seen((0, joined()), (2, diverged)), T0 + 2)
    assert json.loads(json.dumps(told, allow_nan=False)) == told


HISTORY = [
    closed(0, 1, 0, origin=CommitOrigin.GENESIS),
    closed(1, 1, 0.1, origin=CommitOrigin.GENESIS),
    closed(
        0,
        2,
        1,
        consumed=(
            merged("a", 1),
            merged("b", 4),
        ),
        tokens=1000,
        step=10,
    ),
    closed(0, 3, 2, consumed=(merged("a", 0),), refused=(refused(learner="b"),), tokens=2000),
    closed(1, 2, 3, consumed=(merged("b", 0),), step=30),
]


def ahead_of(view: RunView, known: Commit) -> RunView:
    return peek(view, known, known.closed_ns / 1e9)


def test_the_newest_commits_tell_how_far_the_run_is_before_its_history_is_read() -> None:
    view = ahead_of(ahead_of(EMPTY, HISTORY[3]), HISTORY[4])
    run = report(view, T0 + 4).run
    assert (run.versions, run.step, run.last_round_s_ago) == ((3, 2), 30, pytest.approx(1.0))
    assert (run.rounds, run.counting) == (0, True)
    assert view.accepted == {"a": 2000}


@pytest.mark.parametrize("ahead", [HISTORY[3:], HISTORY[4:], HISTORY[2:3]])
def test_a_history_read_after_the_newest_commits_counts_the_same(ahead: list[Commit]) -> None:
    history: list[tuple[float, Message]] = [(9, message) for message in HISTORY]
    knowing = reduce(ahead_of, ahead, EMPTY)
    view = reduce(lambda v, item: fold(v, item[1], T0 + item[0]), history, knowing)
    assert view == seen(*history)
    assert not report(view, T0 + 9).run.counting


def test_what_the_ledger_has_last_is_the_newest_though_a_clock_was_set_back() -> None:
    first = committed(EMPTY, closed(0, 2, 0), T0 + 1)
    view = committed(first, closed(1, 2, -3600), T0 + 3)
    assert view.last_commit == closed(1, 2, -3600)
    assert report(view, T0 + 4).run.last_round_s_ago == pytest.approx(1.0)


@settings(max_examples=40)
@given(data=st.data())
def test_seeing_messages_again_changes_nothing(data: st.DataObject) -> None:
    messages: list[tuple[float, Message]] = [
        (0, joined()),
        *training(3),
        (1, closed(0, 2, 1, consumed=(merged("a", 1),))),
        (2, closed(1, 2, 2)),
        (2, judged(1)),
        (3, judged(2)),
    ]
    view = seen(*messages)
    again = data.draw(st.lists(st.sampled_from(messages)))
    assert reduce(lambda v, item: fold(v, item[1], T0 + 9), again, view) == view
