"""Folders of weights: blocks are read alone, what is broken or hostile is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from safetensors.numpy import load_file, save_file

from skerry.errors import ModelError
from skerry.models import hf
from skerry.models.arch import Arch, arch_from
from skerry.models.tensors import tensors_of

TABLE: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 3,
    "num_experts_per_tok": 2,
}
DOWN = "model.layers.0.mlp.experts.down_proj"
GATE = "model.layers.0.mlp.experts.gate_up_proj"
ON_DISK = "model.layers.0.block_sparse_moe.experts.1.w2.weight"


def arch() -> Arch:
    return arch_from(TABLE)


def made() -> dict[str, Any]:
    draw = np.random.default_rng(0)
    return {
        name: draw.normal(size=tensor.shape).astype(np.float32)
        for name, tensor in tensors_of(arch()).items()
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write a model in several shards."""
    hf.write(tmp_path / "model", arch(), made(), shard_bytes=4000)
    return tmp_path / "model"


def shard_of(folder: Path, name: str) -> Path:
    return folder / json.loads((folder / hf.INDEX).read_text())["weight_map"][name]


def change(folder: Path, name: str, value: Any) -> None:
    """Replace one stored tensor; None takes it out, from the index too."""
    path = shard_of(folder, name)
    stored: dict[str, Any] = load_file(path)
    stored[name] = value
    if value is None:
        del stored[name]
        index = json.loads((folder / hf.INDEX).read_text())
        del index["weight_map"][name]
        (folder / hf.INDEX).write_text(json.dumps(index))
    save_file(stored, path)


def test_any_block_of_a_leaf_is_read_alone(folder: Path) -> None:
    tensors, params = hf.read_tensors(folder, hf.read_config(folder)), made()
    for name, at in {
        GATE: (slice(1, 3), slice(20, 30), slice(None)),
        DOWN: (slice(None), slice(3, 5), slice(0, 24, None)),
        "lm_head.weight": (slice(7, 9), slice(None)),
        "model.norm.weight": (slice(2, 4),),
    }.items():
        np.testing.assert_array_equal(tensors[name].read(at), params[name][at])


def test_a_folder_is_loaded_onto_the_devices_that_are_asked_for(folder: Path) -> None:
    there = SingleDeviceSharding(jax.devices()[0])
    shardings = dict.fromkeys(tensors_of(arch()), there)
    for name, leaf in hf.load(folder, arch(), shardings).items():
        np.testing.assert_array_equal(leaf, made()[name])
        assert leaf.sharding == there


def test_bfloat16_weights_are_read_and_written_as_such(tmp_path: Path) -> None:
    hf.write(tmp_path / "half", arch(), made(), dtype="bfloat16")
    assert json.loads((tmp_path / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    half = hf.read_tensors(tmp_path / "half", arch())
    for name, leaf in made().items():
        wanted = leaf.astype(ml_dtypes.bfloat16).astype(np.float32)
        np.testing.assert_array_equal(np.asarray(half[name]), wanted)


def test_an_export_says_what_it_is_and_brings_the_tokenizer(folder: Path, tmp_path: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    hf.write(tmp_path / "again", arch(), hf.read_tensors(folder, arch()), folder)
    config = json.loads((tmp_path / "again" / "config.json").read_text())
    assert config["architectures"] == ["MixtralForCausalLM"]
    assert (tmp_path / "again" / "tokenizer.json").read_text() == "{}"
    assert (tmp_path / "again" / "model.safetensors").is_file()
    index = json.loads((folder / hf.INDEX).read_text())
    assert index["metadata"]["total_size"] == 4 * sum(leaf.size for leaf in made().values())


def test_a_folder_in_use_is_not_written_to_and_a_failed_export_leaves_nothing(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ModelError, match="is not empty"):
        hf.write(folder, arch(), made())
    with pytest.raises(KeyError):
        hf.write(tmp_path / "new", arch(), {})
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_the_digest_is_of_config_and_weights(folder: Path) -> None:
    before = hf.digest(folder)
    (folder / "tokenizer.json").write_text("{}")
    assert hf.digest(folder) == before
    change(folder, "lm_head.weight", made()["lm_head.weight"] + 1)
    assert hf.digest(folder) != before


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        (ON_DISK, None, f"lacks the tensor {ON_DISK}"),
        (ON_DISK, np.zeros((16, 23), np.float32), "in the shape"),
        ("lm_head.weight", np.zeros((16, 32), np.float32), "in the shape"),
        ("lm_head.weight", np.zeros((32, 16), np.int8), "as I8: float32, bfloat16"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(
    folder: Path, name: str, value: Any, reason: str
) -> None:
    change(folder, name, value)
    with pytest.raises(ModelError, match=reason) as failure:
        hf.read_tensors(folder, arch())
    assert "\n" not in str(failure.value)


def test_a_tensor_that_nobody_asked_for_is_named(folder: Path) -> None:
    save_file({"model.extra": np.zeros(2, np.float32)}, folder / "z.safetensors")
    index = json.loads((folder / hf.INDEX).read_text())
    index["weight_map"]["model.extra"] = "z.safetensors"
    (folder / hf.INDEX).write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"has the tensor model\.extra, unknown to a mixtral"):
        hf.read_tensors(folder, arch())


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ("nothing", "without a weight_map"),
        ('{"weight_map": []}', "is no table"),
        ('{"weight_map": {"a": "../model.safetensors"}}', "only .safetensors files beside it"),
        ('{"weight_map": {"a": "/etc/passwd"}}', "only .safetensors files beside it"),
        ('{"weight_map": {"a": 7}}', "only .safetensors files beside it"),
        ('{"weight_map": {"a": "none.safetensors"}}', "cannot be read"),
        ("[" * 50_000, "without a weight_map"),
    ],
)
def test_an_index_that_cannot_be_trusted_is_refused(folder: Path, index: str, reason: str) -> None:
    (folder / hf.INDEX).write_text(index)
    with pytest.raises(ModelError, match=reason):
        hf.read_tensors(folder, arch())


def test_a_torn_file_and_an_empty_folder_are_refused(folder: Path, tmp_path: Path) -> None:
    path = shard_of(folder, "lm_head.weight")
    path.write_bytes(path.read_bytes()[:-100])
    with pytest.raises(ModelError, match="cannot be read"):
        hf.read_tensors(folder, arch())
    with pytest.raises(ModelError, match="is it a model's folder"):
        hf.read_tensors(tmp_path, arch())
    with pytest.raises(ModelError, match=r"has no config\.json"):
        hf.read_config(tmp_path)


def test_the_text_model_of_a_multimodal_folder_is_found(tmp_path: Path) -> None:
    table = TABLE | {"model_type": "gemma3_text", "head_dim": 8}
    text, draw = arch_from(table), np.random.default_rng(0)
    for prefix in ("language_model.model.", "model.language_model."):
        where = tmp_path / prefix
        where.mkdir()
        stored = {
            name.replace("model.", prefix, 1): draw.normal(size=tensor.shape).astype(np.float32)
            for name, tensor in tensors_of(text).items()
        }
        tower = {"vision_tower.patch.weight": np.zeros(3, np.float32)}
        save_file(stored | tower, where / "model.safetensors")
        found = hf.read_tensors(where, text)
        assert found.keys() == tensors_of(text).keys()
