"""The safetensors format, against the library that defines it."""

from __future__ import annotations

import io

import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from numpy.typing import NDArray

from skerry.errors import CheckpointCorrupt
from skerry.store import tensorfile
from skerry.store.checked import CheckedFile

Tensors = dict[str, NDArray[np.float32]]

shapes = npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5)
tensors = st.dictionaries(
    st.text(min_size=1, max_size=12).filter(lambda name: name != "__metadata__"),
    npst.arrays(np.float32, shapes),
    max_size=4,
)


def written(tensors: Tensors) -> bytes:
    head = tensorfile.header({name: t.shape for name, t in tensors.items()}, {"format": "skerry"})
    return head + b"".join(bytes(tensorfile.raw(tensor)) for tensor in tensors.values())


def read(data: bytes, path: str = "file") -> Tensors:
    return dict(tensorfile.read_all(CheckedFile(io.BytesIO(data)), path, len(data)))


def same(one: Tensors, two: Tensors) -> bool:
    return one.keys() == two.keys() and all(
        one[name].shape == two[name].shape and one[name].tobytes() == two[name].tobytes()
        for name in one
    )


@given(tensors)
@settings(max_examples=50)
def test_what_we_write_the_library_reads(tensors: Tensors) -> None:
    assert same(safetensors.numpy.load(written(tensors)), tensors)


@given(tensors)
@settings(max_examples=50)
def test_what_the_library_writes_we_read(tensors: Tensors) -> None:
    assert same(read(safetensors.numpy.save(tensors, {"any": "metadata"})), tensors)


@given(st.binary(max_size=200))
def test_bytes_that_are_no_such_file_are_refused_by_name(data: bytes) -> None:
    with pytest.raises(CheckpointCorrupt, match="somewhere"):
        read(data, "somewhere")


def test_a_file_that_ends_early_is_refused() -> None:
    data = written({"w": np.ones(4, np.float32)})
    with pytest.raises(CheckpointCorrupt, match="middle of tensor w"):
        read(data[:-1])


def test_other_dtypes_are_refused() -> None:
    data = safetensors.numpy.save({"w": np.ones(4, np.float16)})
    with pytest.raises(CheckpointCorrupt, match="f32"):
        read(data)
