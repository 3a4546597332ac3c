"""Low-rank adapters (LoRA, arXiv 2106.09685) beside frozen weights: the only fragments of a run.

A matrix ``W [out, in]`` acts as ``W + alpha / rank * B A``; A begins random and B with zeros. Leaf
names are those that the peft library stores. The frozen weights are no part of the log: every
machine reads them from its own copy of the folder that the run's digest names.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from skerry.algorithm.fragments import LeafSpec
from skerry.models import hf
from skerry.models.adapters import PREFIX, UP, adapters_of, alpha_of, base_folder
from skerry.models.presets import arch_of
from skerry.models.tensors import Tensor, leaf_specs_of

if TYPE_CHECKING:
    from skerry.models.base import Aux, Batch
    from skerry.models.decoder import Decoder
    from skerry.settings.models import ModelConfig


@dataclass(frozen=True)
class Lora:
    """A decoder whose parameters are its adapters; ``seed`` makes frozen weights of a preset."""

    decoder: Decoder
    config: ModelConfig
    seed: int
    takes_batch = True

    def __post_init__(self) -> None:
        base_folder(self.config)  # a machine without the weights is refused at once

    def init(self, key: Any) -> dict[str, Any]:
        """Return fresh adapters, which change nothing yet."""
        import jax

        tensors = self._tensors
        keys = jax.random.split(key, len(tensors))
        return {
            name: tensor.std * jax.random.normal(part, tensor.shape, "float32")
            for part, (name, tensor) in zip(keys, tensors.items(), strict=True)
        }

    def loss(self, params: Mapping[str, Any], batch: Batch) -> tuple[Any, Aux]:
        return self.decoder.loss(self._whole(params), batch)

    def logits(self, params: Mapping[str, Any], tokens: Any) -> Any:
        return self.decoder.logits(self._whole(params), tokens)

    @property
    def vocab(self) -> int:
        return self.decoder.vocab

    @property
    def frozen(self) -> tuple[LeafSpec, ...]:
        """The weights' tensors, which no merge touches."""
        found = leaf_specs_of(self.decoder.arch)
        return tuple(replace(spec, trainable=False) for spec in found)

    @cached_property
    def _tensors(self) -> Mapping[str, Tensor]:
        return adapters_of(self.decoder.arch, self.config.lora_rank, self.config.lora_targets)

    @cached_property
    def _weights(self) -> Mapping[str, Any]:
        """The frozen weights in the arithmetic's type, on the device."""
        import jax

        with jax.ensure_compile_time_eval():
            whole = fresh_or_read(self.config, self.seed)
            return {
                name: jax.device_put(whole[name]).astype(self.decoder.compute) for name in whole
            }

    def _whole(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return frozen weights and adapters by the names within the decoder."""
        scale = alpha_of(self.config) / self.config.lora_rank
        own = {
            name.removeprefix(PREFIX): leaf * scale if name.endswith(UP) else leaf
            for name, leaf in params.items()
        }
        return {**self._weights, **own}


def fresh_or_read(model: ModelConfig, seed: int) -> Mapping[str, Any]:
    """Return what a run's adapters stand beside: a folder's weights, or a preset's fresh ones."""
    folder = base_folder(model)
    if folder is not None:
        return hf.load(folder, arch_of(model))
    import jax

    from skerry.models.decoder import Decoder

    weights: Mapping[str, Any] = jax.jit(Decoder(arch_of(model)).init)(jax.random.key(seed))
    return weights
