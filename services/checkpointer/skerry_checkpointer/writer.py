"""Writing one checkpoint, a fragment at a time: parameters stay in memory, outer state does not."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skerry.core.fragments import BLOCK, scatter
from skerry.errors import StoreError
from skerry.store import tensorfile
from skerry.store.checkpoint import MASTER, OUTER, entry_name, tensor_name
from skerry.store.manifest import (
    FORMAT,
    OUTER_FILE,
    PARAMS_FILE,
    Checkpoint,
    SavedFragment,
    SavedLearner,
    SavedPart,
    dump,
    step_of,
    tokens_of,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from numpy.typing import NDArray

    from skerry.core.fragments import Plan
    from skerry.store.base import Draft, Store
    from skerry.wire.messages import Manifest, RunRecord

    Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Written:
    """A checkpoint that is in place and has been read back."""

    name: str
    checkpoint: Checkpoint


class CheckpointWriter:
    """Takes the fragments in order, then commits; every method blocks, so call it in a thread.

    ``manifests`` are the fragments' when the checkpoint is begun: they give the name and the shapes
    of the outer state. A fragment that is committed meanwhile is taken as it is then.
    """

    def __init__(
        self, store: Store, record: RunRecord, plan: Plan, manifests: Mapping[int, Manifest]
    ) -> None:
        self._record = record
        self._plan = plan
        self._leaves = [
            np.zeros(int(np.prod(leaf.shape, dtype=np.int64)), np.float32) for leaf in plan.leaves
        ]
        self._saved: list[SavedFragment] = []
        self._sizes = {
            tensor_name(fragment.index, part.name): (part.blocks * BLOCK,)
            for fragment in plan.fragments
            for part in manifests[fragment.index].parts
            if part.name.startswith(OUTER)
        }
        step = step_of([manifest.commit for manifest in manifests.values()])
        self._draft: Draft = store.draft(entry_name(step))
        try:
            self._draft.append(OUTER_FILE, tensorfile.header(self._sizes, self._metadata()))
        except StoreError:
            self._draft.discard()
            raise

    def add(self, manifest: Manifest, parts: Mapping[str, Vector]) -> None:
        """Take the next fragment: ``master`` and every ``outer.<name>``, f32 padded vectors."""
        fragment = self._plan.fragments[len(self._saved)]
        if manifest.commit.fragment != fragment.index:
            msg = f"Fragment {manifest.commit.fragment} came where {fragment.index} was due."
            raise ValueError(msg)
        outer = [name for name in parts if name != MASTER]
        expected = {key for key in self._sizes if key.startswith(f"{fragment.index}/")}
        found = {tensor_name(fragment.index, name): parts[name].shape for name in outer}
        if found != {key: self._sizes[key] for key in expected}:
            msg = (
                f"The outer state of fragment {fragment.index} changed its shape meanwhile: "
                "all syncers of a run must use the same outer optimizer."
            )
            raise StoreError(msg)
        scatter(fragment, parts[MASTER], self._leaves)
        for name in outer:
            self._draft.append(OUTER_FILE, tensorfile.raw(parts[name]))
        digests = {part.name: part.digest for part in manifest.parts}
        saved = tuple(SavedPart(name, digests[name]) for name in (MASTER, *outer))
        self._saved.append(SavedFragment(manifest.commit, saved))

    def _metadata(self) -> dict[str, str]:
        return {"format": "skerry", "run": self._record.run}

    def finish(
        self,
        *,
        index: int,
        learners: Sequence[SavedLearner],
        now_ns: int,
    ) -> Written:
        """Write the parameters, read everything back, and put the manifest in place."""
        shapes = {leaf.name: leaf.shape for leaf in self._plan.leaves}
        self._draft.append(PARAMS_FILE, tensorfile.header(shapes, self._metadata()))
        for leaf in self._leaves:
            self._draft.append(PARAMS_FILE, tensorfile.raw(leaf))
        commits = [saved.commit for saved in self._saved]
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
            state=tuple(self._saved),
            files=self._draft.seal(),
        )
        data, _ = dump(checkpoint)
        return Written(self._draft.commit(data), checkpoint)

    def discard(self) -> None:
        """Throw away what was written; does nothing after ``finish``."""
        self._draft.discard()
