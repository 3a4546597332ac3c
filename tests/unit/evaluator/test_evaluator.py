"""The evaluator over a log in memory: what it says of which state, when, and how often."""

from __future__ import annotations

import asyncio
import math
import subprocess
import sys
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from structlog.testing import capture_logs

from skerry.algorithm.fragments import gather
from skerry.errors import (
    BrokerUnavailable,
    CorpusError,
    ModelError,
    Overtaken,
    RunMismatch,
    first_cause,
)
from skerry.log import ledger, run_records, state
from skerry.log.memory import MemoryBus
from skerry.log.state import MASTER, PARAMS
from skerry.log.state_writer import NewPart, StateWriter
from skerry.protocol.messages import Commit, Evaluation, Manifest, RunRecord
from skerry.service import shell
from skerry.settings.models import EvalConfig, RunConfig
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from skerry_evaluator import service
from skerry_evaluator.checkpoints import evaluate, restore
from skerry_evaluator.commands import print_scores
from skerry_evaluator.service import MOST_SHARE, Evaluator
from skerry_learner.joining import Work, find_or_create
from tests.support.builders import commit, evaluation, progress

DEADLINE_S = 60.0


@pytest.fixture
def config(config: RunConfig) -> RunConfig:
    return config.model_copy(update={"eval": EvalConfig(every_s=0.01, batches=3)})


@dataclass
class Global:
    """A run whose global state the test commits by hand: fresh parameters from a seed."""

    bus: MemoryBus
    record: RunRecord
    work: Work
    writer: StateWriter
    held: dict[int, Manifest] = field(default_factory=dict[int, Manifest])

    @classmethod
    async def begin(cls, bus: MemoryBus, config: RunConfig) -> Global:
        record, work = await find_or_create(bus, "run", config)
        writer = await StateWriter.acquire(
            bus, "run", work.plan, holder="s", now_ns=1, chunk_bytes=65536
        )
        return cls(bus, record, work, writer)

    async def commit(self, seed: int, fragments: tuple[int, ...] = (0, 1)) -> None:
        """Commit the next version of these fragments."""
        fresh = self.work.model.init(jax.random.key(seed))
        leaves = [np.array(leaf) for leaf in jax.tree.leaves(fresh)]
        for index in fragments:
            vector = gather(self.work.plan.fragments[index], leaves)
            parts = [NewPart(PARAMS, "bf16", vector), NewPart(MASTER, "f32", vector)]
            before = self.held.get(index)
            version = 1 + (before.commit.version if before else 0)
            draft = self._draft(index, version)
            self.held[index] = await self.writer.commit(draft, parts, before)

    def _draft(self, fragment: int, version: int) -> Commit:
        tokens = 100 * version + fragment
        rows = (progress(tokens=tokens),)
        digest = self.work.plan.digest
        return commit(version, fragment, plan_digest=digest, step=10 * version, progress=rows)

    def evaluator(self, name: str = "e") -> Evaluator:
        return Evaluator.of(self.bus, self.record, name)

    async def noted(self) -> list[Evaluation]:
        return await run_records.read_all(self.bus, "run", Evaluation)


@pytest.fixture
async def run(bus: MemoryBus, config: RunConfig) -> Global:
    return await Global.begin(bus, config)


async def test_a_new_state_is_evaluated_once(run: Global) -> None:
    await run.commit(0)
    judging = run.evaluator()
    said = await judging.evaluate()
    assert await judging.evaluate() is None
    assert said is not None
    assert await run.noted() == [said]
    assert (said.evaluator, said.versions, said.step, said.tokens) == ("e", (1, 1), 10, 101)
    assert said.loss == pytest.approx(math.log(256), rel=0.1)
    assert said.perplexity == pytest.approx(math.exp(said.loss))
    assert said.bits_per_byte == pytest.approx(said.loss / math.log(2))
    assert said.evaluated_tokens == 3 * 2 * 16


