"""What ``skerry top`` draws: everything at a glance, on a screen of any size."""

from __future__ import annotations

import asyncio
import io
import json
import os
import pty
import sys
import time
from contextlib import aclosing
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from rich.console import Console
from rich.text import Text

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.goodput import USES
from skerry.algorithm.traffic import data_parallel_bytes
from skerry.cli import top
from skerry.cli.board import board, sparkline, split_bar
from skerry.cli.top import snapshot_json
from skerry.log import ledger, presence
from skerry.log.base import Room, Storage
from skerry.log.memory import MemoryBroker
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    CommitOrigin,
    Evaluation,
    LearnerPhase,
    Pulse,
    RefusalCause,
)
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.service.watch import BrokerWatch
from skerry.settings.models import RunConfig
from skerry.status.alert_table import Alert, Severity
from skerry.status.alerts import StreamStore
from skerry.status.feed import RunFeed, read_model
from skerry.status.model import RunModel, RunSnapshot
from skerry.status.sources import RunMessage, Sources
from skerry.status.timeline import interval_s
from tests.support.builders import (
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    ns,
    pulse,
    refused,
    run_record,
    until,
)
from tests.support.scripted_run import ScriptedRun

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Sequence


NOW_S = 2_000_000.0
DEADLINE_S = 20.0
QUIET = BrokerWatch(report=lambda _event, _fields: None)
TRACE = "0af7651916cd43dd8448eb211c80319c"


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


def scene(messages: Sequence[RunMessage], *, later_s: float = 0.0) -> RunSnapshot:
    """Return a run that has sent these messages, pulses at their own time, all else by now."""
    time_s = [NOW_S]
    model = RunModel(RECORD, CONFIG, lambda: time_s[0], known_to=sys.maxsize)
    for number, message in enumerate(messages, 1):
        time_s[0] = message.sent_ns / 1e9 if isinstance(message, Pulse) else NOW_S
        closed_ns = message.closed_ns if isinstance(message, Commit) else ns(NOW_S)
        model.take(message, number, closed_ns)
    time_s[0] = NOW_S + later_s
    return model.snapshot()


def drawn(seen: RunSnapshot, width: int = 120, height: int | None = None) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False)
    console.print(board(seen, width, height))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue().rstrip("\n").split("\n")


EVALUATION = evaluation(
    tokens=90,
    versions=(2, 2),
    loss=3.25,
    perplexity=25.0,
    bits_per_byte=4.0,
    evaluated_ns=ns(NOW_S),
)
LIVE: list[RunMessage] = [
    closed(1),
    *(closed(version, 3 - version / 100) for version in range(2, 40)),
    beat("a"),
    beat("b", 30),
    EVALUATION,
    checkpoint_record("/c", versions=(2, 2), tokens=90, written_ns=ns(NOW_S - 9)),
]


