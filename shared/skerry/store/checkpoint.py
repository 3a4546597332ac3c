"""Reading and verifying checkpoints: ``params.safetensors``, outer state by fragment, manifest.

The digests form a chain: the manifest's covers the manifest, which covers each file whole, and the
log's own digest of every vector is checked after the files have been cut into fragments again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.algorithm.fragments import gather, plan
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.store import tensorfile
from skerry.store.base import MANIFEST, MOST_MANIFEST_BYTES
from skerry.store.manifest import PARAMS_FILE, load

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy as np
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.store.base import OnBytes, Store
    from skerry.store.manifest import Checkpoint, SavedFragment

    Vector = NDArray[np.float32]

MASTER = "master"
OUTER = "outer."


def entry_name(step: int) -> str:
    """Return the name that a checkpoint at this step would like to have."""
    return f"step-{step:08d}"


def tensor_name(fragment: int, part: str) -> str:
    """Return the name of a fragment's vector in its file of outer state."""
    return f"{fragment}/{part}"


def read_manifest(store: Store, name: str) -> Checkpoint:
    """Return a checkpoint's manifest; CheckpointCorrupt if it is damaged or makes no sense."""
    data = bytes(store.read(name, MANIFEST, MOST_MANIFEST_BYTES + 1))
    return load(data, f"{store.where(name)}/{MANIFEST}")


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


@dataclass(frozen=True, slots=True)
class _Files:
    """The files of one checkpoint, read against its manifest."""

    store: Store
    name: str
    checkpoint: Checkpoint
    on_bytes: OnBytes | None

    def path(self, file: str) -> str:
        return f"{self.store.where(self.name)}/{file}"

    def tensors(self, file: str) -> dict[str, Vector]:
        """Return the tensors of a file that is, byte for byte, what the manifest says about it."""
        expected = {stored.name: stored for stored in self.checkpoint.files}.get(file)
        if expected is None:
            raise self.damaged(file)
        data = self.store.read(self.name, file, expected.size + 1, self.on_bytes)
        return tensorfile.read(data, self.path(file), expected)

    def params(self) -> dict[str, Vector]:
        tensors = self.tensors(PARAMS_FILE)
        shapes = {leaf.name: leaf.shape for leaf in self.checkpoint.leaves}
        if {key: tensor.shape for key, tensor in tensors.items()} != shapes:
            raise self.damaged(PARAMS_FILE)
        return tensors

    def damaged(self, file: str) -> CheckpointCorrupt:
        path = self.path(file)
        msg = f"{path} is damaged (it does not match {MANIFEST}): use another checkpoint."
        return CheckpointCorrupt(msg, path=path)

    def mismatch(self, file: str, fragment: int, part: str) -> CheckpointCorrupt:
        path = self.path(file)
        what = f"{part} of fragment {fragment} is not what the log held"
        return CheckpointCorrupt(f"{path}: {what}: use another checkpoint.", path=path)


def params(store: Store, name: str) -> tuple[Checkpoint, dict[str, Vector]]:
    """Return the global parameters as f32 tensors by leaf name, verified byte by byte."""
    checkpoint = read_manifest(store, name)
    return checkpoint, _Files(store, name, checkpoint, None).params()


def fragments(
    store: Store, name: str, *, on_bytes: OnBytes | None = None
) -> Iterator[tuple[SavedFragment, dict[str, Vector]]]:
    """Yield each fragment with its f32 padded vectors by part name, each against its digest.

    Every file is read once: a fragment is yielded after everything that it comes from is verified.
    """
    from skerry.protocol.chunks import vector_digest  # loads blosc2, which listing does not need

    files = _Files(store, name, read_manifest(store, name), on_bytes)
    checkpoint, tensors = files.checkpoint, files.params()
    cut = plan_of(checkpoint, store.where(name))
    flat = [tensors[leaf.name].reshape(-1) for leaf in checkpoint.leaves]
    read, outer = "", dict[str, "Vector"]()
    for fragment, saved in zip(cut.fragments, checkpoint.state, strict=True):
        file = checkpoint.outer_file(fragment.index)
        if file != read:
            read, outer = file, files.tensors(file)
        master = gather(fragment, flat)
        vectors: dict[str, Vector] = {}
        for part in saved.parts:
            key = tensor_name(fragment.index, part.name)
            vector = master if part.name == MASTER else outer.get(key)
            if vector is None or vector_digest(vector) != part.digest:
                at = PARAMS_FILE if part.name == MASTER else file
                raise files.mismatch(at, fragment.index, part.name)
            vectors[part.name] = vector
        yield saved, vectors


def verify(store: Store, name: str, *, on_bytes: OnBytes | None = None) -> Checkpoint:
    """Check every byte and every vector; CheckpointCorrupt names the file that is damaged."""
    checkpoint = read_manifest(store, name)
    for _ in fragments(store, name, on_bytes=on_bytes):
        pass
    return checkpoint
