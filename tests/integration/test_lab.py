"""The lab commits what a real cluster commits; and its command, as a person starts it."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections import defaultdict
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from skerry.algorithm.fragments import Plan
from skerry.log import ledger, place, run_records
from skerry.log.base import Bus, Record
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.protocol.chunks import unseal
from skerry.protocol.messages import Commit, InnerState, Round, RunRecord
from skerry.protocol.subjects import Subjects
from skerry.settings.models import (
    DataConfig,
    LivenessConfig,
    ModelConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
)
from skerry.tasks import TaskGroup
from skerry_tools.lab.lab import RUN, Lab
from skerry_tools.lab.scenario import Judging, LabScenario
from tests.support.builders import pulse
from tests.support.cluster import Cluster
from tests.support.labs import records
from tests.support.nats_server import NatsServer

SUBJECTS = Subjects(RUN)
STEP_S = 0.01
PULSE_S = 0.05
TIMEOUT_S = 60.0

Key = tuple[int, int]
"""Fragment and version."""
Digests = tuple[int, int]
"""Of the parameters that learners read, and of the f32 master."""


@dataclass(frozen=True, slots=True)
class Tape:
    """A lab run's record, plan, digests, and the chunks that each learner sent for each commit."""

    record: RunRecord
    plan: Plan
    digests: dict[Key, Digests]
    sent: dict[str, dict[Key, list[Record]]]


def taped(scenario: LabScenario) -> Tape:
    """Run a scenario in the lab and keep what its commits were made of."""
    lab = Lab(scenario)
    lab.run()
    plan = lab.work.plan
    chunks = defaultdict[tuple[str, int, int, int], list[Record]](list)
    for record in lab.broker.streams[SUBJECTS.shard(0).stream("CONTRIB")].records.values():
        if ".start." not in record.subject:
            head, _ = unseal(record.payload, run=RUN, plan=plan)
            chunks[head.sender, head.incarnation, head.fragment, head.identity].append(record)
    tape = Tape(records(lab, RunRecord)[0], plan, {}, defaultdict(dict))
    for commit in records(lab, Commit):
        key = commit.fragment, commit.version
        tape.digests[key] = commit.params_digest, commit.master_digest
        for merged in commit.consumed:
            mark = merged.learner, merged.incarnation, commit.fragment, merged.identity
            tape.sent[merged.learner][key] = chunks[mark]
    return tape


async def play(bus: Bus, tape: Tape, name: str) -> None:
    """Be a learner that pulses, and answers each round with what is on the tape; for ever."""
    taken, *_ = await place.take_place(
        bus, RUN, tape.plan, name, host="tape", now_ns=time.time_ns()
    )
    await place.settle_in(bus, replace(taken, inner=InnerState.NEW))
    sent = tape.sent[name]
    for fragment in tape.plan.fragments:
        await _send(bus, sent.get((fragment.index, 1), []))
    async with TaskGroup() as group:
        group.create_task(_pulse(bus, name))
        rounds = run_records.follow(bus, RUN, Round, tape.plan.digest)
        async with aclosing(rounds):
            async for opened in rounds:
                await _send(bus, sent.get((opened.fragment, opened.version), []))


async def _send(bus: Bus, chunks: list[Record]) -> None:
    for chunk in chunks:
        await bus.publish(chunk.subject, chunk.payload, msg_id=f"tape/{chunk.sequence}")


async def _pulse(bus: Bus, name: str) -> None:
    began_s = time.monotonic()
    while True:
        steps = int((time.monotonic() - began_s) / STEP_S)
        said = pulse(name, steps, run=RUN, sent_ns=time.time_ns(), step_time_s=STEP_S)
        await run_records.publish(bus, said)
        await asyncio.sleep(PULSE_S)


async def committed(bus: Bus, wanted: int) -> dict[Key, Digests]:
    """Return what a run's ledger says once it has so many commits."""
    found: dict[Key, Digests] = {}
    commits = ledger.follow_commits(bus, RUN)
    async with asyncio.timeout(TIMEOUT_S), aclosing(commits):
        async for _, commit in commits:
            key = commit.fragment, commit.version
            found[key] = commit.params_digest, commit.master_digest
            if len(found) == wanted:
                break
    return found


