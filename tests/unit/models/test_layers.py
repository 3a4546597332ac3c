"""Layers that repeat, computed in a loop: the numbers of the same layers one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.models.arch import FULL, SLIDING, Layer, arch_from
from skerry.models.decoder import Decoder
from skerry.models.layers import Run, runs_of, scanned
from skerry.models.presets import PRESETS
from skerry.models.stacks import NO_STACKS, Stacks, stacked

LOCAL, GLOBAL = Layer(SLIDING, 2, 8, 48), Layer(FULL, 2, 8, 48)
SMALL = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
}
TABLES: dict[str, dict[str, Any]] = {
    "dense": {**PRESETS["0.1b"], **SMALL},
    "experts": {**PRESETS["moe-0.3b"], **SMALL, "num_experts": 5, "moe_intermediate_size": 24},
    "local and global": {
        **SMALL,
        "model_type": "gemma2",
        "sliding_window": 5,
        "num_hidden_layers": 4,
    },
    "keys of another layer": {
        **SMALL,
        "model_type": "gemma4_text",
        "num_hidden_layers": 8,
        "layer_types": [SLIDING, SLIDING, SLIDING, FULL, *[SLIDING, FULL] * 2],
        "num_kv_shared_layers": 4,
        "global_head_dim": 16,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 64,
        "sliding_window": 5,
    },
}


def loss_and_gradients(model: Decoder, stacks: Stacks = NO_STACKS) -> Any:
    params = stacked(jax.jit(model.init)(jax.random.key(0)), stacks)
    tokens = jax.random.randint(jax.random.key(1), (2, 12), 0, 64)
    segments = np.array([[1] * 12, [1] * 5 + [2] * 5 + [0] * 2])
    batch = {"tokens": tokens, "segments": segments}
    found = jax.value_and_grad(model.loss, has_aux=True)
    return jax.jit(found, compiler_options={"xla_backend_optimization_level": 0})(params, batch)


@pytest.mark.drill
@pytest.mark.parametrize(
    ("name", "remat"),
    [
        ("dense", "attention,mlp"),
        ("experts", "none"),
        ("local and global", "blocks"),
        ("keys of another layer", "none"),
    ],
)
def test_a_loop_has_the_numbers_and_gradients_of_the_layers_one_by_one(
    name: str, remat: str
) -> None:
    model = Decoder(arch_from(TABLES[name]))
    loop = replace(model, scanned=True, remat=remat)
    assert any(run.repeats > 1 for run in runs_of(model.arch.layers))
    loss, gradients = loss_and_gradients(model)
    for wanted, found in (
        ((loss, gradients), loss_and_gradients(loop)),
        ((loss, stacked(gradients, loop.stacks)), loss_and_gradients(loop, loop.stacks)),
    ):
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=2e-5), found, wanted
        )


def test_a_pattern_that_repeats_is_one_run_and_what_is_left_another() -> None:
    gemma3 = ([LOCAL] * 5 + [GLOBAL]) * 4 + [LOCAL] * 2
    assert runs_of(gemma3) == [Run(0, 6, 4), Run(24, 1, 2)]
    assert runs_of([LOCAL] * 24) == [Run(0, 1, 24)]
    assert runs_of([GLOBAL, LOCAL]) == [Run(0, 1, 1), Run(1, 1, 1)]


def test_a_layer_whose_keys_others_use_is_in_no_loop() -> None:
    borrows = replace(GLOBAL, source=2)
    assert runs_of([GLOBAL] * 3 + [borrows] * 4) == [Run(0, 1, 2), Run(2, 1, 1), Run(3, 1, 4)]


@given(st.lists(st.sampled_from([LOCAL, GLOBAL]), max_size=20))
def test_runs_are_all_layers_in_order_each_with_its_pattern(layers: list[Layer]) -> None:
    runs = runs_of(layers)
    assert [number for run in runs for number in run.layers] == list(range(len(layers)))
    for run in runs:
        for number in run.layers:
            assert layers[number] == layers[run.first + (number - run.first) % run.period]


def test_deep_models_are_loops_by_themselves_and_adapters_are_not() -> None:
    assert scanned("auto", [LOCAL] * 24, adapters=False)
    assert not scanned("auto", [LOCAL] * 24, adapters=True)
    assert not scanned("auto", [LOCAL] * 6, adapters=False)
    assert scanned("scanned", [LOCAL] * 6, adapters=False)
    assert not scanned("unrolled", [LOCAL] * 24, adapters=False)
