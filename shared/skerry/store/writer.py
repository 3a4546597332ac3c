"""Writes one checkpoint, a fragment at a time; holds parameters in memory, but no snapshots."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Fragment, Plan, scatter
from skerry.protocol.chunks import vector_digest
from skerry.protocol.commit import tokens_of
from skerry.protocol.messages import Commit, RunRecord
from skerry.protocol.parts import MASTER
from skerry.store import tensorfile
from skerry.store.base import MANIFEST, Buffer, Draft, Store, StoredFile
from skerry.store.checkpoint import (
    FORMAT,
    PARAMS_FILE,
    Checkpoint,
    SavedFragment,
    SavedLearner,
    SavedPart,
    SavedSnapshot,
    dump,
    load,
    snapshot_file,
    step_of,
    tensor_name,
)
from skerry.store.tensorfile import Dtype

Vector = NDArray[np.float32]


class Snapshot(NamedTuple):
    """A fragment's snapshot: the commit that made it, its master and outer state by part name."""

    commit: Commit
    vectors: Mapping[str, Vector]


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is in place and has been read back."""

    name: str
    checkpoint: Checkpoint


class CheckpointWriter:
    """Takes the fragments in any order, then commits; every method blocks: call it in a thread.

    A fragment may be added again in a newer version; the last one counts. ``finish`` needs every
    fragment. The checkpoint's name has the ``step`` at which it was begun.
    """

    def __init__(self, store: Store, record: RunRecord, plan: Plan, step: int) -> None:
        self._record = record
        self._plan = plan
        self._leaves = list[NDArray[Any]](np.zeros(leaf.size, np.uint16) for leaf in plan.leaves)
        self._dtype: Dtype = "BF16"
        self._saved: dict[int, SavedFragment] = {}
        self._files: dict[str, StoredFile] = {}
        self._draft: Draft = store.draft(f"step-{step:08d}")

    def add(self, commit: Commit, vector: Vector, snapshot: Snapshot | None) -> None:
        """Take a fragment's global parameters, f32 [padded_size], and its newest snapshot."""
        index, held = commit.fragment, None
        self._keep(self._plan.fragments[index], vector)
        if snapshot is not None:
            parts = {name: snapshot.vectors[name] for name in sorted(snapshot.vectors)}
            parts = {MASTER: parts.pop(MASTER)} | parts
            tensors = {tensor_name(index, name): parts[name] for name in parts}
            shapes = {name: tensor.shape for name, tensor in tensors.items()}
            self._write(snapshot_file(index), shapes, map(tensorfile.raw, tensors.values()), "F32")
            digests = (SavedPart(name, vector_digest(part)) for name, part in parts.items())
            held = SavedSnapshot(snapshot.commit, tuple(digests))
        self._saved[index] = SavedFragment(commit, vector_digest(vector), held)

    def _keep(self, fragment: Fragment, vector: Vector) -> None:
        """Copy a vector into its leaves, as bf16 bits, or as f32 once a vector needs that."""
        if self._dtype == "BF16" and tensorfile.dtype_of([vector]) == "F32":
            self._dtype = "F32"
            self._leaves[:] = map(tensorfile.widened, self._leaves)
        kept = vector if self._dtype == "F32" else tensorfile.bf16_bits(vector)
        scatter(fragment, kept, self._leaves)

    def finish(
        self,
        *,
        index: int,
        learners: Sequence[SavedLearner],
        ledger_sequence: int,
        now_ns: int,
    ) -> Written:
        """Write the parameters, then the manifest, which makes the checkpoint exist."""
        shapes = {leaf.name: leaf.shape for leaf in self._plan.leaves}
        self._write(PARAMS_FILE, shapes, map(tensorfile.raw, self._leaves), self._dtype)
        state = tuple(self._saved[fragment.index] for fragment in self._plan.fragments)
        commits = [saved.commit for saved in state]
        checkpoint = Checkpoint(
            format=FORMAT,
            run=self._record.run,
            run_created_ns=self._record.created_ns,
            index=index,
            step=step_of(commits),
            tokens=tokens_of(commits),
            created_ns=now_ns,
            skerry_version=self._record.skerry_version,
            config=json.loads(self._record.config_json),
            plan_digest=self._plan.digest,
            fragments=len(self._plan.fragments),
            leaves=self._plan.specs,
            learners=tuple(learners),
            state=state,
            files=tuple(self._files.values()),
            ledger_sequence=ledger_sequence,
        )
        data, _ = dump(checkpoint)
        load(data, MANIFEST)  # what cannot be read is never put in place
        return Written(self._draft.commit(data), checkpoint)

    def _write(
        self, file: str, shapes: Mapping[str, tuple[int, ...]], made: Iterable[Buffer], dtype: Dtype
    ) -> None:
        head = tensorfile.header(shapes, {"format": "skerry", "run": self._record.run}, dtype)
        self._files[file] = self._draft.write(file, [head, *made])

    def discard(self) -> None:
        """Delete what was written; does nothing after ``finish``."""
        self._draft.discard()
