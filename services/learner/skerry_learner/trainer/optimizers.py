"""The inner optimizers of a run, without their learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import optax  # pyright: ignore[reportMissingTypeStubs] - it is typed in parts
from optax import contrib  # pyright: ignore[reportMissingTypeStubs] - as above

from skerry.algorithm.fragments import LeafSpec
from skerry.algorithm.outer import optax_named
from skerry.algorithm.presets import INNERS
from skerry.models.base import Layout, Params
from skerry.settings.models import TrainConfig

MOMENTUM = 0.95
"""Decay of Muon's one moment, that of its authors."""
ADAMS_RMS = 0.2
"""Root mean square of AdamW's updates. Muon's are scaled to it, so that one rate and one weight
decay serve both (arXiv 2502.16982, section 2.2)."""


def make_optimizer(
    config: TrainConfig, leaves: Sequence[LeafSpec] = ()
) -> optax.GradientTransformation:
    """Return the inner optimizer without its learning rate.

    AdamW (arXiv 1711.05101) with decay on matrices only; Muon (arXiv 2502.16982, and 2505.23725
    within DiLoCo) for the matrices among ``leaves``, which are those of the model; ``gradient``
    passes gradients through. Any other is made with a learning rate of 1, so that the run's
    schedule scales its updates.
    """
    if config.inner == "gradient":
        return optax.identity()
    if config.inner not in INNERS:
        named = optax_named(config.inner, "train.inner", {"learning_rate": 1.0})
        return optax.chain(optax.clip_by_global_norm(config.clip), named, optax.scale(-1.0))
    rule = optax.scale_by_adam(b1=config.b1, b2=config.b2)
    return optax.chain(
        optax.clip_by_global_norm(config.clip),
        _muon(rule, leaves) if config.inner == "muon" else rule,
        optax.add_decayed_weights(config.weight_decay, mask=_decays),
    )


def is_matrix(leaf: LeafSpec) -> bool:
    """Return True if Muon trains a leaf: a matrix, or a stack of experts with one matrix each.

    Embeddings, heads and routers are tables of vectors: AdamW trains them, as it does norms.
    """
    return not leaf.embedding and len(leaf.shape) == (3 if leaf.unit else 2)


def _muon(
    others: optax.GradientTransformation, leaves: Sequence[LeafSpec]
) -> optax.GradientTransformation:
    matrices = {leaf.name for leaf in leaves if is_matrix(leaf)}

    def labels(params: Params) -> Any:
        layout = Layout.of(params)
        return layout.params(["muon" if name in matrices else "adam" for name in layout.names])

    muon = optax.chain(
        contrib.scale_by_muon(beta=MOMENTUM, weight_dimension_numbers=_dimensions),
        optax.stateless(lambda updates, _: jax.tree.map(_scaled, updates)),
    )
    return optax.partition({"muon": muon, "adam": others}, labels)


def _scaled(update: jax.Array) -> jax.Array:
    """Scale an orthogonal update, whose root mean square is one over that of the longer side."""
    longer: int = max(update.shape[-2:])
    return update * float(ADAMS_RMS * longer**0.5)


def _dimensions(matrices: Any) -> Any:
    """Return which axes make a matrix, ``[..., out, in]``: those before it are a batch."""
    return jax.tree.map(
        lambda leaf: contrib.MuonDimensionNumbers(leaf.ndim - 1, leaf.ndim - 2), matrices
    )


def _decays(params: Params) -> Any:
    return jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
