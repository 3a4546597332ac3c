"""The fold over pulses and ledger records says who is alive, how far the run is, and how well."""

from __future__ import annotations

import json
import math
from copy import deepcopy
from dataclasses import asdict, replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.liveness import Liveness
from skerry.protocol.messages import (
    Commit,
    CommitOrigin,
    Evaluation,
    LearnerPhase,
    MemberRecord,
    Pulse,
    RefusalCause,
    RunState,
)
from skerry.settings.models import RunConfig
from skerry.status.report import RunReport, report, unconfirmed
from skerry.status.view import MOST_EVALUATIONS, RECENT_EVALUATIONS, Message, RunView
from tests.support.builders import (
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    member,
    ns,
    progress,
    pulse,
    refused,
    run_record,
)

T0 = 1_000_000.0
GENESIS = CommitOrigin.GENESIS
CONFIG: dict[str, Any] = {
    "liveness": {"pulse_s": 0.5, "suspect_phi": 3.0, "gone_phi": 8.0},
    "train": {"steps": 100},
    "sync": {"quorum": 1, "overlap_steps": 4},
}


def at_ns(at_s: float) -> int:
    return ns(T0 + at_s)


def joined(name: str = "a", incarnation: int = 1, at_s: float = 0.0) -> MemberRecord:
    return member(name, incarnation, joined_ns=at_ns(at_s))


def beat(at_s: float, steps: int, name: str = "a", incarnation: int = 1, **changes: Any) -> Pulse:
    """A learner that started at 0 with 0.1 s and 1000 tokens a step, busy all the time."""
    sums = {"tokens": 1000 * steps, "bytes_up": 10 * steps, "bytes_down": 20 * steps}
    at = {"incarnation": incarnation, "sent_ns": at_ns(at_s), "alive_s": at_s}
    return replace(pulse(name, steps, **at, **sums), **changes)


def closed(fragment: int, version: int, at_s: float, *, tokens: int = 0, **changes: Any) -> Commit:
    times = {"opened_ns": at_ns(at_s), "closed_ns": at_ns(at_s)}
    rows = (progress(tokens=tokens),) if tokens else ()
    base = {"origin": CommitOrigin.ROUND, "step": 0, "progress": rows, **times}
    return commit(version, fragment, **(base | changes))


def merged(**staleness: int) -> dict[str, Any]:
    return {"consumed": tuple(consumed(name, staleness=n) for name, n in staleness.items())}


def empty(**config: dict[str, Any]) -> RunView:
    given = {name: CONFIG.get(name, {}) | config.get(name, {}) for name in CONFIG | config}
    return RunView("r", 2, RunConfig.model_validate(given))


def seen(*messages: tuple[float, Message], into: RunView | None = None) -> RunView:
    view = empty() if into is None else into
    for at_s, message in messages:
        view.take(message, T0 + at_s)
    return view


def reported(
    at_s: float, *messages: tuple[float, Message], into: RunView | None = None
) -> RunReport:
    return report(seen(*messages, into=into), T0 + at_s)


def training(
    until_s: float, name: str = "a", incarnation: int = 1, **changes: Any
) -> list[tuple[float, Message]]:
    """A pulse each half second, as it arrives."""
    times = [0.5 * i for i in range(1, int(until_s / 0.5) + 1)]
    return [(t, beat(t, round(10 * t), name, incarnation, **changes)) for t in times]


def test_learners_are_in_the_order_of_their_numbers() -> None:
    names = ["eu-2", "eu-10", "eu-10-b", "us-1"]
    beats = [(1.0, beat(1.0, 10, name)) for name in reversed(names)]
    assert [row.name for row in reported(1.0, *beats).learners] == names


def test_its_utilisation_is_its_speed_over_what_its_devices_could_do() -> None:
    on = replace(joined(), mesh="fsdp=8", device="H100", peak_tokens_per_s=40_000.0)
    (row,) = reported(10, (0, on), *training(10)).learners
    assert (row.mesh, row.device, row.mfu) == ("fsdp=8", "H100", pytest.approx(0.25))
    (row,) = reported(10, (0, joined()), *training(10)).learners
    assert row.mfu is None, "no table has its peak"


