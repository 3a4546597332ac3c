"""Adapters as tensors, without JAX: their names and shapes, merged weights, and peft's files.

Leaf names are those that the peft library stores.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from skerry.errors import ModelError
from skerry.folders import offered, writing
from skerry.models import hf
from skerry.models.arch import Arch
from skerry.models.saving import save_tensors
from skerry.models.tensors import Tensor, tensors_of

if TYPE_CHECKING:
    from skerry.settings.models import ModelConfig

PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
ADAPTER = re.compile(rf"{re.escape(PREFIX)}(.+)\.lora_[AB]\.weight")


def adapters_of(arch: Arch, rank: int, targets: tuple[str, ...]) -> Mapping[str, Tensor]:
    """Return the adapters' tensors by name, sorted; ModelError for a target that no matrix has."""
    found = dict(sorted(_adapters(arch, rank, targets)))
    for target in targets:
        if not any(f".{target}." in name for name in found):
            msg = (
                f"model.lora_targets names {target!r}, but no matrix of a {arch.family} has it:"
                " leave it out."
            )
            raise ModelError(msg, path="model.lora_targets")
    return found


def _adapters(arch: Arch, rank: int, targets: tuple[str, ...]) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors_of(arch).items():
        module = name.removesuffix(".weight")
        if len(tensor.shape) == 2 and module.rpartition(".")[2] in targets:
            out, into = tensor.shape
            yield f"{PREFIX}{module}{DOWN}", Tensor((rank, into), into**-0.5)
            yield f"{PREFIX}{module}{UP}", Tensor((out, rank))


def merged(
    arch: Arch, weights: Mapping[str, Any], adapters: Mapping[str, Any], scale: float
) -> Mapping[str, Any]:
    """Return the weights with their adapters added, one tensor at a time, for an export."""
    return _Merged(arch, weights, adapters, scale)


class _Merged(dict[str, Any]):
    """Tensors by name, each computed when it is asked for."""

    def __init__(
        self, arch: Arch, weights: Mapping[str, Any], adapters: Mapping[str, Any], scale: float
    ) -> None:
        super().__init__(dict.fromkeys(tensors_of(arch)))
        self._weights, self._adapters, self._scale = weights, adapters, scale

    def __getitem__(self, name: str) -> Any:
        whole = np.asarray(self._weights[name], np.float32)
        module = PREFIX + name.removesuffix(".weight")
        if module + DOWN not in self._adapters:
            return whole
        down, up = (np.asarray(self._adapters[module + end]) for end in (DOWN, UP))
        return whole + np.float32(self._scale) * (up @ down)


def write_peft(
    folder: str | Path, model: ModelConfig, adapters: Mapping[str, Any], base: str = ""
) -> None:
    """Write adapters as the peft library loads them; ``base`` is its name of the weights."""
    tensors = {name: np.ascontiguousarray(leaf, np.float32) for name, leaf in adapters.items()}
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": model.lora_rank,
        "lora_alpha": alpha_of(model),
        "target_modules": sorted(model.lora_targets),
        "base_model_name_or_path": base,
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    with writing(Path(folder)) as draft:
        save_tensors(tensors, draft / "adapter_model.safetensors")
        text = json.dumps(config, indent=2, sort_keys=True) + "\n"
        (draft / "adapter_config.json").write_text(text)


def alpha_of(model: ModelConfig) -> float:
    return 2.0 * model.lora_rank if model.lora_alpha is None else model.lora_alpha


def base_folder(model: ModelConfig) -> Path | None:
    """Return this machine's copy of a run's frozen weights; None if the run began without.

    Raises ModelError if the run has such weights and no folder given to this process holds them.
    """
    if model.path:
        return Path(model.path).expanduser()
    if not model.weights:
        return None
    for folder in offered():
        if digest_of(folder) == model.weights:
            return folder
    msg = (
        f"This run trains adapters of weights with digest {model.weights}, which this machine does"
        " not have: name a copy of their folder with --set model.path=FOLDER."
    )
    raise ModelError(msg, path="model.path")


def digest_of(folder: str | Path) -> str:
    """Return the digest of a folder's weights, which are read once; raises as ``hf.digest``."""
    return _digest(Path(folder).expanduser())


@lru_cache(maxsize=8)
def _digest(folder: Path) -> str:
    return hf.digest(folder)
