"""``skerry replay`` on a real broker: any moment again, and what if."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import nats
import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry.algorithm.fragments import LeafSpec, gather, plan
from skerry.errors import ConfigError
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import Commit
from skerry.protocol.subjects import Subjects
from skerry.settings.models import LogConfig, OuterConfig, RunConfig, SyncConfig
from skerry.store.kinds.s3 import S3Store
from skerry_checkpointer.service import Checkpointer
from skerry_syncer.service import load_kernels, stand_by
from skerry_tools.audit.command_replay import policy_of
from skerry_tools.audit.moment import ReplayMoment, parse
from tests.support.builders import run_record
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer
from tests.support.s3_server import BUCKET, S3Server

WINDOW_BYTES = 16 * 1024**2
PLAN = plan([LeafSpec("embed", (30, 64), embedding=True), LeafSpec("w", (20, 64))], 2)
CONFIG = RunConfig(
    sync=SyncConfig(fragments=2, h_steps=8, merge="rda", chunk_bytes=4096),
    outer=OuterConfig(preset="nesterov"),
    log=LogConfig(window_bytes=WINDOW_BYTES),
)
NOW_NS = 1_790_000_000 * 10**9


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


@pytest.mark.nats
async def test_parameters_of_a_version_are_written_bit_by_bit(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    commits = await train(shared_nats, run_id)
    out = tmp_path / "then.safetensors"
    done = await skerry(shared_nats, run_id, "replay", "--to", "v3", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    tensors = load_file(out)
    leaves = [np.asarray(tensors[leaf.name]) for leaf in PLAN.leaves]
    for fragment in PLAN.fragments:
        (then,) = [c for _, c in commits if (c.fragment, c.version) == (fragment.index, 3)]
        assert vector_digest(gather(fragment, leaves)) == then.master_digest
    assert "Window:" in done.stdout


@pytest.mark.nats
async def test_what_if_says_how_far_it_drifts_and_what_it_assumes(
    shared_nats: NatsServer, run_id: str
) -> None:
    await train(shared_nats, run_id)
    words = ("replay", "--outer", "direct", "--quorum", "2")
    done = await skerry(shared_nats, run_id, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learners that had seen another global state would have sent others" in done.stdout
    assert "Quorum: rounds close at the arrival of the K-th answer" in done.stdout
    assert "Drift over all fragments:" in done.stdout
    told = json.loads((await skerry(shared_nats, run_id, *words, "--json")).stdout)
    assert told["drift"]["distance"] > 0
    assert told["fragments"][0]["curve"]["points"][0]["version"] == 2


@pytest.mark.nats
async def test_what_the_window_has_dropped_is_told_and_nothing_is_written(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    commits = await train(shared_nats, run_id)
    lost = max(i.sequence_last for _, c in commits if c.version == 2 for i in c.consumed)
    client = await nats.connect(shared_nats.url)
    stream = Subjects(run_id).stream("CONTRIB")
    await client.jetstream().purge_stream(stream, seq=lost + 1)
    await client.close()
    out = tmp_path / "params.safetensors"
    done = await skerry(shared_nats, run_id, "replay", "--out", str(out))
    assert done.returncode == 4
    assert "name a checkpoint of version 2 or newer with --from" in done.stderr
    assert "log.window_bytes of about" in done.stderr
    assert not out.exists()


@pytest.mark.drill
@pytest.mark.nats
async def test_checkpoints_in_s3_are_where_a_replay_begins_as_the_settings_reach_them(
    nats_server: NatsServer, s3_server: S3Server, run_id: str
) -> None:
    commits = await train(nats_server, run_id, 3)
    url = f"s3://{BUCKET}/replay"
    store = S3Store(f"{url}/{run_id}", s3_server.access())
    async with NatsBus(nats_server.url) as bus:
        record = await ledger.read_run(bus, run_id)
        written = await Checkpointer.of(bus, record, store).save()
    assert written is not None
    await train(nats_server, run_id, 5)
    lost = max(i.sequence_last for _, c in commits if c.version == 2 for i in c.consumed)
    client = await nats.connect(nats_server.url)
    stream = Subjects(run_id).stream("CONTRIB")
    await client.jetstream().purge_stream(stream, seq=lost + 1)
    await client.close()

    keys = f"store.credentials={s3_server.credentials}", "store.profile=writer"
    access = (*keys, f"store.endpoint={s3_server.endpoint}")
    for words, given in (
        ((), (*access, f"store.url={url}")),
        ((), access),  # the ledger says where
        (("--from", store.where(written.name)), access),
    ):
        sets = (word for one in given for word in ("--set", one))
        done = await skerry(nats_server, run_id, "replay", *words, "--json", *sets)
        assert done.returncode == 0, done.stdout + done.stderr
        told = json.loads(done.stdout)
        assert told["ok"]
        assert all(f["base"] > 1 for f in told["fragments"])
        assert any(f["reached"] > f["base"] for f in told["fragments"])

    away = (*keys, "store.endpoint=http://127.0.0.1:1", "store.timeout_s=1")
    sets = (word for one in away for word in ("--set", one))
    done = await skerry(nats_server, run_id, "replay", *sets)
    assert done.returncode != 0
    assert "does not answer" in done.stderr, "not that there is no checkpoint"


@pytest.mark.nats
async def test_moment_that_is_none_is_exit_code_two(shared_nats: NatsServer, run_id: str) -> None:
    await train(shared_nats, run_id, 1)
    done = await skerry(shared_nats, run_id, "replay", "--to", "yesterday")
    assert done.returncode == 2
    assert "use v17" in done.stderr


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("v17", ReplayMoment(version=17)),
        ("f3@17", ReplayMoment(version=17, fragment=3)),
        ("f3@v17", ReplayMoment(version=17, fragment=3)),
        ("seq:1234", ReplayMoment(sequence=1234)),
        ("-5m", ReplayMoment(at_ns=NOW_NS - 300 * 10**9)),
        ("-1.5s", ReplayMoment(at_ns=NOW_NS - 1_500_000_000)),
        ("2026-09-21T14:13:20Z", ReplayMoment(at_ns=NOW_NS)),
        ("2026-09-21T14:13:20", ReplayMoment(at_ns=NOW_NS)),
        ("2026-09-21T16:13:20+02:00", ReplayMoment(at_ns=NOW_NS)),
    ],
)
def test_moments_are_read_in_every_form(text: str, moment: ReplayMoment) -> None:
    assert parse(text, NOW_NS) == moment


@pytest.mark.parametrize("text", ["17", "f3", "v", "seq:", "-5", "soon", ""])
def test_what_is_no_moment_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="f3@17"):
        parse(text, NOW_NS)


def policy(**given: object) -> object:
    blank = dict.fromkeys(
        (
            "merge",
            "outer",
            "outer_lr",
            "outer_momentum",
            "quorum",
            "max_staleness",
            "staleness_discount",
        )
    )
    return policy_of(**{**blank, **given})  # type: ignore[arg-type]


def test_no_option_is_no_what_if() -> None:
    assert policy() is None


@pytest.mark.parametrize("given", [{"merge": "median"}, {"staleness_discount": 0.0}])
def test_policy_that_cannot_be_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(ConfigError):
        policy(**given)
