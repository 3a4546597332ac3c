"""Checkpoints: their files, their manifest, and reading both with every byte verified.

``params.safetensors`` holds the global parameters by leaf, as learners have them, and each
``snapshot-NNNN.safetensors`` a fragment's newest snapshot, f32 parameters and outer state, which
may be some versions older. If a fragment is committed while the checkpoint is being written, it
alone is written again. ``manifest.json`` holds all else that a run needs to go on; its last line
has the SHA-256 of everything before it, which finds any flipped bit, white space included.

The digests form a chain: the manifest's covers the manifest, which covers each file whole, and the
log's own digest of every vector is checked after the files have been cut into fragments again.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import TypeAdapter

from skerry.algorithm.fragments import LeafSpec, Plan, check, gather, plan, trainable
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.protocol.messages import Commit
from skerry.protocol.parts import KEYFRAME, MASTER
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import TOKEN
from skerry.store import tensorfile
from skerry.store.base import MANIFEST, MOST_MANIFEST_BYTES, NAME, Store, StoredFile

Vector = NDArray[np.float32]

FORMAT = 4
LEAST_ITEM = min(tensorfile.ITEMS.values())
PARAMS_FILE = "params.safetensors"
MOST = 2**64
MOST_NS = 2**63
"""Nanoseconds since the epoch from which no date can be computed."""
VERSION = re.compile(r"[A-Za-z0-9.!+_-]{0,64}")


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One vector of a fragment: its name and its xxh3-64, as in ``messages.Part``."""

    name: str
    digest: int


@dataclass(frozen=True, slots=True)
class SavedSnapshot:
    """A fragment's newest snapshot: the commit that made it, and its vectors, the master first."""

    commit: Commit
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True, slots=True)
class SavedFragment:
    """A fragment's last commit (version, step, progress of every learner) and what was saved.

    ``digest`` is that of its global parameters. Without a ``snapshot`` no run can go on from it.
    """

    commit: Commit
    digest: int
    snapshot: SavedSnapshot | None


@dataclass(frozen=True, slots=True)
class SavedLearner:
    """A learner that has been part of the run and the data shard its name owns."""

    learner: str
    shard: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The contents of ``manifest.json``; ``index`` counts the run's checkpoints from 0.

    ``run`` and ``run_created_ns`` together tell a run from a later one of the same name. ``config``
    is the run's RunConfig, ``tokens`` the number that all learners have contributed, ``step`` the
    global clock. ``state`` holds the fragments in order, as they are after exactly those commits
    that the run's ledger has up to ``ledger_sequence``.
    """

    format: int
    run: str
    run_created_ns: int
    index: int
    step: int
    tokens: int
    created_ns: int
    skerry_version: str
    config: dict[str, Any]
    plan_digest: int
    fragments: int
    leaves: tuple[LeafSpec, ...]
    learners: tuple[SavedLearner, ...]
    state: tuple[SavedFragment, ...]
    files: tuple[StoredFile, ...]
    ledger_sequence: int

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment, in order."""
        return tuple(saved.commit.version for saved in self.state)

    @property
    def age(self) -> tuple[int, int, int]:
        """Sort key, oldest first, that needs no writer's clock: run, index, ledger sequence.

        The last decides between two checkpointers that wrote at once. The index goes before it: a
        broker whose store was rolled back counts sequences again, a checkpointer no index.
        """
        return self.run_created_ns, self.index, self.ledger_sequence

    @property
    def size_bytes(self) -> int:
        """Length of all files but the manifest."""
        return sum(file.size for file in self.files)

    @property
    def content(self) -> tuple[tuple[int, int], ...]:
        """Version and digest of each saved fragment."""
        return tuple((saved.commit.version, saved.digest) for saved in self.state)


def snapshot_file(fragment: int) -> str:
    return f"snapshot-{fragment:04d}.safetensors"


def tensor_name(fragment: int, part: str) -> str:
    """Return the name of a fragment's vector in its snapshot's file."""
    return f"{fragment}/{part}"


