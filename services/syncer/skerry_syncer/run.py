"""What every shard of a run is served with, and how a shard's server is made of it."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from skerry.algorithm import liveness, schedule
from skerry.algorithm.merge import rule_of
from skerry.algorithm.outer import outer_of
from skerry.errors import Denied
from skerry.log import run_records
from skerry.log.streams import specs
from skerry.protocol import rounds
from skerry.protocol.clock import GlobalClock, LearnerTable
from skerry.protocol.coordinator import CoordinatorSettings, RoundCoordinator, RunEnd, clock_limit
from skerry.protocol.messages import Pulse, Quarantine, Round
from skerry.protocol.records import plan_of
from skerry.settings.loading import run_config_from_json
from skerry.tasks import now_s
from skerry_syncer.committer import Committer
from skerry_syncer.loading import load
from skerry_syncer.restoring import Restorer
from skerry_syncer.serving import ShardServer, note_quarantine
from skerry_syncer.telemetry import RoundTelemetry

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.algorithm.fragments import Plan
    from skerry.algorithm.outer import Outer
    from skerry.log.base import Bus
    from skerry.log.state_writer import StateWriter
    from skerry.protocol.messages import RunRecord
    from skerry.protocol.shard import Shard
    from skerry.settings.models import RunConfig

log = structlog.get_logger()

ALONE_S = 15.0
"""Seconds without a pulse of any learner after which a syncer says so."""
STORED_S = 2.0
"""Pulses that the log holds already come within this many seconds."""


@dataclass(frozen=True, slots=True)
class ServedRun:
    """One run as this process serves it; ``learners`` is shared by all its shards.

    ``restorer`` holds what it has of the shards that others serve.
    """

    bus: Bus
    record: RunRecord
    config: RunConfig
    plan: Plan
    outer: Outer
    name: str
    learners: LearnerTable
    wall_ns: Callable[[], int]
    restorer: Restorer

    @classmethod
    async def begin(
        cls, bus: Bus, record: RunRecord, name: str, wall_ns: Callable[[], int]
    ) -> ServedRun:
        """Read the run's settings and declare its streams.

        Raises ConfigError or RunMismatch where this release cannot serve it.
        """
        config = run_config_from_json(record.config_json, record.skerry_version)
        plan = plan_of(record)
        rule_of(config.sync.merge)
        outer = outer_of(config, plan)
        blocking = not config.sync.overlap_steps
        policy = liveness.LivenessPolicy(**config.liveness.model_dump(), blocking=blocking)
        learners = LearnerTable(policy, config.sync.round_timeout_s)
        restorer = Restorer.of(bus, record.run, plan, config.sync, outer)
        served = cls(bus, record, config, plan, outer, name, learners, wall_ns, restorer)
        await served.declare()
        return served

    async def declare(self) -> None:
        """Create what is missing of the run's streams, as far as this client may."""
        with suppress(Denied):
            record, given = self.record, self.config.log.model_dump()
            await self.bus.declare(specs(record.run, shards=record.shards, **given))

    async def follow_pulses(self, wake: Callable[[], None]) -> None:
        """Note the learners' pulses, and call ``wake`` at each; say once where none comes."""
        loop = asyncio.get_running_loop()
        began_s, alone = loop.time(), loop.call_later(ALONE_S, self._say_alone)
        try:
            async for pulse in run_records.follow(self.bus, self.record.run, Pulse):
                self.learners.observe(pulse, loop.time())
                if loop.time() - began_s > STORED_S:  # else one of a learner that may be gone
                    alone.cancel()
                wake()
        finally:
            alone.cancel()

    def _say_alone(self) -> None:
        hint = f"start `skerry learner --run {self.record.run}` on the same broker, or see its log"
        log.warning("waits_for_learners", seconds=ALONE_S, hint=hint)

    async def follow_quarantine(self, wake: Callable[[], None]) -> None:
        """Note which learners are in quarantine; call ``wake`` at each change."""
        async for record in run_records.follow(self.bus, self.record.run, Quarantine):
            note_quarantine(self.learners, record)
            wake()

    async def server(
        self, writer: StateWriter, on_bytes: Callable[[int], None] | None = None
    ) -> ShardServer:
        """Rebuild a shard from the log; StateLost where that cannot be done."""
        loaded = await load(
            *(self.bus, writer, self.plan, self.config),
            restorer=self.restorer,
            on_bytes=on_bytes,
        )
        log.info(
            "shard_loaded",
            run=self.record.run,
            shard=writer.shard,
            fence=writer.token,
            versions={index: state.version for index, state in loaded.shard.fragments.items()},
        )
        for record in await run_records.newest_each(self.bus, self.record.run, Quarantine):
            note_quarantine(self.learners, record)
        loaded.shard.quarantined = self.learners.quarantined
        loaded.shard.pulse_of = self.learners.pulse_of
        telemetry = RoundTelemetry(self.record, self.config.sync.merge)
        return ShardServer(
            bus=self.bus,
            run=self.record,
            coordinator=self._coordinator(loaded.shard, telemetry),
            committer=Committer(
                writer, self.config.sync, self.outer, loaded.vectors, wall_ns=self.wall_ns
            ),
            telemetry=telemetry,
            wall_ns=self.wall_ns,
        )

    def _coordinator(self, shard: Shard, telemetry: RoundTelemetry) -> RoundCoordinator:
        sync = self.config.sync
        timetable = schedule.Schedule(
            sync.fragments, sync.h_steps, sync.overlap_steps, own=len(shard.fragments)
        )
        policy = rounds.RoundPolicy(
            sync.quorum,
            sync.grace_gamma,
            sync.overlap_steps,
            schedule.room_steps(timetable),
            sync.round_timeout_s,
        )
        train = self.config.train
        sooner = train.duration_s is not None or train.tokens is not None
        settings = CoordinatorSettings(timetable, policy, train.steps, sooner)
        manifests = [s.manifest for s in shard.fragments.values() if s.manifest is not None]
        newest_ns = max((m.commit.closed_ns for m in manifests), default=self.wall_ns())
        since_s = now_s() - max(0, self.wall_ns() - newest_ns) / 1e9
        limit = clock_limit(shard, settings, since_s)

        def new_round(fragment: int, version: int, due_step: int, opened_ns: int) -> Round:
            return Round(
                run=self.record.run,
                plan_digest=self.plan.digest,
                fragment=fragment,
                version=version,
                due_step=due_step,
                opened_ns=opened_ns,
                syncer=self.name,
                trace_id=telemetry.trace(fragment, version),
            )

        return RoundCoordinator(
            shard=shard,
            clock=GlobalClock(self.learners, sync.quorum, timetable.blocking, limit),
            settings=settings,
            new_round=new_round,
            end=RunEnd(finals={m.commit.fragment for m in manifests if m.commit.final}),
        )
