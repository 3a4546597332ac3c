"""The commands ``skerry eval`` and ``skerry sample``: checkpoints as models with parameters."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from skerry import folders
from skerry.algorithm.fragments import trainable
from skerry.data.corpus import Corpus, load_corpus
from skerry.data.shards import MANIFEST
from skerry.data.tokenizer import Words
from skerry.errors import ConfigError, ModelError
from skerry.models.base import (
    Model,
    Params,
    build_model,
    judged_loss,
    layout_of,
    specs_of,
    whole,
)
from skerry.models.mesh import frozen_leaves
from skerry.settings import loading
from skerry.settings.checks import refuse_data
from skerry.settings.models import DataConfig, RunConfig
from skerry.store import checkpoint
from skerry.store.finding import is_url, locate
from skerry_evaluator.global_model import HeldOutText, Score
from skerry_evaluator.sampling import Sampler, to_text, to_tokens, words_of

HALF = "\N{REPLACEMENT CHARACTER}"
"""What the last bytes of a text decode to while they are no whole character."""


@dataclass(frozen=True, slots=True)
class Restored:
    """The model of a checkpoint, and its parameters with what is frozen beside them."""

    path: str
    config: RunConfig
    model: Model
    params: Params
    step: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CheckpointScore(Score):
    """A checkpoint's score; ``text`` is the digest of the held-out text."""

    checkpoint: str
    step: int
    tokens: int
    evaluated_tokens: int
    text: str


def evaluate(restored: Restored, corpus: Corpus, *, batches: int | None = None) -> CheckpointScore:
    """Return a checkpoint's score on held-out text; ``batches`` None: as its run's evaluator."""
    wanted = restored.config.eval.batches if batches is None else batches
    held_out = HeldOutText.of(corpus, wanted, restored.model)
    loss = jax.jit(judged_loss(restored.model))
    score = held_out.score([loss(restored.params, batch) for batch in held_out.batches])
    return CheckpointScore(
        **asdict(score),
        checkpoint=restored.path,
        step=restored.step,
        tokens=restored.tokens,
        evaluated_tokens=held_out.tokens,
        text=f"{held_out.digest:016x}",
    )


def restore(path: str | Path, sets: Sequence[str] = ()) -> Restored:
    """Read a checkpoint's folder or ``s3://`` address, or the newest one in a run's folder.

    The environment and ``sets`` say how to reach buckets, and which code of the checkpoint is
    allowed. Raises StoreError, CheckpointCorrupt, CodeRefused or ModelError.
    """
    where = str(path) if is_url(path) else Path(path).expanduser()
    access = loading.load(None, sets).local.store
    saved, tensors = checkpoint.params(*locate(where, access))
    config = loading.run_config_from_json(json.dumps(saved.config))
    model = build_model(config.model, config.train)
    specs = specs_of(model)
    if specs != saved.leaves:
        msg = f"{path} holds other parameters than its model has now: use the model code it was"
        raise ModelError(msg + " trained with.", path="model.factory")
    leaves = [jnp.asarray(tensors[spec.name]) for spec in trainable(specs)]
    params = whole(layout_of(model).params(leaves), frozen_leaves(model))
    return Restored(str(path), config, model, params, saved.step, saved.tokens)


def print_scores(
    paths: Sequence[str | Path],
    *,
    batches: int | None,
    as_json: bool,
    text: Sequence[str] = (),
    tokenizer: Path | None = None,
    sets: Sequence[str] = (),
) -> None:
    """Evaluate checkpoints and print a line for each, in order: a sentence, or a JSON object.

    ``text`` are files, folders and addresses to use instead of a run's own. A run that was trained
    on tokens takes prepared text, or plain text and a ``tokenizer``; ``data.field`` in ``sets``
    names its column. In JSON infinity and NaN are null.
    """
    if tokenizer is not None and not text:
        msg = "--tokenizer is that of other text: name the text with --text."
        raise ConfigError(msg, path="text")
    folders.allow(map(str, filter(None, (*text, tokenizer))))
    corpora: dict[str, Corpus] = {}
    for path in paths:
        restored = restore(path, sets)
        data = restored.config.data
        if text:
            data = _on_other_text(data, text, tokenizer, sets)
        refuse_data(data, by="--text")
        key = data.model_dump_json()
        if key not in corpora:
            corpora[key] = load_corpus(data)
        found = evaluate(restored, corpora[key], batches=batches)
        if as_json:
            floats = {name: v for name, v in asdict(found).items() if isinstance(v, float)}
            nothing = {name: None for name, value in floats.items() if not math.isfinite(value)}
            print(json.dumps(asdict(found) | nothing), flush=True)
            continue
        bits = found.bits_per_byte
        per_byte = "" if bits is None else f", {bits:.4f} bits per byte"
        print(
            f"{found.checkpoint}: step {found.step}, held-out loss {found.loss:.4f} nats per"
            f" token{per_byte}, perplexity {found.perplexity:.3f} ({found.evaluated_tokens} tokens"
            f" of text {found.text})",
            flush=True,
        )


def _on_other_text(
    data: DataConfig, text: Sequence[str], tokenizer: Path | None, sets: Sequence[str] = ()
) -> DataConfig:
    """Return a run's data settings with other text, read as the run's is."""
    given = loading.load(None, sets).run.data
    folder = data.tokenizer_folder if tokenizer is None else folders.from_here(str(tokenizer))
    own: dict[str, Any] = {"paths": tuple(text), "weights": (), "factory": ""}
    own |= given.model_dump(include={"field"}, exclude_unset=True)
    if data.of_bytes:
        if tokenizer is not None:
            msg = "The run was trained on bytes, not on tokens: leave --tokenizer out."
            raise ConfigError(msg, path="tokenizer")
        own["source"] = "text"
    elif folder and not any(Path(path, MANIFEST).is_file() for path in text):
        own |= {"source": "text", "tokenizer_folder": folder}
    elif data.source != "tokens":
        own |= {"source": "prepared", "tokenizer_folder": ""}
    return data.model_copy(update=own)


def print_sample(
    path: str | Path,
    prompt: str,
    count: int,
    temperature: float,
    seed: int,
    tokenizer: Path | None = None,
    sets: Sequence[str] = (),
) -> None:
    """Print a prompt and its continuation as it is written, by the ``tokenizer`` of a folder."""
    prompt = prompt.encode(errors="surrogateescape").decode(errors="replace")  # if no UTF-8
    restored = restore(path, sets)
    data, vocab = restored.config.data, getattr(restored.model, "vocab", None)
    sampler = Sampler(restored.model, data.seq_len, temperature)
    given = Words.of(tokenizer, vocab, data.tokenizer) if tokenizer is not None else None
    words = given or words_of(data)
    start = to_tokens(data, prompt, vocab) if words is None else words.encode(prompt) or [0]
    decode = partial(to_text, data) if words is None else words.decode
    written = [] if words is None else [*start]
    if words is None:
        print(prompt, end="" if data.of_bytes else " ")  # between numbers
    shown = ""
    for token in sampler.tokens(restored.params, start, count, seed):
        written.append(token)
        whole = decode(written).rstrip(HALF)
        print(whole[len(shown) :], end="", flush=True)
        shown = whole
    print(decode(written)[len(shown) :])
