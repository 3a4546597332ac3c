"""The moving average of the global model: what it holds, how it is judged, and that it lasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file
from structlog.testing import capture_logs

from skerry.errors import StoreError
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.models.base import leaves_by_name, specs_of
from skerry.models.export import export_hf
from skerry.settings.local import StoreSettings
from skerry.settings.models import EvalConfig, RunConfig
from skerry.store import checkpoint
from skerry.store.finding import locate, open_store, root_of
from skerry_checkpointer.restore import restore as continue_from
from skerry_evaluator.checkpoints import evaluate, print_sample, restore
from skerry_evaluator.service import Evaluator
from tests.support.s3_server import BUCKET, S3Server
from tests.unit.evaluator.committed import CommittedRun


@pytest.fixture(params=["disk", "s3"])
def access(request: pytest.FixtureRequest, tmp_path: Path, run_id: str) -> StoreSettings:
    """Where a run's checkpoints lie: on a disk, or in a bucket."""
    if request.param == "disk":
        return StoreSettings(path=tmp_path)
    server: S3Server = request.getfixturevalue("s3_server")
    return server.access().model_copy(update={"url": f"s3://{BUCKET}/{run_id}"})


@pytest.fixture
async def run(bus: MemoryBus, config: RunConfig) -> CommittedRun:
    update = {"eval": EvalConfig(every_s=0.01, batches=1, ema=0.75, sample_tokens=0)}
    return await CommittedRun.begin(bus, config.model_copy(update=update))


def judging(run: CommittedRun, access: StoreSettings) -> Evaluator:
    return Evaluator.of(run.bus, run.record, "e", access)


def parameters(run: CommittedRun, seed: int) -> dict[str, Any]:
    fresh = leaves_by_name(run.work.model.init(jax.random.key(seed)))
    names = (spec.name for spec in specs_of(run.work.model))
    read = (np.array(leaf.astype("bfloat16").astype("float32")) for leaf in fresh)
    return dict(zip(names, read, strict=True))


async def test_it_goes_over_versions_and_an_evaluator_that_starts_again_takes_it_up(
    run: CommittedRun, access: StoreSettings
) -> None:
    first = judging(run, access)
    await run.commit(0)
    await first.evaluate()
    await run.commit(1)
    await first.evaluate()
    again = judging(run, access)
    await run.commit(2)
    await run.commit(3)  # two versions at once
    noted = await again.evaluate()
    assert noted is not None
    where = f"{root_of(access)}/run/ema"
    saved, tensors = checkpoint.params(*locate(where, access))
    assert saved.versions == (4, 4)
    zero, one, last = (parameters(run, seed) for seed in (0, 1, 3))
    for name, tensor in tensors.items():
        wanted = 0.75**3 * zero[name] + 0.75**2 * 0.25 * one[name] + (1 - 0.75**2) * last[name]
        np.testing.assert_allclose(tensor, wanted, rtol=1e-5, atol=1e-6)
    reached = [
        f"store.{name}={value}"
        for name, value in access.model_dump(mode="json").items()
        if value and name in ("endpoint", "region", "credentials", "profile")
    ]
    found = evaluate(restore(where, reached), run.work.corpus)
    assert noted == (await run.noted())[-1]
    assert noted.average_loss == pytest.approx(found.loss, abs=1e-5)
    assert noted.average_loss != pytest.approx(noted.loss, abs=1e-5)
    assert len(open_store(where, access).names()) == 1, "the one before is gone"
    assert not open_store(f"{root_of(access)}/run", access).names(), "it is none of the run's"


async def test_the_average_writes_text_and_is_exported(
    run: CommittedRun, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    evaluator = judging(run, StoreSettings(path=tmp_path))
    for seed in range(2):
        await run.commit(seed)
        await evaluator.evaluate()
    folder = tmp_path / "run" / "ema"
    capsys.readouterr()
    print_sample(folder, "def ", 5, 0.0, 0)
    assert capsys.readouterr().out.startswith("def ")
    out = export_hf(str(folder), tmp_path / "out", StoreSettings())
    _, tensors = checkpoint.params(*locate(folder))
    exported = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(exported[name], tensor)


async def test_no_run_goes_on_from_it(run: CommittedRun, tmp_path: Path) -> None:
    evaluator = judging(run, StoreSettings(path=tmp_path))
    for seed in range(2):
        await run.commit(seed)
        await evaluator.evaluate()
    average = tmp_path / "run" / "ema"
    checkpoint.verify(*locate(average))
    with pytest.raises(StoreError, match="holds a moving average, from which no run goes on"):
        await continue_from(MemoryBroker().connect(), average, "again")


async def test_what_a_dead_evaluator_left_half_written_is_removed(
    run: CommittedRun, tmp_path: Path
) -> None:
    left = tmp_path / "run" / "ema" / ".partial-step-00000010-0123456789ab"
    left.mkdir(parents=True)
    await run.commit(0)
    await judging(run, StoreSettings(path=tmp_path)).evaluate()
    assert not left.exists()
    assert len(open_store(left.parent).names()) == 1


async def test_a_damaged_average_begins_anew(run: CommittedRun, tmp_path: Path) -> None:
    access = StoreSettings(path=tmp_path)
    await run.commit(0)
    await judging(run, access).evaluate()
    folder = tmp_path / "run" / "ema"
    (params,) = folder.glob("*/params.safetensors")
    params.write_bytes(params.read_bytes()[:-1])
    with capture_logs() as logs:
        again = judging(run, access)
    assert [line["event"] for line in logs] == ["average_lost"]
    await run.commit(1)
    await again.evaluate()
    _, tensors = checkpoint.params(*locate(folder))
    for name, tensor in parameters(run, 1).items():
        np.testing.assert_array_equal(tensors[name], tensor)


async def test_a_store_that_cannot_be_written_costs_the_save_alone(
    run: CommittedRun, tmp_path: Path
) -> None:
    evaluator = judging(run, StoreSettings(path=tmp_path))
    (tmp_path / "run").write_text("a file where the folder should be")
    await run.commit(0)
    with capture_logs() as logs:
        assert await evaluator.evaluate() is not None
    assert "average_not_saved" in [line["event"] for line in logs]
