"""Small random models as folders of Hugging Face weights, made on the spot."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from skerry.models import hf
from skerry.models.arch import read_arch
from skerry.models.tensors import tensors_of

MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 260,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
    "attention_bias": False,
}
"""A mixture of experts over bytes, with some room for marks."""


def random_folder(path: Path, table: dict[str, Any] = MOE, seed: int = 0) -> Path:
    """Write a model with random weights, and return its folder."""
    arch, draw = read_arch(json.dumps(table)), np.random.default_rng(seed)
    tensors = {
        name: draw.normal(scale=0.05, size=tensor.shape).astype(np.float32)
        for name, tensor in tensors_of(arch).items()
    }
    hf.write(path, arch, tensors)
    return path
