"""From settings to a model: a preset with overrides, or ``module:function`` of your own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from skerry import code
from skerry.errors import ModelError
from skerry.models.base import Model
from skerry.models.sizes import sizes_of
from skerry.models.transformer import Transformer
from skerry.settings.models import ModelConfig, TrainConfig

AMPERE = 8.0
"""NVIDIA's first compute capability with matrix units for bfloat16."""


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


def compute_dtype(precision: str) -> Any:
    """Return the dtype of the arithmetic; ``auto`` means bfloat16 where the hardware has it."""
    if precision == "auto":
        precision = "bfloat16" if has_bfloat16(jax.devices()[0]) else "float32"
    return jnp.bfloat16 if precision == "bfloat16" else jnp.float32


def build_model(config: ModelConfig, train: TrainConfig) -> Model:
    """Return the model that a run trains; ModelError if the settings make none."""
    if config.factory:
        return load_factory(config.factory, config.options)
    return Transformer(sizes_of(config), compute_dtype(train.precision))


def load_factory(path: str, options: Mapping[str, str | int | float | bool]) -> Model:
    """Return the model that ``module:function`` makes of ``options``; else raises ModelError."""
    model = code.build(path, "model.factory", options, ModelError)
    if not isinstance(model, Model):
        msg = f"model.factory {path!r} returned a {type(model).__name__} without init and loss:"
        raise ModelError(msg + " see skerry.models.base.Model.", path="model.factory")
    return model
