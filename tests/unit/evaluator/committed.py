"""A run whose global state a test commits by hand: fresh parameters from a seed."""

from __future__ import annotations

from dataclasses import dataclass, field

import jax
import numpy as np

from skerry.algorithm.fragments import gather
from skerry.log import run_records
from skerry.log.memory import MemoryBus
from skerry.log.state_writer import NewPart, StateWriter
from skerry.models.base import leaves_by_name
from skerry.protocol.messages import Evaluation, Manifest, RunRecord
from skerry.protocol.parts import KEYFRAME, MASTER
from skerry.settings.models import RunConfig
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from skerry_evaluator.service import Evaluator
from skerry_learner.work import Work, find_or_create
from tests.support.builders import commit, progress


@dataclass
class CommittedRun:
    """A run whose global state the test commits by hand: fresh parameters from a seed."""

    bus: MemoryBus
    record: RunRecord
    work: Work
    writer: StateWriter
    held: dict[int, Manifest] = field(default_factory=dict[int, Manifest])

    @classmethod
    async def begin(cls, bus: MemoryBus, config: RunConfig) -> CommittedRun:
        record, work = await find_or_create(bus, "run", config)
        writer = await StateWriter.acquire(
            bus, "run", work.plan, holder="s", now_ns=1, chunk_bytes=65536
        )
        return cls(bus, record, work, writer)

    async def commit(
        self, seed: int, fragments: tuple[int, ...] = (0, 1), *, off: float = 0.0
    ) -> None:
        """Commit the next version of these fragments; their master is ``off`` what is read."""
        fresh = self.work.model.init(jax.random.key(seed))
        leaves = [np.array(leaf) for leaf in leaves_by_name(fresh)]
        for index in fragments:
            vector = gather(self.work.plan.fragments[index], leaves)
            master = NewPart.of(MASTER, "f32", vector + np.float32(off))
            parts = [NewPart.of(KEYFRAME, "bf16", vector), master]
            before = self.held.get(index)
            version = 1 + (before.commit.version if before else 0)
            draft = commit(
                version,
                index,
                plan_digest=self.work.plan.digest,
                step=10 * version,
                progress=(progress(tokens=100 * version + index),),
            )
            self.held[index] = await self.writer.commit(draft, parts, before)

    def evaluator(self, name: str = "e") -> Evaluator:
        return Evaluator.of(self.bus, self.record, name)

    async def checkpoint(self, store: LocalStore) -> str:
        """Write a checkpoint of the global state as a run does; return where it lies."""
        written = await Checkpointer.of(self.bus, self.record, store).save()
        assert written is not None
        return store.where(written.name)

    async def noted(self) -> list[Evaluation]:
        return await run_records.read_all(self.bus, "run", Evaluation)
