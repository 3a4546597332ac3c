"""Weights from a folder that anybody may have written: what is refused, and in which words."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from skerry.errors import ModelError
from skerry.models import hf
from tests.support.hf_folder import random_folder

NORM = "model.norm.weight"
FILE = "model.safetensors"
Tensors = dict[str, Any]


def change(path: Path, what: Callable[[Tensors], None]) -> None:
    tensors = load_file(path / FILE)
    what(tensors)
    save_file(tensors, path / FILE)


def place(path: Path, file: str) -> None:
    """Write an index that has one tensor in another file."""
    names = dict.fromkeys(load_file(path / FILE), FILE) | {NORM: file}
    (path / hf.INDEX).write_text(json.dumps({"weight_map": names}))


def read(path: Path) -> dict[str, hf.LazyTensor]:
    return hf.read_tensors(path, hf.read_config(path))


def lack(tensors: Tensors) -> None:
    del tensors[NORM]


def add(tensors: Tensors) -> None:
    tensors["model.extra.weight"] = np.zeros(3, np.float32)


def reshape(tensors: Tensors) -> None:
    tensors[NORM] = np.zeros(3, np.float32)


def make_whole(tensors: Tensors) -> None:
    tensors[NORM] = tensors[NORM].astype(np.int32)


def shrink_expert(tensors: Tensors) -> None:
    name = "model.layers.1.mlp.experts.3.down_proj.weight"
    tensors[name] = tensors[name][1:]


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        (lack, f"lacks the tensor {NORM}, which its config.json asks for"),
        (add, "has the tensor model.extra.weight, unknown to a qwen3_moe: is this its config"),
        (reshape, rf"has {NORM} in the shape \(3,\), but its config.json makes it \(32,\)"),
        (shrink_expert, r"has model.layers.1.mlp.experts.down_proj in the shape \(31, 24\)"),
        (make_whole, f"has {NORM} as I32: float32, bfloat16 or float16 are needed"),
    ],
)
def test_tensors_that_are_not_the_models_are_refused(
    tmp_path: Path, what: Callable[[Tensors], None], sentence: str
) -> None:
    change(random_folder(tmp_path / "m"), what)
    with pytest.raises(ModelError, match=sentence):
        read(tmp_path / "m")


@pytest.mark.parametrize(
    "file", ["../other.safetensors", "/etc/passwd", "weights.bin", "a/b.safetensors"]
)
def test_an_index_leads_to_no_file_but_safetensors_beside_it(tmp_path: Path, file: str) -> None:
    place(random_folder(tmp_path / "m"), file)
    with pytest.raises(ModelError, match=r"only \.safetensors files beside it are read"):
        read(tmp_path / "m")


def test_a_shard_that_is_missing_or_lacks_its_tensor_is_named(tmp_path: Path) -> None:
    path = random_folder(tmp_path / "m")
    place(path, "b.safetensors")
    with pytest.raises(ModelError, match=r"has a b\.safetensors that cannot be read"):
        read(path)
    (path / "b.safetensors").mkdir()
    with pytest.raises(ModelError, match=r"cannot be read: Is a directory"):
        read(path)
    (path / "b.safetensors").rmdir()
    save_file({"another": np.zeros(1, np.float32)}, path / "b.safetensors")
    with pytest.raises(ModelError, match=rf"has no {NORM} in b\.safetensors"):
        read(path)


@pytest.mark.parametrize("text", ["[]", "{}", "{", "[" * 9000, '{"weight_map": []}'])
def test_an_index_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    path = random_folder(tmp_path / "m")
    (path / hf.INDEX).write_text(text)
    with pytest.raises(ModelError, match="weight_map"):
        read(path)


def test_a_pointer_to_weights_that_were_not_fetched_says_how_to_fetch_them(tmp_path: Path) -> None:
    path = random_folder(tmp_path / "m")
    (path / FILE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 9\n")
    with pytest.raises(ModelError, match="`git lfs pull` in the folder fetches"):
        read(path)


def test_a_digest_names_the_file_that_is_missing(tmp_path: Path) -> None:
    path = random_folder(tmp_path / "model")
    place(path, "gone.safetensors")
    with pytest.raises(ModelError, match=r"has no gone\.safetensors that can be read"):
        hf.digest(path)
    (path / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config\.json that can be read"):
        hf.digest(path)


def test_a_config_that_is_no_file_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(ModelError, match=r"has no config\.json"):
        hf.read_config(tmp_path)


@pytest.mark.parametrize("cut", [0, 7, 8, 100, -1])
def test_a_file_that_is_cut_short_is_refused(tmp_path: Path, cut: int) -> None:
    path = random_folder(tmp_path / "m")
    data = (path / FILE).read_bytes()
    (path / FILE).write_bytes(data[:cut])
    with pytest.raises(ModelError, match=r"has a model\.safetensors that cannot be read"):
        read(path)