def test_the_time_allocated_to_a_learner_does_not_hang_on_its_own_clock() -> None:
    behind = replace(joined(), joined_ns=at_ns(-3 * 3600.0))
    (row,) = reported(10, (0, behind), *training(10)).learners
    assert row.goodput == reported(10, (0, joined()), *training(10)).learners[0].goodput


def test_silence_counts_though_the_viewers_clock_was_set_back() -> None:
    later = [(at_s - 3600, beat) for at_s, beat in training(20)[20:]]
    (row,) = reported(60 - 3600, (0, joined()), *training(10), *later).learners
    assert (row.liveness, row.reason) == (Liveness.GONE, "silent")


def test_a_learner_that_lost_its_connection_is_gone_sooner_until_it_pulses_again() -> None:
    view, now_s = seen((0, joined()), *training(10)), T0 + 11.3
    assert (unconfirmed(view, T0 + 10.4), unconfirmed(view, now_s)) == ([], ["a"])
    view.disconnected({"a": T0 + 10.1, "b": T0 + 10.1})
    (row,) = report(view, now_s).learners
    assert (row.liveness, row.reason) == (Liveness.GONE, "disconnected")
    assert unconfirmed(view, now_s) == [], "it is gone: nothing more to ask"
    (back,) = reported(12.6, (11.4, beat(11.4, 110)), into=view).learners
    assert back.liveness is Liveness.ALIVE


def test_a_connection_that_ended_before_the_last_pulse_says_nothing() -> None:
    view = seen((0, joined()), *training(10))
    view.disconnected({"a": T0 + 8.0})
    assert report(view, T0 + 11.3).learners[0].liveness is Liveness.ALIVE


def test_a_learner_that_stopped_or_is_gone_is_not_asked_for() -> None:
    view = seen((0, joined()), *training(10))
    assert unconfirmed(view, T0 + 60) == []
    seen((10.5, beat(10.5, 100, phase=LearnerPhase.STOPPED)), into=view)
    assert unconfirmed(view, T0 + 11.9) == []


def test_pulses_without_steps_give_a_dead_trainer_away() -> None:
    stuck = [(10 + 0.5 * i, beat(10 + 0.5 * i, 100)) for i in range(1, 41)]
    (row,) = reported(30.1, *training(10), *stuck).learners
    assert (row.liveness, row.reason) == (Liveness.GONE, "stalled")


@pytest.mark.parametrize(("at_s", "liveness"), [(25, Liveness.ALIVE), (90, Liveness.GONE)])
def test_a_learner_that_joined_and_never_pulsed_is_gone_after_a_while(
    at_s: float, liveness: Liveness
) -> None:
    assert reported(at_s, (0, joined())).learners[0].liveness is liveness


def test_a_name_is_as_old_as_the_log_says_its_first_start_is_in_any_order() -> None:
    starts = [(5 * n, joined(incarnation=n, at_s=-86_400.0)) for n in (1, 2, 3)]
    pulsed = (20, beat(20, 5, incarnation=3))
    for messages in (
        [*starts, pulsed],
        [starts[2], pulsed, *starts],
        [pulsed, *starts],
        [*starts[:2], pulsed, starts[2]],
    ):
        assert reported(25, *messages).learners[0].joined_s_ago == 20.0
    assert reported(25, pulsed).learners[0].joined_s_ago is None


def test_an_old_pulse_read_back_from_the_stream_proves_no_life() -> None:
    assert reported(3600, (10, beat(10, 100))).learners[0].liveness is Liveness.GONE


def test_a_sender_whose_clock_is_behind_is_alive_from_its_first_pulse() -> None:
    (row,) = reported(500.1, (500, beat(0.5, 5))).learners
    assert row.liveness is Liveness.ALIVE


def test_a_sender_whose_clock_was_set_back_is_still_heard() -> None:
    fast = beat(2.0, 20, sent_ns=at_ns(3602.0))
    (row,) = reported(3, (1.0, beat(1.0, 10)), (2.0, fast), (3.0, beat(3.0, 30))).learners
    assert row.step == 30


