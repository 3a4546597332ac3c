"""Writing one checkpoint, a fragment at a time: parameters stay in memory, outer state does not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm.fragments import scatter
from skerry.protocol.parts import MASTER
from skerry.store import tensorfile
from skerry.store.base import MANIFEST
from skerry.store.checkpoint import (
    FORMAT,
    PARAMS_FILE,
    Checkpoint,
    SavedFragment,
    SavedLearner,
    SavedPart,
    dump,
    load,
    outer_file,
    step_of,
    tensor_name,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.protocol.messages import Manifest, RunRecord
    from skerry.store.base import Buffer, Draft, Store, StoredFile

    Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is in place and has been read back."""

    name: str
    checkpoint: Checkpoint


class CheckpointWriter:
    """Takes the fragments in any order, then commits; every method blocks: call it in a thread.

    A fragment may be given again in a newer version, and the last one counts. The checkpoint exists
    only after every fragment has been given; its name has the ``step`` at which it was begun.
    """

    def __init__(self, store: Store, record: RunRecord, plan: Plan, step: int) -> None:
        self._record = record
        self._plan = plan
        self._leaves = [np.zeros(leaf.size, np.float32) for leaf in plan.leaves]
        self._saved: dict[int, SavedFragment] = {}
        self._files: dict[str, StoredFile] = {}
        self._draft: Draft = store.draft(f"step-{step:08d}")

    def add(self, manifest: Manifest, parts: Mapping[str, Vector]) -> None:
        """Take a fragment: ``master`` and every ``outer.<name>``, f32 padded vectors."""
        index = manifest.commit.fragment
        scatter(self._plan.fragments[index], parts[MASTER], self._leaves)
        outer = [name for name in parts if name != MASTER]
        self._write(outer_file(index), {tensor_name(index, name): parts[name] for name in outer})
        digests = {part.name: part.digest for part in reversed(manifest.parts)}  # the first counts
        saved = tuple(SavedPart(name, digests[name]) for name in (MASTER, *outer))
        self._saved[index] = SavedFragment(manifest.commit, saved)

    def finish(
        self,
        *,
        index: int,
        learners: Sequence[SavedLearner],
        ledger_sequence: int,
        now_ns: int,
    ) -> Written:
        """Write the parameters, then the manifest, which makes the checkpoint exist."""
        named = zip(self._plan.leaves, self._leaves, strict=True)
        self._write(PARAMS_FILE, {leaf.name: flat.reshape(leaf.shape) for leaf, flat in named})
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

    def _write(self, file: str, tensors: Mapping[str, Vector]) -> None:
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        head = tensorfile.header(shapes, {"format": "skerry", "run": self._record.run})
        data: list[Buffer] = [head, *map(tensorfile.raw, tensors.values())]
        self._files[file] = self._draft.write(file, data)

    def discard(self) -> None:
        """Delete what was written; does nothing after ``finish``."""
        self._draft.discard()
