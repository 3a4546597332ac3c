"""A log that lost part of its state or its history: services say what, and where it still is."""

from __future__ import annotations

import asyncio
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.client.joining import LearnerPlace
from skerry.client.network import open_sync
from skerry.client.telemetry import LearnerIdentity
from skerry.errors import StateLost
from skerry.log import ledger, recovery
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import specs
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig, SyncConfig
from tests.support.builders import checkpoint_record, member, run_record, until
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer
from tests.support.scripted_run import WINDOW_BYTES, ScriptedRun

pytestmark = [pytest.mark.nats]

CONFIG = RunConfig(sync=SyncConfig(fragments=3, lease_s=0.5))


async def says(server: NatsServer, run: str, service: str, *given: str) -> tuple[int, str]:
    """Run a real service to its end; return its exit code and its last line."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", f"skerry_{service}"),
        *("--nats", server.url, "--run", run, *given),
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(120):
        _, errors = await process.communicate()
    return process.returncode or 0, errors.decode().strip().splitlines()[-1]


async def committed(bus: NatsBus, run: str) -> ScriptedRun:
    """Return a run of three fragments at version 2, of which version 1 is in a checkpoint."""
    scripted = await ScriptedRun.begin(bus, run, config=CONFIG)
    await scripted.commit_all(step=10)
    saved = checkpoint_record("saved/step-00000010", run=run, versions=(1, 1, 1), step=10)
    await ledger.record_checkpoint(bus, saved)
    await scripted.commit_all(step=20)
    return scripted


async def lose(bus: NatsBus, run: str, what: str = "PURGE", **given: object) -> None:
    await bus._connection.api(f"STREAM.{what}.{Subjects(run).shard(0).stream('STATE')}", given)


@pytest.mark.parametrize("part", ["manifest", "master"])
async def test_deleted_part_of_the_state_is_named_with_its_place(
    shared_nats: NatsServer, run_id: str, part: str
) -> None:
    async with NatsBus(shared_nats.url, name="test") as bus:
        scripted = await committed(bus, run_id)
        (master,) = (p for p in scripted.manifests[2].parts if p.name == "master")
        place, missing = master.chunks[0].sequence, "its manifest is not in the log"
        if part == "manifest":
            await lose(bus, run_id, filter=Subjects(run_id).shard(0).manifest(2))
        else:
            await lose(bus, run_id, "MSG.DELETE", seq=place)
            missing = f"the chunk of its 'master' at sequence {place}"
        code, said = await says(shared_nats, run_id, "syncer")
    assert code == 4
    assert f"fragment 2 at version 2: {missing}" in said


@pytest.mark.drill
async def test_purged_state_is_named_and_never_recreated(
    shared_nats: NatsServer, run_id: str
) -> None:
    async with NatsBus(shared_nats.url, name="test") as bus:
        await committed(bus, run_id)
        await lose(bus, run_id)
        code, said = await says(shared_nats, run_id, "syncer")
        assert code == 4
        assert said.startswith(f"error: Run {run_id!r} has lost fragment 0 at version 2: ")
        assert "saved/step-00000010 at step 10, holds version 1" in said
        assert await bus.last_each(Subjects(run_id).shard(0).manifest()) == []


@pytest.mark.drill
async def test_state_that_is_purged_under_a_running_syncer_is_named(
    shared_nats: NatsServer, run_id: str
) -> None:
    settings = CONFIG.model_copy(update={"sync": SyncConfig(fragments=1, h_steps=8, lease_s=0.5)})
    cut = plan([LeafSpec("w", (60, 64))], 1)
    async with NatsBus(shared_nats.url, name="test") as bus:
        await bus.declare(specs(run_id, window_bytes=WINDOW_BYTES))
        await ledger.create_run(bus, run_record(run_id, cut, settings.model_dump_json()))
        training = asyncio.ensure_future(FakeLearner(bus, run_id, cut, "l", step_s=0.02).train())
        saying = asyncio.ensure_future(says(shared_nats, run_id, "syncer"))
        async for _, commit in ledger.follow_commits(bus, run_id):
            if commit.version == 3:
                break
        await lose(bus, run_id)
        code, said = await saying
        training.cancel()
    assert code == 4
    assert f"Run {run_id!r} has lost fragment 0 at version" in said
    assert "its manifest is not in the log" in said


@pytest.mark.drill
async def test_an_older_copy_of_the_store_ends_a_learner_that_has_seen_a_newer_one(
    nats_server: NatsServer, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put in place while the learner lives: it follows on, and nothing else tells it."""
    monkeypatch.setattr(recovery, "SETTLED_PAUSE_S", 0.05)
    store, copy = nats_server.store, nats_server.folder / "older"
    async with NatsBus(nats_server.url, name="test", options=NatsOptions(patience_s=30.0)) as bus:
        scripted = await committed(bus, run_id)
        nats_server.stop()
        shutil.copytree(store, copy)
        nats_server.start()
        await scripted.commit_all(step=30)
        learner = LearnerIdentity(run_id, "a", 1)
        parameters: Any = None
        place = LearnerPlace(learner, member("a", 1), TrainingProgress(0, 0, 0, 0), ())
        _, network = open_sync(bus, place, scripted.plan, RunConfig(), parameters)
        receiver = network.receiver
        proving = asyncio.ensure_future(receiver.prove())
        following = asyncio.ensure_future(receiver.manifests())
        await until(lambda: len(receiver.wanted) >= len(scripted.plan.fragments))
        nats_server.kill9()
        shutil.rmtree(store)
        copy.rename(store)
        nats_server.start()
        with pytest.raises(
            StateLost, match=r"fragment \d was at version 3 and is at 2, so an older"
        ):
            await asyncio.wait_for(following, 60)
        proving.cancel()


