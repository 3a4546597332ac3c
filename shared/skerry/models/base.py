"""The Model protocol, its parameters by name, and how settings become a model."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

import jax
import jax.numpy as jnp
from jax.sharding import Sharding

from skerry import code
from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ModelError, SkerryError
from skerry.models import names
from skerry.models.layers import scanned
from skerry.models.presets import arch_of
from skerry.models.stacks import NO_STACKS
from skerry.settings.models import ModelConfig, TrainConfig

Params: TypeAlias = Any
"""A pytree of float32 arrays, of any structure."""

Frozen: TypeAlias = Mapping[str, jax.Array]
"""Leaves by name that are not trained, and so not part of a run's fragments."""

Batch: TypeAlias = Mapping[str, jax.Array]
"""``tokens`` i32 [batch, seq + 1]; optional ``segments`` i32 [batch, seq + 1] (0: padding; the
sequences packed in a row count from 1), ``positions`` i32 [batch, seq + 1], and ``weights`` f32
[batch, seq], of the targets in the loss."""

AMPERE = 8.0
"""NVIDIA's first compute capability with matrix units for bfloat16."""


class Aux(NamedTuple):
    """What a loss returns besides its value; every field is summed over the batch."""

    tokens: jax.Array
    """Targets that count in the loss: the sum of their weights, an f32 scalar."""
    expert_tokens: Mapping[str, jax.Array] = MappingProxyType({})
    """By the name of a tensor of units: the tokens routed to each unit, f32 [units]."""
    balance: jax.Array | float = 0.0
    """The part of the loss that balances experts."""


@runtime_checkable
class Model(Protocol):
    """``init`` and ``loss`` are all that training needs; both must be traceable by ``jax.jit``.

    A model with the attribute ``takes_batch = True`` has another loss: ``loss(params, batch)``
    with a ``Batch`` returns ``(loss, Aux)``.

    More attributes are used where they exist:

    - ``logits(params, tokens)``, int32 ``[batch, seq]`` -> f32 ``[batch, seq, vocab]``: for
      ``skerry sample``.
    - ``vocab``, an int: lets the data pipeline refuse tokens out of range.
    - ``embeddings``, name parts of tensors that are averaged and never merged by direction;
      default: embeddings, output heads and routers by the names of ``skerry.models.names``.
    - ``trainable(name) -> bool``: tensors that are not trainable are not in the run's fragments.
    - ``unit(name, shape) -> int``: for a leaf that stacks several tensors, such as experts, the
      elements of one, which is merged by itself; 0: the whole leaf.
    - ``frozen``, specs of more leaves, which are not trained. ``frozen_leaves(places)`` returns
      them by name with the shardings ``places``, in ``frozen_dtype`` (default: float32); ``loss``
      and ``logits`` get them among the parameters, as ``whole`` returns them.
    - ``stacks``, ``{name: (leaf, leaf, ...)}``: leaves of one shape, of a flat dict of parameters,
      that may be held as one array of that name; ``loss`` then gets the array in their place.
    - ``axes``, ``{regex: (logical axis or None, ...)}``: the axes of the tensors whose whole name
      matches, for a mesh: ``embed``, ``heads``, ``kv_heads``, ``mlp``, ``vocab``, ``experts``.
    """

    def init(self, key: jax.Array) -> Params:
        """Return fresh float32 parameters; equal keys give equal parameters on every machine."""
        ...

    def loss(self, params: Params, tokens: Any, /) -> Any:
        """Return the mean loss in nats per token over int32 ``[batch, seq + 1]``, a scalar."""
        ...


def path_name(path: tuple[Any, ...]) -> str:
    """Return the name of a leaf: its tree path joined by ``.``, as Hugging Face and torch do."""
    return jax.tree_util.keystr(path, simple=True, separator=".") or "params"


@dataclass(frozen=True, slots=True)
class Layout:
    """The leaves of a tree in the order of their names, the same in JAX and in torch.

    JAX flattens by keys instead, one level after another: ``{"a": {"b": ...}, "a.a": ...}``.
    """

    names: tuple[str, ...]
    order: tuple[int, ...]
    tree: Any

    @classmethod
    def of(cls, params: Params) -> Layout:
        """Return the layout of arrays or of ``ShapeDtypeStruct``."""
        found, tree = jax.tree_util.tree_flatten_with_path(params)
        names = [path_name(path) for path, _ in found]
        order = tuple(sorted(range(len(names)), key=names.__getitem__))
        return cls(tuple(names[number] for number in order), order, tree)

    def leaves(self, params: Params) -> list[Any]:
        """Return a tree's leaves by name."""
        flat = self.tree.flatten_up_to(params)
        return [flat[number] for number in self.order]

    def params(self, leaves: Sequence[Any]) -> Params:
        """Return the tree of leaves that are sorted by name."""
        flat: list[Any] = [None] * len(self.order)
        for number, leaf in zip(self.order, leaves, strict=True):
            flat[number] = leaf
        return jax.tree.unflatten(self.tree, flat)

    def named(self, leaves: Mapping[str, Any]) -> Params:
        return self.params([leaves[name] for name in self.names])


