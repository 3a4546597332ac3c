"""Absurd messages that can be decoded end no viewer, and none of them obeys what they say."""

from __future__ import annotations

import io
import json
from contextlib import suppress
from typing import Any

import pytest
from rich.console import Console
from structlog.testing import capture_logs

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.cli.board import board, line
from skerry.cli.viewer import snapshot_json
from skerry.errors import Implausible
from skerry.log.memory import MemoryBroker
from skerry.protocol.door import MOST_COUNT
from skerry.protocol.messages import RefusalCause
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.status.model import RunModel, RunSnapshot
from skerry.status.sources import MessageCounts, RunMessage
from skerry_health_monitor.alert_log import AlertLog
from skerry_health_monitor.metrics.exporting import exposition
from skerry_health_monitor.metrics.figures import figures
from skerry_health_monitor.service import Monitor
from skerry_health_monitor.web.sections import marks, sections
from skerry_health_monitor.web.stream import event
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
    round_,
    run_record,
    until,
)
from tests.support.scripted_run import ScriptedRun

NOW_S = 1_000_000.0
MOST = MOST_COUNT
ESCAPE = "\x1b]0;pwn\x07\x1b[2J[bold]"
HUGE = 1.7e308

WELL = [commit(1, closed_ns=ns(NOW_S)), member(), pulse(step=5, sent_ns=ns(NOW_S), tokens=50)]
ODD: dict[str, list[RunMessage]] = {
    "counts": [
        pulse("b", MOST, steps=MOST, tokens=MOST, cursor=MOST, bytes_up=MOST, bytes_down=MOST)
    ],
    "speed": [pulse("b", 8, steps=1, tokens=MOST, step_time_s=1e-6, alive_s=1e11)],
    "loss": [pulse("b", 8, loss=HUGE), pulse("c", 8, loss=-HUGE), pulse("d", 8, loss=HUGE)],
    "times": [pulse("b", 8, sent_ns=MOST, alive_s=1e11, busy_s=1e11, recover_s=1e11)],
    "versions": [pulse("b", 8, versions=(MOST,), f32_bytes_up=MOST)],
    "names": [
        pulse(ESCAPE + "y" * 5000, 8),
        member(ESCAPE, 2, host=ESCAPE * 100),
        commit(2, consumed=(consumed(ESCAPE),), syncer=ESCAPE, trace_id=ESCAPE, closed_ns=ns(1)),
    ],
    "commit": [
        commit(
            MOST,
            step=MOST,
            opened_ns=MOST,
            closed_ns=1,
            quorum_s=1e11,
            grace_s=1e11,
            merge_s=1e11,
            consumed=tuple(
                consumed(f"l{n}", tokens=MOST, loss=HUGE, staleness=MOST, arrived_ns=MOST)
                for n in range(50)
            ),
            refused=(refused(RefusalCause.TOO_STALE, ESCAPE),) * 50,
        )
    ],
    "checkpoint": [checkpoint_record("/c" + ESCAPE + "p" * 9000, step=MOST, versions=(MOST,) * 99)],
    "evaluation": [
        evaluation(MOST, loss=HUGE, bits_per_byte=-HUGE, sample=ESCAPE * 999, evaluator=ESCAPE)
    ],
    "round": [round_(MOST, due_step=MOST, attempt=MOST, trace_id=ESCAPE, opened_ns=MOST)],
}


def seen(messages: list[RunMessage]) -> RunModel:
    record = run_record("run", plan((LeafSpec("w", (8, 8)),), 1), created_ns=ns(NOW_S - 60))
    model = RunModel(record, RunConfig(), lambda: NOW_S)
    for number, message in enumerate([*WELL, *messages], 1):
        with suppress(Implausible):  # what the door refuses does not get here
            again = decode(type(message), encode(message), run="run")
            model.take(as_seen(again, NOW_S, number))
    model.judge(model.snapshot().report)
    return model


def drawn(now: RunSnapshot, **size: int) -> str:
    console = Console(file=io.StringIO(), width=size.get("width", 120), color_system=None)
    console.print(board(now, console.width, size.get("height")))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.parametrize("kind", ODD)
def test_a_terminal_shows_it_as_what_it_is(kind: str) -> None:
    now = seen(ODD[kind]).snapshot()
    for text in (drawn(now), drawn(now, width=80, height=24), line(now, 10.0)):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "9" * 25 not in text.replace(",", "")
    assert max(map(len, drawn(now, width=80, height=24).split("\n"))) <= 80
    assert json.loads(json.dumps(snapshot_json(now), allow_nan=False))["run"]["run"] == "run"


@pytest.mark.parametrize("kind", ODD)
def test_the_page_and_the_metrics_take_it(kind: str) -> None:
    model = seen(ODD[kind])
    now = model.snapshot()
    text = event("whole", {"sections": sections(now, AlertLog()), "marks": marks(model)})
    assert len(text) < 200_000
    scrape, _ = exposition(figures(now, MessageCounts()))
    assert b"skerry_run_step" in scrape


@pytest.mark.parametrize("kind", [kind for kind in ODD if kind not in {"commit", "names"}])
def test_what_was_merged_stays_what_commits_say(kind: str) -> None:
    """One learner's claims change neither versions nor rounds nor another learner's row."""
    before, after = seen([]).snapshot().report, seen(ODD[kind]).snapshot().report
    assert (after.run.versions, after.run.rounds) == (before.run.versions, before.run.rounds)
    assert [row for row in after.learners if row.name == "a"] == list(before.learners)


async def test_a_flood_of_junk_is_counted_and_one_alert() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    names = Subjects("run")
    monitor = Monitor(scripted.bus, "run", until_finished=False)
    counts = monitor.feed.counts
    async with background(monitor.follow()):
        await until(lambda: counts.read["member"])
        with capture_logs() as logs:
            for number in range(2000):
                await scripted.bus.publish(names.pulse(f"l{number}"), b"junk")
                await scripted.bus.publish(names.commit(number), b"junk")
            await until(lambda: counts.malformed.total() == 4000)
            monitor.look()
        lines: list[Any] = [entry for entry in logs if entry.get("key") == "malformed"]
        assert len(lines) == 1
        assert len(logs) <= 4
