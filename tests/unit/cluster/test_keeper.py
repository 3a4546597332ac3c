"""What keeps the broker of a local cluster at work, with a real server."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import signal
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from skerry.cli.cluster.broker import LocalBroker
from skerry.cli.cluster.keeper import Keeper, complained, has_room
from skerry.cli.cluster.processes import BROKER, TABLE, Processes, read
from skerry.errors import BrokerUnavailable, StorageFull
from skerry.log.streams import specs
from skerry.service.connect import bus_from
from skerry.settings.models import NatsSettings
from skerry_tools.chaos.actions import DiskFull
from skerry_tools.chaos.local import LocalGround

pytestmark = pytest.mark.nats


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110 - another process's state sends us no event
            await asyncio.sleep(0.02)


@asynccontextmanager
async def kept(folder: Path) -> AsyncGenerator[tuple[Keeper, list[str]]]:
    said: list[str] = []
    keeper = Keeper(LocalBroker(folder / "broker"), Processes(folder / TABLE), said.append)
    with keeper.table.kept():
        keeper.start()
        task = asyncio.create_task(keeper.run())
        try:
            yield keeper, said
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            keeper.ours.kill()


def pid_of(folder: Path) -> int:
    held = read(folder).get(BROKER)
    return 0 if held is None else held.pid


async def test_a_broker_that_ends_is_started_again_at_the_same_address(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, _):
        url, first = keeper.ours.url, pid_of(tmp_path)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(tmp_path) not in {0, first})
        assert keeper.ours.url == url


async def test_a_broker_killed_on_purpose_stays_away_for_as_long_as_was_asked(
    tmp_path: Path,
) -> None:
    async with kept(tmp_path) as (keeper, _):
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = keeper.kill(back_after_s=0.5)
        await until(lambda: pid_of(tmp_path) not in {0, first})
        assert loop.time() - began >= 0.5


async def test_a_broker_whose_disk_was_full_takes_messages_again(tmp_path: Path) -> None:
    async with kept(tmp_path) as (keeper, said):
        first = pid_of(tmp_path)
        nats = NatsSettings(url=keeper.ours.url, request_timeout_s=1.0)
        async with bus_from(nats, "test") as bus:
            await bus.declare(specs("full", window_bytes=1024**2))
            fault = DiskFull(LocalGround("full", tmp_path, bus))
            await fault.begin()
            with pytest.raises(StorageFull):
                await bus.publish("skerry.full.contrib.0.a", b"x", msg_id="1")
            assert pid_of(tmp_path) == first, "the full disk ended the broker"
            assert "refused a write" in await fault.proof()
            await fault.end()
            async with asyncio.timeout(60):
                while True:
                    with suppress(BrokerUnavailable, StorageFull):
                        await bus.publish("skerry.full.contrib.0.a", b"x", msg_id="1")
                        break
        assert pid_of(tmp_path) != first
    assert said == ["The broker could not write; there is room again: it is started again."]


async def test_a_broker_that_a_full_disk_keeps_from_starting_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.cli.cluster.keeper.AGAIN_S", 0.01)
    start, full = LocalBroker.start, [OSError(errno.ENOSPC, "No space left on device")]

    def starts(ours: LocalBroker) -> None:
        if full:
            raise full.pop()
        start(ours)

    async with kept(tmp_path) as (_, said):
        first = pid_of(tmp_path)
        monkeypatch.setattr(LocalBroker, "start", starts)
        os.kill(first, signal.SIGKILL)
        await until(lambda: pid_of(tmp_path) not in {0, first})
        assert said == ["[Errno 28] No space left on device. It is tried again."]


def test_only_what_was_said_since_counts_as_a_complaint(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("JetStream failed to store a msg on stream A\n")
    assert complained(log, 0)
    assert not complained(log, log.stat().st_size)
    assert not complained(tmp_path / "none", 0)


def test_room_is_what_can_be_written(tmp_path: Path) -> None:
    assert has_room(tmp_path)
    assert list(tmp_path.iterdir()) == []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        assert not has_room(tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
