"""A model that compiles in a second, compiled once for all tests, and text for it."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.settings.models import DataConfig, LivenessConfig, ModelConfig, RunConfig, SyncConfig
from skerry.settings.models import TrainConfig as Train
from skerry_tools.lab.scenario import Judging


@pytest.fixture(autouse=True)
def _quiet(silent: None) -> None:
    del silent


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return path


@pytest.fixture(scope="session")
def config(text: Path) -> RunConfig:
    """A run of 40 steps, in which each of two fragments is merged every 8."""
    return RunConfig(
        model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
        data=DataConfig(source="text", paths=(str(text),), batch=2, seq_len=16, streams=2),
        train=Train(steps=40),
        sync=SyncConfig(learners=2, fragments=2, h_steps=8),
        liveness=LivenessConfig(pulse_s=0.2),
    )


@pytest.fixture(scope="session")
def judging() -> Judging:
    return Judging(points=4, batches=1, final_batches=2, batch=4)
