"""The decoder in plain JAX, for every family of ``arch.FAMILIES``.

Parameters are a flat dict with the names and shapes of Hugging Face's transformers. To the log and
the merge each layer has leaves of its own; a learner may hold those of equal layers as stacks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp

from skerry.models import experts, names
from skerry.models.arch import Arch, Kind, Layer
from skerry.models.attention import trusted
from skerry.models.base import Aux, Batch
from skerry.models.block import Block, KeysValues, Params, Text, normed, project
from skerry.models.layers import Run, apart, runs_of
from skerry.models.loss import nats, scores_of, target_weights
from skerry.models.mesh import rows_apart
from skerry.models.positions import Angles, angles
from skerry.models.stacks import Stacks
from skerry.models.tensors import tensors_of

LAYERS = "model.layers."
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model by the port; master parameters are float32, arithmetic is done in ``compute``.

    ``remat`` says what a block recomputes for its gradient: ``none`` nothing, ``blocks``
    everything, and names of ``block.SAVED`` joined by commas all but those. ``fused`` asks for
    cuDNN. ``scanned`` computes layers that repeat in a loop over stacks of their parameters, in the
    type of the arithmetic; with ``none`` such a loop keeps the results of products. If parameters
    come by leaf, not by ``stacks``, it stacks them for one pass.
    """

    arch: Arch
    compute: Any = jnp.float32
    remat: str = "none"
    fused: bool = False
    scanned: bool = False
    takes_batch: ClassVar[bool] = True
    axes: ClassVar[Mapping[str, names.Axes]] = names.AXES

    @classmethod
    def of(
        cls,
        arch: Arch,
        compute: Any = jnp.float32,
        remat: str = "none",
        *,
        scanned: bool = False,
    ) -> Decoder:
        """Return the decoder with the fastest attention that is correct on this machine."""
        kinds = {
            (
                layer.kv_heads,
                layer.head_dim,
                arch.window if layer.kind != "full_attention" else None,
            )
            for layer in arch.layers
        }
        fused = all(trusted(arch.heads, *kind, jnp.dtype(compute).name) for kind in kinds)
        return cls(arch, compute, remat, fused, scanned)

    @property
    def vocab(self) -> int:
        return self.arch.vocab

    @property
    def stacks(self) -> Stacks:
        """The stacks of parameters that the loops go over."""
        loops = [run for run in runs_of(self.arch.layers) if run.repeats > 1]
        parts = _by_layer(tensors_of(self.arch), len(self.arch.layers))
        return {
            _stack(layers) + rest: tuple(f"{LAYERS}{number}.{rest}" for number in layers)
            for run in (loops if self.scanned else ())
            for layers in _kinds(run)
            for rest in parts[layers.start]
        }

    def unit(self, name: str, shape: tuple[int, ...]) -> int:
        return names.unit_of(name, shape)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return fresh parameters; each tensor depends only on ``key`` and its own name."""
        tensors = tensors_of(self.arch)
        keys = jax.random.split(key, len(tensors))
        return {
            name: tensor.mean + tensor.std * jax.random.normal(part, tensor.shape, jnp.float32)
            if tensor.std
            else jnp.full(tensor.shape, tensor.mean, jnp.float32)
            for part, (name, tensor) in zip(keys, tensors.items(), strict=True)
        }

    def logits(self, params: Params, tokens: jax.Array) -> jax.Array:
        """Score what follows each of ``tokens`` int32 [batch, seq]: f32 [batch, seq, vocab]."""
        rows, _ = self._rows(params, {"tokens": tokens}, tokens)
        return scores_of(self.arch, rows, self._head(params)).reshape(*tokens.shape, -1)

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, Aux]:
        """Return the mean loss per target in nats, with the experts' balance, and its ``Aux``."""
        tokens = batch["tokens"]
        cut = {name: batch[name][:, :-1] for name in ("segments", "positions") if name in batch}
        rows, routed = self._rows(params, cut, tokens[:, :-1])
        weights = target_weights(batch)
        total = nats(self.arch, rows, self._head(params), tokens[:, 1:], weights)
        count = jnp.float32(tokens[:, 1:].size) if weights is None else jnp.sum(weights)
        mean, balance = total / jnp.maximum(count, 1e-9), jnp.float32(0.0)
        if self.arch.experts is not None and routed:
            coefficient = self.arch.experts.balance / len(routed)
            balance = coefficient * sum((r.balance for r in routed.values()), balance)
        return mean + balance, Aux(count, self._expert_tokens(routed), balance)

    def _expert_tokens(self, routed: Mapping[int, experts.Routed]) -> dict[str, jax.Array]:
        """Return the tokens of each expert under the names of both stacks of its layer."""
        return {
            name: found.tokens
            for name in tensors_of(self.arch)
            if names.EXPERTS.search(name)
            for found in [routed[int(name.split(".")[2])]]
        }

    def _rows(
        self, params: Params, packed: Mapping[str, jax.Array], tokens: jax.Array
    ) -> tuple[jax.Array, dict[int, experts.Routed]]:
        """Return the normed last rows [batch * seq, d], and where each layer's tokens went."""
        arch, flat = self.arch, tokens.reshape(-1)
        text = self._text(packed, *tokens.shape)
        table = params["model.embed_tokens.weight"]
        x = table[flat].astype(self.compute)
        if arch.scaled_embedding:
            x = x * jnp.asarray(arch.width**0.5, self.compute)
        extras = self._per_layer(params, flat, x) if arch.per_layer else None
        parts = _by_layer(params, len(arch.layers))
        held: dict[int, KeysValues] = {}
        routed: dict[int, experts.Routed] = {}
        for run in runs_of(arch.layers) if self.scanned else apart(arch.layers):
            if run.repeats > 1:
                stacks = [self._stacked(params, parts, layers) for layers in _kinds(run)]
                x, found = self._scanned(run, text, stacks, x, held, extras)
                routed |= found
                continue
            number, layer = run.first, arch.layers[run.first]
            shared = None if layer.source is None else held[layer.source]
            extra = None if extras is None else extras[:, number]
            x, held[number], where = _traced(
                self, layer, text, parts[number], rows_apart(x), shared, extra
            )
            x = rows_apart(x)
            if where is not None:
                routed[number] = where
        return normed(arch, x, params["model.norm.weight"]), routed

    def _scanned(
        self,
        run: Run,
        text: Text,
        stacks: Sequence[Mapping[str, jax.Array]],
        x: jax.Array,
        held: Mapping[int, KeysValues],
        extras: jax.Array | None,
    ) -> tuple[jax.Array, dict[int, experts.Routed]]:
        """Apply a run of blocks as one loop over its repeats, over stacks of their parameters."""
        kinds = self.arch.layers[run.first : run.first + run.period]
        own = None
        if extras is not None:
            own = extras[:, run.layers.start : run.layers.stop].swapaxes(0, 1)
            own = own.reshape(run.repeats, run.period, *own.shape[1:])

        def repeat(x: jax.Array, given: Any) -> tuple[jax.Array, list[experts.Routed | None]]:
            leaves, extra = given
            wheres: list[experts.Routed | None] = []
            for at, layer in enumerate(kinds):
                block = self.remembering(layer, looped=True)
                shared = None if layer.source is None else held[layer.source]
                x, _, where = block(
                    text, leaves[at], rows_apart(x), shared, None if extra is None else extra[at]
                )
                x = rows_apart(x)
                wheres.append(where)
            return x, wheres

        x, found = jax.lax.scan(repeat, x, (stacks, own), length=run.repeats)
        routed = {
            number: jax.tree.map(lambda leaf, at=at: leaf[at], where)
            for kind, where in enumerate(found)
            if where is not None
            for at, number in enumerate(_kinds(run)[kind])
        }
        return x, routed

    def _stacked(
        self, params: Params, parts: Sequence[Mapping[str, jax.Array]], layers: range
    ) -> dict[str, jax.Array]:
        """Return the leaves of equal layers stacked, matrices in the type of the arithmetic."""

        def cast(name: str, leaf: jax.Array, more: int = 0) -> jax.Array:
            matrix = leaf.ndim > 1 + more and not names.averaged(f".{name}")
            return leaf.astype(self.compute) if matrix else leaf

        held = {
            name.removeprefix(stack): leaf
            for stack in [_stack(layers)]
            for name, leaf in params.items()
            if name.startswith(stack)
        }
        if held:
            return {name: cast(name, leaf, 1) for name, leaf in held.items()}
        return {
            name: jnp.stack([cast(name, parts[number][name]) for number in layers])
            for name in parts[layers.start]
        }

    def remembering(self, layer: Layer, *, looped: bool = False) -> Callable[..., Any]:
        """Return the block of a layer, which recomputes for its gradient what ``remat`` says."""
        block = Block(self.arch, layer, self.fused)
        if self.remat == "none":
            return jax.checkpoint(block, policy=_product, prevent_cse=False) if looped else block
        if self.remat == "blocks":
            return jax.checkpoint(block, prevent_cse=not looped)
        saved = jax.checkpoint_policies.save_only_these_names(*self.remat.split(","))
        return jax.checkpoint(block, policy=saved, prevent_cse=not looped)

    def _text(self, packed: Mapping[str, jax.Array], batch: int, seq: int) -> Text:
        arch, positions = self.arch, packed.get("positions")
        turned: dict[Kind, Angles] = {
            layer.kind: angles(arch.rope(layer), layer.head_dim, seq, positions)
            for layer in arch.layers
        }
        text = Text(batch, seq, turned, packed.get("segments"))
        if text.segments is None:
            return text
        return replace(text, counted=(text.segments.reshape(-1) > 0).astype(jnp.float32))

    def _per_layer(self, params: Params, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Return each layer's own embeddings of the tokens: [n, layers, e]."""
        arch, shape = self.arch, (tokens.size, len(self.arch.layers), self.arch.per_layer)
        table = params["model.embed_tokens_per_layer.weight"]
        own = table[tokens].astype(x.dtype).reshape(shape) * jnp.asarray(shape[2] ** 0.5, x.dtype)
        seen = project(x, params["model.per_layer_model_projection.weight"])
        seen = (seen * jnp.asarray(arch.width**-0.5, x.dtype)).reshape(shape)
        gain = params["model.per_layer_projection_norm.weight"]
        return (normed(arch, seen, gain) + own) * jnp.asarray(0.5**0.5, x.dtype)

    def _head(self, params: Params) -> jax.Array:
        return params["model.embed_tokens.weight" if self.arch.tied else "lm_head.weight"]


def _product(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True for operations that take long: matrix products and attention's kernels."""
    return "dot" in primitive.name


@partial(jax.jit, static_argnums=(0, 1))
def _traced(decoder: Decoder, layer: Layer, *operands: Any) -> Any:
    """Apply a block; all layers that are equal are traced once."""
    return decoder.remembering(layer)(*operands)


def _kinds(run: Run) -> list[range]:
    """Return the numbers of the layers that are equal, for each layer of a run's pattern."""
    return [run.layers[at :: run.period] for at in range(run.period)]


def _stack(layers: range) -> str:
    """Return how the names of stacks of these layers begin, as ``model.layers.0:24:1.``."""
    return f"{LAYERS}{layers.start}:{layers.stop}:{layers.step}."


def _by_layer(params: Mapping[str, T], layers: int) -> list[dict[str, T]]:
    """Return each layer's parameters by their names within it; stacks are left out."""
    parts: list[dict[str, T]] = [{} for _ in range(layers)]
    for name, leaf in params.items():
        if name.startswith(LAYERS):
            number, _, rest = name.removeprefix(LAYERS).partition(".")
            if number.isdigit():
                parts[int(number)][rest] = leaf
    return parts
