"""A run without syncer and learners: the test commits each fragment by hand."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import BLOCK, LeafSpec, Plan, plan
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import Commit, CommitOrigin, LearnerProgress, Manifest, RunRecord
from skerry.settings.models import RunConfig
from tests.support.builders import commit, run_record
from tests.support.learners import walk

Vectors = dict[str, NDArray[np.float32]]

LEAVES = (
    LeafSpec("embed", (64, 16), embedding=True),
    LeafSpec("block/w", (40, 33)),
    LeafSpec("block/scale", ()),
    LeafSpec("bias", (7,)),
)
"""A small model with an embedding, a scalar and sizes that need padding."""

STARTS = 2
"""How often learner ``a`` has started: that is what its rows in commits say."""
WINDOW_BYTES = 16 * 1024**2
"""Contributions kept: a broker reserves this for every run, and a test server holds many."""


@dataclass(slots=True)
class ScriptedRun:
    """A run in the log; ``vectors`` is each fragment's newest snapshot, by part."""

    bus: Bus
    record: RunRecord
    plan: Plan
    writers: list[StateWriter]
    manifests: dict[int, Manifest] = field(default_factory=dict[int, Manifest])
    vectors: dict[int, Vectors] = field(default_factory=dict[int, "Vectors"])

    @classmethod
    async def begin(
        cls,
        bus: Bus,
        run: str = "run",
        *,
        leaves: tuple[LeafSpec, ...] = LEAVES,
        config: RunConfig | None = None,
    ) -> ScriptedRun:
        """Declare the streams, create the run, let learner ``a`` start twice and take its fence."""
        cut = plan(leaves, 3, config.sync.shards if config else 1)
        await bus.declare(specs(run, shards=cut.shards, window_bytes=WINDOW_BYTES))
        text = (config or RunConfig()).model_dump_json()
        record = await ledger.create_run(bus, run_record(run, cut, config_json=text))
        for start in range(1, STARTS + 1):
            await ledger.join(bus, run, "a", "script", start)
        writers = [
            await StateWriter.acquire(bus, run, cut, holder="script", now_ns=1, shard=shard)
            for shard in range(cut.shards)
        ]
        return cls(bus, record, cut, writers)

    @property
    def writer(self) -> StateWriter:
        """The writer of the first shard, which is all there is unless the config says so."""
        return self.writers[0]

    async def commit(
        self, index: int, *, step: int = 0, tokens: int = 0, whole: bool = True
    ) -> Manifest:
        """Commit the next version of one fragment with vectors that depend on it only.

        ``whole``: with a snapshot, not only what learners read.
        """
        fragment = self.plan.fragments[index]
        held = self.manifests.get(index)
        version = held.commit.version + 1 if held else 1
        vectors = {
            "master": walk(fragment, "master", version),
            "outer.count": np.full(BLOCK, version, np.float32),
            "outer.momentum": walk(fragment, "momentum", version),
        }
        parts = [NewPart.of("keyframe", "bf16", vectors["master"])]
        if whole:
            parts += [NewPart.of(name, "f32", vector) for name, vector in vectors.items()]
            self.vectors[index] = vectors
        draft = self._draft(index, version, step, tokens)
        draft = replace(draft, master_digest=vector_digest(vectors["master"]))
        self.manifests[index] = await self.writers[self.plan.shard_of(index)].commit(
            draft, parts, held
        )
        return self.manifests[index]

    async def commit_all(self, *, step: int = 0, tokens: int = 0) -> None:
        """Commit the next version of every fragment."""
        for fragment in self.plan.fragments:
            await self.commit(fragment.index, step=step, tokens=tokens)

    async def finish(self) -> None:
        """Mark the run as finished."""
        await ledger.finish_run(self.bus, self.record)

    def _draft(self, index: int, version: int, step: int, tokens: int) -> Commit:
        """Return a commit whose learner ``a`` is in its second incarnation."""
        return commit(
            version,
            index,
            run=self.record.run,
            plan_digest=self.plan.digest,
            origin=CommitOrigin.ROUND,
            step=step,
            syncer="",
            fence=0,
            contrib_floor=17,
            progress=(LearnerProgress("a", STARTS, 5, tokens, 3 * step),),
        )
