"""Partitions that lose packets: real namespaces and cables, which only root can make."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from skerry.cli.cluster import namespaces
from skerry.cli.cluster.faults import FaultControl
from skerry_tools.chaos import plan as plans
from skerry_tools.chaos.healing import Healing, Undone, undo
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind
from tests.support.local_cluster import chaos, cluster, pids
from tests.support.processes import Watched, command, until

pytestmark = [
    pytest.mark.fault,
    pytest.mark.skipif(bool(namespaces.unable()), reason=f"chaos.netns: {namespaces.unable()}"),
]

SILENT = 2
"""A seed by which no partition ends connections."""
TALKER = """
import socket, sys
with socket.create_connection((sys.argv[1], int(sys.argv[2]))) as near:
    while data := near.recv(100):
        near.sendall(data)
"""


async def test_a_cut_cable_loses_packets_and_delivers_what_was_sent_once_reconnected(
    tmp_path: Path,
) -> None:
    async with asyncio.timeout(60):
        with namespaces.wired(tmp_path, ["a"]) as held:
            wire = held["a"]
            come: asyncio.Queue[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = asyncio.Queue()
            server = await asyncio.start_server(lambda *ends: come.put_nowait(ends), wire.outer, 0)
            port = server.sockets[0].getsockname()[1]
            words = (*wire.entering, sys.executable, "-c", TALKER, wire.outer, str(port))
            talker = await asyncio.create_subprocess_exec(*words)
            reader, writer = await come.get()

            writer.write(b"before")
            assert await reader.readexactly(6) == b"before"
            await namespaces.cut(wire)
            writer.write(b"during")
            while not await namespaces.lost(wire):  # noqa: ASYNC110 - the kernel sends no event
                await asyncio.sleep(0.01)
            await asyncio.gather(
                *(namespaces.reconnect(wire) for _ in range(8))
            )  # as two healers do
            assert await reader.readexactly(6) == b"during"

            writer.close()
            assert await talker.wait() == 0
            server.close()


async def test_a_cable_that_a_killed_drill_left_cut_is_healed_and_reported(tmp_path: Path) -> None:
    with namespaces.wired(tmp_path, ["a", "b"]) as held:
        assert await undo(tmp_path) == Healing()
        await namespaces.cut(held["a"])
        assert (await undo(tmp_path)).undone == [Undone("network", "a")]
        assert await undo(tmp_path) == Healing()


async def test_nothing_is_left_of_a_namespace(tmp_path: Path) -> None:
    with namespaces.wired(tmp_path, ["a", "b"]) as held:
        assert namespaces.read(tmp_path) == held
        assert all((namespaces.SPACES / wire.space).exists() for wire in held.values())
        devices = {wire.device for wire in held.values()}
        assert devices <= _devices()
        await namespaces.cut(held["a"])
    assert namespaces.read(tmp_path) == {}
    assert not any((namespaces.SPACES / wire.space).exists() for wire in held.values())
    assert not devices & _devices()
    await namespaces.reconnect(held["a"])


def test_namespaces_of_a_killed_cluster_are_removed_by_the_next(tmp_path: Path) -> None:
    with contextlib.ExitStack() as killed:
        old = killed.enter_context(namespaces.wired(tmp_path, ["a", "b"]))
        killed.pop_all()  # as after SIGKILL
    with namespaces.wired(tmp_path, ["a"]) as held:
        assert held["a"].space == old["a"].space
        assert not (namespaces.SPACES / old["b"].space).exists()
    with namespaces.wired(tmp_path, ["a"]) as held:
        namespaces.sweep(tmp_path)
        assert namespaces.read(tmp_path) == {}
        assert not (namespaces.SPACES / held["a"].space).exists()


@pytest.mark.parametrize("healed", [True, False])
async def test_a_learner_that_the_page_cut_off_is_back_once_healed_or_after_its_time(
    tmp_path: Path, watched: Watched, healed: bool
) -> None:
    order = {"op": "fault", "name": "learner-1", "fault": "partition"}
    learner = command(tmp_path, "learner-1", kind="learner")
    with namespaces.wired(tmp_path, ["learner-1"]) as held:
        async with watched.running([learner]):
            control = FaultControl(watched.supervisor, wires=held)
            await control.answer({**order, "duration_s": 300 if healed else 0.5})
            assert _is_cut(held["learner-1"])
            if healed:
                await control.answer({"op": "heal", "name": "learner-1"})
            else:
                await until(lambda: not control._active)
            assert not _is_cut(held["learner-1"])


@pytest.mark.drill
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
        verdict, said = chaos(tmp_path, "netns", "--plan", str(plan), "--quiet-s", "2")
        inside = {name: _net(pid) for name, pid in pids(tmp_path, "netns").items()}
    alone = {name for name, net in inside.items() if list(inside.values()).count(net) == 1}
    assert alone == {"learner-1", "learner-2", "syncer", "checkpointer", "evaluator"}
    assert [fault["proof"].split()[1:] for fault in verdict["faults"]] == 3 * [["packets", "lost"]]
    assert all(check["ok"] for check in verdict["checks"]), (
        f"{json.dumps(verdict, indent=1)}\n{said}"
    )


def _is_cut(wire: namespaces.Wire) -> bool:
    done = subprocess.run(
        ["tc", "qdisc", "show", "dev", wire.device], capture_output=True, check=True
    )
    return b"blackhole" in done.stdout


def _net(pid: int) -> str:
    return str(Path(f"/proc/{pid}/ns/net").readlink())


def _devices() -> set[str]:
    done = subprocess.run(["ip", "-j", "link"], capture_output=True, check=True)
    return {link["ifname"] for link in json.loads(done.stdout)}