async def test_from_the_second_evaluation_on_it_says_what_the_model_writes(run: Global) -> None:
    judging, samples = run.evaluator(), list[str]()
    for seed in range(3):
        await run.commit(seed)
        said = await judging.evaluate()
        assert said is not None
        samples.append(said.sample)
    assert samples[0] == ""
    assert all(samples[1:])
    assert samples[1] != samples[2]


@pytest.mark.parametrize("broken", [None, lambda *_: 1 / 0])
async def test_a_model_that_cannot_be_sampled_is_evaluated_all_the_same(
    run: Global, broken: object
) -> None:
    judging = run.evaluator()
    (await judging._built())._logits = broken
    for seed in range(2):
        await run.commit(seed)
        said = await judging.evaluate()
        assert said is not None
        assert said.sample == ""


async def test_a_state_that_lacks_a_fragment_is_not_evaluated(run: Global) -> None:
    await run.commit(0, fragments=(1,))
    assert await run.evaluator().evaluate() is None


async def test_only_what_has_changed_is_read_again(
    run: Global, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    async def counted(*args: Any) -> Any:
        reads.append(args[3].index)
        return await state.read_latest(*args)

    monkeypatch.setattr(service, "read_latest", counted)
    judging = run.evaluator()
    await run.commit(0)
    await judging.evaluate()
    await run.commit(1, fragments=(1,))
    said = await judging.evaluate()
    assert reads == [0, 1, 1]
    assert said is not None
    assert said.versions == (1, 2)


async def test_what_it_says_of_a_state_is_what_eval_says_of_a_checkpoint_of_it(
    run: Global, tmp_path: Path
) -> None:
    await run.commit(7)
    store = LocalStore(tmp_path / "checkpoints")
    written = await Checkpointer.of(run.bus, run.record, store).save()
    said = await run.evaluator().evaluate()
    assert written is not None
    assert said is not None
    verdict = evaluate(restore(store.where(written.name)), run.work.corpus)
    assert verdict.score.loss == said.loss
    assert verdict.score.perplexity == said.perplexity
    assert verdict.score.bits_per_byte == said.bits_per_byte
    assert verdict.text == f"{said.text_digest:016x}"
    assert (verdict.step, verdict.tokens) == (said.step, said.tokens)
    assert verdict.evaluated_tokens == said.evaluated_tokens


async def test_two_evaluators_say_one_thing_once(run: Global) -> None:
    await run.commit(0)
    one, other = run.evaluator("one"), run.evaluator("other")
    assert await one.evaluate() is not None
    assert await other.evaluate() is None
    await run.commit(1)
    both = await asyncio.gather(one.evaluate(), other.evaluate())
    assert any(both)
    assert [said.versions for said in await run.noted()] == [(1, 1), (2, 2)]


async def test_an_evaluator_with_another_text_is_noticed_once_and_hinders_nobody(
    run: Global,
) -> None:
    await run.commit(0)
    judging = run.evaluator()
    stranger = evaluation(10, evaluator="stranger", versions=(1, 1), text_digest=5)
    await ledger.record_evaluation(run.bus, stranger)
    with capture_logs() as logs:
        assert await judging.evaluate() is not None
        await run.commit(1)
        await ledger.record_evaluation(run.bus, replace(stranger, versions=(2, 2)))
        assert await judging.evaluate() is not None
    warned = [line for line in logs if line["event"] == "held_out_text_differs"]
    assert [line["evaluator"] for line in warned] == ["stranger"]
    assert len(await run.noted()) == 4


async def test_it_waits_for_a_state_follows_the_run_and_ends_with_it(run: Global) -> None:
    judging = asyncio.create_task(run.evaluator().run())
    await run.commit(0)
    evaluations = run_records.follow(run.bus, "run", Evaluation)
    async with asyncio.timeout(DEADLINE_S), aclosing(evaluations):
        assert (await anext(evaluations)).versions == (1, 1)
        await run.commit(1)
        assert (await anext(evaluations)).versions == (2, 2)
        await run.commit(2)
        await ledger.finish_run(run.bus, run.record)
        await judging
    assert (await run.noted())[-1].versions == (3, 3)


async def test_a_run_that_has_ended_is_evaluated_at_its_end(run: Global) -> None:
    await run.commit(0)
    await ledger.finish_run(run.bus, run.record)
    for _ in range(2):
        await asyncio.wait_for(run.evaluator().run(), DEADLINE_S)
    assert [said.versions for said in await run.noted()] == [(1, 1)]


async def test_an_evaluation_that_fails_is_tried_again(
    run: Global, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = iter([True])

    async def overtaken(*args: Any) -> Any:
        if next(fail, False):
            msg = "Fragment 0 is committed faster than this link can read it."
            raise Overtaken(msg)
        return await state.read_latest(*args)

    monkeypatch.setattr(service, "read_latest", overtaken)
    await run.commit(0)
    judging = asyncio.create_task(run.evaluator().run())
    evaluations = run_records.follow(run.bus, "run", Evaluation)
    async with asyncio.timeout(DEADLINE_S), aclosing(evaluations):
        assert (await anext(evaluations)).versions == (1, 1)
        await ledger.finish_run(run.bus, run.record)
        await judging


async def test_a_broker_that_is_away_ends_a_session_and_not_the_evaluator(
    run: Global, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = iter([True])
    read = state.read_manifests

    async def unavailable(*args: Any) -> Any:
        if next(away, False):
            msg = "No NATS server answered."
            raise BrokerUnavailable(msg)
        return await read(*args)

    monkeypatch.setattr(service, "read_manifests", unavailable)
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    await run.commit(0)
    await ledger.finish_run(run.bus, run.record)
    with capture_logs() as logs:
        await asyncio.wait_for(service.evaluator(run.bus, "run", "e", shutdown_s=1.0), DEADLINE_S)
    assert "session_restarts" in {line["event"] for line in logs}
    assert [said.versions for said in await run.noted()] == [(1, 1)]


async def test_a_long_evaluation_is_followed_by_a_long_rest(
    run: Global, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.commit(0)
    spent = iter([10.0, 13.0])
    monkeypatch.setattr(service.time, "process_time", lambda: next(spent))
    judging = run.evaluator()
    await judging.evaluate()
    assert judging.rest_s == pytest.approx(3.0 / MOST_SHARE)


def lost(config: RunConfig) -> str:
    """Remove the text of a run and return its path."""
    (path,) = config.data.paths
    Path(path).unlink()
    return path


async def test_a_text_that_this_machine_lacks_is_named(run: Global) -> None:
    await run.commit(0)
    text = lost(run.work.config)
    with pytest.raises(BaseExceptionGroup) as caught:
        await service.evaluator(run.bus, "run", "e", shutdown_s=1.0)
    cause = first_cause(caught.value)
    assert isinstance(cause, CorpusError)
    assert str(cause) == f"Corpus path {text} does not exist: correct data.paths."


async def test_other_model_code_than_the_runs_is_refused(run: Global) -> None:
    await run.commit(0)
    other = run.work.config.model.model_copy(update={"d_ff": 32})
    judging = run.evaluator()
    judging.config = run.work.config.model_copy(update={"model": other})
    with pytest.raises(ModelError, match="other model code"):
        await judging.evaluate()


async def test_a_run_that_was_cut_otherwise_is_refused(run: Global) -> None:
    with pytest.raises(RunMismatch, match="another release"):
        Evaluator.of(run.bus, replace(run.record, plan_digest=1), "e")


def test_jax_is_not_imported_before_there_is_a_state_to_evaluate() -> None:
    code = "import sys, skerry_evaluator.service; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


async def test_eval_takes_as_many_batches_as_the_evaluator_unless_told(
    run: Global, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await run.commit(0)
    store = LocalStore(tmp_path / "checkpoints")
    written = await Checkpointer.of(run.bus, run.record, store).save()
    assert written is not None
    for batches, tokens in ((None, 3 * 2 * 16), (1, 2 * 16)):
        print_scores([store.where(written.name)], batches=batches, as_json=False)
        assert f"({tokens} tokens of text " in capsys.readouterr().out