def test_a_run_is_told_at_a_glance() -> None:
    text = "\n".join(drawn(scene(LIVE)))
    for fact in (
        "step 40/100",
        "40%",
        "learners 2/2",
        "loss 2.345",
        "held-out 3.250",
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


def test_a_fragment_has_no_age_while_its_newest_version_is_only_known_of() -> None:
    seen = scene(LIVE)
    seen.model.peek(closed(90), 100, ns(NOW_S))
    text = "\n".join(drawn(seen.model.snapshot()))
    assert "fragments 0:v90  1:v0" in text


def test_data_parallel_is_that_of_as_many_as_the_run_is_laid_out_for() -> None:
    """Names that replaced others were never in one ring; the page counts the same."""
    seen = scene([*LIVE, beat("replaces-a"), beat("replaces-b")])
    steps = seen.model.history.steps_by_learner()
    parallel = data_parallel_bytes(1_000_000, steps, CONFIG.sync.learners)
    moved = seen.report.run.bytes_up + seen.report.run.bytes_down
    assert f"1/{parallel / moved:.0f} of data-parallel" in "\n".join(drawn(seen))


def test_every_learner_has_a_row() -> None:
    rows = [line.split() for line in drawn(scene(LIVE)) if "#3" in line]
    assert [row[:5] for row in rows] == [
        ["a#3", "training", "40", "2,000", "2.345"],
        ["b#3", "training", "30", "2,000", "2.345"],
    ]


def test_a_round_comes_with_the_id_of_its_trace() -> None:
    lines = [line for line in drawn(scene(LIVE)) if TRACE in line]
    assert lines[0].split()[:9] == [
        "0:v39",
        "0:04",
        "all",
        "arrived",
        "1",
        "1",
        "0.70",
        "s",
        "0.25",
    ]
    assert len(lines) == 10


@pytest.mark.parametrize("height", [20, 24, 50])
@pytest.mark.parametrize("learners", [1, 12, 200])
@pytest.mark.parametrize("width", [40, 80, 200])
def test_it_fits_the_screen(width: int, learners: int, height: int) -> None:
    seen = scene([*LIVE[:40], *(beat(f"l{n:03}") for n in range(learners))])
    lines = drawn(seen, width, height)
    assert len(lines) <= height
    assert max(map(len, lines)) <= width


def test_of_many_learners_those_in_trouble_come_first_and_the_rest_is_counted() -> None:
    many = [beat(f"l{n:03}") for n in range(199)]
    seen = scene([*many, beat("zz", phase=LearnerPhase.CATCHING_UP)])
    rows = [line for line in drawn(seen, height=30) if "#3" in line or line.startswith("and ")]
    assert rows[0].split()[:3] == ["zz#3", "catching", "up"]
    assert rows[-1].rstrip() == f"and {201 - len(rows)} more"


def test_a_learner_that_is_gone_is_a_warning() -> None:
    lines = drawn(scene(LIVE, later_s=60.0))
    assert any(line.startswith("! a, b are gone: 0 of the 1 that a round needs") for line in lines)
    assert not any("gone" in line for line in drawn(scene(LIVE)))


def warned(seen: RunSnapshot) -> list[str]:
    return [line.rstrip() for line in drawn(seen) if line.startswith("! ")]


def test_a_round_is_late_by_how_often_rounds_come() -> None:
    rounds = [closed(n, closed_s=NOW_S + 30 * (n - 9)) for n in range(2, 10)]
    here = [
        beat("a", 40 + later_s, NOW_S + later_s, alive_s=30.0 + later_s) for later_s in range(302)
    ]
    for later_s, late in ((60, False), (299, False), (301, True)):
        told = warned(scene([*rounds, *here[: later_s + 1]], later_s=later_s))
        expected = "! No round has been committed for 5 min, one is expected each 30 s."
        assert any(line.startswith(expected) for line in told) is late
        assert any("No round" in line for line in told) is late


def test_a_round_is_late_from_when_somebody_has_been_at_work() -> None:
    """What went into starting and catching up is no time in which a round was due."""
    back = beat("a", compile_s=6.0, recover_s=3.0, alive_s=30.0)
    seen = scene([*(closed(n, closed_s=NOW_S - 43_200 + n) for n in range(2, 10)), back])
    assert seen.report.learners[0].worked_s == 21.0
    for worked_s, late in ((19.0, False), (21.0, True)):
        ready = replace(back, alive_s=9.0 + worked_s)
        told = warned(
            scene([*(closed(n, closed_s=NOW_S - 43_200 + n) for n in range(2, 10)), ready])
        )
        assert (
            any(line.startswith("! No round has been committed for 21 s") for line in told) is late
        )


def test_restored_fragments_are_no_rounds_and_none_is_late_by_them() -> None:
    restored = [
        closed(n, closed_s=NOW_S + n / 1000, origin=CommitOrigin.RESTORED) for n in range(2, 10)
    ]
    seen = scene([*restored, beat("a", 41, NOW_S + 60)], later_s=60)
    assert interval_s(seen.model.history.timeline.rounds) is None
    assert not any("No round" in line for line in warned(seen))


def test_a_refusal_is_a_warning_for_ten_minutes() -> None:
    seen = [closed(2), closed(3)]
    said = "! Contributions were refused within 10 min: 2 too_stale."
    assert any(line.startswith(said) for line in warned(scene(seen, later_s=590)))
    assert not any("refused" in line for line in warned(scene(seen, later_s=610)))
    offers = closed(2, refused=(refused(RefusalCause.GENESIS),))
    assert not any("refused" in line for line in warned(scene([offers])))


def test_low_goodput_of_late_is_a_warning_whatever_the_days_before_were_like() -> None:
    day_s = 86_400.0
    watched = [
        beat("a", at_s=NOW_S - ago_s, busy_s=0.9 * day_s, alive_s=day_s - ago_s)
        for ago_s in range(600, -1, -10)
    ]
    low = "! Goodput of the last 15 min is 0%."
    assert any(line.startswith(low) for line in warned(scene([*LIVE, *watched])))
    assert not any("Goodput" in line for line in warned(scene(LIVE)))


def test_a_loss_that_is_not_finite_is_a_warning() -> None:
    sick = beat("b", loss=float("nan"))
    told = warned(scene([beat("a"), sick]))
    assert any(line.startswith("! The loss of b is not finite. Such steps") for line in told)


def test_what_costs_training_comes_first_and_of_many_alerts_the_rest_is_counted() -> None:
    many = [Alert(f"k{n}", Severity.WARNING, f"Text {n}.", "Do.") for n in range(8)]
    seen = replace(scene(LIVE), alerts=many)
    assert warned(seen)[-1] == "! and 3 more"
    assert len(warned(seen)) == 6


def test_an_alert_is_shown_as_it_is_whatever_a_learner_is_called() -> None:
    odd = replace(scene(LIVE), alerts=[Alert("k", Severity.INFO, "[red]a[/] is gone.", "[b]")])
    assert warned(odd) == ["! [red]a[/] is gone. [b]"]


def test_a_broker_that_is_away_and_a_full_account_are_alerts() -> None:
    model, stores = scene(LIVE).model, [StreamStore(Room(Storage.FILE, 95, 100))]
    keys = {alert.key for alert in model.snapshot(stores, away_s=30.0).alerts}
    assert {"broker", "store-file-"} <= keys
    assert not model.snapshot(stores, away_s=30.0, at_rest=True).alerts


def test_what_the_model_wrote_last_is_one_harmless_line() -> None:
    said = [
        replace(EVALUATION, evaluated_ns=at_ns, sample=text)
        for at_ns, text in ((5, "new [bold]\n\tlines \x1b[2J" + "z" * 9000), (4, "old"), (6, ""))
    ]
    (line,) = [line for line in drawn(scene([*LIVE, *said])) if line.startswith("writes")]
    assert line.startswith("writes new [bold] lines \N{REPLACEMENT CHARACTER}[2Jzzz")
    assert len(line) <= 120
    assert not any(line.startswith("writes") for line in drawn(scene([*LIVE, *said]), height=15))


def test_warnings_of_every_kind_at_once_leave_room_for_learners() -> None:
    sick = [
        replace(
            beat(f"l{n}", 900 - ago_s, NOW_S - ago_s), loss=float("nan"), alive_s=9000.0 - ago_s
        )
        for n in range(9)
        for ago_s in range(600, -1, -10)
    ]
    texts = replace(EVALUATION, evaluator="f", text_digest=8, evaluated_ns=9)
    seen = scene([*LIVE[:-1], texts, beat("gone", at_s=NOW_S - 500), *sick])
    late: dict[str, Any] = {"wall_s": 1e6, "checkpoint_s_ago": 1e6, "checkpoint_lacks_s": 1e6}
    now = replace(seen.report, run=replace(seen.report.run, **late))
    wrong = seen.model.alerts(now)
    assert {a.key for a in wrong} == {"gone", "loss", "goodput", "refused", "texts", "checkpoint"}
    seen = replace(seen, report=now, alerts=wrong)
    lines = drawn(seen, 80, 20)
    assert sum(line.startswith("! ") for line in lines) == 6
    assert len(lines) <= 20
    assert any("#3" in line for line in lines)


def test_a_run_without_anything_yet_is_drawn_too() -> None:
    assert "no parameters yet" in drawn(scene([]), 80, 24)[0]


def test_what_others_chose_as_their_name_cannot_move_the_cursor_or_the_markup() -> None:
    seen = scene([beat("[red]\x1b[2J" + "y" * 100)])
    text = "\n".join(drawn(seen, 200))
    assert "\x1b" not in text
    assert "[red]\N{REPLACEMENT CHARACTER}[2Jyy" in text
    assert "y" * 80 not in text


def test_a_curve_shows_the_whole_of_it_in_the_width_there_is() -> None:
    assert sparkline([], 8) == ""
    assert sparkline([5.0], 8) == "▁"
    assert sparkline([1, 2, 3, 4, 5, 6, 7, 8], 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(list(range(800)), 8) == "▁▂▃▄▅▆▇█"


def test_shares_fill_the_bar() -> None:
    shares = dict.fromkeys(USES, 1 / len(USES))
    bar = Text.from_markup(split_bar(shares, 10)).plain
    assert bar == "█" * 10
    assert Text.from_markup(split_bar(dict.fromkeys(USES, 0.0), 10)).plain == " " * 10


async def test_the_newest_round_is_as_old_as_the_broker_says_whatever_its_syncers_clock() -> None:
    """A scripted run closes its rounds in 1970."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    at_once = (await read_model(scripted.bus, "run")).snapshot().report
    feed = RunFeed(scripted.bus, "run")
    following = asyncio.create_task(feed.run())
    async with asyncio.timeout(20):
        while (now := feed.report()) is None or now.run.rounds < 3:  # noqa: ASYNC110 - it reads the log
            await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    for told in (at_once, now):
        assert told.run.last_round_s_ago is not None
        assert told.run.last_round_s_ago < 60


async def test_a_long_ledger_raises_no_alert_of_what_is_only_not_read_yet(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Read from its first commit, it looks for a while as if nothing had come since."""
    ago_s = [21 * 86_400.0]
    broker = MemoryBroker(clock_ns=lambda: time.time_ns() - int(ago_s[0] * 1e9))
    scripted = await ScriptedRun.begin(broker.connect())
    losses = (2.0, 5.0, 5.0, 5.0, 1.9)
    for version, loss in enumerate(losses, 1):
        ago_s[0] = 0.0 if version == len(losses) else ago_s[0] - 10.0
        await scripted.commit_all(step=version)
        said = replace(EVALUATION, run="run", versions=(version,) * 3, loss=loss)
        await ledger.record_evaluation(scripted.bus, replace(said, evaluated_ns=version))
    here = beat("a", sent_ns=time.time_ns(), alive_s=9e5)
    await presence.publish_pulse(scripted.bus, here)

    follow = Sources.follow
    most: dict[type, int] = {Commit: 12, Evaluation: 4}

    async def some(self: Sources, kind: type[RunMessage]) -> AsyncGenerator[Any]:
        messages = follow(self, kind)
        async with aclosing(messages):
            for _ in range(most.get(kind, sys.maxsize)):
                yield await anext(messages)
            await asyncio.Event().wait()

    monkeypatch.setattr(Sources, "follow", some)
    feed = RunFeed(scripted.bus, "run")
    following = asyncio.create_task(feed.run())
    async with asyncio.timeout(DEADLINE_S):
        while (  # noqa: ASYNC110 - it reads the log
            (now := feed.report()) is None
            or now.run.rounds < 12
            or len(now.evaluations) < 4
            or not any(row.at_work for row in now.learners)
        ):
            await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert feed.model is not None
    told = snapshot_json(feed.model.snapshot())
    wrong = {alert["key"] for alert in json.loads(json.dumps(told["alerts"]))}
    assert not wrong & {"no-commit", "held-out"}
    assert (now.run.counting, feed.model.view.evaluating) == (True, True)
    assert (now.run.versions[:3], now.run.step) == ((5, 5, 5), 40)


async def test_what_a_checkpoint_lacks_is_told_though_it_is_read_after_a_long_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ago_s = [3600.0]
    broker = MemoryBroker(clock_ns=lambda: time.time_ns() - int(ago_s[0] * 1e9))
    scripted = await ScriptedRun.begin(broker.connect())
    await scripted.commit_all(step=1)
    written_ns = time.time_ns() - 3600 * 10**9
    written = checkpoint_record("/c", versions=(1, 1, 1), written_ns=written_ns)
    await ledger.record_checkpoint(scripted.bus, written)
    ago_s[0] = 5.0
    await scripted.commit(0)

    follow = Sources.follow

    async def no_checkpoint(self: Sources, kind: type[RunMessage]) -> AsyncGenerator[Any]:
        async for found in follow(self, kind):
            if kind is not CheckpointRecord:
                yield found

    monkeypatch.setattr(Sources, "follow", no_checkpoint)
    feed = RunFeed(scripted.bus, "run")
    following = asyncio.create_task(feed.run())
    async with asyncio.timeout(DEADLINE_S):
        while (now := feed.report()) is None or now.run.counting:  # noqa: ASYNC110 - it reads the log
            await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert now.run.checkpoint_lacks == 1
    assert now.run.checkpoint_lacks_s < 60


@pytest.mark.parametrize("off_s", [0, 86_400, -660])
async def test_who_was_started_again_and_again_is_told_of_by_a_top_that_starts_later(
    off_s: int,
) -> None:
    """And by one that only looks once, whatever the clock of the learner's host says."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    off_ns = off_s * 10**9
    joined = [
        await ledger.join(scripted.bus, "run", "flaps", "host", time.time_ns() + off_ns)
        for _ in range(4)
    ]
    here = beat("flaps", incarnation=joined[-1].incarnation)
    await presence.publish_pulse(scripted.bus, here)
    time_s = [time.time()]
    once = await read_model(scripted.bus, "run", lambda: time_s[0])
    feed = RunFeed(scripted.bus, "run", clock_s=lambda: time_s[0])
    following = asyncio.create_task(feed.run())
    await until(lambda: feed.model and feed.model.history.lately.starts(0)["flaps"] >= 3)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert feed.model is not None
    for later_s, expected in ((0.0, True), (601.0, False)):
        time_s[0] += later_s
        for model in (once, feed.model):
            keys = {alert.key for alert in model.snapshot().alerts}
            assert ("flapping-flaps" in keys) is expected


async def test_a_round_that_comes_is_new_though_the_brokers_clock_is_an_hour_behind() -> None:
    """So is what it refuses."""
    broker = MemoryBroker(clock_ns=lambda: time.time_ns() - 3600 * 10**9)
    scripted = await ScriptedRun.begin(broker.connect())
    await scripted.commit_all()
    feed = RunFeed(scripted.bus, "run")
    following = asyncio.create_task(feed.run())

    async def ago_s(rounds: int) -> float:
        async with asyncio.timeout(DEADLINE_S):
            while (now := feed.report()) is None or now.run.rounds < rounds:  # noqa: ASYNC110
                await asyncio.sleep(0)  # it reads the log
        assert now.run.last_round_s_ago is not None
        return now.run.last_round_s_ago

    try:
        assert await ago_s(3) > 3500
        await scripted.commit_all()
        assert await ago_s(6) < 60
        refusing = encode(closed(3))
        await scripted.bus.publish(Subjects("run").commit(0), refusing)
        assert await ago_s(7) < 60
        assert feed.model is not None
        assert feed.model.history.lately.refused(time.time()) == {"too_stale": 1}
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_a_log_begun_anew_begins_the_view_and_what_is_remembered_anew() -> None:
    broker = MemoryBroker()
    first = await ScriptedRun.begin(broker.connect())
    for step in range(3):
        await first.commit_all(step=step)
    feed = RunFeed(broker.connect(), "run")
    following = asyncio.create_task(feed.run())

    def reads(versions: tuple[int, ...], rounds: int) -> bool:
        assert not following.done()
        now = feed.snapshot()
        if now is None or (now.report.run.versions[:3], now.report.run.rounds) != (
            versions,
            rounds,
        ):
            return False
        return sum(row.merged for row in now.model.history.timeline.rounds.values()) == rounds

    try:
        await until(lambda: reads((3, 3, 3), 9))
        for name in tuple(broker.streams):
            stream = broker.streams.pop(name)
            stream.lost = True
            stream.wake()
        second = await ScriptedRun.begin(broker.connect())
        await second.commit_all(step=5)
        await until(lambda: reads((1, 1, 1), 3))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_json_holds_the_state_and_the_newest_rounds() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    for step in range(3):
        await scripted.commit_all(step=step)
    await presence.publish_pulse(scripted.bus, beat("a"))
    model = await read_model(scripted.bus, "run")
    told = json.loads(json.dumps(snapshot_json(model.snapshot())))
    assert [row["version"] for row in told["rounds"]] == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(age >= 0 for age in told["fragment_age_s"][:3])
    assert told["learners"][0]["time"]["train"] >= 0
    (alert,) = told["alerts"]
    assert (alert["key"], alert["severity"]) == ("gone", "critical")


async def test_times_that_cannot_be_are_left_out() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    (first, second) = (await scripted.commit(0)).commit, closed(2)
    odd = encode(replace(second, grace_s=float("nan")))
    await scripted.bus.publish(Subjects("run").commit(0), odd)
    await presence.publish_pulse(scripted.bus, beat("a", step_time_s=float("inf")))
    model = await read_model(scripted.bus, "run")
    told = json.dumps(snapshot_json(model.snapshot()), allow_nan=False)
    assert [row["version"] for row in json.loads(told)["rounds"]] == [first.version]
    assert [row["heard"] for row in json.loads(told)["learners"]] == [False]


@pytest.mark.parametrize("readable", [0, 1, 2])
async def test_a_single_look_shows_what_can_be_read_where_the_newest_cannot(readable: int) -> None:
    """Of a finished run it is the only one: it ended with an error, or showed no rounds at all."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    for step in range(2):
        await scripted.commit_all(step=step)
    for fragment in range(readable, 3):
        await scripted.bus.publish(Subjects("run").commit(fragment), b"noise")
    await scripted.bus.publish(Subjects("run").ledger("checkpoint"), b"noise")
    await scripted.finish()
    model = await asyncio.wait_for(read_model(scripted.bus, "run"), DEADLINE_S)
    assert (model.view.rounds, model.view.checkpoint) == (6, None)


def test_a_curve_leaves_out_what_would_flatten_it() -> None:
    assert sparkline([1.0, float("nan"), 2.0, 1.7e308, float("inf"), -1.7e308, 3.0], 8) == "▁▅█"
    assert sparkline([1e300], 8) == ""


async def test_it_draws_until_the_run_is_finished_and_once_more_at_the_end() -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    feed = RunFeed(scripted.bus, "run")
    following = asyncio.create_task(top.follow(feed, QUIET, console))
    await scripted.finish()
    await asyncio.wait_for(following, DEADLINE_S)
    assert "finished" in out.getvalue()


async def test_of_a_finished_run_it_draws_all_there_is_however_long_the_ledger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    for step in range(10):
        await scripted.commit_all(step=step)
    assert not await top._is_over(scripted.bus, "run")
    assert not await top._is_over(scripted.bus, "another")
    await scripted.finish()
    assert await top._is_over(scripted.bus, "run")
    follow = Sources.follow

    async def slowly(self: Sources, kind: type[RunMessage]) -> AsyncGenerator[Any]:
        async for found in follow(self, kind):
            if kind is Commit:
                await asyncio.sleep(0.05)
            yield found

    monkeypatch.setattr(Sources, "follow", slowly)
    out = io.StringIO()
    console = Console(file=out, width=80, height=24, force_terminal=True)
    feed = RunFeed(scripted.bus, "run")
    await asyncio.wait_for(top.follow(feed, QUIET, console), DEADLINE_S)
    assert "rounds 30 " in out.getvalue()


async def test_a_run_that_ends_while_its_ledger_is_read_is_read_to_its_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record of its end comes before commits that were not there when the reading began."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    follow, ended = Sources.follow, asyncio.Event()

    async def late(self: Sources, kind: type[RunMessage]) -> AsyncGenerator[Any]:
        read = 0
        async for found in follow(self, kind):
            if kind is Commit and read == 3:
                await ended.wait()
            read += 1
            yield found

    monkeypatch.setattr(Sources, "follow", late)
    feed = RunFeed(scripted.bus, "run")
    following = asyncio.create_task(feed.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            while (now := feed.report()) is None or now.run.rounds < 3:  # noqa: ASYNC110 - it reads the log
                await asyncio.sleep(0)
            await scripted.commit_all(step=1)
            await scripted.finish()
            while not (feed.view and feed.view.finished):  # noqa: ASYNC110 - it reads the log
                await asyncio.sleep(0)
            assert not feed.finished.is_set()
            ended.set()
            await feed.finished.wait()
        assert feed.view.rounds == 6
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_q_is_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = pty.openpty()
    enough = asyncio.Event()
    with os.fdopen(theirs, "r") as keyboard:
        monkeypatch.setattr("sys.stdin", keyboard)
        with top.keys(enough):
            os.write(ours, b"xQ")
            await asyncio.wait_for(enough.wait(), DEADLINE_S)
    os.close(ours)
