"""A model's shape from the config.json of a folder that anybody may have written."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from skerry.errors import ModelError
from skerry.models.arch import Arch, read_arch
from tests.support.hf_folder import MOE

FURTHER = ("rope_scaling", "rope_parameters", "layer_types", "sliding_window", "text_config")
"""Keys that other families have."""

plain = st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(["gemma3", "x"])
values = st.recursive(plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner))
changes = st.dictionaries(st.sampled_from([*MOE, *FURTHER]), values, min_size=1, max_size=3)


@given(changes)
@example({"model_type": []})
def test_any_config_is_read_or_refused(changed: dict[str, Any]) -> None:
    with suppress(ModelError):
        assert isinstance(read_arch(json.dumps({**MOE, **changed})), Arch)


@pytest.mark.parametrize(
    "given",
    [
        {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34},
        {"hidden_size": 3840, "intermediate_size": 15360, "num_hidden_layers": 48}
        | {"num_attention_heads": 16, "num_key_value_heads": 8},
    ],
)
def test_gemma_3_leaves_out_the_sizes_that_transformers_has_by_default(
    given: dict[str, Any],
) -> None:
    """As google/gemma-3-4b-it and -12b-it do."""
    transformers = pytest.importorskip("transformers")
    more = {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024}
    table = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text", **given, **more}}
    found, known = read_arch(json.dumps(table)), transformers.Gemma3TextConfig(**given)
    sizes = found.vocab, found.heads, found.layers[0].kv_heads, found.layers[0].head_dim
    wanted = known.vocab_size, known.num_attention_heads, known.num_key_value_heads, known.head_dim
    assert sizes == wanted