def test_a_repeated_pulse_shows_that_its_sender_lives() -> None:
    view = seen((1.0, beat(1.0, 10)), (1.5, beat(1.0, 10, sent_ns=at_ns(1.5))))
    assert view.learners["a"].heartbeat.last_s == T0 + 1.5


def test_a_restart_adds_up_what_both_incarnations_did() -> None:
    again = beat(1.0, 10, incarnation=2, sent_ns=at_ns(21))
    view = seen((0, joined()), *training(10), (20, joined(incarnation=2, at_s=20)), (21, again))
    (row,) = report(view, T0 + 21).learners
    assert (row.incarnation, row.tokens, row.bytes_up, row.bytes_down) == (2, 110_000, 1100, 2200)
    seen((22, beat(30, 900, incarnation=1)), into=view)
    assert view.steps_by_learner() == {"a": 110}


def test_time_is_split_over_all_incarnations_and_the_pause_between_them() -> None:
    first = beat(10, 60, compile_s=3.0, recover_s=1.0)
    again = beat(4, 10, incarnation=2, sent_ns=at_ns(20), replay_s=1.0)
    second = joined(incarnation=2, at_s=16)
    time = reported(20, (0, joined()), (10, first), (16, second), (20, again)).run.time
    assert {use: round(share * 20, 6) for use, share in time.items()} == {
        "train": 7,
        "compile": 3,
        "recover": 1,
        "wait": 0,
        "replay": 1,
        "idle": 2,
        "down": 6,
    }


def test_down_time_after_joining_lowers_goodput() -> None:
    view = seen((0, joined()), *training(10))
    assert report(view, T0 + 10.2).run.goodput == pytest.approx(1.0)
    assert report(view, T0 + 20).run.goodput == pytest.approx(0.5)


def test_time_after_a_learner_finished_is_not_allocated() -> None:
    done = beat(10, 100, phase=LearnerPhase.FINISHED)
    again = replace(done, sent_ns=at_ns(10.5))
    (row,) = reported(500, (0, joined()), (10, done), (10.5, again)).learners
    assert row.goodput == pytest.approx(1.0)


def test_goodput_is_summed_over_learners() -> None:
    both = [(0, joined("a")), (0, joined("b")), *training(10, "a"), *training(10, "b", busy_s=0.0)]
    assert reported(10, *both).run.goodput == pytest.approx(0.5)


@pytest.mark.parametrize(
    ("phase", "waited_s"), [(LearnerPhase.TRAINING, 0.0), (LearnerPhase.CATCHING_UP, 7.5)]
)
def test_a_learner_that_catches_up_reports_for_how_long(
    phase: LearnerPhase, waited_s: float
) -> None:
    (row,) = reported(9, (9, beat(9, 0, recover_s=7.5, phase=phase))).learners
    assert row.waited_s == waited_s


@pytest.mark.parametrize("origin", [GENESIS, CommitOrigin.RESTORED])
def test_what_a_fragment_begins_with_is_no_round_and_begins_the_run(origin: CommitOrigin) -> None:
    view = seen(
        (0, closed(0, 40, 0, origin=origin)),
        (0, closed(1, 41, 0, origin=origin)),
        into=empty(train={"duration_s": 50.0}),
    )
    assert (view.rounds, view.merged, view.started_s) == (0, 0, T0)
    run = report(view, T0 + 20).run
    assert (run.versions, run.eta_s) == ((40, 41), pytest.approx(30.0))


def test_parameters_put_back_are_no_round_and_begin_nothing() -> None:
    put_back = closed(0, 3, 9, origin=CommitOrigin.REPLACED)
    view = seen((0, closed(0, 1, 0, origin=GENESIS)), (5, closed(0, 2, 5)), (9, put_back))
    assert (view.rounds, view.started_s) == (1, T0)


