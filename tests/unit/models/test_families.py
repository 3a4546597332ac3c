"""Each family against transformers, in f32 on a CPU: logits, weights in, weights out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry.models import hf
from skerry.models.decoder import Decoder

torch: Any = pytest.importorskip("torch")
transformers: Any = pytest.importorskip("transformers")

COMMON = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 3e-4,
    "pad_token_id": 0,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 5e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 5e4,
    "factor": 4.0,
    "original_max_position_embeddings": 40,
    "beta_fast": 8.0,
}
BOTH_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
    "full_attention": {"rope_type": "linear", "rope_theta": 3e5, "factor": 4.0},
}
GEMMA4 = {
    "head_dim": 8,
    "global_head_dim": 16,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "sliding_window": 5,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "num_hidden_layers": 4,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 12.0,
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 2e3},
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": 3e5,
            "partial_rotary_factor": 0.5,
        },
    },
}
MOE = {"num_experts_per_tok": 2, "router_aux_loss_coef": 0.02}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama2": ("Llama", {"rope_theta": 3e3, "attention_bias": True, "mlp_bias": True}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3, "head_dim": 16, "tie_word_embeddings": True}),
    "mistral": ("Mistral", {"sliding_window": 5, "rope_theta": 2e4}),
    "qwen2": ("Qwen2", {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}),
    "qwen2_yarn": ("Qwen2", {"rope_parameters": YARN}),
    "qwen3_yarn": (
        "Qwen3",
        {"rope_parameters": {**YARN, "mscale": 0.8, "mscale_all_dim": 0.3}, "head_dim": 16},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16, "rope_theta": 5e6, "tie_word_embeddings": True}),
    "qwen3_moe": (
        "Qwen3Moe",
        MOE
        | {
            "num_experts": 6,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "mixtral": ("Mixtral", MOE | {"num_local_experts": 5, "rope_theta": 3e4}),
    "gemma": ("Gemma", {"head_dim": 16, "rope_theta": 2e3}),
    "gemma2": (
        "Gemma2",
        {"head_dim": 16, "query_pre_attn_scalar": 20, "sliding_window": 5, "rope_theta": 2e3},
    ),
    "gemma3": (
        "Gemma3",
        {
            "head_dim": 16,
            "query_pre_attn_scalar": 20,
            "sliding_window": 5,
            "rope_parameters": BOTH_ROPES,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
            "tie_word_embeddings": False,
        },
    ),
    "gemma4": ("Gemma4", GEMMA4),
    "gemma4_moe": (
        "Gemma4",
        GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 5,
            "top_k_experts": 2,
            "moe_intermediate_size": 24,
        },
    ),
    "gemma4_ple": (
        "Gemma4",
        GEMMA4
        | {
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "attention_k_eq_v": False,
        },
    ),
}


def model_of(family: str) -> Any:
    """Make a small random model, its routers far from ties."""
    kind, more = FAMILIES[family]
    text = "Text" if kind in {"Gemma3", "Gemma4"} else ""
    config = getattr(transformers, f"{kind}{text}Config")(**(COMMON | more))
    config._attn_implementation = "eager"
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).eval()
    with torch.no_grad():
        for name, leaf in [*model.named_parameters(), *model.named_buffers()]:
            if leaf.ndim == 1 and "inv_freq" not in name and "scale" not in name:
                leaf.add_(0.1 * torch.randn_like(leaf))
            elif leaf.ndim > 1:
                router = name.endswith(("mlp.gate.weight", "router.proj.weight"))
                leaf.copy_(torch.randn_like(leaf) * (3.0 if router else leaf.shape[-1] ** -0.5))
    return model


TOKENS = np.random.default_rng(5).integers(1, 96, (2, 24))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers_and_an_export_is_what_was_imported(
    family: str, tmp_path: Path
) -> None:
    theirs = model_of(family)
    theirs.save_pretrained(tmp_path / "in", max_shard_size="60KB")
    arch = hf.read_config(tmp_path / "in")
    read = hf.read_tensors(tmp_path / "in", arch)
    params = {name: jnp.asarray(np.asarray(leaf)) for name, leaf in read.items()}
    with torch.no_grad():
        wanted = theirs(torch.tensor(TOKENS)).logits.numpy()
    ours = np.asarray(jax.jit(Decoder(arch).logits)(params, jnp.asarray(TOKENS, jnp.int32)))
    limit = 5e-4 if family.startswith("gemma4") else 1e-5
    assert np.abs(ours - wanted).max() <= limit * max(1.0, np.abs(wanted).max())
    hf.write(tmp_path / "out", arch, params, tmp_path / "in", shard_bytes=60_000)
    assert stored(tmp_path / "in").keys() == stored(tmp_path / "out").keys()
    for name, leaf in stored(tmp_path / "in").items():
        np.testing.assert_array_equal(stored(tmp_path / "out")[name], leaf, err_msg=name)
    again, told = type(theirs).from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(told.values()), told
    assert_equal_state(again, theirs)


def stored(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        found |= load_file(file)
    return found


def assert_equal_state(one: Any, other: Any) -> None:
    for name, leaf in other.state_dict().items():
        assert torch.equal(one.state_dict()[name], leaf), name
