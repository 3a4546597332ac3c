"""The evaluator over a log in memory: what it says of which state, when, and how often."""

from __future__ import annotations

import asyncio
import math
import os
import subprocess
import sys
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
from structlog.testing import capture_logs

from skerry.errors import (
    BrokerUnavailable,
    CorpusError,
    ModelError,
    Overtaken,
    RunMismatch,
    first_cause,
)
from skerry.log import ledger, run_records, state
from skerry.log.global_fragments import GlobalReader
from skerry.models.base import Aux
from skerry.protocol.messages import Evaluation
from skerry.service import shell
from skerry.settings.local import LocalSettings, Settings
from skerry.store.local import LocalStore
from skerry_evaluator import service
from skerry_evaluator.checkpoints import evaluate, restore
from skerry_evaluator.service import MOST_SHARE, Evaluator
from tests.support.builders import evaluation
from tests.unit.evaluator.committed import CommittedRun

DEADLINE_S = 60.0
BRISK = Settings(local=LocalSettings(shutdown_s=1.0))


async def test_a_new_state_is_evaluated_once(run: CommittedRun) -> None:
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


async def test_from_the_second_evaluation_on_it_says_what_the_model_writes(
    run: CommittedRun,
) -> None:
    judging, samples = run.evaluator(), list[str]()
    for seed in range(3):
        await run.commit(seed)
        said = await judging.evaluate()
        assert said is not None
        samples.append(said.sample)
    assert samples[0] == ""
    assert all(samples[1:])
    assert samples[1] != samples[2]


async def test_a_model_that_cannot_be_sampled_is_evaluated_all_the_same(
    run: CommittedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skerry.models.decoder.Decoder.logits", lambda *_: 1 / 0)
    monkeypatch.setattr(
        "skerry.models.decoder.Decoder.loss", lambda *_: (jnp.float32(1.0), Aux(jnp.float32(1.0)))
    )
    judging = run.evaluator()
    for seed in range(2):
        await run.commit(seed)
        said = await judging.evaluate()
        assert said is not None
        assert said.sample == ""


async def test_a_state_that_lacks_a_fragment_is_not_evaluated(run: CommittedRun) -> None:
    await run.commit(0, fragments=(1,))
    assert await run.evaluator().evaluate() is None


async def test_only_what_has_changed_is_read_again(
    run: CommittedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads: list[int] = []

    latest = GlobalReader.latest

    async def counted(reader: GlobalReader, fragment: int) -> Any:
        reads.append(fragment)
        return await latest(reader, fragment)

    monkeypatch.setattr(GlobalReader, "latest", counted)
    judging = run.evaluator()
    await run.commit(0)
    await judging.evaluate()
    await run.commit(1, fragments=(1,))
    said = await judging.evaluate()
    assert reads == [0, 1, 1]
    assert said is not None
    assert said.versions == (1, 2)


async def test_what_it_says_of_a_state_is_what_eval_says_of_a_checkpoint_of_it(
    run: CommittedRun, tmp_path: Path
) -> None:
    await run.commit(7)
    path = await run.checkpoint(LocalStore(tmp_path / "checkpoints"))
    said = await run.evaluator().evaluate()
    found = evaluate(restore(path), run.work.corpus)
    assert said is not None
    for name in ("loss", "perplexity", "bits_per_byte", "step", "tokens", "evaluated_tokens"):
        assert getattr(found, name) == getattr(said, name)
    assert found.text == f"{said.text_digest:016x}"


async def test_it_judges_what_learners_start_from_and_not_the_master(run: CommittedRun) -> None:
    await run.commit(7)
    said = await run.evaluator("one").evaluate()
    await run.commit(7, off=0.5)
    again = await run.evaluator("other").evaluate()
    assert said is not None
    assert again is not None
    assert again.loss == said.loss


async def test_two_evaluators_say_one_thing_once(run: CommittedRun) -> None:
    await run.commit(0)
    one, other = run.evaluator("one"), run.evaluator("other")
    assert await one.evaluate() is not None
    assert await other.evaluate() is None
    await run.commit(1)
    both = await asyncio.gather(one.evaluate(), other.evaluate())
    assert any(both)
    assert [said.versions for said in await run.noted()] == [(1, 1), (2, 2)]


async def test_an_evaluator_with_another_text_is_noticed_once_and_hinders_nobody(
    run: CommittedRun,
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


async def test_it_waits_for_a_state_follows_the_run_and_ends_with_it(run: CommittedRun) -> None:
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


async def test_a_run_that_has_ended_is_evaluated_at_its_end(run: CommittedRun) -> None:
    await run.commit(0)
    await ledger.finish_run(run.bus, run.record)
    for _ in range(2):
        await asyncio.wait_for(run.evaluator().run(), DEADLINE_S)
    assert [said.versions for said in await run.noted()] == [(1, 1)]


async def test_an_evaluation_that_fails_is_tried_again(
    run: CommittedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    fail = iter([True])

    latest = GlobalReader.latest

    async def overtaken(*args: Any) -> Any:
        if next(fail, False):
            msg = "Fragment 0 is committed faster than this link can read it."
            raise Overtaken(msg)
        return await latest(*args)

    monkeypatch.setattr(GlobalReader, "latest", overtaken)
    await run.commit(0)
    judging = asyncio.create_task(run.evaluator().run())
    evaluations = run_records.follow(run.bus, "run", Evaluation)
    async with asyncio.timeout(DEADLINE_S), aclosing(evaluations):
        assert (await anext(evaluations)).versions == (1, 1)
        await ledger.finish_run(run.bus, run.record)
        await judging


async def test_a_broker_that_is_away_ends_a_session_and_not_the_evaluator(
    run: CommittedRun, monkeypatch: pytest.MonkeyPatch
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
        await asyncio.wait_for(service.evaluator(run.bus, "run", "e", BRISK), DEADLINE_S)
    assert "session_restarts" in {line["event"] for line in logs}
    assert [said.versions for said in await run.noted()] == [(1, 1)]


async def test_a_long_evaluation_is_followed_by_a_long_rest(
    run: CommittedRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    await run.commit(0)
    spent = iter([10.0, 13.0])
    monkeypatch.setattr(service.time, "process_time", lambda: next(spent))
    judging = run.evaluator()
    await judging.evaluate()
    assert judging.rest_s == pytest.approx(3.0 / MOST_SHARE)


async def test_a_text_that_this_machine_lacks_is_named(run: CommittedRun) -> None:
    await run.commit(0)
    (text,) = run.work.config.data.paths
    await asyncio.to_thread(os.remove, text)
    with pytest.raises(BaseExceptionGroup) as caught:
        await service.evaluator(run.bus, "run", "e", BRISK)
    cause = first_cause(caught.value)
    assert isinstance(cause, CorpusError)
    assert str(cause) == f"There is no {text}: correct data.paths, or the command."


async def test_other_model_code_than_the_runs_is_refused(run: CommittedRun) -> None:
    await run.commit(0)
    other = run.work.config.model.model_copy(update={"d_ff": 32})
    judging = run.evaluator()
    judging.config = run.work.config.model_copy(update={"model": other})
    with pytest.raises(ModelError, match="other model code"):
        await judging.evaluate()


async def test_a_run_that_was_cut_otherwise_is_refused(run: CommittedRun) -> None:
    with pytest.raises(RunMismatch, match="another release"):
        Evaluator.of(run.bus, replace(run.record, plan_digest=1), "e")


def test_jax_is_not_imported_before_there_is_a_state_to_evaluate() -> None:
    code = "import sys, skerry_evaluator.service; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
