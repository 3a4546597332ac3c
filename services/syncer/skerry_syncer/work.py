"""What every shard of a run is served with, and how a conductor is made of it."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from skerry.algorithm import liveness, schedule
from skerry.algorithm.adamw import AdamW
from skerry.algorithm.merge import rule_of
from skerry.algorithm.outer import make_outer
from skerry.log import presence
from skerry.log.streams import specs
from skerry.protocol import rounds
from skerry.protocol.run import plan_of
from skerry.settings.loading import run_config_from_json
from skerry.tasks import TaskGroup
from skerry_syncer.committer import Committer
from skerry_syncer.conductor import Conductor
from skerry_syncer.fleet import Fleet
from skerry_syncer.loading import load

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry.algorithm.fragments import Plan
    from skerry.algorithm.outer import Outer
    from skerry.log.base import Bus
    from skerry.log.state_writer import StateWriter
    from skerry.protocol.messages import RunRecord
    from skerry.settings.models import RunConfig

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Work:
    """One run as this process serves it; ``fleet`` is shared by all its shards."""

    bus: Bus
    record: RunRecord
    config: RunConfig
    plan: Plan
    outer: Outer
    name: str
    fleet: Fleet
    wall_ns: Callable[[], int]

    @classmethod
    async def begin(
        cls, bus: Bus, record: RunRecord, name: str, wall_ns: Callable[[], int]
    ) -> Work:
        """Read the run's settings and declare its streams.

        Raises ConfigError or RunMismatch where this release cannot serve it.
        """
        config = run_config_from_json(record.config_json, record.skerry_version)
        plan = plan_of(record)
        rule_of(config.sync.merge)
        outer = make_outer(
            config.outer.preset,
            lr=config.outer.lr,
            momentum=config.outer.momentum,
            h_steps=config.sync.h_steps,
            adamw=AdamW.of(config.train, plan),
        )
        blocking = not config.sync.overlap_steps
        policy = liveness.LivenessPolicy(**config.liveness.model_dump(), blocking=blocking)
        fleet = Fleet(policy, config.sync.round_timeout_s)
        work = cls(bus, record, config, plan, outer, name, fleet, wall_ns)
        await work.declare()
        return work

    async def declare(self) -> None:
        """Create what is missing of the run's streams."""
        given = self.config.log
        await self.bus.declare(
            specs(
                self.record.run,
                replicas=given.replicas,
                window_bytes=given.window_bytes,
                window_s=given.window_s,
            )
        )

    async def follow_pulses(self, wake: Callable[[], None]) -> None:
        """Have the fleet hear the learners, and call ``wake`` at each pulse."""
        now_s = asyncio.get_running_loop().time
        async for pulse in presence.follow_pulses(self.bus, self.record.run):
            self.fleet.observe(pulse, now_s())
            wake()

    async def conductor(
        self, writer: StateWriter, on_bytes: Callable[[int], None] | None = None
    ) -> Conductor:
        """Rebuild a shard from the log; StateLost where that cannot be done."""
        sync = self.config.sync
        shard = await load(self.bus, writer, self.plan, sync, self.outer, on_bytes=on_bytes)
        log.info(
            "shard_loaded",
            run=self.record.run,
            shard=writer.shard,
            fence=writer.token,
            versions={index: state.version for index, state in shard.fragments.items()},
        )
        timetable = schedule.Schedule(
            sync.fragments, sync.h_steps, sync.overlap_steps, own=len(shard.fragments)
        )
        return Conductor(
            bus=self.bus,
            run=self.record,
            config=self.config,
            plan=self.plan,
            committer=Committer(writer, sync, self.outer, wall_ns=self.wall_ns),
            shard=shard,
            fleet=self.fleet,
            timetable=timetable,
            policy=rounds.Policy(
                sync.quorum,
                sync.grace_gamma,
                sync.overlap_steps,
                schedule.room_steps(timetable),
                sync.round_timeout_s,
            ),
            wall_ns=self.wall_ns,
            finals={
                index
                for index, state in shard.fragments.items()
                if state.manifest is not None and state.manifest.commit.final
            },
        )


async def conduct(conductor: Conductor) -> bool:
    """Conduct a shard until the run is finished (True) or it is to be left (False).

    Whatever ends it comes in an exception group: Fenced when another syncer has taken the shard.
    """
    async with TaskGroup() as group:
        followers = [
            group.create_task(conductor.follow_contributions(), name="contributions"),
            group.create_task(conductor.committer.writer.hold(), name="fence"),
        ]
        finished = await group.create_task(conductor.conduct(), name="conduct")
        for task in followers:
            task.cancel()
    return finished
