"""Runs of releases before: this one reads, verifies and replays them, and goes on with them."""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest

from skerry.log import ledger
from skerry.log.memory import MemoryBroker
from skerry.log.state import read_manifest
from skerry.protocol.records import plan_of
from skerry.store import checkpoint
from skerry.store.local import LocalStore
from skerry_checkpointer.restore import restore
from skerry_tools.audit.verify import verify
from tests.golden.run import LOG, RUN, RUNS, VERSIONS, restored
from tests.support.audited import train

MORE = VERSIONS + 3


@pytest.fixture(params=sorted(RUNS.glob("*.tar.xz")), ids=lambda path: path.name)
def unpacked(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        if hasattr(tarfile, "data_filter"):  # Python 3.11.4 and newer
            archive.extraction_filter = tarfile.data_filter
        archive.extractall(tmp_path)  # noqa: S202 - it is a file of ours
    return tmp_path


async def test_a_log_of_a_release_replays_bit_by_bit_and_is_gone_on_with(unpacked: Path) -> None:
    bus = restored((unpacked / LOG).read_bytes()).connect()
    read = await verify(bus, RUN, replay=True)
    assert read.violations == ()
    assert read.replayed is not None
    assert read.replayed.whole
    assert min(read.survey.versions.values()) >= VERSIONS

    await train(bus, RUN, MORE)
    after = await verify(bus, RUN, replay=True)
    assert after.violations == ()
    assert min(after.survey.versions.values()) >= MORE
    assert [row.learner for row in after.learners] == ["a", "b"]


async def test_a_checkpoint_of_a_release_verifies_and_is_gone_on_with(unpacked: Path) -> None:
    store = LocalStore(unpacked / "checkpoints")
    (name,) = store.names()
    saved = checkpoint.verify(store, name)
    there = MemoryBroker().connect()
    await restore(there, store.where(name), "further")
    plan = plan_of(await ledger.read_run(there, "further"))
    assert plan.digest == saved.plan_digest
    for kept in saved.state:
        newest = await read_manifest(there, "further", plan, kept.commit.fragment)
        assert newest is not None
        assert newest.commit.params_digest == kept.digest
    await train(there, "further", max(saved.versions) + 2)
