"""Checkpoints as models with parameters, verified, and their loss on held-out text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from skerry.data.corpus import Corpus
from skerry.errors import ModelError
from skerry.models.base import Model, Params, specs_of
from skerry.models.factory import build_model
from skerry.settings import loading
from skerry.settings.models import RunConfig
from skerry.store import checkpoint
from skerry.store.finding import is_url, locate
from skerry_evaluator.held_out import HeldOutText, Score


@dataclass(frozen=True, slots=True)
class Restored:
    """The model and parameters of a checkpoint."""

    path: str
    config: RunConfig
    model: Model
    params: Params
    step: int
    tokens: int


@dataclass(frozen=True, slots=True)
class CheckpointScore:
    """A checkpoint's score; ``text`` is the digest of the held-out text."""

    checkpoint: str
    step: int
    tokens: int
    score: Score
    evaluated_tokens: int
    text: str


def evaluate(restored: Restored, corpus: Corpus, *, batches: int | None = None) -> CheckpointScore:
    """Return a checkpoint's score on held-out text; ``batches`` None: as its run's evaluator."""
    wanted = restored.config.eval.batches if batches is None else batches
    held_out = HeldOutText.of(corpus, wanted, getattr(restored.model, "vocab", None))
    loss = jax.jit(restored.model.loss)
    return CheckpointScore(
        checkpoint=str(restored.path),
        step=restored.step,
        tokens=restored.tokens,
        score=held_out.score([float(loss(restored.params, row)) for row in held_out.rows]),
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
    leaves = [jnp.asarray(tensors[spec.name]) for spec in specs]
    tree = jax.tree.structure(jax.eval_shape(model.init, jax.random.key(0)))
    params: Params = jax.tree.unflatten(tree, leaves)
    return Restored(str(path), config, model, params, saved.step, saved.tokens)