async def ledger_messages(bus: NatsBus, run: str) -> int:
    """Return how many records the run's ledger holds; 0 where there is no such stream."""
    name = Subjects(run).stream("LEDGER")
    return sum(info.messages for info in await bus.streams() if info.name == name)


async def lose_ledger(bus: NatsBus, run: str, *, emptied: bool) -> None:
    """Delete the ledger's stream, which denies to be purged; ``emptied``: and declare it again."""
    await bus._connection.api(f"STREAM.DELETE.{Subjects(run).stream('LEDGER')}")
    if emptied:
        await bus.declare(specs(run, window_bytes=WINDOW_BYTES))


@pytest.mark.drill
@pytest.mark.parametrize("emptied", [True, False], ids=["purged", "deleted"])
async def test_every_service_names_a_lost_ledger_and_creates_no_run(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, *, emptied: bool
) -> None:
    async with NatsBus(shared_nats.url, name="test") as bus:
        await committed(bus, run_id)
        await lose_ledger(bus, run_id, emptied=emptied)
        told = [
            await says(shared_nats, run_id, "learner", "--name", "a"),
            await says(shared_nats, run_id, "syncer"),
            await says(shared_nats, run_id, "checkpointer", "--set", f"store.path={tmp_path}"),
        ]
        assert await ledger_messages(bus, run_id) == 0
    assert [code for code, _ in told] == [4, 4, 4]
    for _, said in told:
        assert said.startswith(f"error: Run {run_id!r} has lost its record in the ledger, and c")
        assert "commits: fragment 0, every version before 2; fragment 1, every version" in said
        assert "holds fragment 0 at version 2, fragment 1 at version 2, fragment 2 at v" in said
        assert "begin another run from the checkpoint with `skerry up --from CHECKPOINT" in said


@pytest.mark.drill
async def test_a_ledger_without_its_commits_is_named_and_not_continued(
    shared_nats: NatsServer, run_id: str
) -> None:
    async with NatsBus(shared_nats.url, name="test") as bus:
        scripted = await committed(bus, run_id)
        await lose_ledger(bus, run_id, emptied=True)
        await ledger.create_run(bus, scripted.record)  # as a careless hand might
        code, said = await says(shared_nats, run_id, "syncer")
        assert await ledger.last_commits(bus, run_id) == {}
    assert code == 4
    assert "has lost commits that came before those of its manifests: fragment 0, every v" in said