def leaves_by_name(params: Params) -> list[Any]:
    """Return the leaves of a tree in the order of their names."""
    return Layout.of(params).leaves(params)


def leaf_specs(params: Params, embeddings: tuple[str, ...] | None = None) -> tuple[LeafSpec, ...]:
    """Name every tensor of a tree (arrays or ``ShapeDtypeStruct``), sorted by name.

    ``embeddings`` are name parts of tensors to be averaged; None: those of ``names.averaged``.

    Raises ModelError for an empty tree, a tensor that is not float32, or two with one name.
    """
    layout = Layout.of(params)
    specs: list[LeafSpec] = []
    for name, leaf in zip(layout.names, layout.leaves(params), strict=True):
        if getattr(leaf, "dtype", None) != "float32":
            kind = getattr(leaf, "dtype", type(leaf).__name__)
            msg = (
                f"Parameter {name} is not a float32 array but {kind}: make it float32, or keep it"
                " outside of the parameters."
            )
            raise ModelError(msg, path="model.factory")
        embedding = (
            names.averaged(name)
            if embeddings is None
            else any(part in embeddings for part in name.split("."))
        )
        specs.append(LeafSpec(name=name, shape=tuple(leaf.shape), embedding=embedding))
    if not specs or len({s.name for s in specs}) < len(specs):
        msg = "The model's parameters are empty or two of them share a name: give each its own."
        raise ModelError(msg, path="model.factory")
    return tuple(specs)


@lru_cache(maxsize=2)
def shapes_of(init: Callable[[jax.Array], Params]) -> Params:
    """Return the shapes and dtypes of a model's ``init``; tracing a deep one takes a while."""
    return jax.eval_shape(init, jax.random.key(0))


def layout_of(model: Model) -> Layout:
    """Return the layout of a model's parameters without allocating one of them."""
    return Layout.of(shapes_of(model.init))


def specs_of(model: Model) -> tuple[LeafSpec, ...]:
    """Name a model's parameters without allocating one of them."""
    try:
        shapes = shapes_of(model.init)
    except SkerryError:
        raise
    except Exception as error:
        about = code.failure(error, "a tree of arrays from one key")
        msg = f"The model's init failed {about}"
        raise ModelError(msg, path="model.factory") from error
    specs = leaf_specs(shapes, getattr(model, "embeddings", None))
    unit: Callable[[str, tuple[int, ...]], int] = getattr(model, "unit", lambda *_: 0)
    frozen: tuple[LeafSpec, ...] = getattr(model, "frozen", ())
    return (*(replace(spec, unit=unit(spec.name, spec.shape)) for spec in specs), *frozen)


def whole(params: Params, frozen: Frozen | None) -> Params:
    """Return the argument of a model's loss and logits: parameters, with frozen leaves if any.

    Pass both to a program as arguments: an array that it closes over is compiled as a constant.
    """
    return {**frozen, **params} if frozen else params


def batch_loss(model: Any) -> Callable[[Params, Batch], tuple[jax.Array, Aux]]:
    """Return the loss of a batch, ``(params, batch) -> (loss, Aux)``, of a model of either kind.

    It raises ModelError if the model's own loss is not one number.
    """
    if getattr(model, "takes_batch", False):
        return model.loss  # type: ignore[no-any-return] # the port of such a model says so

    def loss(params: Params, batch: Batch) -> tuple[jax.Array, Aux]:
        tokens = batch["tokens"]
        try:
            mean = model.loss(params, tokens)
        except Exception as error:
            about = code.failure(error, "one number from parameters and tokens")
            msg = f"The model's loss failed {about}"
            raise ModelError(msg, path="model.factory") from error
        if (shape := getattr(mean, "shape", None)) != ():
            kind = type(mean).__name__ if shape is None else f"numbers of shape {shape}"
            msg = f"The model's loss returned {kind}: it must return one number, the mean."
            raise ModelError(msg, path="model.factory")
        return mean, Aux(jnp.float32(tokens[:, 1:].size))

    return loss


def judged_loss(model: Any) -> Callable[[Params, Batch], tuple[jax.Array, jax.Array]]:
    """Return the plain loss of a batch, ``(params, batch) -> (nats per target, targets)``."""
    loss = batch_loss(model)

    def plain(params: Params, batch: Batch) -> tuple[jax.Array, jax.Array]:
        value, aux = loss(params, batch)
        return value - aux.balance, aux.tokens

    return plain


