"""From settings to a model: a preset with overrides, or ``module:function`` of your own."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from skerry.errors import ModelError
from skerry.models.base import Model
from skerry.models.transformer import Sizes, Transformer
from skerry.settings.models import ModelConfig, TrainConfig

AMPERE = 8.0
"""NVIDIA's first compute capability with matrix units for bfloat16."""

PRESETS: Mapping[str, Sizes] = {
    "nano": Sizes(layers=4, d_model=128, heads=4, kv_heads=2, d_ff=352),
    "micro": Sizes(layers=6, d_model=256, heads=8, kv_heads=4, d_ff=704),
    "small": Sizes(layers=12, d_model=768, heads=12, kv_heads=4, d_ff=2048),
    "base": Sizes(layers=24, d_model=1024, heads=16, kv_heads=4, d_ff=2816),
}


def sizes_of(config: ModelConfig) -> Sizes:
    """Return the preset with its overrides; ModelError when the heads do not divide."""
    fields = ("layers", "d_model", "heads", "kv_heads", "d_ff", "vocab")
    given = {name: getattr(config, name) for name in fields if getattr(config, name) is not None}
    sizes = replace(PRESETS[config.preset], **given)
    if sizes.d_model % sizes.heads or sizes.head_dim % 2:
        msg = (
            f"model.d_model = {sizes.d_model} does not split into {sizes.heads} heads"
            " of even width: make it a multiple of twice model.heads."
        )
        raise ModelError(msg, path="model.d_model")
    if sizes.heads % sizes.kv_heads:
        msg = f"model.kv_heads = {sizes.kv_heads} does not divide model.heads = {sizes.heads}."
        raise ModelError(msg + " Choose a divisor.", path="model.kv_heads")
    return sizes


def has_bfloat16(device: Any) -> bool:
    """Tell whether a device multiplies in bfloat16: no CPU does it fast, nor NVIDIA before Ampere.

    A device without a compute capability of NVIDIA's kind (``"7.5"``) is a TPU or another maker's
    GPU: those that JAX supports have it.
    """
    capability = str(getattr(device, "compute_capability", ""))
    try:
        return float(capability) >= AMPERE
    except ValueError:
        return bool(device.platform != "cpu")


def compute_dtype(precision: str) -> Any:
    """Return the dtype of the arithmetic; ``auto`` means bfloat16 where the hardware has it."""
    if precision == "auto":
        precision = "bfloat16" if has_bfloat16(jax.devices()[0]) else "float32"
    return jnp.bfloat16 if precision == "bfloat16" else jnp.float32


def build_model(config: ModelConfig, train: TrainConfig) -> Model:
    """Return the model a run trains; ModelError says what is wrong with the configuration."""
    if config.factory:
        return load_factory(config.factory, config.options)
    return Transformer(sizes_of(config), compute_dtype(train.precision))


def load_factory(path: str, options: Mapping[str, str | int | float | bool]) -> Model:
    """Call ``module:function`` with ``options`` and check that what it returns is a model."""
    module_name, _, function_name = path.partition(":")
    try:
        factory = getattr(importlib.import_module(module_name), function_name)
        model = factory(**options)
    except Exception as error:
        msg = f"model.factory {path!r} failed: {error}. It must name an importable module:function"
        msg += " that takes model.options as keyword arguments."
        raise ModelError(msg, path="model.factory") from error
    if not isinstance(model, Model):
        msg = f"model.factory {path!r} returned a {type(model).__name__} without init and loss:"
        raise ModelError(msg + " see skerry.models.base.Model.", path="model.factory")
    return model
