"""Low-rank adapters (LoRA, arXiv 2106.09685) beside frozen weights: the only fragments of a run.

A matrix ``W [out, in]`` acts as ``W + alpha / rank * B A``; A begins random and B with zeros. Leaf
names are those that the peft library stores. The frozen weights are not in the log: every machine
reads its own copy of the folder, which must have the digest in the run's record.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from skerry.algorithm.fragments import LeafSpec
from skerry.models import hf, names
from skerry.models.adapters import PREFIX, UP, adapters_of, alpha_of, base_folder
from skerry.models.tensors import Tensor, leaf_specs_of

if TYPE_CHECKING:
    from jax.sharding import Sharding

    from skerry.models.base import Aux, Batch, Frozen
    from skerry.models.decoder import Decoder
    from skerry.settings.models import ModelConfig


@dataclass(frozen=True)
class Lora:
    """A decoder whose parameters are its adapters; ``seed`` makes frozen weights of a preset."""

    decoder: Decoder
    config: ModelConfig
    seed: int
    takes_batch: ClassVar[bool] = True
    axes: ClassVar[Mapping[str, names.Axes]] = names.AXES

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

    def frozen_leaves(self, places: Mapping[str, Sharding]) -> Frozen:
        """Return the weights in the arithmetic's type: this machine's copy, or a preset's own."""
        import jax

        folder, compute = base_folder(self.config), self.frozen_dtype
        if folder is not None:
            return hf.load(folder, self.decoder.arch, places, compute)

        def made(key: Any) -> dict[str, Any]:
            drawn = self.decoder.init(key)
            return {name: leaf.astype(compute) for name, leaf in drawn.items()}

        found: Frozen = jax.jit(made, out_shardings=dict(places))(jax.random.key(self.seed))
        return found

    @property
    def frozen_dtype(self) -> Any:
        return self.decoder.compute

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

    def _whole(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """Return frozen weights and adapters by the names within the decoder."""
        scale = alpha_of(self.config) / self.config.lora_rank
        return {
            name.removeprefix(PREFIX): leaf * scale if name.endswith(UP) else leaf
            for name, leaf in params.items()
        }
