"""The decoder in plain JAX, for every family of ``arch.FAMILIES``.

RMSNorm (arXiv 1910.07467), rotary positions (2104.09864), gated MLP (2002.05202), grouped queries
(2305.13245), experts (2101.03961). Parameters are a flat dict with the names and shapes of Hugging
Face's transformers. Layers have leaves of their own: a stacked leaf would be "one tensor" to the
merge by direction.

Activations between blocks are rows ``[batch * seq, d]``: where a weight's gradient sums over two
axes, batch and position, XLA on a CPU takes twice as long for it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Any, ClassVar, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.ad_checkpoint import checkpoint_name
from numpy.typing import NDArray

from skerry.models import experts, names
from skerry.models.arch import Arch, Kind, Layer, Rope
from skerry.models.attention import attention, trusted
from skerry.models.base import Aux, Batch
from skerry.models.layers import Run, apart, runs_of
from skerry.models.memory import LOGITS
from skerry.models.mesh import rows_apart
from skerry.models.tensors import tensors_of

Params: TypeAlias = Mapping[str, jax.Array]

ACTIVATIONS: Mapping[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": partial(jax.nn.gelu, approximate=True),
    "gelu": partial(jax.nn.gelu, approximate=False),
}
SAVED = ("attention", "mlp")
"""What a block can keep for its gradient: attention's mix, and what the MLP sums over."""


class KeysValues(NamedTuple):
    """Of one layer: [batch, seq, kv_heads, head_dim] each."""

    keys: jax.Array
    values: jax.Array


@jax.tree_util.register_dataclass
@dataclass(frozen=True, slots=True)
class Text:
    """What all blocks of one pass share; ``angles`` are cosines and sines by kind of layer."""

    batch: int = field(metadata={"static": True})
    seq: int = field(metadata={"static": True})
    angles: Mapping[Kind, tuple[Any, Any]]
    segments: jax.Array | None = None
    counted: jax.Array | None = None


