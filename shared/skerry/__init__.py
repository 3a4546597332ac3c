"""Skerry: train one model on many islands of compute over a durable NATS JetStream log."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skerry.client.asked import config_of as config_of
    from skerry.client.jax_island import join as join

LAZY = {"config_of": "skerry.client.asked", "join": "skerry.client.jax_island"}
"""What the package offers itself, and the module that is imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(LAZY[name]), name)
