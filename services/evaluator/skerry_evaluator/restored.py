"""A checkpoint as a model and parameters, verified on the way in."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp

from skerry.errors import ModelError
from skerry.models.base import Model, Params, specs_of
from skerry.models.factory import build_model
from skerry.settings import loading
from skerry.settings.models import RunConfig
from skerry.store import checkpoint
from skerry.store.listing import locate
from skerry.store.opening import is_url


@dataclass(frozen=True, slots=True)
class Restored:
    """A model as it was when the checkpoint was written."""

    path: str
    config: RunConfig
    model: Model
    params: Params
    step: int
    tokens: int


def restore(path: str | Path, sets: Sequence[str] = ()) -> Restored:
    """Read a checkpoint's folder or ``s3://`` address, or the newest one in a run's folder.

    Buckets are reached as the environment and ``sets`` say, which also allow code of the
    checkpoint's model. StoreError, CheckpointCorrupt, CodeRefused and ModelError name what cannot
    be used.
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
