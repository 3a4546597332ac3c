"""Built-in models as Hugging Face configs, and the shape that settings name; without JAX."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

from skerry.errors import ModelError
from skerry.models.arch import Arch, arch_from, text_table
from skerry.models.folder import read_text
from skerry.settings.models import ModelConfig

KEYS = {
    "layers": "num_hidden_layers",
    "d_model": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "d_ff": "intermediate_size",
    "vocab": "vocab_size",
}
"""Settings that replace a key of the config."""


def _preset(family: str, sizes: str, **more: Any) -> Mapping[str, Any]:
    """Return a config from "layers width heads kv_heads mlp"."""
    numbers = map(int, sizes.split())
    return MappingProxyType(
        {
            "model_type": family,
            **dict(zip(KEYS.values(), numbers, strict=False)),
            "rms_norm_eps": 1e-6,
            "bos_token_id": None,
            "eos_token_id": None,
            **more,
        }
    )


_SHORT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 8192,
    "head_dim": None,
}
_LONG: dict[str, Any] = {
    "vocab_size": 32_768,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "head_dim": 128,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 32_768,
}

OWN: Literal["own"] = "own"
"""The preset in the record of a run whose training loops brought a model of their own."""

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "nano": _preset("gemma", "4 128 4 2 352", **_SHORT),
        "micro": _preset("gemma", "6 256 8 4 704", **_SHORT),
        "small": _preset("gemma", "12 768 12 4 2048", **_SHORT),
        "base": _preset("gemma", "24 1024 16 4 2816", **_SHORT),
        "0.1b": _preset("qwen3", "12 640 10 5 1792", **(_LONG | {"head_dim": 64})),
        "0.3b": _preset("qwen3", "20 1024 16 8 2816", **(_LONG | {"head_dim": 64})),
        "1b": _preset("qwen3", "18 2048 16 8 5632", **_LONG),
        "3b": _preset("qwen3", "28 3072 24 8 8192", **_LONG),
        "7b": _preset("qwen3", "32 4096 32 8 14336", **_LONG),
        "12b": _preset("qwen3", "40 5120 40 8 14336", **_LONG),
        "moe-0.3b": _preset(
            "qwen3_moe",
            "12 512 8 4 2048",
            **(_LONG | {"head_dim": 64}),
            num_experts=16,
            num_experts_per_tok=2,
            moe_intermediate_size=768,
            norm_topk_prob=True,
            router_aux_loss_coef=0.01,
        ),
    }
)


def arch_of(config: ModelConfig) -> Arch:
    """Return the shape that settings name: a config's, a folder's or a preset's, with overrides.

    Raises ModelError for a shape that the decoder does not compute.
    """
    if config.config:
        table = text_table(config.config)
    elif config.path:
        table = text_table(read_text(Path(config.path).expanduser()))
    elif config.preset == OWN:
        msg = (
            "This run's model is its training loops' own, and no config says what it computes: such"
            " a loop trains and judges it, and `skerry export --to tensors` writes its parameters."
        )
        raise ModelError(msg, path="model.preset")
    else:
        table = dict(PRESETS[config.preset])
    given = {key: getattr(config, name) for name, key in KEYS.items()}
    table |= {key: value for key, value in given.items() if value is not None}
    if table.get("head_dim", 0) is None:  # a preset whose heads share its width
        table["head_dim"] = max(1, table["hidden_size"] // table["num_attention_heads"])
    return arch_from(table)


def written_out(config: ModelConfig) -> ModelConfig:
    """Return the settings as a run records them: with the config's text instead of a folder."""
    if not config.path or config.factory:
        return config
    if config.config:
        msg = "model.path and model.config are both set: name the folder, or give the text."
        raise ModelError(msg, path="model.path")
    return config.model_copy(update={"config": arch_of(config).config, "path": ""})
