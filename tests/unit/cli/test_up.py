"""What ``skerry up`` says: about its processes, its broker, its page, and at the end."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from skerry.cli.cluster.cluster import StopSignal, Team, run_stoppable
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.supervisor import Change, ProcessEvent
from skerry.cli.up import (
    broker_watch,
    conclude,
    ends_training,
    run_up,
    say_page,
    unused_address,
)
from skerry.cli.viewer import Screen
from skerry.errors import ConfigError
from skerry.service.entry import exit_on_error
from skerry.settings.loading import load
from skerry.status.format import printable

EVIL = "/x\x1b]0;pwn\x07\x1b[2J/step-1"


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    folder = RunFolder("run", tmp_path)
    folder.logs.mkdir(parents=True)
    return folder


@pytest.mark.parametrize(
    ("event", "sentence"),
    [
        (
            ProcessEvent("a", Change.CRASHED, 7, -9, 3.0, "half a line"),
            "a (pid 7) was ended by signal 9; it starts again in 3 s.",
        ),
        (
            ProcessEvent("a", Change.CRASHED, 7, 1, 2.0, "Too bad."),
            "a (pid 7) ended with 1 (Too bad.); it starts again in 2 s.",
        ),
        (
            ProcessEvent("a", Change.CRASHED, 0, 1, 1.0, "No room."),
            "a could not be started (No room.); it starts again in 1 s.",
        ),
        (
            ProcessEvent("a", Change.UNWELL, 7, -9, sentence="It hangs."),
            "a (pid 7) is started again: It hangs.",
        ),
        (ProcessEvent("a", Change.REFUSED, 7, 3, sentence="Taken."), "a stopped for good: Taken."),
        (
            ProcessEvent("a", Change.REFUSED, 7, -9),
            "a (pid 7) was ended by signal 9; it is not started again.",
        ),
        (
            ProcessEvent("a", Change.REFUSED, 7, 3, sentence=EVIL),
            f"a stopped for good: {printable(EVIL)}",
        ),
        (ProcessEvent("a", Change.STARTED, 7), ""),
    ],
)
def test_a_change_that_matters_is_one_sentence(event: ProcessEvent, sentence: str) -> None:
    assert event.summary == sentence


def test_a_lost_broker_is_reported_once_and_so_is_its_return(
    capsys: pytest.CaptureFixture[str],
) -> None:
    heard = broker_watch(Screen(Console(force_terminal=False)), "nats://me:secret@host:1")
    for event in ("error", "reconnected", "disconnected", "disconnected", "reconnected"):
        heard(event, {})
    away, back = capsys.readouterr().out.splitlines()
    assert away.startswith("The broker at nats://me:***@host:1 is away: learners go on training")
    assert back == "The broker is back."


def concluded(capsys: pytest.CaptureFixture[str], **checkpoint: object) -> str:
    run = SimpleNamespace(run="r", finished=True, step=7, **checkpoint)
    feed = SimpleNamespace(report=lambda: SimpleNamespace(run=run))
    conclude(Screen(Console(force_terminal=False)), cast("Any", feed))
    return capsys.readouterr().out


def test_a_checkpoint_that_is_not_of_the_end_is_said_to_be_none(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = concluded(capsys, checkpoint="a/step-3", checkpoint_lacks=4)
    assert "Checkpoint: a/step-3 without the last 4 merges" in said
    assert "There is no checkpoint of it" in concluded(capsys, checkpoint=None, checkpoint_lacks=4)
    assert "without" not in concluded(capsys, checkpoint="a/step-7", checkpoint_lacks=0)


def test_no_escape_sequence_of_the_ledger_reaches_the_terminal(
    capsys: pytest.CaptureFixture[str],
) -> None:
    shown = concluded(capsys, checkpoint=EVIL, checkpoint_lacks=0)
    assert "\x1b" not in shown
    assert "\x07" not in shown
    assert "step-1" in shown


def test_a_run_at_another_broker_is_not_discarded() -> None:
    given: dict[str, Any] = {"config": None, "sets": [], "run": "r", "checkpoint": None}
    with pytest.raises(ConfigError, match=r"--fresh .* nothing at --nats: take another name"):
        run_up(**given, fresh=True, team=Team(), nats="nats://127.0.0.1:1")


def test_an_address_that_is_set_and_not_used_is_named() -> None:
    given = load(None, [], {"SKERRY_NATS__URL": "nats://me@far:4222"}).local.nats
    assert "nats.url (nats://***@far:4222) is not used" in unused_address(given, None)
    assert unused_address(given, "nats://far:4222") == ""
    assert unused_address(load(None, [], {}).local.nats, None) == ""


def listens(folder: RunFolder, port: int) -> None:
    fields = {"event": "health_listening", "url": f"http://127.0.0.1:{port}/", "port": port}
    with (folder.logs / "health-monitor.log").open("a") as log:
        log.write(json.dumps(fields) + "\n")


async def page_said(folder: RunFolder, *, chaos: bool) -> str:
    """Return what is said once the monitor listens at port 2; it did at port 1 before."""
    listens(folder, 1)
    said: list[str] = []
    saying = asyncio.create_task(say_page(folder, said.append, chaos=chaos))
    await asyncio.sleep(0)
    listens(folder, 2)
    await asyncio.wait_for(saying, 20)
    return "".join(said)


async def test_the_pages_address_is_that_of_this_start(folder: RunFolder) -> None:
    assert await page_said(folder, chaos=False) == "Watch the run on http://127.0.0.1:2/"


async def test_the_token_comes_after_the_address_where_faults_are_allowed(
    folder: RunFolder,
) -> None:
    folder.token.write_text("secret\n")
    assert (await page_said(folder, chaos=True)).endswith("http://127.0.0.1:2/#token=secret")


def test_the_last_that_trains_ends_the_training_once() -> None:
    at_work = {"learner-1": "learner", "syncer-1": "syncer", "page": "health-monitor"}
    ended = [ends_training(at_work, name) for name in ("learner-1", "syncer-1", "page")]
    assert ended == [False, True, False]


def test_training_that_ends_last_leaves_nothing_to_say() -> None:
    at_work = {"page": "health-monitor", "learner-1": "learner"}
    assert [ends_training(at_work, name) for name in ("page", "learner-1")] == [False, False]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_the_exit_code_names_the_signal_that_stopped_it(number: int, code: int) -> None:
    async def main(_stop: StopSignal) -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    before = {sent: signal.getsignal(sent) for sent in (signal.SIGINT, signal.SIGTERM)}
    try:
        with pytest.raises(SystemExit) as ended, exit_on_error():
            run_stoppable(main)
    finally:
        for sent, handler in before.items():
            signal.signal(sent, handler)
    assert ended.value.code == code
