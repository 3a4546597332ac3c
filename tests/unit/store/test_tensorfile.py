"""The safetensors format, against the library that defines it and against hostile files."""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import tensorfile
from skerry.store.base import StoredFile
from skerry.store.local import LocalStore

Tensors = dict[str, NDArray[np.float32]]

shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    npst.arrays(np.float32, shapes),
    max_size=4,
)
ONE = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
META = {"__metadata__": {"format": "skerry"}}


def written(tensors: Tensors) -> bytes:
    head = tensorfile.header({name: t.shape for name, t in tensors.items()}, {"format": "skerry"})
    return head + b"".join(bytes(tensorfile.raw(tensor)) for tensor in tensors.values())


def read(data: bytes, size: int | None = None) -> Tensors:
    """Read a file whose digest and, by default, size are what the manifest says."""
    sha256 = hashlib.sha256(data).hexdigest()
    expected = StoredFile("f", len(data) if size is None else size, sha256)
    return tensorfile.read(memoryview(bytearray(data)), "somewhere", expected)


def framed(entries: object, body: bytes = b"\0\0\0\0", length: int | None = None) -> bytes:
    """Return a file with these entries, which is whole but for what they say."""
    if isinstance(entries, dict):
        entries = json.dumps(META | entries, separators=(",", ":")).encode()
        entries += b" " * (-len(entries) % 8)
    text = entries if isinstance(entries, bytes) else json.dumps(entries).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + body


def same(one: Tensors, two: Tensors) -> bool:
    return one.keys() == two.keys() and all(
        one[name].shape == two[name].shape and one[name].tobytes() == two[name].tobytes()
        for name in one
    )


@given(tensors)
@settings(max_examples=100)
def test_what_we_write_we_and_the_library_read(tensors: Tensors) -> None:
    data = written(tensors)
    assert same(safetensors.numpy.load(data), tensors)
    assert same(read(data), tensors)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_such_file_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="somewhere"):
        read(data)


def test_a_whole_file_is_read() -> None:
    assert read(framed({"w": ONE})) == {"w": np.zeros(1, np.float32)}


@pytest.mark.parametrize(
    "data",
    [
        framed({"w": ONE}, length=2**63),
        framed({"w": ONE}, length=100),
        framed(b"[" * 100_000),
        framed([]),
        framed({"w": []}),
        framed({"w": {**ONE, "dtype": "F16"}}),
        framed({"w": {**ONE, "shape": [2]}}),
        framed({"w": {**ONE, "shape": [-1]}}),
        framed({"w": {**ONE, "shape": [1] * 100}}),
        framed({"w": {**ONE, "shape": [-1, -1]}}),
        framed({"w": {**ONE, "shape": [1.0], "data_offsets": [0, 4.0]}}),
        framed({"w": ONE, "__metadata__": 7}),
        framed({"w": {**ONE, "shape": [2**60], "data_offsets": [0, 2**62]}}),
        framed({"w": {**ONE, "data_offsets": [-4, 0]}}),
        framed({"w": {**ONE, "data_offsets": ["0", "4"]}}),
        framed({"w": {**ONE, "data_offsets": [4, 8]}}, b"\0" * 8),
        framed({"w": ONE, "twice": ONE}),
        framed({"w": ONE}, b"\0" * 5),
        framed({"w": ONE}, b"\0" * 3),
        b"\0",
        b"",
    ],
)
def test_a_header_that_makes_no_sense_is_refused(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="somewhere is not as a release of Skerry"):
        read(data)


@pytest.mark.parametrize("size", [0, 2**62])
def test_a_file_of_another_size_is_refused(size: int) -> None:
    with pytest.raises(CheckpointCorrupt, match="not what the manifest names"):
        read(framed({"w": ONE}), size)


def test_a_file_that_does_not_fit_into_memory_is_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "entry").mkdir()
    with (tmp_path / "entry" / "sparse").open("wb") as file:
        file.truncate(2**43)
    with pytest.raises(StoreError, match="this machine's memory"):
        LocalStore(tmp_path).read("entry", "sparse", 2**43)