def test_staleness_and_refusals_are_counted() -> None:
    first = closed(0, 2, 1, **merged(a=0, b=3), refused=(refused(learner="a"),))
    other = refused(RefusalCause.DIVERGED, "b"), refused(learner="b")
    run = reported(3, (1, first), (2, closed(1, 2, 2, **merged(a=0), refused=other))).run
    assert (run.staleness_mean, run.staleness_max, run.contributions) == (1.0, 3, 3)
    assert run.refused == {"too_stale": 2, "diverged": 1}


def test_merged_tokens_count_even_where_the_pulses_are_lost() -> None:
    assert reported(2, (1, closed(0, 2, 1, tokens=5000)), (2, joined())).run.tokens == 5000


def test_loss_and_speed_come_from_learners_that_train() -> None:
    slow = training(2, "b", loss=3.0, step_time_s=0.3)
    run = reported(2, *training(2, "a", loss=1.0), *slow).run
    assert run.loss == pytest.approx(1.5)
    assert run.tokens_per_s == pytest.approx(10_000 + 10_000 / 3)


def test_a_blocking_learner_that_takes_no_step_has_no_speed_and_is_at_work() -> None:
    def blocking(**changes: Any) -> RunReport:
        view = empty(sync={"overlap_steps": 0})
        return reported(20, *training(20, **changes), into=view)

    going, still = blocking(), blocking(step=3)
    assert [going.run.tokens_per_s > 0, still.run.tokens_per_s > 0] == [True, False]
    assert still.learners[0].liveness is Liveness.ALIVE
    assert [still.learners[0].at_work, still.learners[0].takes_steps] == [True, True]
    assert still.run.eta_s is not None


def test_the_clock_is_that_of_the_quorum_and_never_behind_a_commit() -> None:
    view = seen(*training(2, "a"), (2.0, beat(2, 12, "b")), into=empty(sync={"quorum": 2}))
    assert report(view, T0 + 2).run.step == 12
    assert reported(2, (2, closed(0, 2, 2, step=18)), into=view).run.step == 18


@pytest.mark.parametrize(
    ("train", "eta_s", "timed"),
    [
        ({}, 6.0, False),
        ({"duration_s": 5.0}, 1.0, True),
        ({"duration_s": 1e300}, 6.0, False),
        ({"tokens": 10**9}, 6.0, False),
        ({"tokens": 60_000}, 2.0, True),
    ],
)
def test_the_eta_is_what_ends_first(train: dict[str, float], eta_s: float, timed: bool) -> None:
    view = empty(train=train)
    run = reported(4, (0, closed(0, 1, 0, origin=GENESIS)), *training(4), into=view).run
    assert (run.eta_s, run.timed) == (pytest.approx(eta_s), timed)


def test_the_eta_is_unknown_before_the_first_step() -> None:
    assert reported(1, (0, joined())).run.eta_s is None


@pytest.mark.parametrize(("last", "eta_s"), [("finished", 0.0), ("stopped", None)])
def test_learners_that_were_stopped_do_not_say_that_a_run_is_over(
    last: str, eta_s: float | None
) -> None:
    gone = (10.5, beat(10.5, 100, phase=LearnerPhase.STOPPED))
    other = (10.5, beat(10.5, 100, "b", phase=LearnerPhase(last)))
    assert reported(11, *training(10), *training(10, "b"), gone, other).run.eta_s == eta_s


def test_a_finished_run_stands_still() -> None:
    record = run_record("r", created_ns=at_ns(0), state=RunState.FINISHED)
    run = reported(999, (0, joined()), *training(10), (10, closed(0, 2, 10)), (10, record)).run
    assert (run.finished, run.eta_s) == (True, 0.0)
    assert run.wall_s == pytest.approx(10.0)
    assert run.goodput == pytest.approx(1.0)


def test_a_run_that_has_ended_by_tokens_is_not_shown_as_so_many_of_its_steps() -> None:
    over = (10, run_record("r", created_ns=at_ns(0), state=RunState.FINISHED))
    view = empty(train={"tokens": 50_000})
    assert reported(999, (0, joined()), *training(10), over, into=view).run.timed


