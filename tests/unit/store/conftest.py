"""A store for a run's checkpoints, and one checkpoint in it."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.log.memory import MemoryBroker
from skerry.settings.models import RunConfig
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from tests.support.scripted_run import ScriptedRun

QUICK = RunConfig.model_validate({"sync": {"lease_s": 0.05}, "liveness": {"pulse_s": 0.01}})
"""A lease that is over soon: a restore listens that long for who works on the run."""


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore(tmp_path / "checkpoints" / "run")


@pytest.fixture
async def saved(store: LocalStore) -> Path:
    """The folder of one checkpoint at step 7 with 70 tokens."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect(), config=QUICK)
    await scripted.commit_all(step=7, tokens=70)
    written = await Checkpointer.of(scripted.bus, scripted.record, store).save()
    assert written is not None
    return Path(store.where(written.name))
