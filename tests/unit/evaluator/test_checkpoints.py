"""The commands that evaluate and sample a checkpoint, and what a model writes."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from typer.testing import CliRunner

from skerry.data.tokenizer import train_tokenizer
from skerry.errors import CheckpointCorrupt, ConfigError, ModelError
from skerry.protocol.messages import MOST_SAMPLE_BYTES
from skerry.settings.models import DataConfig, RunConfig
from skerry.store.base import MANIFEST
from skerry.store.kinds.s3 import S3Store
from skerry.store.local import LocalStore
from skerry_evaluator.__main__ import app
from skerry_evaluator.chat import print_chat
from skerry_evaluator.checkpoints import _on_other_text, print_sample, print_scores, restore
from skerry_evaluator.sampling import Sampler, SampleWriter, to_text, to_tokens
from tests.support.s3_server import BUCKET, S3Server
from tests.unit.evaluator.committed import CommittedRun

VOCAB = 256
STRONG = np.float32(1000)


@pytest.fixture
async def folder(run: CommittedRun, tmp_path: Path) -> Path:
    """A checkpoint of fresh parameters, written the way a run writes it."""
    await run.commit(0)
    return Path(await run.checkpoint(LocalStore(tmp_path / "checkpoints")))


class Counting:
    """Its logits make it always write the byte after the last one."""

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        return params * jax.nn.one_hot((tokens + 1) % VOCAB, VOCAB)


class Even:
    """Its logits make every lower-case letter equally likely."""

    def logits(self, params: Any, tokens: jax.Array) -> jax.Array:
        letters = (jnp.arange(VOCAB) >= ord("a")) & (jnp.arange(VOCAB) <= ord("z"))
        return jnp.broadcast_to(jnp.where(letters, params, -1e9), (*tokens.shape, VOCAB))


def writer(model: object, source: str = "text", tokens: int = 8, seq_len: int = 32) -> SampleWriter:
    data = {"source": source, "paths": ["x"], "seq_len": seq_len}
    config = RunConfig.model_validate({"data": data, "eval": {"sample_tokens": tokens}})
    return SampleWriter(model, config, STRONG)


@pytest.mark.parametrize(
    ("source", "tokens", "said"),
    [("text", 8, "".join(map(chr, range(11, 19)))), ("tokens", 4, "1 2 3 4")],
)
def test_it_writes_what_the_logits_say_after_a_line_break(
    source: str, tokens: int, said: str
) -> None:
    assert writer(Counting(), source, tokens).write(STRONG, 1) == said


def test_one_seed_writes_one_text_and_another_one_another() -> None:
    even = writer(Even(), tokens=24)
    assert even.write(STRONG, 5) == even.write(STRONG, 5) != even.write(STRONG, 6)


def test_it_writes_no_more_than_a_training_sequence_holds() -> None:
    assert len(writer(Even(), tokens=500, seq_len=16).write(STRONG, 0)) == 15


def test_a_sample_is_cut_between_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "skerry_evaluator.sampling.to_text", lambda *_: "x" + "é" * MOST_SAMPLE_BYTES
    )
    said = writer(Even()).write(STRONG, 0)
    assert said == "x" + "é" * ((MOST_SAMPLE_BYTES - 1) // 2)


def test_text_that_is_no_utf8_still_is_text() -> None:
    wrong = to_text(DataConfig(), [104, 105, 255, 300])
    assert wrong == "hi\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}"


def test_a_checkpoint_comes_back_with_its_parameters(folder: Path) -> None:
    restored = restore(folder)
    fresh = restored.model.init(jax.random.key(0))
    for mine, theirs in zip(jax.tree.leaves(restored.params), jax.tree.leaves(fresh), strict=True):
        np.testing.assert_array_equal(mine, theirs.astype("bfloat16"))
    assert restored.step == 10


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
    assert (first["step"], first["checkpoint"]) == (10, str(folder))


def test_a_loss_that_is_no_number_is_none_in_json(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restored = restore(folder)
    broken = replace(restored, params=jax.tree.map(lambda leaf: leaf * np.nan, restored.params))
    monkeypatch.setattr("skerry_evaluator.checkpoints.restore", lambda *_: broken)
    print_scores([folder], batches=1, as_json=True)
    told = json.loads(capsys.readouterr().out)
    assert (told["loss"], told["perplexity"], told["bits_per_byte"]) == (None, None, None)


def test_other_text_is_read_as_a_run_reads_its_own_or_by_a_tokenizer(tmp_path: Path) -> None:
    (tmp_path / "corpus").mkdir()
    (tmp_path / "corpus" / "manifest.json").touch()
    texts, corpora = [str(tmp_path / "a.txt")], [str(tmp_path / "corpus")]
    of_bytes, prepared = DataConfig(), DataConfig(source="prepared", paths=("x",))
    on_the_fly = DataConfig(source="text", paths=("x",), tokenizer_folder="words")
    assert _on_other_text(of_bytes, texts, None).of_bytes
    assert _on_other_text(prepared, corpora, None).source == "prepared"
    for words in (tmp_path / "words", tmp_path / "corpus" / ".." / "words"):
        mine = _on_other_text(prepared, texts, words)
        assert (mine.source, mine.tokenizer_folder) == ("text", str(tmp_path / "words"))
    assert _on_other_text(on_the_fly, texts, None).tokenizer_folder == "words"
    assert _on_other_text(on_the_fly, corpora, None).source == "prepared"
    chats = on_the_fly.model_copy(update={"field": "messages"})
    assert _on_other_text(chats, texts, None).field == "messages"
    assert _on_other_text(chats, texts, None, ["data.field=body"]).field == "body"


@pytest.mark.parametrize(
    ("text", "said"), [((), "name the text with --text"), (("a.txt",), "trained on bytes, not on")]
)
def test_a_tokenizer_that_nothing_would_be_read_with_is_refused(
    folder: Path, tmp_path: Path, text: tuple[str, ...], said: str
) -> None:
    paths = [str(tmp_path / name) for name in text]
    with pytest.raises(ConfigError, match=said):
        print_scores([folder], batches=1, as_json=False, text=paths, tokenizer=tmp_path)


@pytest.mark.parametrize("chats", [False, True])
def test_a_sample_by_another_tokenizer_than_the_runs_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chats: bool
) -> None:
    restored, words = restore(folder), tmp_path / "words"
    train_tokenizer(["a text"], 260, words)
    (words / "chat_template.jinja").write_text("{{ messages }}")
    data = restored.config.data.model_copy(update={"source": "tokens", "tokenizer": "another"})
    other = replace(restored, config=restored.config.model_copy(update={"data": data}))
    for module in ("checkpoints", "chat"):
        monkeypatch.setattr(f"skerry_evaluator.{module}.restore", lambda *_: other)
    show: Any = print_chat if chats else print_sample
    with pytest.raises(ConfigError, match="this run's learners have another: name the folder"):
        show(folder, "hello", 5, 0.0, 0, words)


@pytest.mark.parametrize(("batches", "tokens"), [(None, 3 * 2 * 16), (1, 2 * 16)])
def test_eval_takes_as_many_batches_as_the_evaluator_unless_told(
    folder: Path, capsys: pytest.CaptureFixture[str], batches: int | None, tokens: int
) -> None:
    print_scores([folder], batches=batches, as_json=False)
    assert f"({tokens} tokens of text " in capsys.readouterr().out


def test_sampling_repeats_with_its_seed_and_outlives_the_window(folder: Path) -> None:
    restored = restore(folder)

    def written(seed: int, temperature: float) -> list[int]:
        sampler = Sampler(restored.model, 16, temperature)
        return list(sampler.tokens(restored.params, list(b"def "), 40, seed))

    assert written(0, 1.0) == written(0, 1.0) != written(1, 1.0)
    assert written(0, 0.0) == written(1, 0.0)
    assert len(written(0, 1.0)) == 40


def test_greedy_sampling_takes_the_likeliest_token(folder: Path) -> None:
    restored, prompt = restore(folder), list(b"brown")
    (token,) = Sampler(restored.model, 16, 0.0).tokens(restored.params, prompt, 1, 0)
    logits = restored.model.logits(restored.params, np.array([prompt], np.int32))  # type: ignore[attr-defined]
    assert token == int(np.argmax(logits[0, -1]))


def test_sample_prints_prompt_and_text(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_sample(folder, "def ", count=5, temperature=0.0, seed=0)
    assert capsys.readouterr().out.startswith("def ")


def test_sampled_token_numbers_stay_apart(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    restored = restore(folder)
    data = restored.config.data.model_copy(update={"source": "tokens"})
    config = restored.config.model_copy(update={"data": data})
    tokens = replace(restored, config=config)
    monkeypatch.setattr("skerry_evaluator.checkpoints.restore", lambda *_: tokens)
    print_sample(folder, "7 8", count=3, temperature=0.0, seed=0)
    words = capsys.readouterr().out.split()
    assert (len(words), words[:2]) == (5, ["7", "8"])


@pytest.mark.parametrize("prompt", ["1 -5", "1 256", "99999999999"])
def test_a_token_that_the_model_does_not_have_is_refused(prompt: str) -> None:
    data = DataConfig(source="tokens", paths=("x",))
    assert to_tokens(data, "7 255", 256) == [7, 255]
    with pytest.raises(ConfigError, match="its tokens are 0 to 255"):
        to_tokens(data, prompt, 256)


def test_a_prompt_that_is_no_utf8_is_read_like_other_text_that_is_none(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    print_sample(folder, "d\udcff", count=1, temperature=0.0, seed=0)
    assert capsys.readouterr().out.startswith("d\N{REPLACEMENT CHARACTER}")


def test_a_chat_reads_lines_that_are_no_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setattr(
        "skerry_evaluator.chat.print_chat", lambda _path, given, *_: lines.extend(given)
    )
    CliRunner().invoke(app, ["sample", "x", "--chat"], input=b"a\xff\nb\n")
    assert lines == ["a\N{REPLACEMENT CHARACTER}\n", "b\n"]


def test_text_to_judge_on_may_lie_in_a_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    given: dict[str, Any] = {}
    monkeypatch.setattr(
        "skerry_evaluator.checkpoints.print_scores", lambda _paths, **more: given.update(more)
    )
    CliRunner().invoke(app, ["eval", "x", "--text", "s3://bucket/text"])
    assert given["text"] == ["s3://bucket/text"]


def test_one_flipped_bit_is_refused(folder: Path) -> None:
    path = folder / "params.safetensors"
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)
    with pytest.raises(CheckpointCorrupt):
        restore(folder)


def test_a_model_without_logits_cannot_be_sampled() -> None:
    with pytest.raises(ModelError, match="logits"):
        Sampler(object(), 16, 1.0)
