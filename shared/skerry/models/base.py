"""The Model protocol, its parameters by name, and how settings become a model."""

from __future__ import annotations

from typing import Any, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp

from skerry import code
from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ModelError
from skerry.models.sizes import sizes_of
from skerry.models.transformer import Transformer
from skerry.settings.models import ModelConfig, TrainConfig

Params: TypeAlias = Any
"""A pytree of float32 arrays, of any structure."""

EMBEDDING_PARTS = ("embed",)
AMPERE = 8.0
"""NVIDIA's first compute capability with matrix units for bfloat16."""


@runtime_checkable
class Model(Protocol):
    """``init`` and ``loss`` are all that training needs; both must be traceable by ``jax.jit``.

    Two more attributes are used where they exist: ``logits(params, tokens)`` by ``skerry sample``
    (int32 ``[batch, seq]`` -> f32 ``[batch, seq, vocab]``), and ``embeddings``, a tuple of name
    parts that mark embedding tensors (default ``("embed",)``); those are averaged, never merged
    by direction. An int attribute ``vocab`` lets the data pipeline refuse tokens out of range.
    """

    def init(self, key: jax.Array) -> Params:
        """Return fresh float32 parameters; equal keys give equal parameters on every machine."""
        ...

    def loss(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Return the mean loss in nats per token over int32 ``[batch, seq + 1]``, a scalar."""
        ...


def path_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf: its tree path joined by ``/``."""
    return jax.tree_util.keystr(path, simple=True, separator="/") or "params"


def leaf_specs(
    params: Params, embeddings: tuple[str, ...] = EMBEDDING_PARTS
) -> tuple[LeafSpec, ...]:
    """Name every tensor of a tree (arrays or ``ShapeDtypeStruct``), in jax's own flattening order.

    Raises ModelError for an empty tree, a tensor that is not float32, or two with one name.
    """
    leaves = jax.tree_util.tree_flatten_with_path(params)[0]
    specs: list[LeafSpec] = []
    for path, leaf in leaves:
        name = path_name(path)
        if getattr(leaf, "dtype", None) != "float32":
            msg = f"Parameter {name} is not a float32 array: return float32 parameters from init."
            raise ModelError(msg, path="model.factory")
        embedding = any(part in embeddings for part in name.split("/"))
        specs.append(LeafSpec(name=name, shape=tuple(leaf.shape), embedding=embedding))
    if not specs or len({s.name for s in specs}) < len(specs):
        msg = "The model's parameters are empty or two of them share a name: give each its own."
        raise ModelError(msg, path="model.factory")
    return tuple(specs)


def specs_of(model: Model) -> tuple[LeafSpec, ...]:
    """Name a model's parameters without allocating one of them."""
    try:
        shapes = jax.eval_shape(model.init, jax.random.key(0))
    except Exception as error:
        msg = f"The model's init failed ({error}): it must return a tree of arrays from one key."
        raise ModelError(msg, path="model.factory") from error
    return leaf_specs(shapes, getattr(model, "embeddings", EMBEDDING_PARTS))


def has_bfloat16(device: Any) -> bool:
    """Return True if a device multiplies fast in bfloat16: no CPU does, nor NVIDIA before Ampere.

    A device without a compute capability like NVIDIA's (``"7.5"``) is a TPU or another GPU: all
    that JAX supports do.
    """
    capability = str(getattr(device, "compute_capability", ""))
    try:
        return float(capability) >= AMPERE
    except ValueError:
        return bool(device.platform != "cpu")


def build_model(config: ModelConfig, train: TrainConfig) -> Model:
    """Return the model that a run trains: a preset with overrides, or ``module:function``'s.

    With precision ``auto`` its arithmetic is bfloat16 where the hardware has it. Raises ModelError
    if the settings make none.
    """
    if not config.factory:
        fast = train.precision == "auto" and has_bfloat16(jax.devices()[0])
        narrow = fast or train.precision == "bfloat16"
        return Transformer(sizes_of(config), jnp.bfloat16 if narrow else jnp.float32)
    model = code.build(config.factory, "model.factory", config.options, ModelError)
    if not isinstance(model, Model):
        msg = (
            f"model.factory {config.factory!r} returned a {type(model).__name__} without init and"
            " loss: see skerry.models.base.Model."
        )
        raise ModelError(msg, path="model.factory")
    return model
