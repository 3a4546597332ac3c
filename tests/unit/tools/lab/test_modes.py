"""Modes in the lab: the honest baseline is honest, and blocking costs what the link costs."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm import fragments
from skerry.data.stream import Stream
from skerry.models.base import leaves_by_name
from skerry.protocol.parts import MASTER
from skerry.settings.models import DataConfig, ModelConfig, RunConfig, SyncConfig, TrainConfig
from skerry.settings.modes import Mode
from skerry_learner.trainer.optimizers import make_optimizer
from skerry_learner.trainer.step import TrainState, make_step
from skerry_tools.lab.lab import RUN, Lab, LabResult
from skerry_tools.lab.scenario import Failures, Judging, LabScenario, LinkSettings
from tests.support.log import newest_parts

F32s = NDArray[np.float32]
STEP_S = 0.1


@pytest.fixture
def scenario_of(tmp_path: Path) -> Any:
    text = tmp_path / "text.txt"
    text.write_text(
        "".join(f"{i} the quick brown fox jumps over {i * i % 97}. " for i in range(900))
    )

    def make(mode: Mode, steps: int, link: LinkSettings | None = None, **sync: Any) -> LabScenario:
        run = RunConfig(
            mode=mode,
            model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
            data=DataConfig(source="text", paths=(str(text),), batch=4, seq_len=16, streams=2),
            train=TrainConfig(steps=steps, lr=3e-3),
            sync=SyncConfig.model_validate(sync),
        )
        few = Judging(points=1, batches=1, final_batches=2, batch=4)
        return LabScenario(run=run, link=link or LinkSettings(), judging=few)

    return make


def master_of(lab: Lab) -> F32s:
    """Return the one fragment's master as the log holds it in the end."""

    async def read() -> F32s:
        plan = lab.work.plan
        async with lab.connect() as bus:
            _, found = await newest_parts(bus, RUN, plan, 0, [MASTER])
        return found[MASTER]

    return asyncio.run(read())


def by_one_process(lab: Lab, streams: tuple[int, ...]) -> F32s:
    """Train the same model in a plain loop on these learners' batches put together."""
    config, work = lab.config, lab.work
    train = config.train.model_copy(update={"inner": "adamw"})
    step = make_step(work.model, train)
    params = jax.jit(work.model.init)(jax.random.key(train.seed))
    own = TrainState(params, jax.jit(make_optimizer(train).init)(params))
    batch = config.data.batch
    for number in range(train.steps):
        read = [Stream(work.corpus, shard).read(number * batch, batch) for shard in streams]
        done = np.float32(number / train.steps)
        joined = {name: jnp.asarray(np.concatenate([r[name] for r in read])) for name in read[0]}
        own, _ = step(own, joined, done, np.float32(1.0))
    leaves = [np.array(leaf) for leaf in leaves_by_name(own.params)]
    return fragments.gather(work.plan.fragments[0], leaves)


@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_data_parallel_equals_one_process_with_both_batches(
    scenario_of: Any, tmp_path: Path, packing: str
) -> None:
    """In documents packed together no two batches have equally many targets."""
    scenario = scenario_of("data-parallel", 8)
    for number in range(300):
        (tmp_path / f"text-{number}.txt").write_text(
            f"{number * number} is its square. " * (number % 7)
        )
    paths = (str(tmp_path / "text-*.txt"),) if packing == "documents" else scenario.run.data.paths
    data = scenario.run.data.model_copy(update={"packing": packing, "paths": paths})
    run = scenario.run.model_copy(update={"data": data})
    lab = Lab(scenario.model_copy(update={"run": run}))
    result = lab.run()
    merged = master_of(lab)
    both, one = by_one_process(lab, (0, 1)), by_one_process(lab, (0,))
    assert (result.steps, result.commits, result.merged) == (8, 9, 16)
    np.testing.assert_allclose(merged, both, rtol=0, atol=2e-6)
    assert np.abs(both - one).max() > 1e-2, "one learner's batches alone must end elsewhere"


@pytest.mark.parametrize(("mode", "h_steps", "trips"), [("data-parallel", 1, 6), ("diloco", 4, 4)])
def test_a_blocking_round_costs_four_trips_or_six_and_no_wait(
    scenario_of: Any, mode: Mode, h_steps: int, trips: int
) -> None:
    """Pulse, round, contribution and manifest, with which a delta comes; all else is asked for."""
    latency_s = 0.01

    def took(steps: int) -> LabResult:
        link = LinkSettings(latency_s=latency_s)
        return Lab(scenario_of(mode, steps, link, h_steps=h_steps)).run()

    short, long = took(4), took(16)
    rounds = 12 // h_steps
    expected_s = 12 * STEP_S + rounds * trips * latency_s
    assert long.virtual_s - short.virtual_s == pytest.approx(expected_s, abs=0.002)


@pytest.mark.parametrize(("mode", "h_steps"), [("data-parallel", 1), ("diloco", 4)])
def test_whoever_dies_holds_nobody_up_for_ever(scenario_of: Any, mode: Mode, h_steps: int) -> None:
    """A learner that comes back tells of an older step than those who stopped for the round."""
    scenario = scenario_of(mode, 50, h_steps=h_steps, round_timeout_s=1.0)
    failing = Failures(islands=("learner-1",), every_s=1.5, down_s=1.0)
    result = Lab(scenario.model_copy(update={"failures": failing})).run()
    assert result.kills > 1
    assert result.steps == 50


def test_a_single_learner_trains_as_if_alone(scenario_of: Any) -> None:
    lab = Lab(scenario_of("single", 20, fragments=1, h_steps=5))
    lab.run()
    alone = by_one_process(lab, (0,))
    np.testing.assert_allclose(master_of(lab), alone, rtol=0, atol=1e-6)
