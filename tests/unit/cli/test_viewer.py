"""What viewers show of a run: a board on a screen of any size, lines elsewhere, or JSON."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import pty
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from rich.console import Console
from rich.text import Text

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.goodput import USES, data_parallel_bytes
from skerry.cli import viewer
from skerry.cli.board import board, line, sparkline, split_bar
from skerry.cli.viewer import PULSED, FollowedRun, Screen, keys, snapshot_json
from skerry.log import run_records
from skerry.log.base import Room, Storage
from skerry.log.memory import MemoryBroker
from skerry.protocol.messages import CheckpointRecord, Commit, LearnerPhase, Pulse
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.service.reporting import BrokerWatch
from skerry.settings.models import RunConfig
from skerry.status.alert_table import Alert, Severity
from skerry.status.alerts import StreamStore
from skerry.status.feed import RunFeed, read_model
from skerry.status.model import RunModel, RunSnapshot
from skerry.status.sources import RunMessage
from tests.support.builders import (
    as_seen,
    background,
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    member,
    ns,
    pulse,
    refused,
    run_record,
    until,
)
from tests.support.scripted_run import ScriptedRun

DEADLINE_S = 20.0
NOW_S = 2_000_000.0
TRACE = "0af7651916cd43dd8448eb211c80319c"
CONFIG = RunConfig.model_validate(
    {
        "checkpoint": {"every_s": 30.0},
        "sync": {"h_steps": 24, "quorum": 1, "fragments": 2},
        "train": {"steps": 100},
        "liveness": {"pulse_s": 0.5},
    }
)
LEAVES = (LeafSpec("w", (1000, 1000)),)
RECORD = run_record("r", plan(LEAVES, 2), CONFIG.model_dump_json(), created_ns=ns(NOW_S - 60))
EVALUATION = evaluation(
    tokens=90,
    versions=(2, 2),
    loss=3.25,
    perplexity=25.0,
    bits_per_byte=4.0,
    average_loss=3.125,
    evaluated_ns=ns(NOW_S),
)


def beat(name: str, step: int = 40, at_s: float = NOW_S, **changes: Any) -> Pulse:
    base = {
        "incarnation": 3,
        "sent_ns": ns(at_s),
        "tokens": step * 1000,
        "loss": 2.345,
        "step_time_s": 0.5,
        "busy_s": 15.0,
        "alive_s": 30.0,
        "bytes_up": 2_000_000,
        "bytes_down": 1_000_000,
        "compile_s": 6.0,
        "f32_bytes_up": 18_000_000,
        "f32_bytes_down": 3_000_000,
    }
    return pulse(name, step, **(base | changes))


def closed(version: int, loss: float = 2.5, closed_s: float = NOW_S - 4, **changes: Any) -> Commit:
    times = {"opened_ns": ns(closed_s - 1), "closed_ns": ns(closed_s), "quorum_s": 0.7}
    merged = {"consumed": (consumed(loss=loss),), "refused": (refused(learner="b"),)}
    base: dict[str, Any] = {"step": 8, "trace_id": TRACE, **times, **merged}
    return commit(version, **(base | changes))


LIVE: list[RunMessage] = [
    closed(1),
    *(closed(version, 3 - version / 100) for version in range(2, 40)),
    beat("a"),
    beat("b", 30),
    EVALUATION,
    checkpoint_record("/c", versions=(2, 2), tokens=90, written_ns=ns(NOW_S - 9)),
]


def scene(
    messages: Sequence[RunMessage], *, later_s: float = 0.0, config: RunConfig = CONFIG
) -> RunSnapshot:
    """Return a run whose pulses, commits and checkpoints came at their own time, else by now."""
    model = RunModel(RECORD, config, lambda: NOW_S + later_s)
    for number, message in enumerate(messages, 1):
        match message:
            case (
                Pulse(sent_ns=at_ns) | Commit(closed_ns=at_ns) | CheckpointRecord(written_ns=at_ns)
            ):
                at_s = at_ns / 1e9
            case _:
                at_s = NOW_S
        model.take(as_seen(message, at_s, number))
    return model.snapshot()


def drawn(seen: RunSnapshot, width: int = 120, height: int | None = None) -> list[str]:
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(board(seen, width, height))
    return out.getvalue().rstrip("\n").split("\n")


def test_a_board_says_how_the_run_is() -> None:
    text = "\n".join(drawn(scene(LIVE)))
    for fact in (
        "step 40/100",
        "40%",
        "learners 2/2",
        "loss 2.345",
        "held-out 3.250 (4.000 bits per byte)",
        "its moving average 3.125",
        "4,000 tokens/s",
        "train 50%",
        "compile 20%",
        "idle 30%",
        "sent 4.0 MB up, 2.0 MB down  1/7.0 of float32  1/47 of data-parallel",
        "rounds 38",
        "checkpoint at step 8 0:09 ago",
        "0:v39 0:04",
        "39 too_stale",
    ):
        assert fact in text, fact
    rows = [row.split()[:5] for row in text.split("\n") if "#3" in row]
    assert rows == [
        ["a#3", "training", "40", "2,000", "2.345"],
        ["b#3", "training", "30", "2,000", "2.345"],
    ]
    rounds = [row.split() for row in text.split("\n") if TRACE in row]
    assert " ".join(rounds[0][:9]) == "0:v39 0:04 all arrived 1 1 0.70 s 0.25"
    assert len(rounds) == 10


def test_a_fragment_has_no_age_while_its_newest_version_is_only_known_of() -> None:
    seen = scene(LIVE)
    seen.model.peek(as_seen(closed(90), NOW_S, 100))
    assert "fragments 0:v90  1:v0" in "\n".join(drawn(seen.model.snapshot()))


def test_data_parallel_is_that_of_as_many_as_the_run_is_laid_out_for() -> None:
    """Names that replaced others were never in one ring; the page counts the same."""
    seen = scene([*LIVE, beat("replaces-a"), beat("replaces-b")])
    steps = seen.model.view.steps_by_learner()
    parallel = data_parallel_bytes(1_000_000, steps, CONFIG.sync.learners)
    moved = seen.report.run.bytes_up + seen.report.run.bytes_down
    assert f"1/{parallel / moved:.0f} of data-parallel" in "\n".join(drawn(seen))


@pytest.mark.parametrize("height", [20, 50])
@pytest.mark.parametrize("learners", [1, 12, 200])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_a_board_fits_the_screen(width: int, learners: int, height: int) -> None:
    seen = scene([*LIVE[:40], *(beat(f"l{n:03}") for n in range(learners))])
    lines = drawn(seen, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_of_many_learners_those_in_trouble_come_first_and_the_rest_is_counted() -> None:
    many = [beat(f"l{n:03}") for n in range(199)]
    seen = scene([*many, beat("zz", phase=LearnerPhase.CATCHING_UP)])
    rows = [row for row in drawn(seen, height=30) if "#3" in row or row.startswith("and ")]
    assert rows[0].split()[:3] == ["zz#3", "catching", "up"]
    assert rows[-1].rstrip() == f"and {201 - len(rows)} more"


def test_the_first_line_says_how_many_learners_run_in_80_columns() -> None:
    seen = scene([*LIVE[:40], *(beat(f"learner-{n}", 123_456_789) for n in range(200))])
    assert drawn(seen, 80, 24)[0].rstrip().endswith("learners 201/201")


def warned(seen: RunSnapshot) -> list[str]:
    return [row.rstrip() for row in drawn(seen) if row.startswith("! ")]


def test_alerts_are_shown_and_beyond_a_few_they_are_counted() -> None:
    (gone,) = [row for row in warned(scene(LIVE, later_s=60.0)) if "gone" in row]
    assert gone.startswith("! a, b are gone: 0 of the 1 that a round needs")
    many = [Alert(f"k{n}", Severity.WARNING, f"Text {n}.", "Do.") for n in range(8)]
    shown = warned(replace(scene(LIVE), alerts=many))
    assert (len(shown), shown[-1]) == (6, "! and 3 more")
    fitted = drawn(replace(scene(LIVE), alerts=many), 80, 20)
    assert sum(row.startswith("! ") for row in fitted) == 6
    assert any("#3" in row for row in fitted)
    odd = [Alert("k", Severity.INFO, "[red]a[/] is gone.", "[b]")]
    assert warned(replace(scene(LIVE), alerts=odd)) == ["! [red]a[/] is gone. [b]"]


def test_a_broker_that_is_away_and_a_full_account_are_alerts_and_nobody_is_called_gone() -> None:
    model, stores = scene(LIVE).model, [StreamStore(Room(Storage.FILE, 95, 100))]
    keys = {alert.key for alert in model.snapshot(stores, away_s=30.0).alerts}
    assert {"broker", "store-file-"} <= keys
    silent = scene(LIVE, later_s=60.0).model
    for away_s, gone in ((None, True), (60.0, False)):
        now = silent.snapshot(away_s=away_s)
        assert ("gone" in {alert.key for alert in now.alerts}) is gone
        assert (now.report.run.alive == 0) is gone
    assert not model.snapshot(stores, away_s=30.0, at_rest=True).alerts


def test_what_the_model_wrote_last_is_one_harmless_line() -> None:
    said = [
        replace(EVALUATION, evaluated_ns=at_ns, sample=text)
        for at_ns, text in ((5, "new [bold]\n\tlines \x1b[2J" + "z" * 9000), (4, "old"), (6, ""))
    ]
    (shown,) = [row for row in drawn(scene([*LIVE, *said])) if row.startswith("writes")]
    assert shown.startswith("writes new [bold] lines \N{REPLACEMENT CHARACTER}[2Jzz")
    assert len(shown) <= 120


def test_names_that_others_chose_move_neither_cursor_nor_markup() -> None:
    seen = scene([beat("[red]\x1b[2J" + "y" * 100)])
    text = "\n".join(drawn(seen, 200))
    assert "\x1b" not in text + line(seen, 1)
    assert "[red]\N{REPLACEMENT CHARACTER}[2Jyy" in text
    assert "y" * 80 not in text


@pytest.mark.parametrize(
    ("curve", "shown"),
    [
        ([], ""),
        ([5.0], "▁"),
        ([1, 2, 3, 4, 5, 6, 7, 8], "▁▂▃▄▅▆▇█"),
        (list(range(800)), "▁▂▃▄▅▆▇█"),
        ([1.0, math.nan, 2.0, 1.7e308, math.inf, -1.7e308, 3.0], "▁▅█"),
        ([1e300], ""),
    ],
)
def test_a_curve_shows_all_of_it_but_what_would_flatten_it(curve: list[float], shown: str) -> None:
    assert sparkline(curve, 8) == shown


def test_shares_fill_the_bar() -> None:
    shares = dict.fromkeys(USES, 1 / len(USES))
    assert Text.from_markup(split_bar(shares, 10)).plain == "█" * 10
    assert Text.from_markup(split_bar(dict.fromkeys(USES, 0.0), 10)).plain == " " * 10


@pytest.mark.parametrize(
    ("messages", "later_s", "words"),
    [
        ([], 0, ["no parameters yet: no learner yet"]),
        ([member("b")], 0, ["no parameters yet: b starting"]),
        (
            LIVE,
            0,
            ["  0:10  step 40/100  loss 2.345  held-out 3.250  4,000 tokens/s", "sent 6.0 MB"],
        ),
        (LIVE, 10_000, ["a gone  b gone"]),
        ([*LIVE, beat("a", 60, NOW_S + 50), beat("b", 60, NOW_S + 50)], 50, ["no round for 0:54"]),
    ],
)
def test_a_line_says_how_far_how_fast_and_what_is_missing(
    messages: list[RunMessage], later_s: float, words: list[str]
) -> None:
    text = line(scene(messages, later_s=later_s), 10 + later_s)
    assert all(word in text for word in words), text
    assert ("no round for" in text) is any("no round" in word for word in words)


def test_a_run_that_goes_on_is_not_said_to_have_had_no_round_while_it_was_stopped() -> None:
    for alive_s, seconds, late in ((10.0, 10, ""), (30.0, 30, "no round for 0:30: see the logs")):
        seen = scene([*LIVE, beat("a", 60, NOW_S + 5000, alive_s=alive_s)], later_s=5000)
        assert late in line(seen, seconds)
        assert ("no round" in line(seen, seconds)) is bool(late)


def test_the_total_of_steps_is_left_out_where_the_clock_ends_the_run() -> None:
    timed = CONFIG.model_copy(
        update={"train": CONFIG.train.model_copy(update={"duration_s": 20.0})}
    )
    assert "step 40  " in line(scene(LIVE, config=timed), 10)


def test_a_held_out_loss_that_is_no_number_is_said_to_be_none() -> None:
    seen = scene([*LIVE[:-2], replace(EVALUATION, loss=math.nan)])
    assert "held-out" not in line(seen, 10)
    assert "held-out loss at step 8 is not finite" in "\n".join(drawn(seen))


def test_a_learner_that_stopped_in_order_is_not_called_gone() -> None:
    text = "\n".join(drawn(scene([beat("b", phase=LearnerPhase.STOPPED)], later_s=10_000)))
    assert "stopped" in text
    assert "gone" not in text


def test_a_log_without_pulses_claims_no_speeds() -> None:
    text = "\n".join(drawn(scene([closed(1), member("a", joined_ns=ns(NOW_S))], later_s=1)))
    assert "no pulses in this log" in text
    assert "tokens/s" not in text.partition("learner")[0]


def test_off_a_terminal_lines_are_neither_repeated_nor_many_and_move_no_cursor(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = Screen(Console(force_terminal=False), began_s=NOW_S)
    monkeypatch.setattr(viewer.time, "time", lambda: NOW_S + 70)
    scenes = scene(LIVE), scene([*LIVE, beat("a", 41, NOW_S + 1)], later_s=1)
    early, late = (replace(one, alerts=()) for one in scenes)
    for now in (early, late):
        lines.show(now)
    monkeypatch.setattr(viewer, "LINE_S", 0.0)
    for now in (early, late, late):
        lines.show(now)
    monkeypatch.setattr(viewer, "SILENT_S", 0.0)
    lines.show(late)
    lines.say("Checkpoint: /c\x1b]0;pwn\x07")
    first, second, again, said = capsys.readouterr().out.splitlines()
    assert first.startswith("  1:10  step 40/100")
    assert second.startswith("  1:10  step 41/100")
    assert again == second, "nothing has changed for long, and that is said"
    assert said == "Checkpoint: /c\N{REPLACEMENT CHARACTER}]0;pwn\N{REPLACEMENT CHARACTER}"


def test_off_a_terminal_what_is_wrong_is_said_once_for_as_long_as_it_is(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = Screen(Console(force_terminal=False), began_s=NOW_S)
    well = replace(scene(LIVE), alerts=())
    slow = Alert("slow", Severity.INFO, "a is slow.", "Nothing yet.")
    wrong = replace(well, alerts=(Alert("c", Severity.WARNING, "No checkpoint.", "Look."), slow))
    for now in (well, wrong, wrong, well, wrong):
        lines.show(now)
    said = [text for text in capsys.readouterr().out.splitlines() if "step" not in text]
    assert said == ["! No checkpoint. Look."] * 2


def test_on_a_terminal_sentences_stay_above_the_board() -> None:
    out = io.StringIO()
    with Screen(Console(file=out, force_terminal=True, width=100)) as terminal:
        terminal.show(scene(LIVE))
        terminal.say("learner-2 [gone]")
    assert "learner-2 [gone]" in out.getvalue()
    assert "a#3" in out.getvalue()


def test_json_has_the_loss_of_the_newest_commits_where_no_pulse_is_kept() -> None:
    messages = [message for message in LIVE if not isinstance(message, Pulse)]
    for shown, loss in ((scene(messages), pytest.approx(2.795)), (scene(LIVE), 2.345)):
        run: Any = snapshot_json(shown)["run"]
        assert run["loss"] == loss


def test_json_has_null_where_the_board_says_that_it_is_not_known() -> None:
    silent: Any = snapshot_json(scene([closed(1), member("a", joined_ns=ns(NOW_S))]))
    for row in (silent["run"], *silent["learners"]):
        assert [row[key] for key in PULSED] == [None] * len(PULSED)
    assert silent["learners"][0]["step"] is silent["learners"][0]["step_time_s"] is None
    live: Any = snapshot_json(scene(LIVE))
    for row in (live["run"], live["learners"][0]):
        assert None not in [row[key] for key in PULSED]


async def test_json_holds_the_state_the_newest_rounds_and_no_time_that_cannot_be() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    for step in range(3):
        await scripted.commit_all(step=step)
    odd = encode(replace(closed(9), grace_s=math.nan))
    await scripted.bus.publish(Subjects("run").commit(0), odd)
    await run_records.publish(scripted.bus, beat("a", step_time_s=math.inf))
    later_s = [0.0]
    model = await read_model(scripted.bus, "run", lambda: time.time() + later_s[0])
    later_s[0] = 600.0
    shown = json.loads(json.dumps(snapshot_json(model.snapshot()), allow_nan=False))
    assert [row["version"] for row in shown["rounds"]] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(age >= 0 for age in shown["fragment_age_s"][:3])
    assert [row["heard"] for row in shown["learners"]] == [False]
    assert {alert["key"] for alert in shown["alerts"]} >= {"gone"}


async def test_top_draws_until_the_run_is_finished_and_once_more_at_the_end() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    link = BrokerWatch(report=lambda _event, _fields: None)
    drawing = asyncio.create_task(FollowedRun(RunFeed(scripted.bus, "run"), link).show(console))
    await scripted.finish()
    await asyncio.wait_for(drawing, DEADLINE_S)
    assert "finished" in out.getvalue()
    assert "rounds 3 " in out.getvalue()


async def test_top_names_a_run_that_is_not_there_yet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")  # a dumb one shows the end alone
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    link = BrokerWatch(report=lambda _event, _fields: None)
    feed = RunFeed(MemoryBroker().connect(), "mian")
    async with background(FollowedRun(feed, link).show(console)):
        await until(lambda: "Waits for run mian in this log." in out.getvalue())


async def test_top_quits_on_q(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    enough = asyncio.Event()
    with os.fdopen(theirs, "r") as keyboard:
        monkeypatch.setattr("sys.stdin", keyboard)
        with keys(enough):
            os.write(ours, b"xQ")
            await asyncio.wait_for(enough.wait(), DEADLINE_S)
    os.close(ours)
