"""Faults on real processes that do next to nothing: each fires, shows it, and is undone."""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from skerry.cli.cluster import clock
from skerry.cli.cluster.faults import FaultControl
from skerry.cli.cluster.processes import TABLE, ProcessEntry, ProcessTable
from skerry.cli.cluster.proxy import Proxy
from skerry.cli.cluster.supervisor import Supervisor
from skerry.errors import ConfigError, SkerryError
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.service.control import CONTROL, listening
from skerry.tasks import TaskGroup
from skerry_tools.chaos import healing, messages
from skerry_tools.chaos.drilled import (
    Injected,
    Injection,
    NotFired,
    able,
    refuse,
    refuse_targets,
    running,
)
from skerry_tools.chaos.engine import Engine, Firing
from skerry_tools.chaos.healing import Healing, heal, undo
from skerry_tools.chaos.local import LocalRun
from skerry_tools.chaos.messages import MESSAGES
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind

RUN = "r"
IDLE = "import signal; signal.pause()"
WRITING = """
import pathlib, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
while True:
    try:
        pathlib.Path(sys.argv[1]).write_bytes(bytes(10))
    except OSError:
        pass
"""
KINDS = {"learner-1": "learner", "learner-2": "learner", "syncer": "syncer", "broker": "broker"}


def stop(pid: int) -> None:
    """Stop a child, and return when its kernel says that it has stopped."""
    os.kill(pid, signal.SIGSTOP)
    os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)


@dataclass(slots=True)
class EngineSite:
    """A run folder with processes in it, and a supervisor that only kills."""

    ground: LocalRun
    table: ProcessTable
    proxy: Proxy
    processes: dict[str, asyncio.subprocess.Process] = field(
        default_factory=dict[str, asyncio.subprocess.Process]
    )
    said: list[str] = field(default_factory=list[str])

    @property
    def routes(self) -> FaultControl:
        return FaultControl(Supervisor([], lambda _event: None), proxy=self.proxy)

    def entry(self, name: str) -> ProcessEntry:
        return running(self.ground.entries(), name)

    async def start(self, name: str, code: str = IDLE, *arguments: str) -> None:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", "-c", code, *arguments
        )
        self.processes[name] = process
        self.table.started(name, KINDS[name], process.pid)

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["op"] != "kill":
            return await self.routes.answer(order)
        process = self.processes[order["name"]]
        process.kill()
        await process.wait()
        return {"pid": process.pid}

    async def run(self, *faults: Fault) -> list[Firing]:
        made = Engine(FaultPlan(1, faults), self.ground, self.said.append)
        async with asyncio.timeout(60):
            await made.run()
        return list(made.history)


@asynccontextmanager
async def site(folder: Path) -> AsyncGenerator[EngineSite]:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    held = EngineSite(
        LocalRun(RUN, folder, bus, proxied=True),
        ProcessTable(folder / TABLE),
        Proxy(1),
    )
    with held.table.kept():
        async with listening(folder / CONTROL, held.obey):
            try:
                for name in KINDS:
                    await held.start(name)
                yield held
            finally:
                for process in held.processes.values():
                    with contextlib.suppress(ProcessLookupError):
                        process.kill()
                    await process.wait()


def injected(ground: LocalRun, kind: Kind, amount: float = 0.0) -> Injected:
    """Return a fault of ``learner-1``."""
    fault = Fault(0.0, kind, "learner-1", amount=amount)
    return ground.inject(Injection.of(fault, "learner-1", "seed"))


