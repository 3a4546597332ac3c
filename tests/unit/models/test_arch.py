"""A config.json that is wrong, hostile or not ours is refused in one sentence."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import ModelError
from skerry.models.arch import FAMILIES, arch_from, read_arch
from skerry.models.presets import PRESETS
from skerry.models.tensors import tensors_of

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
MORE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "top_k_experts": 2,
    "moe_intermediate_size": 24,
    "enable_moe_block": True,
    "rope_parameters": {"rope_type": "linear", "factor": 2.0},
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "sliding_window": 8,
    "mlp_only_layers": [1],
    "per_layer_config": {"1": {"head_dim": 16}},
    "num_kv_shared_layers": 1,
    "text_config": {},
}
ROPE = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": "bert"}, "model_type = 'bert': this decoder knows llama, mistral"),
        ({"model_type": None}, "lacks model_type"),
        ({"hidden_size": None}, "lacks hidden_size"),
        ({"hidden_size": "32"}, "hidden_size = '32': it must be a whole number"),
        ({"hidden_size": True}, "hidden_size = 'True'"),
        ({"hidden_size": 1 << 40}, "hidden_size = '1099511627776'"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"vocab_size": -1}, "vocab_size"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"hidden_act": "relu"}, "hidden_act = 'relu': this decoder knows silu"),
        ({"num_key_value_heads": 3}, r"3 key heads \(model.kv_heads\), which do not divide"),
        ({"head_dim": 7}, r"heads of 7 \(head_dim\)"),
        ({"quantization_config": {"bits": 4}}, "names a quantisation"),
        ({"use_bidirectional_attention": True}, "bidirectional"),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}},
            "rope_parameters.rope_type = 'yarn'",
        ),
        ({"rope_scaling": {"rope_type": "linear"}}, "lacks rope_parameters.factor"),
        ({"rope_scaling": ROPE | {"low_freq_factor": 4.0, "high_freq_factor": 1.0}}, "high_freq"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "0.5 of each head only"),
        ({"rope_parameters": [1]}, "must be a table"),
        ({"attention_bias": 1}, "attention_bias = '1': it must be true or false"),
        ({"model_type": "qwen3", "layer_types": ["full_attention"]}, "one entry for each of 3"),
        ({"model_type": "qwen3", "layer_types": ["chunked_attention"] * 3}, "layer_types other"),
        ({"model_type": "mixtral"}, "lacks num_local_experts"),
        (MORE | {"model_type": "mixtral", "num_experts_per_tok": 5}, "num_experts_per_tok = '5'"),
        (MORE | {"model_type": "gemma4_text", "num_kv_shared_layers": 3}, "num_kv_shared_layers"),
    ],
)
def test_a_config_that_the_decoder_does_not_compute_is_refused(
    changes: dict[str, Any], reason: str
) -> None:
    table = {key: value for key, value in (LLAMA | changes).items() if value is not None}
    with pytest.raises(ModelError, match=reason) as failure:
        read_arch(json.dumps(table))
    assert failure.value.path == "model.config"
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize(
    "text", ["", "[]", "nothing", "[" * 100_000, '{"a": ' * 5000, "x" * 5_000_000]
)
def test_what_is_no_config_is_refused(text: str) -> None:
    with pytest.raises(ModelError, match=r"config\.json"):
        read_arch(text)


def test_a_model_of_more_parameters_than_any_machine_holds_is_refused() -> None:
    wide = {"hidden_size": 1 << 20, "intermediate_size": 1 << 20, "head_dim": 1 << 16}
    huge = LLAMA | wide | {"num_hidden_layers": 99}
    with pytest.raises(ModelError, match="parameters, more than any machine holds"):
        tensors_of(arch_from(huge))


def test_the_text_model_of_a_multimodal_one_is_read() -> None:
    inner = LLAMA | {"model_type": "gemma3_text", "head_dim": 8}
    arch = read_arch(
        json.dumps({"model_type": "gemma3", "text_config": inner, "vision_config": {}})
    )
    assert (arch.family, arch.architecture) == ("gemma3_text", "Gemma3ForCausalLM")
    assert read_arch(arch.config) == arch


@pytest.mark.parametrize("preset", PRESETS)
def test_the_config_that_an_arch_keeps_reads_back_to_it(preset: str) -> None:
    arch = arch_from({**PRESETS[preset], "head_dim": 64})
    assert read_arch(arch.config) == arch


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    family=st.sampled_from([*FAMILIES, "gemma3", "gemma4"]),
    key=st.sampled_from([*LLAMA, *MORE, "head_dim", "rope_scaling", "rms_norm_eps", "hidden_act"]),
    junk=JUNK,
)
def test_no_value_of_any_key_is_a_traceback(family: str, key: str, junk: Any) -> None:
    table = LLAMA | MORE | {"head_dim": 8, "model_type": family} | {key: junk}
    if family in {"gemma3", "gemma4"}:
        table["text_config"] = junk if key == "text_config" else table | {"text_config": None}
    with suppress(ModelError):
        tensors_of(read_arch(json.dumps(table)))
