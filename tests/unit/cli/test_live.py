"""What the live view prints."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from skerry.algorithm.liveness import Policy
from skerry.cli import live
from skerry.cli.live import Lines, Terminal, line, picture, screen
from skerry.protocol.messages import Commit, Evaluation, LearnerPhase, Pulse
from skerry.status.report import Report, report
from skerry.status.view import Frame, RunView, fold
from tests.support.builders import commit, evaluation, member, ns, pulse

FRAME = Frame("t", 2, 1, 100, None, Policy(0.5, 3.0, 8.0))
BEGAN = 1000.0


def beat(learner: str, step: int, loss: float = 2.5) -> Pulse:
    return pulse(
        learner,
        step,
        sent_ns=ns(BEGAN + step),
        tokens=step * 1000,
        loss=loss,
        step_time_s=0.5,
        busy_s=step * 0.5,
        alive_s=float(step),
        bytes_up=2_000_000,
        bytes_down=1_000_000,
    )


def genesis() -> Commit:
    return commit(1, opened_ns=ns(BEGAN), closed_ns=ns(BEGAN))


def at(step: int, now_s: float | None = None, frame: Frame = FRAME) -> Report:
    view = fold(RunView(frame), genesis(), BEGAN)
    for name in ("a[x]", "b"):
        view = fold(view, member(name, joined_ns=ns(BEGAN)), BEGAN)
    for name in ("a[x]", "b"):
        view = fold(view, beat(name, step), BEGAN + step)
    return report(view, BEGAN + step if now_s is None else now_s)


def test_a_line_says_how_far_how_fast_and_how_much() -> None:
    text = line(at(10), 10)
    for part in ("step 10/100", "loss 2.500", "4,000 tokens/s", "learners 2/2", "sent 6.0 MB"):
        assert part in text


def judged(loss: float, text: int = 7, by: str = "e") -> Evaluation:
    return evaluation(evaluator=by, loss=loss, bits_per_byte=2.4, text_digest=text)


def shown(*evaluations: Evaluation) -> tuple[str, str]:
    """Return the line and the picture of a run that has been evaluated."""
    view = fold(RunView(FRAME), genesis(), BEGAN)
    for one in evaluations:
        view = fold(view, one, BEGAN)
    out = io.StringIO()
    now = report(view, BEGAN + 10)
    Console(file=out, width=80, color_system=None).print(picture(now, 10))
    return line(now, 10), " ".join(out.getvalue().split())


def test_the_held_out_loss_is_shown_once_there_is_one() -> None:
    assert "held-out" not in "".join(shown())
    told, pictured = shown(judged(1.625))
    assert "held-out 1.625" in told
    assert "held-out loss 1.625 (2.400 bits per byte) at step 8" in pictured


def test_a_held_out_loss_that_is_no_number_is_said_to_be_none() -> None:
    told, pictured = shown(judged(math.nan))
    assert "held-out" not in told
    assert "held-out loss at step 8 is not finite" in pictured


def test_evaluators_that_read_different_texts_are_pointed_at() -> None:
    _, pictured = shown(judged(1.5), judged(1.75, text=8, by="other"))
    assert "evaluators read 2 different texts" in pictured


def test_the_total_of_steps_is_left_out_where_the_clock_ends_the_run() -> None:
    timed = replace(FRAME, duration_s=12.0)
    assert "step 10  " in line(at(10, frame=timed), 10)


def test_times_count_from_where_the_command_began(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live.time, "time", lambda: BEGAN + 70)
    Lines(began_s=BEGAN).show(at(10))
    assert capsys.readouterr().out.startswith("  1:10  step 10/100")


def test_a_line_says_that_rounds_have_stopped_while_training_goes_on() -> None:
    assert "no round for" not in line(at(10), 10)
    assert "no round for 0:50: see the logs" in line(at(50), 50)


@pytest.mark.parametrize(("rounds", "late"), [(4, False), (40, True)])
def test_where_rounds_come_seldom_a_gap_is_no_trouble(rounds: int, late: bool) -> None:
    told = at(50)
    slow = replace(told, run=replace(told.run, rounds=rounds, wall_s=160.0))
    assert ("no round for" in line(slow, 50)) is late


def test_before_genesis_a_line_says_what_is_waited_for() -> None:
    view = fold(RunView(FRAME), member("b", joined_ns=ns(BEGAN)), BEGAN)
    assert line(report(view, BEGAN), 0).endswith("no parameters yet: b starting")


def test_a_line_names_who_is_not_alive() -> None:
    assert "b gone" in line(at(10, BEGAN + 10_000), 10_000)


def test_a_picture_shows_every_learner_by_its_name() -> None:
    console = Console(file=io.StringIO(), width=120, color_system=None)
    console.print(picture(at(10), 10))
    shown = console.file.getvalue() if isinstance(console.file, io.StringIO) else ""
    assert "a[x]#1" in shown
    assert "b#1" in shown


def test_a_picture_keeps_every_fact_whole_on_80_columns() -> None:
    out = io.StringIO()
    Console(file=out, width=80, color_system=None).print(picture(at(10), 4000))
    for fact in ("step 10/100", "1:06:40 (ETA 0:45)", "up 4.0 MB, down 2.0 MB"):
        assert fact in out.getvalue()


def test_lines_are_not_repeated_when_nothing_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "LINE_S", 0.0)
    lines = Lines()
    for report_now in (at(10), at(10), at(11)):
        lines.show(report_now)
    assert len(capsys.readouterr().out.splitlines()) == 2


def test_lines_leave_time_between_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    lines = Lines()
    for step in (10, 11, 12):
        lines.show(at(step))
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_no_table_where_there_is_no_terminal() -> None:
    assert isinstance(screen(Console(file=io.StringIO())), Lines)
    assert isinstance(screen(Console(file=io.StringIO(), force_terminal=True)), Terminal)


def test_sentences_stay_above_the_table() -> None:
    out = io.StringIO()
    with Terminal(Console(file=out, force_terminal=True, width=100)) as terminal:
        terminal.show(at(10))
        terminal.say("learner-2 [gone]")
    assert "learner-2 [gone]" in out.getvalue()


def test_a_learner_that_stopped_in_order_is_not_called_gone() -> None:
    view = fold(RunView(FRAME), member("b", joined_ns=ns(BEGAN)), BEGAN)
    stopped = replace(beat("b", 10), phase=LearnerPhase.STOPPED)
    out = io.StringIO()
    now = report(fold(view, stopped, BEGAN + 10), BEGAN + 10_000)
    Console(file=out, width=80, color_system=None).print(picture(now, 10))
    assert "stopped" in out.getvalue()
    assert "gone" not in out.getvalue()


def test_a_log_without_pulses_claims_no_speeds() -> None:
    view = fold(RunView(FRAME), genesis(), BEGAN)
    view = fold(view, member("a", joined_ns=ns(BEGAN)), BEGAN)
    console = Console(file=io.StringIO(), width=120)
    console.print(picture(report(view, BEGAN + 1), 1))
    assert isinstance(console.file, io.StringIO)
    told = console.file.getvalue()
    assert "no pulses in this log" in told
    assert "goodput 0%" not in told
    assert "tokens/s" not in told.splitlines()[0]


def test_names_and_sentences_that_others_chose_move_no_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = member("\x1b[2Jb", joined_ns=ns(BEGAN))
    lines = Lines()
    lines.show(report(fold(RunView(FRAME), odd, BEGAN), BEGAN))
    lines.say("Checkpoint: /c\x1b]0;pwn\x07")
    assert "\x1b" not in capsys.readouterr().out
