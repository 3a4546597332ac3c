"""The exponential moving average of a run's global parameters: ``eval.ema``."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan, gather
from skerry.errors import CheckpointCorrupt
from skerry.protocol.messages import Manifest, RunRecord
from skerry.settings.local import StoreSettings
from skerry.store import checkpoint
from skerry.store.base import Store
from skerry.store.finding import open_store, root_of, summaries
from skerry.store.writer import CheckpointWriter

log = structlog.get_logger()

Vector = NDArray[np.float32]

FOLDER = "ema"
"""Below the folder of a run's checkpoints: the newest average, as a checkpoint of its own."""


@dataclass(slots=True)
class MovingAverage:
    """The average of each fragment over its versions, and the version up to which it goes.

    ``decay`` is the share of the average that a version leaves. A version that was not read,
    because newer ones came meanwhile, counts as the one that was.
    """

    decay: float
    vectors: dict[int, Vector] = field(default_factory=dict[int, "Vector"])
    versions: dict[int, int] = field(default_factory=dict[int, int])
    manifests: dict[int, Manifest] = field(default_factory=dict[int, "Manifest"])

    def follow(self, manifest: Manifest, vector: Vector) -> None:
        """Take in a version of a fragment: f32 (padded_size,)."""
        fragment, version = manifest.commit.fragment, manifest.commit.version
        passed = version - self.versions.get(fragment, version)
        before = self.vectors.get(fragment)
        if before is None or passed < 0:
            self.vectors[fragment] = vector.copy()
        else:
            moved: Vector = np.float32(1 - self.decay**passed) * (vector - before)
            self.vectors[fragment] = before + moved
        self.versions[fragment], self.manifests[fragment] = version, manifest


@dataclass(slots=True)
class SavedAverage:
    """A run's moving average, which a store keeps as a checkpoint."""

    record: RunRecord
    plan: Plan
    store: Store
    average: MovingAverage
    index: int = 0

    @classmethod
    def of(cls, access: StoreSettings, record: RunRecord, plan: Plan, decay: float) -> SavedAverage:
        """Return the average that was saved of this run, or an empty one; skip damaged ones."""
        where = f"{root_of(access)}/{record.run}/{FOLDER}"
        made = cls(record, plan, open_store(where, access), MovingAverage(decay))
        for found in reversed(summaries(where, access)):
            saved = found.checkpoint
            if saved and saved.run_created_ns == record.created_ns:
                try:
                    _, tensors = checkpoint.params(made.store, found.name)
                except CheckpointCorrupt as error:
                    log.warning("average_lost", run=record.run, cause=str(error))
                    continue
                flat = [tensors[leaf.name].reshape(-1) for leaf in plan.leaves]
                made.average.vectors = {f.index: gather(f, flat) for f in plan.fragments}
                made.average.versions, made.index = dict(enumerate(saved.versions)), saved.index + 1
                break
        return made

    def save(self) -> str:
        """Write the average as a checkpoint from which no run goes on; return where it lies.

        It takes the place of the one before, and of what a dead evaluator left half-written. Raises
        StoreError if the store cannot be written.
        """
        self.store.sweep()
        commits = [manifest.commit for manifest in self.average.manifests.values()]
        writer = CheckpointWriter(self.store, self.record, self.plan, checkpoint.step_of(commits))
        old = self.store.names()
        try:
            for index, vector in self.average.vectors.items():
                writer.add(self.average.manifests[index].commit, vector, None)
            counts: dict[str, Any] = {"learners": (), "ledger_sequence": 0}
            written = writer.finish(index=self.index, now_ns=time.time_ns(), **counts)
        finally:
            writer.discard()
        self.index += 1
        for name in old:
            self.store.delete(name)
        return self.store.where(written.name)
