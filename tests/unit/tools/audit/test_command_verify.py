"""``skerry ledger verify`` on a real broker: exit codes and sentences."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager

import nats
import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.protocol.messages import Commit
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.models import DataConfig, LogConfig, OuterConfig, RunConfig, SyncConfig
from skerry_syncer.service import load_kernels, stand_by
from tests.support.builders import run_record
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats

WINDOW_BYTES = 16 * 1024**2
PLAN = plan([LeafSpec("embed", (30, 64), embedding=True), LeafSpec("w", (20, 64))], 2)
CONFIG = RunConfig(
    data=DataConfig(seq_len=100, batch=1),  # what a fake learner's step stands for
    sync=SyncConfig(fragments=2, h_steps=8, merge="rda", chunk_bytes=4096),
    outer=OuterConfig(preset="nesterov"),
    log=LogConfig(window_bytes=WINDOW_BYTES),
)


@asynccontextmanager
async def background(*coroutines: object) -> AsyncGenerator[None]:
    tasks = [asyncio.ensure_future(c) for c in coroutines]  # type: ignore[call-overload]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def train(server: NatsServer, run: str, versions: int = 4) -> list[tuple[int, Commit]]:
    """Let the real syncer and two fake learners make a history; return its commits."""
    found: list[tuple[int, Commit]] = []
    newest: dict[int, int] = {}
    await asyncio.to_thread(load_kernels)
    async with NatsBus(server.url, name="test") as bus:
        await bus.declare(specs(run, window_bytes=WINDOW_BYTES))
        await ledger.create_run(bus, run_record(run, PLAN, CONFIG.model_dump_json()))
        learners = [FakeLearner(bus, run, PLAN, name, step_s=0.005).train() for name in ("a", "b")]
        commits = ledger.follow_commits(bus, run)
        async with background(stand_by(bus, run, "s"), *learners), aclosing(commits):
            async with asyncio.timeout(180):
                async for sequence, commit in commits:
                    found.append((sequence, commit))
                    newest[commit.fragment] = commit.version
                    if len(newest) == 2 and min(newest.values()) >= versions:
                        break
    return found


async def skerry(server: NatsServer, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skerry.cli.main", *words, "--nats", server.url, "--run", run]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )


async def delete(server: NatsServer, run: str, sequence: int) -> None:
    """Delete a message of the ledger, in a copy of the stream: the real one does not allow it."""
    name = Subjects(run).stream("LEDGER")
    async with NatsBus(server.url, name="thief") as bus:
        (info,) = [s for s in await bus.streams() if s.name == name]
        records = [await bus.get(name, s) for s in range(1, info.last_seq + 1)]
    client = await nats.connect(server.url)
    stream = client.jetstream()
    await stream.delete_stream(name)
    await stream.add_stream(name=name, subjects=list(info.spec.subjects), allow_direct=True)
    for record in records:
        assert record is not None
        await stream.publish(record.subject, record.payload)
    await stream.delete_msg(name, sequence)
    await client.close()


async def test_whole_log_exits_with_zero_and_tells_what_it_holds(
    shared_nats: NatsServer, run_id: str
) -> None:
    await train(shared_nats, run_id)
    done = await skerry(shared_nats, run_id, "ledger", "verify", "--replay")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The log of run {run_id} holds" in done.stdout
    assert "of 16.8 MB of contributions" in done.stdout
    assert "Replay: every version, from genesis." in done.stdout


async def test_json_tells_learners_fragments_and_window(
    shared_nats: NatsServer, run_id: str
) -> None:
    await train(shared_nats, run_id)
    done = await skerry(shared_nats, run_id, "ledger", "verify", "--replay", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], told["violations"]) == (0, True, [])
    assert [row["learner"] for row in told["learners"]] == ["a", "b"]
    assert all(row["starts"] == {"new": 1} for row in told["learners"])
    assert told["window"]["window_bytes"] == WINDOW_BYTES
    assert told["replayed"]["ok"]


async def test_deleted_message_is_exit_code_five_and_names_what_is_missing(
    shared_nats: NatsServer, run_id: str
) -> None:
    commits = await train(shared_nats, run_id)
    sequence, gone = next((s, c) for s, c in commits if (c.fragment, c.version) == (1, 3))
    await delete(shared_nats, run_id, sequence)
    done = await skerry(shared_nats, run_id, "ledger", "verify")
    assert done.returncode == 5
    assert f"Ledger record {sequence} is missing" in done.stderr
    assert f"Fragment 1, version {gone.version + 1}: came after version 2" in done.stdout


async def test_forged_commit_is_exit_code_five(shared_nats: NatsServer, run_id: str) -> None:
    commits = await train(shared_nats, run_id)
    _, forged = commits[-1]
    async with NatsBus(shared_nats.url, name="forger") as bus:
        await bus.publish(Subjects(run_id).commit(forged.fragment), encode(forged))
    done = await skerry(shared_nats, run_id, "ledger", "verify")
    assert done.returncode == 5
    assert f"Fragment {forged.fragment}, version {forged.version}" in done.stderr


async def test_run_that_is_not_there_is_exit_code_two(shared_nats: NatsServer) -> None:
    done = await skerry(shared_nats, "nothing", "ledger", "verify")
    assert done.returncode == 2
    assert "There is no run 'nothing'" in done.stderr