def frequencies(rope: Rope, head_dim: int) -> NDArray[np.float64]:
    """Return the angle that each pair of a head's dimensions turns by per position."""
    half = head_dim // 2
    turned = int(rope.share * head_dim // 2)
    angle = np.zeros(half)
    angle[:turned] = rope.theta ** (-np.arange(turned) * 2.0 / head_dim)
    if rope.kind == "yarn":
        return angle * (1 - yarn_share(rope, half) * (1 - 1 / rope.factor))
    if rope.kind != "llama3":
        return angle / rope.factor
    length = 2 * math.pi / angle
    share = (rope.original / length - rope.low) / (rope.high - rope.low)
    return angle * (np.clip(share, 0, 1) + (1 - np.clip(share, 0, 1)) / rope.factor)


def yarn_share(rope: Rope, half: int) -> NDArray[np.float64]:
    """Return in how far YaRN divides the frequency of each pair: 0 to 1."""

    def pair_of(turns: float) -> float:
        return half * math.log(rope.original / (turns * 2 * math.pi)) / math.log(rope.theta)

    first, last = pair_of(rope.high), pair_of(rope.low)
    if rope.truncated:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    pairs: NDArray[np.float64] = np.arange(half, dtype=np.float64)
    return np.clip((pairs - first) / (last - first if last != first else 1e-3), 0.0, 1.0)


@lru_cache(maxsize=16)
def _angles(rope: Rope, head_dim: int, seq: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return cosines and sines f32 [1, seq, 1, half]; one array, so that a program has it once."""
    angle = (np.arange(seq)[:, None] * frequencies(rope, head_dim))[None, :, None, :]
    cos, sin = rope.gain * np.cos(angle), rope.gain * np.sin(angle)
    return cos.astype(np.float32), sin.astype(np.float32)


def rotate(x: jax.Array, angles: tuple[Any, Any]) -> jax.Array:
    """Turn ``[batch, seq, heads, head_dim]`` by its positions, in float32."""
    cos, sin = angles
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return turned.astype(x.dtype)


def project(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Multiply rows [n, in] with a matrix [out, in], as it lies in memory."""
    return jax.lax.dot_general(x, weight.astype(x.dtype), (((1,), (1,)), ((), ())))


@dataclass(frozen=True, slots=True)
class Decoder:
    """A model by the port; master parameters are float32, arithmetic is done in ``compute``.

    ``remat`` says what a block keeps for its gradient: ``none`` recomputes nothing, ``blocks``
    everything, and names of ``SAVED`` joined by commas all but those. ``fused`` asks for cuDNN.
    ``scanned`` computes layers that repeat in a loop over stacks of their parameters, made for one
    pass in the type of the arithmetic; of ``none`` such a loop keeps what products give.
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
        """Return the decoder with the fastest attention that this machine can be trusted with."""
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

    def unit(self, name: str, shape: tuple[int, ...]) -> int:
        return names.unit_of(name, shape)

    def init(self, key: jax.Array) -> dict[str, jax.Array]:
        """Return fresh parameters: every tensor from its own name, whatever else there is."""
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
        return self._scores(rows, self._head(params)).reshape(*tokens.shape, -1)

    def loss(self, params: Params, batch: Batch) -> tuple[jax.Array, Aux]:
        """Return the mean loss per target in nats with the experts' balance, and what is in it."""
        tokens = batch["tokens"]
        cut = {name: batch[name][:, :-1] for name in ("segments", "positions") if name in batch}
        rows, routed = self._rows(params, cut, tokens[:, :-1])
        weights = _target_weights(batch)
        total = self._nats(rows, self._head(params), tokens[:, 1:], weights)
        count = jnp.float32(tokens[:, 1:].size) if weights is None else jnp.sum(weights)
        mean, balance = total / jnp.maximum(count, 1e-9), jnp.float32(0.0)
        if self.arch.experts is not None and routed:
            coefficient = self.arch.experts.balance / len(routed)
            balance = coefficient * sum(r.balance for r in routed.values())
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
                x, found = self._scanned(run, text, parts, x, held, extras)
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
        return self._norm(x, params["model.norm.weight"]), routed

    def _scanned(
        self,
        run: Run,
        text: Text,
        parts: Sequence[Mapping[str, jax.Array]],
        x: jax.Array,
        held: Mapping[int, KeysValues],
        extras: jax.Array | None,
    ) -> tuple[jax.Array, dict[int, experts.Routed]]:
        """Apply a run of blocks as one loop over its repeats, over stacks of their parameters."""
        kinds = self.arch.layers[run.first : run.first + run.period]
        stacks = [
            self._stacked([parts[number] for number in run.layers[at :: run.period]])
            for at in range(run.period)
        ]
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
            for at, number in enumerate(run.layers[kind :: run.period])
        }
        return x, routed

    def _stacked(self, parts: Sequence[Mapping[str, jax.Array]]) -> dict[str, jax.Array]:
        """Return the leaves of equal layers stacked, those of matrices as arithmetic takes them."""

        def cast(name: str, leaf: jax.Array) -> jax.Array:
            matrix = leaf.ndim > 1 and not names.averaged(f".{name}")
            return leaf.astype(self.compute) if matrix else leaf

        return {name: jnp.stack([cast(name, part[name]) for part in parts]) for name in parts[0]}

    def _text(self, packed: Mapping[str, jax.Array], batch: int, seq: int) -> Text:
        arch, positions = self.arch, packed.get("positions")
        angles: dict[Kind, tuple[Any, Any]] = {}
        for layer in arch.layers:
            rope = arch.rope(layer)
            if positions is None:
                angles[layer.kind] = _angles(rope, layer.head_dim, seq)
            else:
                turn = jnp.asarray(frequencies(rope, layer.head_dim), jnp.float32)
                angle = positions.astype(jnp.float32)[:, :, None, None] * turn[None, None, None]
                gain = jnp.float32(rope.gain)
                angles[layer.kind] = gain * jnp.cos(angle), gain * jnp.sin(angle)
        text = Text(batch, seq, angles, packed.get("segments"))
        if text.segments is None:
            return text
        return replace(text, counted=(text.segments.reshape(-1) > 0).astype(jnp.float32))

    def remembering(self, layer: Layer, *, looped: bool = False) -> Callable[..., Any]:
        """Return the block of a layer, which keeps for its gradient what ``remat`` says."""
        block = partial(self._block, layer)
        if self.remat == "none":
            return jax.checkpoint(block, policy=_product, prevent_cse=False) if looped else block
        if self.remat == "blocks":
            return jax.checkpoint(block, prevent_cse=not looped)
        saved = jax.checkpoint_policies.save_only_these_names(*self.remat.split(","))
        return jax.checkpoint(block, policy=saved, prevent_cse=not looped)

    def _block(
        self,
        layer: Layer,
        text: Text,
        p: Params,
        x: jax.Array,
        shared: KeysValues | None,
        extra: jax.Array | None,
    ) -> tuple[jax.Array, KeysValues, experts.Routed | None]:
        """Add one block to rows [n, d]; ``extra`` [n, e] is what this layer knows of the tokens."""
        arch = self.arch
        mixed, held = self._attention(layer, text, p, self._named(p, "input_layernorm", x), shared)
        after = "post_attention_layernorm"
        x = x + (self._named(p, after, mixed) if arch.sandwich else mixed)
        before = "pre_feedforward_layernorm" if arch.sandwich else after
        out, where = self._feed_forward(layer, text, p, x, self._named(p, before, x))
        x = x + (self._named(p, "post_feedforward_layernorm", out) if arch.sandwich else out)
        if extra is not None:
            gate = self._activate(project(x, p["per_layer_input_gate.weight"])) * extra
            added = project(gate, p["per_layer_projection.weight"])
            x = x + self._named(p, "post_per_layer_input_norm", added)
        if "layer_scalar" in p:  # a constant of the checkpoint, not a parameter
            x = x * jax.lax.stop_gradient(p["layer_scalar"]).astype(x.dtype)
        return x, held, where

    def _attention(
        self, layer: Layer, text: Text, p: Params, x: jax.Array, shared: KeysValues | None
    ) -> tuple[jax.Array, KeysValues]:
        arch, angles = self.arch, text.angles[layer.kind]
        shape = text.batch, text.seq, -1, layer.head_dim
        query = self._biased(p, "self_attn.q_proj", x).reshape(shape)
        if arch.qk_norm:
            query = self._named(p, "self_attn.q_norm", query)
        if shared is None:
            key = self._biased(p, "self_attn.k_proj", x).reshape(shape)
            value = key
            if layer.values:
                value = self._biased(p, "self_attn.v_proj", x).reshape(shape)
            if arch.qk_norm:
                key = self._named(p, "self_attn.k_norm", key)
            if arch.value_norm:
                value = self._norm(value, None)
            shared = KeysValues(rotate(key, angles), value)
        mixed = attention(
            rotate(query, angles),
            shared.keys,
            shared.values,
            scale=arch.scale(layer),
            window=arch.window if layer.kind == "sliding_attention" else None,
            cap=arch.score_cap,
            segments=text.segments,
            fused=self.fused,
        )
        mixed = checkpoint_name(mixed.reshape(x.shape[0], -1), "attention")
        return self._biased(p, "self_attn.o_proj", mixed), shared

    def _feed_forward(
        self, layer: Layer, text: Text, p: Params, x: jax.Array, normed: jax.Array
    ) -> tuple[jax.Array, experts.Routed | None]:
        """Return what MLP and experts add; Gemma 4's experts see rows of their own norm."""
        if not layer.experts:
            return self._mlp(p, normed), None
        if not layer.mlp:
            scores = _router(normed, p["mlp.gate.weight"])
            return self._experts(text, p, "mlp.experts", normed, scores)
        dense = self._named(p, "post_feedforward_layernorm_1", self._mlp(p, normed))
        plain = self._norm(x, None) * p["router.scale"].astype(x.dtype)
        scores = _router(plain * jnp.asarray(x.shape[1] ** -0.5, x.dtype), p["router.proj.weight"])
        own = self._named(p, "pre_feedforward_layernorm_2", x)
        sparse, where = self._experts(text, p, "experts", own, scores)
        return dense + self._named(p, "post_feedforward_layernorm_2", sparse), where

    def _experts(
        self, text: Text, p: Params, name: str, x: jax.Array, scores: jax.Array
    ) -> tuple[jax.Array, experts.Routed]:
        assert self.arch.experts is not None  # a layer has them only where the arch does
        choice, where = experts.choose(scores, self.arch.experts, text.counted)
        if "router.per_expert_scale" in p:
            scale = p["router.per_expert_scale"][choice.experts]
            choice = choice._replace(weights=choice.weights * scale)
        stacks = p[f"{name}.gate_up_proj"], p[f"{name}.down_proj"]
        return experts.mix(x, choice, *stacks, self._activate), where

    def _mlp(self, p: Params, x: jax.Array) -> jax.Array:
        gate = self._activate(self._biased(p, "mlp.gate_proj", x))
        inner = checkpoint_name(gate * self._biased(p, "mlp.up_proj", x), "mlp")
        return self._biased(p, "mlp.down_proj", inner)

    def _per_layer(self, params: Params, tokens: jax.Array, x: jax.Array) -> jax.Array:
        """Return what each layer gets of each token: [n, layers, e]."""
        arch, shape = self.arch, (tokens.size, len(self.arch.layers), self.arch.per_layer)
        table = params["model.embed_tokens_per_layer.weight"]
        own = table[tokens].astype(x.dtype).reshape(shape) * jnp.asarray(shape[2] ** 0.5, x.dtype)
        seen = project(x, params["model.per_layer_model_projection.weight"])
        seen = (seen * jnp.asarray(arch.width**-0.5, x.dtype)).reshape(shape)
        gain = params["model.per_layer_projection_norm.weight"]
        return (self._norm(seen, gain) + own) * jnp.asarray(0.5**0.5, x.dtype)

    def _biased(self, p: Params, name: str, x: jax.Array) -> jax.Array:
        out = project(x, p[f"{name}.weight"])
        if f"{name}.lora_A.weight" in p:
            out = out + project(project(x, p[f"{name}.lora_A.weight"]), p[f"{name}.lora_B.weight"])
        bias = p.get(f"{name}.bias")
        return out if bias is None else out + bias.astype(x.dtype)

    def _named(self, p: Params, name: str, x: jax.Array) -> jax.Array:
        return self._norm(x, p[f"{name}.weight"])

    def _norm(self, x: jax.Array, gain: jax.Array | None) -> jax.Array:
        """Scale ``[..., d]`` to unit root mean square in float32, then by a gain; keeps dtype."""
        wide = x.astype(jnp.float32)
        mean = jnp.mean(jnp.square(wide), axis=-1, keepdims=True)
        wide = wide * jax.lax.rsqrt(mean + jnp.float32(self.arch.eps))
        if gain is not None:
            shape = (1,) * (x.ndim - 1) + (-1,)
            wide = wide * (gain + self.arch.gain_offset if self.arch.gain_offset else gain).reshape(
                shape
            )
        return wide.astype(x.dtype)

    def _activate(self, x: jax.Array) -> jax.Array:
        return ACTIVATIONS[self.arch.activation](x)

    def _head(self, params: Params) -> jax.Array:
        return params["model.embed_tokens.weight" if self.arch.tied else "lm_head.weight"]

    def _scores(self, rows: jax.Array, head: jax.Array) -> jax.Array:
        """Return the vocabulary's scores, f32 [n, vocab].

        The head is cast here, so that its gradient is summed over chunks in f32.
        """
        table = head.astype(rows.dtype)
        across = (((1,), (1,)), ((), ()))
        scores = jax.lax.dot_general(rows, table, across, preferred_element_type=jnp.float32)
        cap = self.arch.logit_cap
        return scores if cap is None else jnp.tanh(scores / cap) * cap

    def _nats(
        self, rows: jax.Array, head: jax.Array, targets: jax.Array, weights: jax.Array | None
    ) -> jax.Array:
        """Return the summed loss of rows [batch * seq, d], in chunks if they are many."""

        def summed(rows: jax.Array, targets: jax.Array, weights: jax.Array | None) -> jax.Array:
            scores = self._scores(rows, head)
            picked = jnp.take_along_axis(scores, targets[:, None], axis=-1)[:, 0]
            nats = jax.nn.logsumexp(scores, axis=-1) - picked
            return jnp.sum(nats if weights is None else nats * weights)

        batch, seq = targets.shape
        chunks = min(seq, -(-targets.size * self.arch.vocab // LOGITS))
        if chunks <= 1:
            flat = None if weights is None else weights.reshape(-1)
            return summed(rows, targets.reshape(-1), flat)
        weights = jnp.ones(targets.shape, jnp.float32) if weights is None else weights
        parts = (rows.reshape(batch, seq, -1), targets, weights)
        cut = [_chunked(part, chunks) for part in parts]
        body = jax.checkpoint(lambda total, part: (total + summed(*part), None))
        total, _ = jax.lax.scan(body, jnp.float32(0.0), tuple(cut))
        return jnp.asarray(total)


def _product(primitive: Any, *_: Any, **__: Any) -> bool:
    """Return True for what takes long to compute again: products, and attention's kernels."""
    return "dot" in primitive.name


@partial(jax.jit, static_argnums=(0, 1))
def _traced(decoder: Decoder, layer: Layer, *operands: Any) -> Any:
    """Apply a block; all layers that are equal are traced once."""
    return decoder.remembering(layer)(*operands)


def _chunked(x: jax.Array, chunks: int) -> jax.Array:
    """Cut [batch, seq, ...] at positions, padded with zeros: [chunks, batch * size, ...]."""
    size = -(-x.shape[1] // chunks)
    wide = jnp.pad(x, [(0, 0), (0, chunks * size - x.shape[1])] + [(0, 0)] * (x.ndim - 2))
    split = wide.reshape(x.shape[0], chunks, size, *x.shape[2:]).swapaxes(0, 1)
    return split.reshape(chunks, -1, *x.shape[2:])


def _target_weights(batch: Batch) -> jax.Array | None:
    """Return the targets' weights f32 [batch, seq], or None if all count.

    No sequence of a row predicts another.
    """
    weights, segments = batch.get("weights"), batch.get("segments")
    if segments is None:
        return weights
    inside = (segments[:, 1:] == segments[:, :-1]) & (segments[:, 1:] > 0)
    return inside.astype(jnp.float32) * (1.0 if weights is None else weights)


def _router(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return the experts' scores f32 [n, experts]: ties must not be decided by rounding."""
    return project(x.astype(jnp.float32), weight)


def _by_layer(params: Params, layers: int) -> list[dict[str, jax.Array]]:
    """Return the parameters of each layer under the names within it."""
    parts: list[dict[str, jax.Array]] = [{} for _ in range(layers)]
    for name, leaf in params.items():
        if name.startswith("model.layers."):
            number, _, rest = name.removeprefix("model.layers.").partition(".")
            parts[int(number)][rest] = leaf
    return parts
