"""A log that lost part of its state: the syncer says what is missing and where it still is."""

from __future__ import annotations

import asyncio
import sys

import pytest

from skerry.bus import ledger
from skerry.bus.nats_bus import NatsBus
from skerry.settings import RunConfig, SyncConfig
from skerry.testing.nats_server import NatsServer
from skerry.testing.scripted_run import ScriptedRun
from skerry.wire.messages import CheckpointRecord, Manifest
from skerry.wire.subjects import Subjects

pytestmark = [pytest.mark.nats]

CONFIG = RunConfig(sync=SyncConfig(fragments=3, lease_s=0.5))


async def syncer_says(server: NatsServer, run: str) -> tuple[int, str]:
    """Run the real syncer to its end; return its exit code and its last line."""
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        "-m",
        "skerry_syncer",
        "--nats",
        server.url,
        "--run",
        run,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    return process.returncode or 0, errors.decode().strip().splitlines()[-1]


async def committed(bus: NatsBus, run: str) -> ScriptedRun:
    """Return a run of three fragments at version 2, of which version 1 is in a checkpoint."""
    scripted = await ScriptedRun.begin(bus, run, config=CONFIG)
    await scripted.commit_all(step=10)
    saved = CheckpointRecord(run, "saved/step-00000010", "d", (1, 1, 1), 10, 1, 1, 1)
    await ledger.record_checkpoint(bus, saved)
    await scripted.commit_all(step=20)
    return scripted


async def purge(bus: NatsBus, run: str, subject: str | None = None) -> None:
    stream = Subjects(run).stream("STATE")
    wanted = {"filter": subject} if subject else {}
    await bus._connection.api(f"STREAM.PURGE.{stream}", wanted)


async def delete(bus: NatsBus, run: str, sequence: int) -> None:
    stream = Subjects(run).stream("STATE")
    await bus._connection.api(f"STREAM.MSG.DELETE.{stream}", {"seq": sequence})


def chunk_of(manifest: Manifest, part: str) -> int:
    return next(p for p in manifest.parts if p.name == part).chunks[0].sequence


async def test_purged_state_is_named_and_never_begun_anew(
    shared_nats: NatsServer, run_id: str
) -> None:
    async with NatsBus(shared_nats.url, name="test") as bus:
        await committed(bus, run_id)
        await purge(bus, run_id)
        code, said = await syncer_says(shared_nats, run_id)
        assert code == 4
        assert said.startswith(f"error: Run {run_id!r} has lost fragment 0 at version 2: ")
        assert "saved/step-00000010 at step 10, holds version 1" in said
        assert await bus.last_each(Subjects(run_id).manifests()) == []


async def test_deleted_manifest_is_named_by_fragment_and_version(
    shared_nats: NatsServer, run_id: str
) -> None:
    async with NatsBus(shared_nats.url, name="test") as bus:
        await committed(bus, run_id)
        await purge(bus, run_id, Subjects(run_id).manifest(1))
        code, said = await syncer_says(shared_nats, run_id)
    assert code == 4
    assert "has lost fragment 1 at version 2: its manifest is not in the log" in said


async def test_deleted_chunk_of_the_master_is_named_with_its_place(
    shared_nats: NatsServer, run_id: str
) -> None:
    async with NatsBus(shared_nats.url, name="test") as bus:
        scripted = await committed(bus, run_id)
        sequence = chunk_of(scripted.manifests[2], "master")
        await delete(bus, run_id, sequence)
        code, said = await syncer_says(shared_nats, run_id)
    assert code == 4
    assert f"fragment 2 at version 2: the chunk of its 'master' at sequence {sequence}" in said
