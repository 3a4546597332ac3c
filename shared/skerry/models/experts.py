"""Mixtures of experts: routing, the experts' MLPs as ragged products, and their balance."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from skerry.models.arch import Experts
from skerry.models.axes import BY_ROWS
from skerry.models.mesh import on_mesh

_STACKED = jax.lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)


class Routed(NamedTuple):
    """Where a layer's tokens went: f32 [experts] each, over the tokens that count."""

    tokens: jax.Array
    balance: jax.Array
    """Experts times the sum over them of (share of tokens) x (mean probability): an f32 scalar."""


class Choice(NamedTuple):
    """The experts of each row and their weights: i32 and f32 [rows, chosen]."""

    experts: jax.Array
    weights: jax.Array


def choose(scores: jax.Array, experts: Experts, counted: jax.Array | None) -> tuple[Choice, Routed]:
    """Choose experts by their scores, f32 [rows, experts]; ``counted`` f32 [rows] may be 0 or 1."""
    shares = jax.nn.softmax(scores, axis=-1)
    weights, chosen = jax.lax.top_k(shares, experts.chosen)
    if experts.normalised:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    counts = jnp.ones(scores.shape[:1], jnp.float32) if counted is None else counted
    hits = jnp.sum(jax.nn.one_hot(chosen, experts.count, dtype=jnp.float32), axis=1)
    tokens = jnp.sum(hits * counts[:, None], axis=0)
    rows = jnp.maximum(jnp.sum(counts), 1.0)
    likely = jnp.sum(shares * counts[:, None], axis=0) / rows
    balance = experts.count * jnp.sum(jax.lax.stop_gradient(tokens) / rows * likely)
    return Choice(chosen, weights), Routed(tokens, balance)


def mix(
    rows: jax.Array,
    choice: Choice,
    gate_up: jax.Array,
    down: jax.Array,
    activate: Callable[[jax.Array], jax.Array],
) -> jax.Array:
    """Send rows [n, d] through their experts: gate_up [E, 2 i, d] and down [E, d, i].

    On a mesh each device handles its own rows; by default XLA would have each compute all rows.
    """
    mixed = partial(_mix, activate)
    if on_mesh():
        own, whole = PartitionSpec(BY_ROWS), PartitionSpec()
        mixed = jax.shard_map(
            mixed,
            in_specs=(own, own, whole, whole),
            out_specs=own,
            axis_names=set(BY_ROWS),
        )
    return mixed(rows, choice, gate_up, down)


def _mix(
    activate: Callable[[jax.Array], jax.Array],
    rows: jax.Array,
    choice: Choice,
    gate_up: jax.Array,
    down: jax.Array,
) -> jax.Array:
    count, chosen = choice.experts.shape
    flat = choice.experts.reshape(-1)
    order = jnp.argsort(flat)
    sizes = jnp.bincount(flat, length=gate_up.shape[0]).astype(jnp.int32)
    sent = rows[order // chosen]
    gate, up = jnp.split(_ragged(sent, gate_up, sizes), 2, axis=-1)
    out = _ragged(activate(gate) * up, down, sizes)
    weighted = out * choice.weights.reshape(-1)[order][:, None].astype(out.dtype)
    back = jnp.zeros((count * chosen, rows.shape[1]), out.dtype).at[order].set(weighted)
    return jnp.sum(back.reshape(count, chosen, -1), axis=1)


def _ragged(rows: jax.Array, stack: jax.Array, sizes: jax.Array) -> jax.Array:
    """Multiply each group of rows with its own matrix [out, in] of a stack."""
    return jax.lax.ragged_dot_general(rows, stack.astype(rows.dtype), sizes, _STACKED)
