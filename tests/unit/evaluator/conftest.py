"""Strict jax, where silent promotions are errors; and a run whose global state a test commits."""

from __future__ import annotations

import pytest

from skerry.log.memory import MemoryBus
from skerry.settings.models import EvalConfig, RunConfig
from tests.support.small_run import bus, config, strict_jax
from tests.unit.evaluator.committed import CommittedRun

__all__ = ["bus", "config", "strict_jax"]


@pytest.fixture
async def run(bus: MemoryBus, config: RunConfig) -> CommittedRun:
    update = {"eval": EvalConfig(every_s=0.01, batches=3)}
    return await CommittedRun.begin(bus, config.model_copy(update=update))
