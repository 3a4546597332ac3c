"""Reading and verifying checkpoints: ``params.safetensors``, ``outer.safetensors``, manifest.

The digests form a chain: the manifest's covers the manifest, which covers each file whole, and the
log's own digest of every vector is checked after the files have been cut into fragments again.
"""

from __future__ import annotations

import hashlib
from contextlib import closing
from typing import TYPE_CHECKING

from skerry.core.fragments import gather, plan
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import tensorfile
from skerry.store.base import MANIFEST
from skerry.store.manifest import OUTER_FILE, PARAMS_FILE, load

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy as np
    from numpy.typing import NDArray

    from skerry.core.fragments import Fragment, Plan
    from skerry.store.base import Store, StoredFile
    from skerry.store.manifest import Checkpoint, SavedFragment

    Vector = NDArray[np.float32]

MASTER = "master"
OUTER = "outer."
READ_BYTES = 4 * 1024**2


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
    """Return the global parameters as f32 tensors by leaf name, verified file by file."""
    checkpoint = read_manifest(store, name)
    path = _checked_file(store, name, checkpoint, PARAMS_FILE, on_bytes)
    with closing(store.open(name, PARAMS_FILE)) as file:
        tensors = dict(tensorfile.read_all(file, path))
    shapes = {leaf.name: leaf.shape for leaf in checkpoint.leaves}
    if {key: tensor.shape for key, tensor in tensors.items()} != shapes:
        msg = f"{path} does not hold the tensors that {MANIFEST} names: use another checkpoint."
        raise CheckpointCorrupt(msg, path=path)
    return checkpoint, tensors


def fragments(
    store: Store, name: str, *, on_bytes: Callable[[int], None] | None = None
) -> Iterator[tuple[SavedFragment, dict[str, Vector]]]:
    """Yield each fragment with its f32 padded vectors by part name, each against its digest."""
    from skerry.wire.codec import vector_digest

    checkpoint, tensors = params(store, name, on_bytes=on_bytes)
    outer_path = _checked_file(store, name, checkpoint, OUTER_FILE, on_bytes)
    cut = plan_of(checkpoint, store.where(name))
    flat = [tensors[leaf.name].reshape(-1) for leaf in checkpoint.leaves]
    with closing(store.open(name, OUTER_FILE)) as file:
        found = tensorfile.index(file, outer_path)

        def vector_of(fragment: Fragment, part: str) -> Vector:
            if part == MASTER:
                return gather(fragment, flat)
            key = tensor_name(fragment.index, part)
            if key not in found:
                raise _mismatch(outer_path, fragment.index, part)
            return tensorfile.read(file, found[key], outer_path)

        for fragment, saved in zip(cut.fragments, checkpoint.state, strict=True):
            vectors = {part.name: vector_of(fragment, part.name) for part in saved.parts}
            for part in saved.parts:
                if vector_digest(vectors[part.name]) != part.digest:
                    at = PARAMS_FILE if part.name == MASTER else OUTER_FILE
                    path = f"{store.where(name)}/{at}"
                    raise _mismatch(path, fragment.index, part.name)
            yield saved, vectors


def verify(store: Store, name: str, *, on_bytes: Callable[[int], None] | None = None) -> Checkpoint:
    """Check every byte and every vector; CheckpointCorrupt names the file that is damaged."""
    checkpoint = read_manifest(store, name)
    for _ in fragments(store, name, on_bytes=on_bytes):
        pass
    return checkpoint


def tensor_name(fragment: int, part: str) -> str:
    """Return the name of a fragment's vector in ``outer.safetensors``."""
    return f"{fragment}/{part}"


def _checked_file(
    store: Store,
    name: str,
    checkpoint: Checkpoint,
    file: str,
    on_bytes: Callable[[int], None] | None,
) -> str:
    """Compare a file with what the manifest says about it and return its path."""
    path = f"{store.where(name)}/{file}"
    expected = {stored.name: stored for stored in checkpoint.files}.get(file)
    if expected is None or not _matches(store, name, expected, on_bytes):
        msg = f"{path} is damaged (it does not match {MANIFEST}): use another checkpoint."
        raise CheckpointCorrupt(msg, path=path)
    return path


def _matches(
    store: Store, name: str, expected: StoredFile, on_bytes: Callable[[int], None] | None
) -> bool:
    digest, size = hashlib.sha256(), 0
    with closing(store.open(name, expected.name)) as file:
        while block := file.read(READ_BYTES):
            digest.update(block)
            size += len(block)
            if on_bytes is not None:
                on_bytes(len(block))
    return size == expected.size and digest.hexdigest() == expected.sha256


def _mismatch(path: str, fragment: int, part: str) -> CheckpointCorrupt:
    msg = f"{path}: {part} of fragment {fragment} is not what the log held: use another checkpoint."
    return CheckpointCorrupt(msg, path=path)
