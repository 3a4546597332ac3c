"""``skerry checkpoints restore`` into the log that a run of ``skerry up`` left in its folder."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from subprocess import CompletedProcess

import nats
import pytest

from skerry.cli.cluster.cluster import served
from skerry.cli.cluster.folder import RunFolder
from skerry.log.nats.login import NatsOptions, login_of
from skerry.protocol.parts import MASTER
from skerry.protocol.subjects import Subjects
from skerry.service.entry import bus_from
from skerry.settings.loading import load
from skerry.settings.local import NatsSettings
from skerry.settings.models import RunConfig
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from tests.support.log import newest_parts
from tests.support.processes import SKERRY, call
from tests.support.scripted_run import ScriptedRun

pytestmark = pytest.mark.nats
CONFIG = RunConfig.model_validate(
    {
        "sync": {"lease_s": 0.05},
        "liveness": {"pulse_s": 0.01},
        "log": {"window_bytes": 16 * 1024**2},
    }
)
RUN = "main"


@asynccontextmanager
async def serving(folder: RunFolder) -> AsyncGenerator[NatsSettings]:
    """Serve the log of a folder, as the cluster that runs there does."""
    async with served(folder, load(None, [], {}), None) as broker:
        yield broker.nats


async def restore(folder: Path, *words: str, **environ: str) -> CompletedProcess[str]:
    command, env = (*SKERRY, "checkpoints", "restore", *words), os.environ | environ
    return await asyncio.to_thread(call, *command, cwd=folder, env=env)


@pytest.mark.drill
async def test_what_the_log_in_this_folder_lost_is_put_back_without_naming_a_broker(
    tmp_path: Path,
) -> None:
    folder = RunFolder(RUN, tmp_path / ".skerry")
    folder.path.mkdir(parents=True)
    folder.settings.touch()
    async with serving(folder) as given, bus_from(given, "test") as bus:
        scripted = await ScriptedRun.begin(bus, RUN, config=CONFIG)
        await scripted.commit_all(step=1, tokens=10)
        store = LocalStore(tmp_path / "checkpoints" / RUN)
        saved = await Checkpointer.of(bus, scripted.record, store).save()
        assert saved is not None
        assert given.credentials is not None
        login = login_of(NatsOptions(credentials=given.credentials)).name
        client = await nats.connect(
            given.url, nkeys_seed=str(given.credentials), inbox_prefix=f"_INBOX.{login}"
        )
        await client.jetstream().purge_stream(Subjects(RUN).shard(0).stream("STATE"))
        await client.close()
    where = store.where(saved.name)
    away = "nats://127.0.0.1:9"
    named = {"SKERRY_NATS__URL": away, "SKERRY_NATS__CONNECT_TIMEOUT_S": "0.1"}
    elsewhere = await restore(tmp_path, where, SKERRY_RUN=RUN, **named)
    assert "No NATS server answered" in elsewhere.stderr
    done = await restore(tmp_path, where, "--replace", SKERRY_RUN=RUN)
    assert done.returncode == 0, done.stderr
    async with serving(folder) as given, bus_from(given, "test") as bus:
        for fragment in scripted.plan.fragments:
            names = [MASTER]
            found, _ = await newest_parts(bus, RUN, scripted.plan, fragment.index, names)
            assert found.commit.version > 1