def step_of(commits: Sequence[Commit]) -> int:
    """Return the global clock: the largest step in the last commits of all fragments."""
    return max((c.step for c in commits), default=0)


def dump(checkpoint: Checkpoint) -> tuple[bytes, str]:
    """Return the manifest's bytes and its digest; StoreError if it is too large to be read."""
    body = json.dumps(asdict(checkpoint), indent=1).removesuffix("\n}").encode()
    digest = hashlib.sha256(body).hexdigest()
    data = body + _trailer(digest)
    if len(data) > MOST_MANIFEST_BYTES:
        msg = (
            f"The manifest of a checkpoint would have {len(data)} bytes: use fewer sync.fragments."
        )
        raise StoreError(msg)
    return data, digest


def load(data: bytes, path: str) -> Checkpoint:
    """Return a manifest's checkpoint; CheckpointCorrupt naming ``path`` if a single bit is off.

    Raises StoreError for a format that this release does not read.
    """
    body = data[: -len(_trailer("0" * 64))]
    fits = len(data) <= MOST_MANIFEST_BYTES
    if not fits or data != body + _trailer(hashlib.sha256(body).hexdigest()):
        msg = f"{path} is damaged (its digest does not match): use another checkpoint."
        raise CheckpointCorrupt(msg, path=path)
    try:
        values = cast("dict[str, Any]", json.loads(data))
        if values.get("format") != FORMAT:
            raise _of_another_release(values, path)
        return _checked(TypeAdapter(Checkpoint).validate_python(values))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        msg = (
            f"{path} contradicts itself, so it was made or changed by hand: use another checkpoint."
        )
        raise CheckpointCorrupt(msg, path=path) from error


def _trailer(digest: str) -> bytes:
    return f',\n "digest": "{digest}"\n}}\n'.encode()


def _of_another_release(values: Mapping[str, Any], path: str) -> StoreError:
    by = str(values.get("skerry_version"))
    release = by if VERSION.fullmatch(by) else "of another release"
    msg = (
        f"{path} has checkpoint format {str(values.get('format'))[:8]!r}, this release reads"
        f" {FORMAT}: use skerry {release}, or take the parameters from {PARAMS_FILE} beside it."
    )
    return StoreError(msg)


def _checked(found: Checkpoint) -> Checkpoint:
    """Return ``found`` once it is checked: a checkpoint is untrusted even if its digests match.

    Raises ValueError for what no release writes: invalid names, numbers out of bounds, or contents
    that contradict each other.
    """
    names = [file.name for file in found.files]
    params = next((file.size for file in found.files if file.name == PARAMS_FILE), 0)
    counts = (found.run_created_ns, found.index, found.step, found.tokens, found.created_ns)
    sound = (
        all(0 <= count < MOST for count in (*counts, found.ledger_sequence))
        and found.created_ns < MOST_NS
        and all(TOKEN.fullmatch(name) for name in (found.run, *(m.learner for m in found.learners)))
        and VERSION.fullmatch(found.skerry_version)
        and all(NAME.fullmatch(name) for name in names)
        and len(set(names)) == len(names)
        and sum(leaf.size for leaf in trainable(found.leaves)) <= params // LEAST_ITEM
        and len(found.state) == found.fragments
        and [saved.commit.fragment for saved in found.state] == list(range(found.fragments))
    )
    if not sound:
        raise ValueError(found.run)
    check(found.leaves, found.fragments)
    for saved in found.state:
        commits = [saved.commit]
        if (snapshot := saved.snapshot) is not None:
            commits.append(snapshot.commit)
            is_earlier = snapshot.commit.version <= saved.commit.version
            is_its = snapshot.commit.fragment == saved.commit.fragment
            if not is_earlier or not is_its or snapshot.parts[0].name != MASTER:
                raise ValueError(found.run)
        for commit in commits:  # the log's own door: numbers and names that a commit may have
            decode(Commit, encode(commit), run=found.run, plan_digest=found.plan_digest)
    return found


