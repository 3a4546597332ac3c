"""``skerry ledger verify`` and ``skerry replay`` on a real broker: exit codes and sentences."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path

import nats
import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry.algorithm.fragments import gather
from skerry.errors import BrokerUnavailable, ConfigError
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import Commit
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.store.kinds.s3 import S3Store
from skerry_checkpointer.service import Checkpointer
from skerry_tools.audit.command import parameters, refuse_policy
from skerry_tools.audit.survey import ReplayMoment, parse
from skerry_tools.audit.whatif import WhatIfPolicy
from tests.support.audited import CONFIG, PLAN, WHOLE, WINDOW_BYTES, create, train
from tests.support.nats_server import NatsServer
from tests.support.s3_server import BUCKET, S3Server

REAL = pytest.mark.nats
NS = 10**9


async def trained(
    server: NatsServer,
    run: str,
    versions: int = 4,
    *,
    begins: bool = True,
    config: RunConfig = CONFIG,
) -> list[tuple[int, Commit]]:
    async with NatsBus(server.url, name="test") as bus:
        if begins:
            await create(bus, run, config)
        return await train(bus, run, versions)


async def skerry(server: NatsServer, run: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skerry.cli.main", *words, "--nats", server.url, "--run", run]
    return await asyncio.to_thread(
        subprocess.run, command, capture_output=True, text=True, check=False
    )


async def drop_second_version(
    server: NatsServer, run: str, commits: list[tuple[int, Commit]]
) -> None:
    """Have the window lose all contributions to the second versions."""
    lost = max(i.sequence_last for _, c in commits if c.version == 2 for i in c.consumed)
    client = await nats.connect(server.url)
    await client.jetstream().purge_stream(Subjects(run).shard(0).stream("CONTRIB"), seq=lost + 1)
    await client.close()


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


@pytest.mark.drill
@REAL
async def test_whole_log_verifies_and_rebuilds_and_asks_what_if(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    commits = await trained(shared_nats, run_id)
    done = await skerry(shared_nats, run_id, "ledger", "verify", "--replay")
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The log of run {run_id} holds" in done.stdout
    assert "of 16.8 MB of contributions" in done.stdout
    assert "Replay: every version, from genesis." in done.stdout

    done = await skerry(shared_nats, run_id, "ledger", "verify", "--replay", "--json")
    told = json.loads(done.stdout)
    assert (done.returncode, told["ok"], told["violations"]) == (0, True, [])
    assert [row["learner"] for row in told["learners"]] == ["a", "b"]
    assert all(row["starts"] == {"new": 1} for row in told["learners"])
    assert told["survey"]["window"]["window_bytes"] == WINDOW_BYTES
    assert told["replayed"]["ok"]

    out = tmp_path / "then.safetensors"
    done = await skerry(shared_nats, run_id, "replay", "--to", "v3", "--out", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    tensors = load_file(out)
    leaves = [np.asarray(tensors[leaf.name]) for leaf in PLAN.leaves]
    for fragment in PLAN.fragments:
        (then,) = [c for _, c in commits if (c.fragment, c.version) == (fragment.index, 3)]
        assert vector_digest(gather(fragment, leaves)) == then.master_digest

    words = ("replay", "--outer", "direct", "--max-staleness", "1")
    done = await skerry(shared_nats, run_id, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "learners that had seen another global state would have sent others" in done.stdout
    assert "Drift over all fragments:" in done.stdout
    told = json.loads((await skerry(shared_nats, run_id, *words, "--json")).stdout)
    assert told["drift"]["distance"] > 0


@REAL
async def test_a_fork_is_a_run_of_its_own(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    """What it writes would count as the newest state of a run that is older."""
    older, where = run_id + "-older", f"store.path={tmp_path}"
    for run in (older, run_id):
        await trained(shared_nats, run, 1)
    fork = ("fork", "--at", "v1", "--set", where, "--as")
    assert (await skerry(shared_nats, older, *fork, "new")).returncode == 0
    (tmp_path / "new").rename(tmp_path / older)
    for taken in (run_id, older):
        done = await skerry(shared_nats, run_id, *fork, taken)
        assert (done.returncode, done.stdout) == (2, ""), taken
        assert "give it another id with --as" in done.stderr


@REAL
async def test_deleted_message_is_exit_code_five_and_names_what_is_missing(
    shared_nats: NatsServer, run_id: str
) -> None:
    commits = await trained(shared_nats, run_id)
    sequence, gone = next((s, c) for s, c in commits if (c.fragment, c.version) == (1, 3))
    await delete(shared_nats, run_id, sequence)
    done = await skerry(shared_nats, run_id, "ledger", "verify")
    assert done.returncode == 5
    assert f"Ledger record {sequence} is missing" in done.stderr
    assert f"Fragment 1, version {gone.version + 1}: came after version 2" in done.stdout


@pytest.mark.drill
@REAL
async def test_what_was_forged_and_what_the_window_has_dropped_are_told(
    shared_nats: NatsServer, run_id: str, tmp_path: Path
) -> None:
    commits = await trained(shared_nats, run_id)
    await drop_second_version(shared_nats, run_id, commits)
    out = tmp_path / "params.safetensors"
    done = await skerry(shared_nats, run_id, "replay", "--out", str(out))
    assert done.returncode == 4
    assert "Name a checkpoint of version 2 or newer with --from" in done.stderr
    assert not out.exists()

    _, forged = commits[-1]
    async with NatsBus(shared_nats.url, name="forger") as bus:
        await bus.publish(Subjects(run_id).commit(forged.fragment), encode(forged))
    done = await skerry(shared_nats, run_id, "ledger", "verify")
    assert done.returncode == 5
    assert f"Fragment {forged.fragment}, version {forged.version}" in done.stderr

    done = await skerry(shared_nats, "nothing", "ledger", "verify")
    assert done.returncode == 2
    assert "There is no run 'nothing'" in done.stderr


@pytest.mark.drill
@REAL
async def test_replay_begins_at_a_checkpoint_in_s3_as_the_settings_reach_it(
    nats_server: NatsServer, s3_server: S3Server, run_id: str
) -> None:
    commits = await trained(nats_server, run_id, 3, config=WHOLE)
    store = S3Store(f"s3://{BUCKET}/replay/{run_id}", s3_server.access())
    async with NatsBus(nats_server.url) as bus:
        record = await ledger.read_run(bus, run_id)
        written = await Checkpointer.of(bus, record, store).save()
    assert written is not None
    await trained(nats_server, run_id, 5, begins=False)
    await drop_second_version(nats_server, run_id, commits)

    async def replayed(**access: str) -> subprocess.CompletedProcess[str]:
        keys = {"credentials": s3_server.credentials, "profile": "writer", **access}
        sets = (word for k, v in keys.items() for word in ("--set", f"store.{k}={v}"))
        words = ("--from", store.where(written.name), "--json", *sets)
        return await skerry(nats_server, run_id, "replay", *words)

    done = await replayed(endpoint=s3_server.endpoint)
    assert done.returncode == 0, done.stdout + done.stderr
    told = json.loads(done.stdout)
    assert told["ok"]
    assert all(f["base"] > 1 for f in told["fragments"])
    assert any(f["reached"] > f["base"] for f in told["fragments"])

    done = await replayed(endpoint="http://127.0.0.1:1", timeout_s="1")
    assert done.returncode != 0
    assert "does not answer" in done.stderr, "not that there is no checkpoint"


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("v17", ReplayMoment(version=17)),
        ("seq:1234", ReplayMoment(sequence=1234)),
        ("2026-09-21T14:13:20Z", ReplayMoment(at_ns=1_790_000_000 * NS)),
        ("2026-09-21T14:13:20", ReplayMoment(at_ns=1_790_000_000 * NS)),
        ("2026-09-21T16:13:20+02:00", ReplayMoment(at_ns=1_790_000_000 * NS)),
    ],
)
def test_moments_are_read_in_every_form(text: str, moment: ReplayMoment) -> None:
    assert parse(text) == moment


@pytest.mark.parametrize("text", ["17", "f3", "v", "v" + "9" * 5000, "seq:", "-5", "soon", ""])
def test_what_is_no_moment_is_refused_with_the_forms(text: str) -> None:
    with pytest.raises(ConfigError, match="seq:1234"):
        parse(text)


def test_a_broker_that_goes_away_is_not_taken_for_a_file_that_cannot_be_written(
    tmp_path: Path,
) -> None:
    out, msg = tmp_path / "params.safetensors", "Nobody answers."
    with pytest.raises(BrokerUnavailable, match=msg), parameters(out, PLAN, {}):
        raise BrokerUnavailable(msg)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "policy", [WhatIfPolicy(merge="median"), WhatIfPolicy(staleness_discount=0.0)]
)
def test_policy_that_cannot_be_is_refused(policy: WhatIfPolicy) -> None:
    with pytest.raises(ConfigError):
        refuse_policy(policy)
