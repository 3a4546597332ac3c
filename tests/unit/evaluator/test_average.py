"""The moving average of the global model: what it holds, how it is judged, and that it lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from structlog.testing import capture_logs

from skerry.errors import CheckpointCorrupt
from skerry.log.memory import MemoryBus
from skerry.models.base import leaves_by_name, specs_of
from skerry.settings.models import EvalConfig, RunConfig, StoreSettings
from skerry.store import checkpoint
from skerry.store.finding import locate
from skerry_evaluator.checkpoints import evaluate, restore
from skerry_evaluator.service import Evaluator
from tests.unit.evaluator.committed import CommittedRun


@pytest.fixture
async def run(bus: MemoryBus, config: RunConfig) -> CommittedRun:
    update = {"eval": EvalConfig(every_s=0.01, batches=1, ema=0.75, sample_tokens=0)}
    return await CommittedRun.begin(bus, config.model_copy(update=update))


def judging(run: CommittedRun, folder: Path) -> Evaluator:
    return Evaluator.of(run.bus, run.record, "e", StoreSettings(path=folder))


def parameters(run: CommittedRun, seed: int) -> dict[str, Any]:
    fresh = leaves_by_name(run.work.model.init(jax.random.key(seed)))
    names = (spec.name for spec in specs_of(run.work.model))
    return {name: np.array(leaf) for name, leaf in zip(names, fresh, strict=True)}


async def test_it_goes_over_versions_and_an_evaluator_that_starts_again_takes_it_up(
    run: CommittedRun, tmp_path: Path
) -> None:
    first = judging(run, tmp_path)
    await run.commit(0)
    await first.evaluate()
    await run.commit(1)
    await first.evaluate()
    again = judging(run, tmp_path)
    await run.commit(2)
    await run.commit(3)  # two versions at once
    with capture_logs() as logs:
        await again.evaluate()
    (said,) = (line for line in logs if line["event"] == "average_evaluated")
    saved, tensors = checkpoint.params(*locate(tmp_path / "run" / "ema"))
    assert saved.versions == (4, 4)
    zero, one, last = (parameters(run, seed) for seed in (0, 1, 3))
    for name, tensor in tensors.items():
        wanted = 0.75**3 * zero[name] + 0.75**2 * 0.25 * one[name] + (1 - 0.75**2) * last[name]
        np.testing.assert_allclose(tensor, wanted, rtol=1e-5, atol=1e-6)
    found = evaluate(restore(tmp_path / "run" / "ema"), run.work.corpus)
    assert found.loss == pytest.approx(said["loss"], abs=1e-5)


async def test_no_run_goes_on_from_it(run: CommittedRun, tmp_path: Path) -> None:
    evaluator = judging(run, tmp_path)
    for seed in range(2):
        await run.commit(seed)
        await evaluator.evaluate()
    with pytest.raises(CheckpointCorrupt, match="not what the log held"):
        checkpoint.verify(*locate(tmp_path / "run" / "ema"))


async def test_a_store_that_cannot_be_written_costs_the_save_alone(
    run: CommittedRun, tmp_path: Path
) -> None:
    evaluator = judging(run, tmp_path)
    (tmp_path / "run").write_text("a file where the folder should be")
    await run.commit(0)
    with capture_logs() as logs:
        assert await evaluator.evaluate() is not None
    assert "average_not_saved" in [line["event"] for line in logs]