async def test_killed_process_is_gone_and_paused_one_is_stopped_and_then_resumed(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as held:
        (killed,) = await held.run(Fault(0.0, Kind.KILL, "learner-1"))
        assert killed.fired
        assert f"pid {held.processes['learner-1'].pid} is gone" in killed.proof
        assert [line.partition(" s  ")[2] for line in held.said] == [
            "kill learner-1 begins",
            f"kill learner-1 ends: {killed.proof}",
        ]
        (paused,) = await held.run(Fault(0.0, Kind.PAUSE, "syncer"))
        assert "(T)" in paused.proof
        assert not held.entry("syncer").paused


async def test_a_target_that_is_down_is_skipped_and_counted_as_not_fired(tmp_path: Path) -> None:
    async with site(tmp_path) as held:
        held.processes["syncer"].kill()
        await held.processes["syncer"].wait()
        (firing,) = await held.run(Fault(0.0, Kind.PAUSE, "syncer"))
        assert (firing.fired, firing.proof) == (False, "syncer is down already")


async def test_the_same_fault_twice_at_once_counts_once(tmp_path: Path) -> None:
    async with site(tmp_path) as held:
        history = await held.run(
            Fault(0.0, Kind.PAUSE, "syncer", 0.5), Fault(0.1, Kind.PAUSE, "syncer", 0.1)
        )
        assert [firing.fired for firing in history] == [True, False]


async def test_a_full_disk_shows_itself_by_a_refused_write(tmp_path: Path) -> None:
    async with site(tmp_path) as held:
        held.processes["broker"].kill()
        await held.processes["broker"].wait()
        await held.start("broker", WRITING, str(tmp_path / "written"))
        (firing,) = await held.run(Fault(0.0, Kind.DISK_FULL, "broker"))
        assert "refused a write" in firing.proof
        limit = resource.prlimit(held.processes["broker"].pid, resource.RLIMIT_FSIZE)
        assert limit == resource.getrlimit(resource.RLIMIT_FSIZE)


async def test_a_partition_shows_itself_by_what_stalls(tmp_path: Path) -> None:
    async with site(tmp_path) as held, held.proxy.serving(["learner-1"]):
        ground = held.ground
        async with injected(ground, Kind.PARTITION) as proof:
            assert not await proof()
            _, writer = await asyncio.open_connection("127.0.0.1", held.proxy.ports["learner-1"])
            async with asyncio.timeout(30):
                while not await proof():  # noqa: ASYNC110 - counters send no event
                    await asyncio.sleep(0.01)
            assert "connections kept out" in await proof()
        assert (await ground.routes())["learner-1"]["cut"] == "none"
        writer.close()


async def test_a_clock_that_was_moved_is_put_right(tmp_path: Path) -> None:
    async with site(tmp_path) as held:
        async with injected(held.ground, Kind.CLOCK_JUMP, -30.0):
            assert float(clock.file_of(tmp_path, "learner-1").read_text()) == -30.0
        assert float(clock.file_of(tmp_path, "learner-1").read_text()) == 0.0


async def test_healing_tells_what_it_undid_and_nothing_where_there_is_nothing(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as held, held.proxy.serving(["learner-1", "learner-2"]):
        clock.move(tmp_path, "learner-1", 0.0)
        written_ns = clock.file_of(tmp_path, "learner-1").stat().st_mtime_ns
        assert (await undo(tmp_path)).undone == []
        assert clock.file_of(tmp_path, "learner-1").stat().st_mtime_ns == written_ns
        stop(held.processes["syncer"].pid)
        broker = held.processes["broker"].pid
        resource.prlimit(broker, resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
        clock.move(tmp_path, "learner-1", 99.0)
        await held.ground.control(op="set", route="learner-2", cut="blackhole")
        told = await undo(tmp_path)
        assert told.undone == [
            "The way of learner-2 to the broker was cut or slow, and is open.",
            "The clock of learner-1 was off, and is right.",
            "syncer was stopped, and goes on.",
            "No file of the broker could grow, and now they can.",
        ]
        assert (await held.ground.routes())["learner-2"]["cut"] == "none"
        assert await undo(tmp_path) == Healing()


async def test_another_users_process_that_cannot_be_resumed_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def forbidden(_pid: int, _signal: int) -> None:
        raise PermissionError

    async with site(tmp_path):
        monkeypatch.setattr("skerry_tools.chaos.healing.os.kill", forbidden)
        told = await undo(tmp_path)
        monkeypatch.undo()
    assert len(told.wrong) == len(KINDS)
    assert all("is another user's: run this command as that user." in one for one in told.wrong)


async def test_healing_names_who_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "BACK_S", 0.1)
    async with site(tmp_path) as held:
        with pytest.raises(SkerryError, match=r"^ghost did not come back"):
            await heal(held.ground, {*KINDS, "ghost"})


@pytest.mark.parametrize(
    ("kind", "target", "words"),
    [
        (Kind.PARTITION, "learner", "without a proxy"),
        (Kind.SLOW, "learner", "without a proxy"),
        (Kind.BROKER_KILL, "broker", "not started by this cluster"),
        (Kind.DISK_FULL, "broker", "not started by this cluster"),
        (Kind.CLOCK_JUMP, "learner", "apt install faketime"),
        (Kind.LOST_ACK, "learner", "simulation only"),
    ],
)
def test_what_cannot_be_done_here_is_refused_with_the_fix(
    ground: LocalRun, kind: Kind, target: str, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        refuse(FaultPlan(0, (Fault(0.0, kind, target),)), ground)


def test_what_can_be_done_without_help_is_offered(ground: LocalRun) -> None:
    assert set(able(ground)) == {Kind.KILL, Kind.PAUSE, *MESSAGES}


def test_a_target_that_is_nothing_here_is_refused_with_what_there_is(ground: LocalRun) -> None:
    with pytest.raises(ConfigError, match="use any of learner, learner-1, learner-2, syncer"):
        refuse_targets(("learner", "leaner"), ground)


def test_another_users_processes_cannot_be_struck(
    ground: LocalRun, monkeypatch: pytest.MonkeyPatch
) -> None:

    def forbidden(_pid: int, _signal: int) -> None:
        raise PermissionError

    monkeypatch.setattr("skerry_tools.chaos.local.os.kill", forbidden)
    assert able(ground) == ()


async def corrupted(ground: LocalRun, kind: Kind) -> list[bytes]:
    """Publish four contributions of a learner, let the fault strike; return what came after."""
    subject = f"skerry.{RUN}.contrib.0.0.learner-1"
    for number in range(4):
        await ground.bus.publish(subject, bytes([number]) * 8, msg_id=str(number))
    async with injected(ground, kind, 1.0) as proof:
        assert "4 stored" in await proof()
    stream = f"SKERRY_{RUN}_CONTRIB_0"
    found = [await ground.bus.get(stream, sequence) for sequence in range(5, 9)]
    return [record.payload for record in found if record is not None]


SENT = [bytes([number]) * 8 for number in range(4)]
REPEATED = {
    Kind.DUPLICATE: lambda came: set(came) <= set(SENT),
    Kind.REORDER: lambda came: came == SENT[::-1],
    Kind.CORRUPT: lambda came: not set(came) & set(SENT),
}


@pytest.mark.parametrize("kind", REPEATED)
async def test_messages_come_again_as_they_were_newest_first_or_damaged(
    tmp_path: Path, kind: Kind
) -> None:
    async with site(tmp_path) as held:
        assert REPEATED[kind](await corrupted(held.ground, kind))


async def test_a_log_without_contributions_has_nothing_to_repeat(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(messages, "PATIENCE_S", 0.01)
    async with site(tmp_path) as held:
        with pytest.raises(NotFired, match="no contribution of learner-1"):
            await injected(held.ground, Kind.DUPLICATE, 0.5).__aenter__()


async def test_a_learner_that_has_just_begun_is_struck_at_its_first_contribution(
    tmp_path: Path,
) -> None:
    async with site(tmp_path) as held:
        fault = injected(held.ground, Kind.DUPLICATE, 0.5)
        root = f"skerry.{RUN}.contrib.0"
        async with asyncio.timeout(10), TaskGroup() as group:
            begun = group.create_task(fault.__aenter__())
            for subject in ("0.learner-2", "start.learner-1", "0.learner-1"):
                await asyncio.sleep(0)
                await held.ground.bus.publish(f"{root}.{subject}", subject.encode())
        assert await begun.result()() == "1 stored, from sequence 4 of CONTRIB_0"
        copy = await held.ground.bus.get(f"SKERRY_{RUN}_CONTRIB_0", 4)
        assert copy is not None
        assert copy.payload == b"0.learner-1"
