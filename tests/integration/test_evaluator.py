"""The evaluator as a process, on a real broker and beside real services."""

from __future__ import annotations

import math
from contextlib import aclosing
from pathlib import Path

import pytest

from skerry.log import ledger, run_records
from skerry.log.nats.bus import NatsBus
from skerry.models.base import build_model, specs_of
from skerry.protocol.messages import Evaluation
from skerry.settings import loading
from skerry.settings.models import RunConfig
from skerry.status.feed import read_model
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.verify import verify
from tests.support.cluster import Cluster
from tests.support.nats_server import NatsServer
from tests.support.scripted_run import ScriptedRun

pytestmark = pytest.mark.nats

SLOW_S = 180.0
"""It yields to whatever else is being tested."""

OFTEN = """
[eval]
every_s = 0.1
batches = 2
"""


@pytest.fixture
def often(short_config: Path) -> Path:
    """A config file for a run that ends by itself and is evaluated often."""
    short_config.write_text(short_config.read_text() + OFTEN)
    return short_config


@pytest.fixture
def config(often: Path) -> RunConfig:
    """The same run, cut as scripted runs are."""
    return loading.load(often, ["sync.fragments=3"], {}).run


async def begin(bus: NatsBus, run: str, config: RunConfig) -> ScriptedRun:
    """Return a run with a real model whose global state the test commits."""
    leaves = specs_of(build_model(config.model, config.train))
    return await ScriptedRun.begin(bus, run, leaves=leaves, config=config)


async def until(bus: NatsBus, run: str, versions: tuple[int, ...]) -> list[Evaluation]:
    """Return all evaluations up to that of these versions."""
    seen: list[Evaluation] = []
    evaluations = run_records.follow(bus, run, Evaluation)
    async with aclosing(evaluations):
        async for evaluation in evaluations:
            seen.append(evaluation)
            if evaluation.versions == versions:
                break
    return seen


@pytest.mark.drill
async def test_it_follows_a_run_through_a_broker_restart_and_ends_with_it(
    nats_server: NatsServer,
    run_id: str,
    tmp_path: Path,
    jax_cache: Path,
    often: Path,
    config: RunConfig,
) -> None:
    async with (
        Cluster(nats_server.url, run_id, tmp_path, often, jax_cache) as cluster,
        NatsBus(nats_server.url, name="test") as bus,
    ):
        evaluator = await cluster.start("evaluator", "e")
        scripted = await begin(bus, run_id, config)
        await scripted.commit_all(step=10, tokens=100)
        await until(bus, run_id, (1, 1, 1))
        nats_server.kill9()
        nats_server.restart()
        await scripted.commit_all(step=20, tokens=200)
        await until(bus, run_id, (2, 2, 2))
        await scripted.commit_all(step=30, tokens=300)
        await scripted.finish()
        assert await evaluator.ended(SLOW_S) == 0, evaluator.said[-2000:]
        said = await until(bus, run_id, (3, 3, 3))
        entries = RunLog.of(bus, scripted.record).ledger(await bus_end(bus, run_id))
        async with aclosing(entries):
            problems = [entry.problem async for entry in entries]
    assert set(problems) == {""}
    assert {evaluation.evaluator for evaluation in said} == {"e"}
    assert (said[-1].step, said[-1].tokens) == (30, 300)
    assert all(math.isfinite(evaluation.loss) for evaluation in said)


async def bus_end(bus: NatsBus, run: str) -> int:
    """Return the last sequence of a run's ledger."""
    return next(s.last_seq for s in await bus.streams() if s.name == f"SKERRY_{run}_LEDGER")


@pytest.mark.drill
async def test_a_run_that_trained_is_evaluated_and_its_log_holds(
    shared_nats: NatsServer, run_id: str, tmp_path: Path, jax_cache: Path, often: Path
) -> None:
    async with (
        Cluster(shared_nats.url, run_id, tmp_path, often, jax_cache) as cluster,
        NatsBus(shared_nats.url, name="test") as bus,
    ):
        services = [
            await cluster.start("evaluator", "e"),
            await cluster.start("syncer", "s"),
            await cluster.start("learner", "a"),
        ]
        for service in services:
            assert await service.ended(SLOW_S) == 0, service.said[-2000:]
        commits = await ledger.last_commits(bus, run_id)
        said = await run_records.read_all(bus, run_id, Evaluation)
        proof = await verify(bus, run_id)
        view = (await read_model(bus, run_id)).view
    assert said[-1].versions == (commits[0].version, commits[1].version)
    assert said[-1].loss < 0.5 * math.log(256)
    assert said[-1].bits_per_byte == pytest.approx(said[-1].loss / math.log(2))
    assert proof.violations == ()
    assert view.evaluations.kept == said
