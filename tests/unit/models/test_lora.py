"""Adapters beside frozen weights: they are all that is trained, and an export has them in it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry import folders
from skerry.algorithm.fragments import plan
from skerry.errors import ConfigError, ModelError
from skerry.models import adapters, hf
from skerry.models.base import build_model, layout_of, specs_of, whole
from skerry.models.decoder import Decoder
from skerry.models.mesh import frozen_leaves, frozen_shapes, one_device
from skerry.models.presets import PRESETS, arch_of
from skerry.settings.models import ModelConfig, TrainConfig
from skerry_learner.trainer.step import TrainState, gradients_of, make_step, optimizer_of

SIZES: dict[str, Any] = {"layers": 1, "d_model": 32, "heads": 4, "kv_heads": 2, "d_ff": 48}
CONFIG = ModelConfig(lora_rank=3, vocab=64, lora_targets=("q_proj", "down_proj"), **SIZES)
A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"
B = "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"


def text() -> jax.Array:
    return jax.random.randint(jax.random.key(1), (2, 9), 0, 64)


def scores(model: Any, params: Any) -> jax.Array:
    found: jax.Array = jax.jit(model.logits)(whole(params, frozen_leaves(model)), text())
    return found


def moved(params: Any) -> Any:
    """Return adapters that have learned something."""
    keys = iter(jax.random.split(jax.random.key(7), len(params)))
    return {
        name: leaf + 0.1 * jax.random.normal(next(keys), leaf.shape)
        for name, leaf in params.items()
    }


def test_only_adapters_are_parameters_and_fragments() -> None:
    model: Any = build_model(CONFIG, TrainConfig())
    cut = plan(specs_of(model), 2)
    assert sorted(leaf.name for leaf in cut.leaves) == list(layout_of(model).names)
    assert {A, B} < {leaf.name for leaf in cut.leaves}
    assert all(adapters.ADAPTER.fullmatch(leaf.name) for leaf in cut.leaves)
    assert cut.parameters == 3 * (32 + 32) + 3 * (48 + 32)
    assert {leaf.name for leaf in cut.frozen} == hf.tensors_of(arch_of(CONFIG)).keys()


def test_fresh_adapters_change_nothing_and_then_only_they_learn() -> None:
    model: Any = build_model(CONFIG, TrainConfig(seed=5))
    params, plain = jax.jit(model.init)(jax.random.key(0)), Decoder(arch_of(CONFIG))
    weights = jax.jit(plain.init)(jax.random.key(5))
    np.testing.assert_array_equal(scores(model, params), scores(plain, weights))
    found = jax.jit(gradients_of(model, frozen_leaves(model)))(params, {"tokens": text()})
    loss, _ = jax.jit(plain.loss)(weights, {"tokens": text()})
    assert float(found.loss) == pytest.approx(float(loss))
    assert found.of_params.keys() == params.keys()
    assert float(abs(found.of_params[B]).max()) > 0


def test_frozen_weights_are_arguments_of_a_step_and_not_written_into_it() -> None:
    model: Any = build_model(CONFIG, TrainConfig())
    params = jax.eval_shape(model.init, jax.random.key(0))
    state = TrainState(params, jax.eval_shape(optimizer_of(model, TrainConfig()).init, params))
    batch = {"tokens": jax.ShapeDtypeStruct((1, 9), "int32")}
    given = state, batch, np.float32(0), np.float32(1), frozen_shapes(model, one_device())
    program = make_step(model, TrainConfig()).lower(*given).as_text()
    assert "tensor<64x32xf32>" in program
    constants = re.findall(r'dense<"0x[0-9A-F]+"> : tensor<([0-9x]+)xf32>', program)
    assert all(shape.startswith("1x8x") for shape in constants), constants  # cosines and sines


def test_merged_weights_score_as_adapters_do() -> None:
    model: Any = build_model(CONFIG, TrainConfig(seed=5))
    learned, plain = moved(jax.jit(model.init)(jax.random.key(0))), Decoder(arch_of(CONFIG))
    weights = jax.jit(plain.init)(jax.random.key(5))
    whole = adapters.merged(
        plain.arch, weights, learned, adapters.alpha_of(CONFIG) / CONFIG.lora_rank
    )
    found = scores(plain, {name: whole[name] for name in whole})
    np.testing.assert_allclose(found, scores(model, learned), rtol=2e-4, atol=2e-5)


def test_frozen_weights_are_read_from_this_machines_copy_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_offered", [])
    plain = Decoder(arch_of(CONFIG))
    weights = jax.jit(plain.init)(jax.random.key(9))
    hf.write(tmp_path / "base", plain.arch, weights)
    config = CONFIG.model_copy(update={"weights": hf.digest(tmp_path / "base")})
    with pytest.raises(ModelError, match="which this machine does not have: name a copy"):
        build_model(config, TrainConfig())
    folders.offer(str(tmp_path / "base"))
    model: Any = build_model(config, TrainConfig())
    params = jax.jit(model.init)(jax.random.key(0))
    np.testing.assert_array_equal(scores(model, params), scores(plain, weights))


@pytest.mark.drill
def test_adapters_are_written_as_peft_reads_them(tmp_path: Path) -> None:
    model: Any = build_model(CONFIG, TrainConfig())
    params = moved(jax.jit(model.init)(jax.random.key(0)))
    adapters.write_peft(tmp_path / "out", CONFIG, params, "some/model")
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"]) == (3, 6.0)
    assert config["target_modules"] == ["down_proj", "q_proj"]
    for name, leaf in load_file(tmp_path / "out" / "adapter_model.safetensors").items():
        np.testing.assert_array_equal(params[name], leaf)
    with pytest.raises(ConfigError, match="is not empty"):
        adapters.write_peft(tmp_path / "out", CONFIG, params)


def test_a_target_that_no_matrix_has_is_refused() -> None:
    config = ModelConfig(config=json.dumps(dict(PRESETS["1b"])), lora_rank=2, lora_targets=("qkv",))
    with pytest.raises(ModelError, match=r"^model\.lora_targets names 'qkv'.*: leave it out"):
        specs_of(build_model(config, TrainConfig()))