def mean_loss(judged: Sequence[tuple[Any, Any]]) -> float:
    """Return the loss per target over batches, given each one's mean loss and summed weights."""
    weights = [float(weight) for _, weight in judged]
    losses = [float(loss) * weight for (loss, _), weight in zip(judged, weights, strict=True)]
    return sum(losses) / sum(weights) if sum(weights) else math.nan


def token_loss(model: Any) -> Callable[[Params, jax.Array], jax.Array]:
    """Return the plain loss of text, ``(params, tokens) -> nats per token``, to judge a model."""
    loss = judged_loss(model)
    return lambda params, tokens: loss(params, {"tokens": tokens})[0]


class TrainedPart:
    """A model whose parameters are only those that are trained, a flat dict by name.

    Every machine makes the other leaves with the model's ``init`` from the run's seed.
    """

    stacks = NO_STACKS
    """The model's own hold leaves that are not trained, too."""

    def __init__(self, model: Any, specs: Sequence[LeafSpec], seed: int) -> None:
        self._model = model
        self._layout = layout_of(model)
        self._seed = seed
        self._trained = [spec.name for spec in specs if model.trainable(spec.name)]
        self.frozen = tuple(replace(s, trainable=False) for s in specs if s.name in self._rest)

    def init(self, key: jax.Array) -> Params:
        return self._pick(key, self._trained)

    def loss(self, params: Params, tokens: Any) -> Any:
        return self._model.loss(self._layout.named(params), tokens)

    def frozen_leaves(self, places: Mapping[str, Sharding]) -> Frozen:
        make = jax.jit(partial(self._pick, names=self._rest), out_shardings=dict(places))
        made: Frozen = make(jax.random.key(self._seed))
        return made

    @property
    def _rest(self) -> list[str]:
        return [name for name in self._layout.names if name not in self._trained]

    def _pick(self, key: jax.Array, names: Sequence[str]) -> dict[str, jax.Array]:
        leaves = self._layout.leaves(self._model.init(key))
        named = dict(zip(self._layout.names, leaves, strict=True))
        return {name: named[name] for name in names}

    def __getattr__(self, name: str) -> Any:
        """Return any other attribute of the model: ``logits``, ``vocab``, ``axes``, ``unit``."""
        found = getattr(self._model, name)
        if name != "logits":
            return found
        return lambda params, *rest: found(self._layout.named(params), *rest)


def without_frozen(model: Any, seed: int) -> Model:
    """Return the model, or its ``TrainedPart`` if its ``trainable`` excludes leaves."""
    if not hasattr(model, "trainable"):
        return model  # type: ignore[no-any-return] # a Model, as far as it can be seen
    specs = specs_of(model)
    if all(model.trainable(spec.name) for spec in specs):
        return model  # type: ignore[no-any-return] # as above
    return TrainedPart(model, specs, seed)


def has_bfloat16(device: Any) -> bool:
    """Return True if a device multiplies fast in bfloat16: no CPU does, nor NVIDIA before Ampere.

    A device without a compute capability like NVIDIA's (``"7.5"``) is a TPU or another GPU; all of
    these that JAX supports do.
    """
    capability = str(getattr(device, "compute_capability", ""))
    try:
        return float(capability) >= AMPERE
    except ValueError:
        return bool(device.platform != "cpu")


def build_model(config: ModelConfig, train: TrainConfig) -> Model:
    """Return the model that a run trains: a preset with overrides, or ``module:function``'s.

    With precision ``auto`` its arithmetic is bfloat16 where the hardware has it; a factory that
    takes ``precision`` gets ``bfloat16`` or ``float32``. Raises ModelError if the settings do not
    describe a model.
    """
    fast = train.precision == "auto" and has_bfloat16(jax.devices()[0])
    precision = "bfloat16" if fast or train.precision == "bfloat16" else "float32"
    if not config.factory:
        from skerry.models.decoder import Decoder  # these import this module
        from skerry.models.lora import Lora

        arch, adapters = arch_of(config), config.lora_rank > 0
        loops = scanned(train.layers, arch.layers, adapters=adapters)
        decoder = Decoder.of(arch, jnp.dtype(precision), train.remat, scanned=loops)
        return Lora(decoder, config, train.seed) if adapters else decoder
    offered = {"precision": precision}
    model: Any = code.build(config.factory, "model.factory", config.options, ModelError, offered)
    if not isinstance(model, Model):
        msg = (
            f"model.factory {config.factory!r} returned a {type(model).__name__} without init and"
            " loss: see skerry.models.base.Model."
        )
        raise ModelError(msg, path="model.factory")
    return without_frozen(model, train.seed)