def test_the_newest_checkpoint_is_shown() -> None:
    older, newer = (
        checkpoint_record(path, written_ns=at_ns(t), ledger_sequence=t)
        for path, t in (("x", 1), ("y", 2))
    )
    run = reported(5, (2, newer), (3, older)).run
    assert (run.checkpoint, run.checkpoint_s_ago) == ("y", pytest.approx(3.0))


def test_json_is_strict_whatever_numbers_messages_claim() -> None:
    claims = [
        [beat(4, 40, name, step_time_s=1e-300) for name in ("b", "c")],
        [beat(4, 40, name, loss=1.7e308) for name in ("d", "e")],
        [beat(4, 40, name, loss=1.7e308, phase=LearnerPhase.STARTING) for name in ("d", "e")],
        [beat(2, 20, loss=math.nan)],
        [judged(1, math.inf)],
    ]
    for odd in claims:
        now = asdict(reported(4, *((4, one) for one in odd)))
        assert json.dumps(now, allow_nan=False)


def test_a_checkpoint_lacks_commits_since_the_first_that_it_does_not_hold() -> None:
    written = checkpoint_record("x", versions=(2, 1), written_ns=at_ns(3))
    before = [(1, closed(0, 1, 1)), (1, closed(1, 1, 1)), (2, closed(0, 2, 2)), (3, written)]
    later = [(60, closed(0, 3, 60)), (61, closed(0, 4, 61)), (62, closed(1, 2, 62))]
    runs = [reported(65, *before, *later[:n]).run for n in range(4)]
    assert [run.checkpoint_lacks_s for run in runs] == [0.0, 5.0, 5.0, 5.0]
    assert [run.checkpoint_lacks for run in runs] == [0, 1, 2, 3]
    caught_up = replace(written, versions=(4, 1), written_ns=at_ns(63))
    assert reported(65, *before, *later, (63, caught_up)).run.checkpoint_lacks_s == 3.0
    assert reported(65, *before[:3]).run.checkpoint_lacks == 3, "all of them without one"
    ahead = seen(before[-1])
    for at_s, newest in (later[1], later[2]):
        ahead.peek(newest, T0 + at_s)
    assert report(ahead, T0 + 65).run.checkpoint_lacks_s == 4.0
    assert reported(65, *before, *later, into=ahead).run.checkpoint_lacks_s == 5.0


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


def test_the_newest_state_that_was_evaluated_is_shown_with_its_history() -> None:
    quick, slow = judged(3, 1.5, by="quick"), judged(2, 1.8, by="slow")
    now = reported(5, (1, judged(1)), (3, quick), (4, slow))
    assert now.run.held_out is not None
    assert (now.run.held_out.loss, now.run.held_out.step) == (1.5, 30)
    assert now.run.held_out.s_ago == pytest.approx(2.0)
    assert now.run.held_out.bits_per_byte == pytest.approx(1.5 / math.log(2))
    assert [row.loss for row in now.evaluations] == [2.0, 1.5, 1.8]


REPLACED = [judged(n, by="other", text=8) for n in range(2, 2 + RECENT_EVALUATIONS)]


@pytest.mark.parametrize(
    ("evaluations", "texts"),
    [
        ([], 0),
        ([judged(1)], 1),
        ([judged(1), judged(1, by="other", text=8)], 2),
        ([judged(1), judged(1, by="other", text=8), judged(2, by="other")], 1),
        ([judged(1), *REPLACED[:-1]], 2),
        ([judged(1), *REPLACED], 1),
    ],
    ids=["none", "one", "two", "corrected", "not yet replaced", "replaced"],
)
def test_texts_that_evaluators_read_now_are_counted(
    evaluations: list[Evaluation], texts: int
) -> None:
    run = reported(3, *((1.0, one) for one in evaluations)).run
    assert (run.held_out is None, run.held_out_texts) == (not evaluations, texts)


def test_texts_stay_counted_where_a_history_thins_out() -> None:
    view, turns = empty(), [("e", 7), ("other", 8)]
    for n in range(1, MOST_EVALUATIONS):
        for by, text in turns:
            view.take(judged(n, by=by, text=text), T0)
        assert report(view, T0 + 3).run.held_out_texts == 2


