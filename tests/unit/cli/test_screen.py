"""What the live view prints."""

from __future__ import annotations

import io
import math
from dataclasses import replace

import pytest
from rich.console import Console

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.cli import screen as cli_screen
from skerry.cli.board import board
from skerry.cli.screen import Lines, Terminal, line, screen
from skerry.protocol.messages import Evaluation, LearnerPhase, Pulse
from skerry.settings.models import RunConfig
from skerry.status.model import RunModel, RunSnapshot
from skerry.status.sources import RunMessage
from tests.support.builders import commit, evaluation, member, ns, pulse, run_record

BEGAN = 1000.0
CONFIG = RunConfig.model_validate(
    {"train": {"steps": 100}, "sync": {"quorum": 1}, "liveness": {"pulse_s": 0.5}}
)
TIMED = CONFIG.model_copy(update={"train": CONFIG.train.model_copy(update={"duration_s": 12.0})})
RECORD = run_record("t", plan((LeafSpec("w", (8, 8)),), 2), created_ns=ns(BEGAN))
GENESIS = commit(1, opened_ns=ns(BEGAN), closed_ns=ns(BEGAN))


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


def seen(
    *messages: tuple[RunMessage, float], now_s: float, config: RunConfig = CONFIG
) -> RunSnapshot:
    """Return a run that has sent these messages by the time; its model's clock is then."""
    time_s = [BEGAN]
    model = RunModel(RECORD, config, lambda: time_s[0], known_to=1)
    for message, at_s in messages:
        time_s[0] = at_s
        model.take(message, 1, ns(at_s))
    time_s[0] = now_s
    return model.snapshot()


def at(step: int, now_s: float | None = None, config: RunConfig = CONFIG) -> RunSnapshot:
    joined = [(member(name, joined_ns=ns(BEGAN)), BEGAN) for name in ("a[x]", "b")]
    beats = [(beat(name, step), BEGAN + step) for name in ("a[x]", "b")]
    now_s = BEGAN + step if now_s is None else now_s
    return seen((GENESIS, BEGAN), *joined, *beats, now_s=now_s, config=config)


def told(now: RunSnapshot, seconds: float = 10) -> str:
    return line(now.report, seconds)


def drawn(now: RunSnapshot, width: int = 80, elapsed_s: float = 10) -> str:
    """Return the board as one line of words."""
    out = io.StringIO()
    shown = board(now, width, elapsed_s=elapsed_s, with_rounds=False)
    Console(file=out, width=width, color_system=None).print(shown)
    return " ".join(out.getvalue().split())


def test_a_line_says_how_far_how_fast_and_how_much() -> None:
    text = told(at(10))
    for part in ("step 10/100", "loss 2.500", "4,000 tokens/s", "learners 2/2", "sent 6.0 MB"):
        assert part in text


def judged(loss: float, text: int = 7, by: str = "e") -> Evaluation:
    return evaluation(evaluator=by, loss=loss, bits_per_byte=2.4, text_digest=text)


def shown(*evaluations: Evaluation) -> tuple[str, str]:
    """Return the line and the board of a run that has been evaluated."""
    said = [(one, BEGAN) for one in evaluations]
    now = seen((GENESIS, BEGAN), *said, now_s=BEGAN + 10)
    return told(now), drawn(now)


def test_the_held_out_loss_is_shown_once_there_is_one() -> None:
    assert "held-out" not in "".join(shown())
    lined, boarded = shown(judged(1.625))
    assert "held-out 1.625" in lined
    assert "held-out 1.625 (2.400 bits per byte) ▁ at step 8" in boarded


def test_a_held_out_loss_that_is_no_number_is_said_to_be_none() -> None:
    lined, boarded = shown(judged(math.nan))
    assert "held-out" not in lined
    assert "held-out loss at step 8 is not finite" in boarded


def test_evaluators_that_read_different_texts_are_pointed_at() -> None:
    _, boarded = shown(judged(1.5), judged(1.75, text=8, by="other"))
    assert "Evaluators read 2 different texts" in boarded


def test_the_total_of_steps_is_left_out_where_the_clock_ends_the_run() -> None:
    assert "step 10  " in told(at(10, config=TIMED))


def test_times_count_from_where_the_command_began(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_screen.time, "time", lambda: BEGAN + 70)
    Lines(began_s=BEGAN).show(at(10))
    assert capsys.readouterr().out.startswith("  1:10  step 10/100")


def test_a_line_says_that_rounds_have_stopped_while_training_goes_on() -> None:
    assert "no round for" not in told(at(10))
    assert "no round for 0:50: see the logs" in told(at(50))


@pytest.mark.parametrize(("rounds", "late"), [(4, False), (40, True)])
def test_where_rounds_come_seldom_a_gap_is_no_trouble(rounds: int, late: bool) -> None:
    now = at(50).report
    slow = replace(now, run=replace(now.run, rounds=rounds, wall_s=160.0))
    assert ("no round for" in line(slow, 50)) is late


def test_before_genesis_a_line_says_what_is_waited_for() -> None:
    now = seen((member("b", joined_ns=ns(BEGAN)), BEGAN), now_s=BEGAN)
    assert told(now).endswith("no parameters yet: b starting")


def test_a_line_names_who_is_not_alive() -> None:
    assert "b gone" in told(at(10, BEGAN + 10_000))


def test_a_board_shows_every_learner_by_its_name() -> None:
    assert {"a[x]#1", "b#1"} <= set(drawn(at(10), 120).split())


def test_a_board_keeps_every_fact_whole_on_80_columns() -> None:
    text = drawn(at(10), elapsed_s=4000)
    for fact in ("step 10/100", "1:06:40, ETA 0:45", "4.0 MB up, 2.0 MB down", "learners 2/2"):
        assert fact in text


def test_lines_are_not_repeated_when_nothing_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli_screen, "LINE_S", 0.0)
    lines = Lines()
    for now in (at(10), at(10), at(11)):
        lines.show(now)
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
    stopped = replace(beat("b", 10), phase=LearnerPhase.STOPPED)
    text = drawn(seen((stopped, BEGAN + 10), now_s=BEGAN + 10_000))
    assert "stopped" in text
    assert "gone" not in text


def test_a_log_without_pulses_claims_no_speeds() -> None:
    joined = member("a", joined_ns=ns(BEGAN))
    text = drawn(seen((GENESIS, BEGAN), (joined, BEGAN), now_s=BEGAN + 1))
    assert "no pulses in this log" in text
    assert "0%" not in text.partition("learner state")[2]
    assert "tokens/s" not in text.partition("learner state")[0]


def test_names_and_sentences_that_others_chose_move_no_cursor(
    capsys: pytest.CaptureFixture[str],
) -> None:
    odd = (member("\x1b[2Jb", joined_ns=ns(BEGAN)), BEGAN)
    lines = Lines()
    lines.show(seen(odd, now_s=BEGAN))
    lines.show(seen((GENESIS, BEGAN), odd, now_s=BEGAN + 900))
    lines.say("Checkpoint: /c\x1b]0;pwn\x07")
    assert "\x1b" not in capsys.readouterr().out
