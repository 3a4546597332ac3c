"""Strict jax, where silent promotions are errors; and a run that compiles in a second or two."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import jax
import pytest

from skerry import folders
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.settings.models import (
    DataConfig,
    LivenessConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
)


@pytest.fixture(autouse=True)
def strict_jax() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run small enough to compile in a second or two."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    folders.allow([str(tmp_path)])  # as for the owner of every machine that reads it
    return RunConfig(
        model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
        data=DataConfig(source="text", paths=(str(text),), batch=2, seq_len=16, streams=2),
        train=TrainConfig(steps=40),
        sync=SyncConfig(learners=1, fragments=2, h_steps=8),
        liveness=LivenessConfig(pulse_s=0.05),
    )


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBroker().connect() as connected:
        yield connected
