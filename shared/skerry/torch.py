"""PyTorch learners: ``skerry.torch.join``, and callbacks for Hugging Face's Trainer and Lightning.

Nothing of torch is imported before it is asked for.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from skerry.client.torch_hf import SkerryCallback, model_of
    from skerry.client.torch_island import join
    from skerry.client.torch_lightning import LightningCallback

__all__ = ["LightningCallback", "SkerryCallback", "join", "model_of"]

LAZY = {
    "join": "skerry.client.torch_island",
    "SkerryCallback": "skerry.client.torch_hf",
    "model_of": "skerry.client.torch_hf",
    "LightningCallback": "skerry.client.torch_lightning",
}
"""What this module offers, and the module that is imported when it is asked for."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(LAZY[name]), name)
