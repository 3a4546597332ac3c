"""Reading and verifying checkpoints: ``params.safetensors``, outer state by fragment, manifest.

The digests form a chain: the manifest's covers the manifest, which covers each file whole, and the
log's own digest of every vector is checked after the files have been cut into fragments again.
"""

from __future__ import annotations

from contextlib import closing
from typing import TYPE_CHECKING

from skerry.algorithm.fragments import gather, plan
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import tensorfile
from skerry.store.base import MANIFEST
from skerry.store.checked import CheckedFile
from skerry.store.manifest import PARAMS_FILE, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.store.base import Store
    from skerry.store.manifest import Checkpoint, SavedFragment

    Vector = NDArray[np.float32]

MASTER = "master"
OUTER = "outer."


def entry_name(step: int) -> str:
    """Return the name that a checkpoint at this step would like to have."""
    return f"step-{step:08d}"


def read_manifest(store: Store, name: str) -> Checkpoint:
    """Return a checkpoint's manifest after checking its own digest."""
    with closing(store.open(name, MANIFEST)) as file:
        return load(file.read(), f"{store.where(name)}/{MANIFEST}")


def plan_of(checkpoint: Checkpoint, path: str) -> Plan:
    """Cut the checkpoint's leaves again; StoreError if this release cuts them differently."""
    cut = plan(checkpoint.leaves, checkpoint.fragments)
    if cut.digest != checkpoint.plan_digest:
        msg = (
            f"{path} was cut by another fragment plan than this release makes: "
            f"use skerry {checkpoint.skerry_version}."
        )
        raise StoreError(msg)
    return cut


def params(
    store: Store, name: str, *, on_bytes: Callable[[int], None] | None = None
) -> tuple[Checkpoint, dict[str, Vector]]:
    """Return the global parameters as f32 tensors by leaf name, verified byte by byte."""
    checkpoint = read_manifest(store, name)
    tensors = _tensors(store, name, checkpoint, PARAMS_FILE, on_bytes)
    shapes = {leaf.name: leaf.shape for leaf in checkpoint.leaves}
    if {key: tensor.shape for key, tensor in tensors.items()} != shapes:
        raise _damaged(_path(store, name, PARAMS_FILE))
    return checkpoint, tensors


def fragments(
    store: Store, name: str, *, on_bytes: Callable[[int], None] | None = None
) -> Iterator[tuple[SavedFragment, dict[str, Vector]]]:
    """Yield each fragment with its f32 padded vectors by part name, each against its digest.

    Every file is read once: a fragment is yielded after all that it came from has been checked.
    """
    checkpoint, tensors = params(store, name, on_bytes=on_bytes)
    cut = plan_of(checkpoint, store.where(name))
    flat = [tensors[leaf.name].reshape(-1) for leaf in checkpoint.leaves]
    read, outer = "", dict[str, "Vector"]()
    for fragment, saved in zip(cut.fragments, checkpoint.state, strict=True):
        file = checkpoint.outer_file(fragment.index)
        if file != read:
            outer = _tensors(store, name, checkpoint, file, on_bytes)
            read = file
        path = _path(store, name, file)
        vectors = _vectors(fragment, saved, flat, outer, path)
        _compare(vectors, saved, _path(store, name, PARAMS_FILE), path)
        yield saved, vectors


def _vectors(
    fragment: Fragment,
    saved: SavedFragment,
    flat: list[Vector],
    outer: dict[str, Vector],
    outer_path: str,
) -> dict[str, Vector]:
    """Return a fragment's parts: the master out of the leaves, the rest as they lie in the file."""
    vectors: dict[str, Vector] = {}
    for part in saved.parts:
        key = tensor_name(fragment.index, part.name)
        if part.name == MASTER:
            vectors[part.name] = gather(fragment, flat)
        elif key in outer:
            vectors[part.name] = outer[key]
        else:
            raise _mismatch(outer_path, fragment.index, part.name)
    return vectors


def _compare(
    vectors: dict[str, Vector], saved: SavedFragment, params_path: str, outer_path: str
) -> None:
    """Hold every vector against the digest that the log had for it."""
    from skerry.protocol.codec import vector_digest

    for part in saved.parts:
        if vector_digest(vectors[part.name]) != part.digest:
            path = params_path if part.name == MASTER else outer_path
            raise _mismatch(path, saved.commit.fragment, part.name)


def verify(store: Store, name: str, *, on_bytes: Callable[[int], None] | None = None) -> Checkpoint:
    """Check every byte and every vector; CheckpointCorrupt names the file that is damaged."""
    checkpoint = read_manifest(store, name)
    for _ in fragments(store, name, on_bytes=on_bytes):
        pass
    return checkpoint


def tensor_name(fragment: int, part: str) -> str:
    """Return the name of a fragment's vector in its file of outer state."""
    return f"{fragment}/{part}"


def _tensors(
    store: Store,
    name: str,
    checkpoint: Checkpoint,
    file: str,
    on_bytes: Callable[[int], None] | None,
) -> dict[str, Vector]:
    """Return the tensors of a file that is, byte for byte, what the manifest says about it."""
    path = _path(store, name, file)
    expected = {stored.name: stored for stored in checkpoint.files}.get(file)
    if expected is None:
        raise _damaged(path)
    with closing(store.open(name, file)) as handle:
        checked = CheckedFile(handle, on_bytes)
        tensors = dict(tensorfile.read_all(checked, path, expected.size))
        if not checked.matches(expected):
            raise _damaged(path)
    return tensors


def _path(store: Store, name: str, file: str) -> str:
    return f"{store.where(name)}/{file}"


def _damaged(path: str) -> CheckpointCorrupt:
    msg = f"{path} is damaged (it does not match {MANIFEST}): use another checkpoint."
    return CheckpointCorrupt(msg, path=path)


def _mismatch(path: str, fragment: int, part: str) -> CheckpointCorrupt:
    msg = f"{path}: {part} of fragment {fragment} is not what the log held: use another checkpoint."
    return CheckpointCorrupt(msg, path=path)