def read_manifest(store: Store, name: str) -> Checkpoint:
    """Return a checkpoint's manifest; CheckpointCorrupt if it is damaged or makes no sense."""
    data = bytes(store.read(name, MANIFEST, MOST_MANIFEST_BYTES + 1))
    return load(data, f"{store.where(name)}/{MANIFEST}")


def plan_of(checkpoint: Checkpoint, path: str) -> Plan:
    """Return the checkpoint's fragment plan; StoreError if this release cuts leaves differently."""
    cut = plan(checkpoint.leaves, checkpoint.fragments)
    if cut.digest != checkpoint.plan_digest:
        msg = (
            f"{path} was cut by another fragment plan than this release makes: "
            f"use skerry {checkpoint.skerry_version}."
        )
        raise StoreError(msg)
    return cut


def params(store: Store, name: str) -> tuple[Checkpoint, dict[str, Vector]]:
    """Return the global parameters as f32 tensors by leaf name, verified byte by byte."""
    checkpoint = read_manifest(store, name)
    tensors = _tensors(store, name, checkpoint, PARAMS_FILE)
    shapes = {leaf.name: leaf.shape for leaf in trainable(checkpoint.leaves)}
    if {key: tensor.shape for key, tensor in tensors.items()} != shapes:
        raise _damaged(store, name, PARAMS_FILE, f"it does not match {MANIFEST}")
    return checkpoint, tensors


def fragments(store: Store, name: str) -> Iterator[tuple[SavedFragment, dict[str, Vector]]]:
    """Yield each fragment with its vectors, f32 [padded_size], by part name.

    ``keyframe`` names its global parameters; the others are its snapshot's. Every file is read
    once, and a fragment is yielded only after all of its files and digests are verified.
    """
    from skerry.protocol.chunks import vector_digest  # loads blosc2, which listing does not need

    checkpoint, tensors = params(store, name)
    cut = plan_of(checkpoint, store.where(name))
    flat = [tensors[leaf.name].reshape(-1) for leaf in cut.leaves]
    for fragment, saved in zip(cut.fragments, checkpoint.state, strict=True):
        file = snapshot_file(fragment.index)
        held = _tensors(store, name, checkpoint, file) if saved.snapshot else {}
        parts = saved.snapshot.parts if saved.snapshot else ()
        vectors: dict[str, Vector] = {}
        for part in (SavedPart(KEYFRAME, saved.digest), *parts):
            vector, at = held.get(tensor_name(fragment.index, part.name)), file
            if part.name == KEYFRAME:
                vector, at = gather(fragment, flat), PARAMS_FILE
            if vector is None or vector_digest(vector) != part.digest:
                why = f"{part.name} of fragment {fragment.index} is not what the log held"
                raise _damaged(store, name, at, why)
            vectors[part.name] = vector
        yield saved, vectors


def verify(store: Store, name: str) -> Checkpoint:
    """Check every byte and every vector; CheckpointCorrupt names the file that is damaged."""
    checkpoint = read_manifest(store, name)
    for _ in fragments(store, name):
        pass
    return checkpoint


def _tensors(store: Store, name: str, checkpoint: Checkpoint, file: str) -> dict[str, Vector]:
    """Return the tensors of a file; CheckpointCorrupt unless the manifest names these bytes."""
    expected = next((stored for stored in checkpoint.files if stored.name == file), None)
    if expected is None:
        raise _damaged(store, name, file, f"it is not in {MANIFEST}")
    data = store.read(name, file, expected.size + 1)
    return tensorfile.read(data, f"{store.where(name)}/{file}", expected)


def _damaged(store: Store, name: str, file: str, why: str) -> CheckpointCorrupt:
    path = f"{store.where(name)}/{file}"
    return CheckpointCorrupt(f"{path} is damaged ({why}): use another checkpoint.", path=path)
