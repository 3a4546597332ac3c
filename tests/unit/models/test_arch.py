"""A model's shape from the config.json of a folder that anybody may have written."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

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
