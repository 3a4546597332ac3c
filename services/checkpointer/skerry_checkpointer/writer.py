"""Writing one checkpoint, a fragment at a time: parameters stay in memory, outer state does not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm.fragments import scatter
from skerry.store import tensorfile
from skerry.store.checkpoint import MASTER, entry_name, tensor_name
from skerry.store.manifest import (
    FORMAT,
    PARAMS_FILE,
    Checkpoint,
    SavedFragment,
    SavedLearner,
    SavedPart,
    dump,
    outer_file,
    step_of,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan
    from skerry.protocol.messages import Manifest, RunRecord
    from skerry.store.base import Draft, Store

    Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is in place and has been read back."""

    name: str
    checkpoint: Checkpoint


class CheckpointWriter:
    """Takes the fragments in any order, then commits; every method blocks: call it in a thread.

    A fragment may be given again, in a newer version: the last one counts. The draft becomes an
    entry only when every fragment has been given.
    """

    def __init__(self, store: Store, record: RunRecord, plan: Plan) -> None:
        self._record = record
        self._plan = plan
        self._leaves = [
            np.zeros(int(np.prod(leaf.shape, dtype=np.int64)), np.float32) for leaf in plan.leaves
        ]
        self._saved: dict[int, SavedFragment] = {}
        self._draft: Draft = store.draft(entry_name(0))

    def add(self, manifest: Manifest, parts: Mapping[str, Vector]) -> None:
        """Take a fragment: ``master`` and every ``outer.<name>``, f32 padded vectors."""
        index = manifest.commit.fragment
        scatter(self._plan.fragments[index], parts[MASTER], self._leaves)
        outer = [name for name in parts if name != MASTER]
        shapes = {tensor_name(index, name): parts[name].shape for name in outer}
        file = outer_file(index)
        self._draft.drop(file)
        self._draft.append(file, tensorfile.header(shapes, self._metadata()))
        for name in outer:
            self._draft.append(file, tensorfile.raw(parts[name]))
        digests = {part.name: part.digest for part in manifest.parts}
        saved = tuple(SavedPart(name, digests[name]) for name in (MASTER, *outer))
        self._saved[index] = SavedFragment(manifest.commit, saved)

    def _metadata(self) -> dict[str, str]:
        return {"format": "skerry", "run": self._record.run}

    def finish(
        self,
        *,
        index: int,
        learners: Sequence[SavedLearner],
        ledger_sequence: int,
        now_ns: int,
    ) -> Written:
        """Write the parameters, read everything back, and put the manifest in place."""
        shapes = {leaf.name: leaf.shape for leaf in self._plan.leaves}
        self._draft.append(PARAMS_FILE, tensorfile.header(shapes, self._metadata()))
        for leaf in self._leaves:
            self._draft.append(PARAMS_FILE, tensorfile.raw(leaf))
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
            leaves=self._plan.leaves,
            learners=tuple(learners),
            state=state,
            files=self._draft.seal(),
            ledger_sequence=ledger_sequence,
        )
        data, _ = dump(checkpoint)
        return Written(self._draft.commit(data, entry_name(checkpoint.step)), checkpoint)

    def discard(self) -> None:
        """Throw away what was written; does nothing after ``finish``."""
        self._draft.discard()