def scenario(text: Path, sync: dict[str, object], outer: OuterConfig) -> LabScenario:
    """Return a run of two learners that wait for each other in every round."""
    together: dict[str, object] = {
        "learners": 2,
        "quorum": 2,
        "fragments": 2,
        "h_steps": 8,
        "chunk_bytes": 4096,
    }
    config = RunConfig(
        model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
        data=DataConfig(source="text", paths=(str(text),), batch=2, seq_len=16, streams=2),
        train=TrainConfig(steps=40),
        sync=SyncConfig.model_validate(together | sync),
        outer=outer,
        liveness=LivenessConfig(pulse_s=0.2),
    )
    return LabScenario(run=config, judging=Judging(points=1, batches=1, final_batches=1, batch=4))


@pytest.mark.drill
@pytest.mark.nats
@pytest.mark.parametrize(
    ("sync", "outer"),
    [
        (
            {"contribution_scheme": "f32", "global_scheme": "f32", "merge": "average"},
            OuterConfig(preset="nesterov"),
        ),
        ({"contribution_scheme": "int4", "merge": "rda"}, OuterConfig()),
    ],
    ids=["f32", "int4"],
)
async def test_the_lab_commits_what_a_real_cluster_commits_from_the_same_contributions(
    nats_server: NatsServer,
    tmp_path: Path,
    jax_cache: Path,
    corpus: Path,
    sync: dict[str, object],
    outer: OuterConfig,
) -> None:
    tape = await asyncio.to_thread(taped, scenario(corpus, sync, outer))
    names = sorted(tape.sent)
    assert len(names) == 2
    later = [key for key in tape.digests if key[1] > 1]
    assert len(later) >= 8
    assert all(key in tape.sent[name] for key in later for name in names)
    empty = tmp_path / "empty.toml"
    empty.touch()
    async with (
        Cluster(nats_server.url, RUN, tmp_path, empty, jax_cache) as cluster,
        NatsBus(nats_server.url, name="test") as bus,
        NatsBus(nats_server.url, name=names[0]) as first,
        NatsBus(nats_server.url, name=names[1]) as second,
    ):
        log = json.loads(tape.record.config_json)["log"]
        await bus.declare(specs(RUN, **{name: log[name] for name in log}))
        await ledger.create_run(bus, tape.record)
        await cluster.start("syncer", "s")
        async with TaskGroup() as group:
            players = [
                group.create_task(play(first, tape, names[0])),
                group.create_task(play(second, tape, names[1])),
            ]
            real = await committed(bus, len(tape.digests))
            for player in players:
                player.cancel()
    assert real == tape.digests


TINY = """
model = {{layers = 1, d_model = 16, heads = 2, kv_heads = 1, d_ff = 24}}
data = {{source = "text", paths = ["{text}"], seq_len = 16, batch = 2}}
train = {{steps = {steps}}}
sync = {{fragments = 2, h_steps = 8}}
judging = {{points = 2, batches = 1, final_batches = 1}}
"""


COMMAND = (sys.executable, "-m", "skerry.cli.main", "lab")


def environment(cache: Path) -> dict[str, str]:
    """Return ours with what the tests have compiled, where a command would begin a new cache."""
    return os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache), "NUMBA_CACHE_DIR": ""}


@pytest.mark.drill
def test_the_command_prints_one_result_for_machines(
    corpus: Path, tmp_path: Path, jax_cache: Path
) -> None:
    file = tmp_path / "tiny.toml"
    file.write_text(TINY.format(text=corpus, steps=24))
    done = subprocess.run(
        [*COMMAND, str(file), "--json"],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
        env=environment(jax_cache),
    )
    result = json.loads(done.stdout)
    assert result["name"] == "tiny"
    assert result["steps"] >= 24
    assert "Error" not in done.stderr
    assert "Warning" not in done.stderr


@pytest.mark.drill
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_the_command_quickly_and_without_a_word(
    corpus: Path, tmp_path: Path, jax_cache: Path
) -> None:
    file = tmp_path / "long.toml"
    file.write_text(TINY.format(text=corpus, steps=1_000_000))
    process = subprocess.Popen(
        [*COMMAND, str(file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env=environment(jax_cache),
    )
    assert process.stderr is not None
    first = process.stderr.readline()
    assert first.startswith("step ")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert all(line.startswith("step ") for line in err.splitlines())
