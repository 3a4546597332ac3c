"""A syncer's committer without rounds: a test says who contributes to which version."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.algorithm.outer import Outer, outer_of
from skerry.log import ledger
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.state_writer import StateWriter
from skerry.log.streams import specs
from skerry.protocol.commit import Closing
from skerry.protocol.messages import CloseReason, Manifest
from skerry.protocol.shard import Shard
from skerry.protocol.subjects import Subjects
from skerry.settings.models import DataConfig, OuterConfig, RunConfig, SyncConfig
from skerry_syncer.committer import Committer
from skerry_syncer.loading import LoadedShard, load
from skerry_syncer.restoring import Restorer
from tests.support.builders import run_record
from tests.support.learners import TOKENS, ScriptedLearner

RUN = "driven"
LEAVES = (LeafSpec("embed", (30, 16), embedding=True), LeafSpec("w", (20, 32)))


@dataclass(slots=True)
class DrivenSyncer:
    """The newest syncer of a run on a memory broker, and the run's learners ``a``, ``b``, ``c``."""

    bus: MemoryBus
    config: RunConfig
    plan: Plan
    outer: Outer
    learners: dict[str, ScriptedLearner]
    shard: Shard
    committer: Committer
    seen: int = 0
    fences: int = 0
    now_ns: int = 1
    manifests: dict[int, Manifest] = field(default_factory=dict[int, "Manifest"])

    @classmethod
    async def begin(
        cls,
        *,
        outer: OuterConfig,
        fragments: int = 2,
        window_bytes: int = 64 * 1024**2,
        **sync: Any,
    ) -> DrivenSyncer:
        """Create a run, let a first syncer begin with it, and commit version 1 of all of it."""
        given = SyncConfig(fragments=fragments, contribution_scheme="int4", **sync)
        config = RunConfig(data=DataConfig(seq_len=TOKENS, batch=1), sync=given, outer=outer)
        if outer.preset == "adamw":
            train = config.train.model_copy(update={"inner": "gradient"})
            config = config.model_copy(update={"train": train})
        bus, cut = MemoryBroker(clock_ns=lambda: 1).connect(), plan(LEAVES, fragments)
        await bus.declare(specs(RUN, window_bytes=window_bytes))
        await ledger.create_run(bus, run_record(RUN, cut, config.model_dump_json()))
        made = outer_of(config, cut)
        learners = {n: ScriptedLearner(bus, RUN, cut, n, scheme="int4") for n in "abc"}
        loaded, committer = await _loaded(bus, config, cut, made, 1)
        driven = cls(bus, config, cut, made, learners, loaded.shard, committer, fences=1)
        await learners["a"].offer_genesis()
        driven.feed()
        for index, state in driven.shard.fragments.items():
            closing = driven.closing(reason=None)
            begun = await committer.genesis(driven.shard, state, closing)
            assert begun is not None
            driven.manifests[index] = begun
        return driven

    def closing(self, **changes: Any) -> Closing:
        """Return why a round closed."""
        return replace(Closing(CloseReason.ALL_ARRIVED, 1, 1, 2), **changes)

    def feed(self) -> None:
        """Let the shard take what has come."""
        stored = self.bus.broker.streams[Subjects(RUN).shard(0).stream("CONTRIB")].records
        for sequence in sorted(s for s in stored if s > self.seen):
            self.shard.take(stored[sequence], 0.0)
            self.seen = sequence

    async def round(
        self, index: int, senders: str = "ab", *, poisoned: str = "", final: bool = False
    ) -> Manifest | None:
        """Commit a version that merges what these learners send; ``poisoned`` ones are refused."""
        state = self.shard.fragments[index]
        for name in senders:
            learner = self.learners[name]
            learner.versions[index] = state.version
            poison = float("inf") if name in poisoned else 0.0
            await learner.send_gradient(index, state.version + 1, poison=poison)
        self.feed()
        manifest = await self.committer.merge(self.shard, state, self.closing(final=final))
        if manifest is not None:
            self.manifests[index] = manifest
        return manifest

    async def take_over(
        self,
        restorer: Restorer | None = None,
        on_bytes: Callable[[int], None] | None = None,
    ) -> LoadedShard:
        """Have another syncer restore the run from its log and go on with it."""
        self.fences += 1
        loaded, self.committer = await _loaded(
            *(self.bus, self.config, self.plan, self.outer, self.fences), restorer, on_bytes
        )
        self.shard, self.seen = loaded.shard, loaded.shard.resume_after
        return loaded


async def _loaded(
    bus: MemoryBus,
    config: RunConfig,
    cut: Plan,
    outer: Outer,
    number: int,
    restorer: Restorer | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> tuple[LoadedShard, Committer]:
    writer = await StateWriter.acquire(
        bus, RUN, cut, holder=f"s{number}", now_ns=number, every=config.sync.keyframe_every
    )
    held = restorer or Restorer.of(bus, RUN, cut, config.sync, outer)
    loaded = await load(bus, writer, cut, config, restorer=held, on_bytes=on_bytes)
    vectors = dict(loaded.vectors)
    return loaded, Committer(writer, config.sync, outer, vectors, wall_ns=lambda: 1)
