"""Evaluating and sampling checkpoints that the checkpointer wrote."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

from skerry.algorithm.fragments import gather
from skerry.errors import CheckpointCorrupt, ModelError
from skerry.log.memory import MemoryBroker
from skerry.log.state import MASTER, PARAMS
from skerry.log.state_writer import NewPart, StateWriter
from skerry.settings.models import DataConfig, ModelConfig, RunConfig, SyncConfig
from skerry.store.base import MANIFEST
from skerry.store.kinds.s3 import S3Store
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from skerry_evaluator.checkpoints import Restored, restore
from skerry_evaluator.commands import print_sample, print_scores
from skerry_evaluator.sampling import sample, to_text, to_tokens
from skerry_learner.joining import find_or_create
from tests.support.builders import commit
from tests.support.s3_server import BUCKET, S3Server


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return RunConfig(
        model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
        data=DataConfig(source="text", paths=(str(text),), batch=2, seq_len=16, streams=2),
        sync=SyncConfig(learners=1, fragments=2, h_steps=8),
    )


@pytest.fixture
async def folder(tmp_path: Path, config: RunConfig) -> Path:
    """A checkpoint of fresh parameters, written the way a run writes it."""
    async with MemoryBroker().connect() as bus:
        record, work = await find_or_create(bus, "run", config)
        leaves = [np.array(x) for x in jax.tree.leaves(work.model.init(jax.random.key(0)))]
        writer = await StateWriter.acquire(
            bus, "run", work.plan, holder="s", now_ns=1, chunk_bytes=65536
        )
        for fragment in work.plan.fragments:
            vector = gather(fragment, leaves)
            parts = [NewPart(PARAMS, "bf16", vector), NewPart(MASTER, "f32", vector)]
            await writer.commit(
                commit(1, fragment.index, plan_digest=work.plan.digest, step=3), parts, None
            )
        store = LocalStore(tmp_path / "checkpoints")
        written = await Checkpointer.of(bus, record, store).save()
    assert written is not None
    return Path(store.where(written.name))


def test_a_checkpoint_comes_back_with_its_parameters(folder: Path) -> None:
    restored = restore(folder)
    fresh = restored.model.init(jax.random.key(0))
    for mine, theirs in zip(jax.tree.leaves(restored.params), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    assert restored.step == 3


def test_a_checkpoint_in_a_bucket_reads_the_same(
    folder: Path, s3_server: S3Server, run_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = S3Store(f"s3://{BUCKET}/{run_id}", s3_server.access())
    draft = store.draft(folder.name)
    for file in sorted(folder.iterdir()):
        if file.name != MANIFEST:
            draft.write(file.name, [file.read_bytes()])
    draft.commit((folder / MANIFEST).read_bytes())
    monkeypatch.setenv("SKERRY_STORE__ENDPOINT", s3_server.endpoint)
    monkeypatch.setenv("SKERRY_STORE__CREDENTIALS", str(s3_server.credentials))
    monkeypatch.setenv("SKERRY_STORE__PROFILE", "reader")
    here, there = restore(folder), restore(store.where(folder.name))
    assert there.path == store.where(folder.name)
    for mine, theirs in zip(
        jax.tree.leaves(here.params), jax.tree.leaves(there.params), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)


def test_eval_prints_one_json_object_per_checkpoint(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_scores([folder, folder], batches=4, as_json=True)
    first, second = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert first == second
    assert first["loss"] == pytest.approx(math.log(256), rel=0.1)
    assert first["bits_per_byte"] == pytest.approx(first["loss"] / math.log(2))
    assert first["perplexity"] == pytest.approx(math.exp(first["loss"]))
    assert (first["step"], first["checkpoint"]) == (3, str(folder))


def test_a_loss_that_is_no_number_is_none_in_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restored = restore(folder)
    broken = replace(restored, params=jax.tree.map(lambda leaf: leaf * np.nan, restored.params))
    monkeypatch.setattr("skerry_evaluator.commands.restore", lambda *_: broken)
    print_scores([folder], batches=1, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["loss"], told["perplexity"], told["bits_per_byte"]) == (None, None, None)


def test_sampling_repeats_with_its_seed_and_outlives_the_window(folder: Path) -> None:
    restored = restore(folder)

    def written(seed: int, temperature: float) -> list[int]:
        prompt = to_tokens(restored.config.data, "def ")
        return list(sample(restored, prompt, count=40, temperature=temperature, seed=seed))

    assert written(0, 1.0) == written(0, 1.0) != written(1, 1.0)
    assert written(0, 0.0) == written(1, 0.0)
    assert len(written(0, 1.0)) == 40


def test_greedy_sampling_takes_the_likeliest_token(folder: Path) -> None:
    restored = restore(folder)
    prompt = to_tokens(restored.config.data, "brown")
    (token,) = sample(restored, prompt, count=1, temperature=0.0, seed=0)
    logits = restored.model.logits(restored.params, np.array([prompt], np.int32))  # type: ignore[attr-defined]
    assert token == int(np.argmax(logits[0, -1]))


def test_sample_prints_prompt_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_sample(folder, prompt="def ", count=5, temperature=0.0, seed=0, as_json=False)
    assert capsys.readouterr().out.startswith("def ")


def test_sampled_token_numbers_stay_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restored = restore(folder)
    data = restored.config.data.model_copy(update={"source": "tokens"})
    config = restored.config.model_copy(update={"data": data})
    tokens = replace(restored, config=config)
    monkeypatch.setattr("skerry_evaluator.commands.restore", lambda *_: tokens)
    print_sample(folder, prompt="7 8", count=3, temperature=0.0, seed=0, as_json=False)
    words = capsys.readouterr().out.split()
    assert (len(words), words[:2]) == (5, ["7", "8"])


def test_text_that_is_no_utf8_is_shown_all_the_same(folder: Path) -> None:
    assert to_text(restore(folder).config.data, [104, 105, 255]) == "hi\ufffd"


def test_one_flipped_bit_is_refused(folder: Path) -> None:
    path = folder / "params.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        restore(folder)


class Mute:
    """A model that cannot be sampled."""

    def init(self, key: jax.Array) -> jax.Array:
        return key

    def loss(self, params: jax.Array, tokens: jax.Array) -> jax.Array:
        del tokens
        return params


def test_a_model_without_logits_cannot_be_sampled(folder: Path, config: RunConfig) -> None:
    mute = Restored(str(folder), config, Mute(), None, 0, 0)
    with pytest.raises(ModelError, match="logits"):
        list(sample(mute, [1], count=1, temperature=1.0, seed=0))