def test_a_long_history_of_evaluations_thins_out_and_keeps_both_ends() -> None:
    last = 5 * MOST_EVALUATIONS
    view = seen(*((float(n), judged(n)) for n in range(1, last + 1)))
    kept = list(view.evaluations.kept)
    assert MOST_EVALUATIONS // 2 <= len(kept) <= MOST_EVALUATIONS
    assert (kept[0].versions, kept[-1].versions) == ((1, 1), (last, last))


def test_the_best_evaluation_outlasts_a_long_history() -> None:
    last = 5 * MOST_EVALUATIONS
    losses = {n: 1.0 if n == 2 else math.nan if n == 4 else 3.0 for n in range(1, last + 1)}
    view = seen(*((float(n), replace(judged(n), loss=loss)) for n, loss in losses.items()))
    assert min(one.loss for one in view.evaluations.kept) == 1.0


def test_the_newest_evaluation_may_be_known_before_those_that_led_to_it() -> None:
    said, ahead = [judged(n) for n in (1, 2, 3)], empty()
    ahead.peek(said[2], T0)
    assert (ahead.evaluations.incomplete, ahead.evaluations.kept) == (True, [])
    assert report(ahead, T0).run.held_out is not None
    ahead.take(said[0], T0)
    assert (ahead.evaluations.incomplete, ahead.evaluations.newest) == (True, said[2])
    seen(*((0, one) for one in said[1:]), into=ahead)
    assert (ahead.evaluations.incomplete, ahead.evaluations.kept) == (False, said)


HISTORY = [
    closed(0, 1, 0, origin=GENESIS),
    closed(1, 1, 0.1, origin=GENESIS),
    closed(0, 2, 1, **merged(a=1, b=4), tokens=1000, step=10),
    closed(0, 3, 2, **merged(a=0), refused=(refused(learner="b"),), tokens=2000),
    closed(1, 2, 3, **merged(b=0), step=30),
]


def ahead_of(*known: Commit) -> RunView:
    view = empty()
    for one in known:
        view.peek(one, one.closed_ns / 1e9)
    return view


def test_the_newest_commits_show_how_far_the_run_is_before_its_history_is_read() -> None:
    view = ahead_of(*HISTORY[3:])
    run = report(view, T0 + 4).run
    assert (run.versions, run.step, run.last_round_s_ago) == ((3, 2), 30, pytest.approx(1.0))
    assert (run.rounds, run.counting) == (0, True)
    assert view.accepted == {"a": 2000}


@pytest.mark.parametrize("ahead", [HISTORY[3:], HISTORY[4:], HISTORY[2:3]])
def test_a_history_read_after_the_newest_commits_counts_the_same(ahead: list[Commit]) -> None:
    history = [((message.closed_ns / 1e9) - T0, message) for message in HISTORY]
    view = seen(*history, into=ahead_of(*ahead))
    assert view == seen(*history)
    assert not view.counting


def test_what_the_ledger_has_last_is_the_newest_though_a_clock_was_set_back() -> None:
    back = closed(1, 2, -3600)
    view = seen((1, closed(0, 2, 0)), (3, back))
    assert view.last_commit == back
    assert report(view, T0 + 4).run.last_round_s_ago == pytest.approx(1.0)


@settings(max_examples=40)
@given(data=st.data())
def test_seeing_messages_again_changes_nothing(data: st.DataObject) -> None:
    messages: list[tuple[float, Message]] = [
        (0, joined()),
        *training(3),
        (1, closed(0, 2, 1, **merged(a=1))),
        (2, closed(1, 2, 2)),
        (2, judged(1)),
        (3, judged(2)),
        (4, joined(incarnation=2, at_s=4)),
        (4, beat(0.1, 3, incarnation=2)),
    ]
    view = seen(*messages)
    before = deepcopy(view)
    again = data.draw(st.lists(st.sampled_from(messages)))
    assert seen(*((9, message) for _, message in again), into=view) == before
