"""Partitions that lose packets: real namespaces and cables, which only root can make."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.cli.cluster import wires
from skerry.cli.cluster.processes import TABLE, Processes
from skerry.log.memory import MemoryBroker
from skerry_health_monitor.web.strikes import Strikes
from skerry_tools.chaos import plan as plans
from skerry_tools.chaos.healing import Healing, Undone, undo
from skerry_tools.chaos.local import LocalGround
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind
from tests.support.local_cluster import chaos, cluster, pids

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(bool(wires.unable()), reason=f"chaos.netns: {wires.unable()}"),
]

SILENT = 2
"""A seed by which no partition ends connections."""
TALKER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as near:
    while data := near.recv(100):
        near.sendall(data)
"""


async def test_a_cut_cable_loses_packets_and_a_mended_one_delivers_what_was_sent(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(60):
        with wires.wired(tmp_path, ["a"]) as held:
            wire = held["a"]
            come: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
            server = await asyncio.start_server(lambda *ends: come.put_nowait(ends), wire.outer, 0)
            port = server.sockets[0].getsockname()[1]
            words = (*wire.entering, sys.executable, "-c", TALKER, wire.outer, str(port))
            talker = await asyncio.create_subprocess_exec(*words)
            reader, writer = await come.get()

            writer.write(b"before")
            assert await reader.readexactly(6) == b"before"
            await wires.cut(wire)
            writer.write(b"during")
            while not await wires.lost(wire):  # noqa: ASYNC110 - the kernel sends no event
                await asyncio.sleep(0.01)
            await asyncio.gather(*(wires.mend(wire) for _ in range(8)))  # as two healers do
            assert await reader.readexactly(6) == b"during"

            writer.close()
            assert await talker.wait() == 0
            server.close()


async def test_a_cable_that_a_killed_drill_left_cut_is_healed_and_told(tmp_path: Path) -> None:
    with wires.wired(tmp_path, ["a", "b"]) as held:
        assert await undo(tmp_path) == Healing()
        await wires.cut(held["a"])
        assert (await undo(tmp_path)).undone == [Undone("network", "a")]
        assert await undo(tmp_path) == Healing()


async def test_nothing_is_left_of_a_namespace(tmp_path: Path) -> None:
    with wires.wired(tmp_path, ["a", "b"]) as held:
        assert wires.read(tmp_path) == held
        assert all((wires.SPACES / wire.space).exists() for wire in held.values())
        devices = {wire.device for wire in held.values()}
        assert devices <= _devices()
        await wires.cut(held["a"])
    assert wires.read(tmp_path) == {}
    assert not any((wires.SPACES / wire.space).exists() for wire in held.values())
    assert not devices & _devices()
    await wires.mend(held["a"])


def test_what_a_killed_cluster_left_behind_is_removed_by_the_next(tmp_path: Path) -> None:
    with contextlib.ExitStack() as killed:
        old = killed.enter_context(wires.wired(tmp_path, ["a", "b"]))
        killed.pop_all()  # as after SIGKILL: nobody cleans up
    with wires.wired(tmp_path, ["a"]) as held:
        assert held["a"].space == old["a"].space
        assert not (wires.SPACES / old["b"].space).exists()
    with wires.wired(tmp_path, ["a"]) as held:
        wires.sweep(tmp_path)
        assert wires.read(tmp_path) == {}
        assert not (wires.SPACES / held["a"].space).exists()


async def test_a_learner_cut_off_from_the_page_is_healed_from_it(tmp_path: Path) -> None:
    table = Processes(tmp_path / TABLE)
    with wires.wired(tmp_path, ["learner-1"]) as held, table.kept():
        table.started("learner-1", "learner", os.getpid())
        strikes = Strikes(LocalGround("run", tmp_path, MemoryBroker().connect()))
        running = asyncio.create_task(strikes.run())
        async with asyncio.timeout(60):
            await strikes.strike("learner-1", "partition", 300)
            assert _is_cut(held["learner-1"])
            await strikes.strike("learner-1", "heal", 1)
            while strikes._held:  # noqa: ASYNC110 - its task ends next
                await asyncio.sleep(0)
        assert not _is_cut(held["learner-1"])
        assert not running.done(), "two healers of one cable are no error"
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


@pytest.mark.nats
@pytest.mark.timeout(600)
def test_a_cluster_in_namespaces_survives_lost_packets(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    faults = (
        Fault(0.0, Kind.PARTITION, "learner:0", 3.0),
        Fault(1.0, Kind.PARTITION, "syncer", 3.0),
        Fault(2.0, Kind.PARTITION, "checkpointer", 3.0),
    )
    plan = tmp_path / "plan.json"
    plans.dump(FaultPlan(SILENT, faults, heal_s=300.0), plan)
    with cluster(tmp_path, "netns", tiny_config, jax_cache, "--set", "chaos.netns=true"):
        told, said = chaos(tmp_path, "netns", "--plan", str(plan), "--quiet-s", "2")
        inside = {name: _net(pid) for name, pid in pids(tmp_path, "netns").items()}
    alone = {name for name, net in inside.items() if list(inside.values()).count(net) == 1}
    assert alone == {"learner-1", "learner-2", "syncer", "checkpointer", "evaluator"}
    assert [fault["proof"].split()[1:] for fault in told["faults"]] == 3 * [["packets", "lost"]]
    assert all(check["ok"] for check in told["checks"]), f"{json.dumps(told, indent=1)}\n{said}"


def _is_cut(wire: wires.Wire) -> bool:
    told = subprocess.run(
        ["tc", "qdisc", "show", "dev", wire.device], capture_output=True, check=True
    )
    return b"blackhole" in told.stdout


def _net(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _devices() -> set[str]:
    told = subprocess.run(["ip", "-j", "link"], capture_output=True, check=True)
    return {link["ifname"] for link in json.loads(told.stdout)}
