"""The syncer: sessions over the log until the run is finished.

All it knows can be rebuilt from the log, so every trouble with the broker ends the session and
begins a new one: the same path as after kill -9.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog

from skerry.bus import ledger
from skerry.bus.state import StateWriter
from skerry.bus.streams import specs
from skerry.core import backend, liveness, rounds, schedule
from skerry.core.fragments import plan as plan_of
from skerry.core.outer import make_outer
from skerry.errors import BrokerUnavailable, RunMismatch, StorageFull, first_cause
from skerry.runtime.service import serve
from skerry.settings import RunConfig
from skerry.wire.messages import RunState
from skerry_syncer.committer import Committer
from skerry_syncer.conductor import Conductor
from skerry_syncer.fleet import Fleet
from skerry_syncer.shard import Shard

if TYPE_CHECKING:
    from skerry.bus.base import Bus
    from skerry.wire.messages import RunRecord

log = structlog.get_logger()

RETRY_S = 1.0


async def session(bus: Bus, run: str, holder: str) -> None:
    """Take the shard, rebuild it from the log and conduct until the run is finished."""
    record = await ledger.wait_run(bus, run)
    if record.state is RunState.FINISHED:
        log.info("run_already_finished", run=run)
        return
    config = RunConfig.model_validate_json(record.config_json)
    await bus.declare(
        specs(
            run,
            replicas=config.log.replicas,
            window_bytes=config.log.window_bytes,
            window_s=config.log.window_s,
        )
    )
    conductor = await _conductor(bus, record, config, holder)
    async with asyncio.TaskGroup() as group:
        followers = [
            group.create_task(conductor.follow_contributions(), name="contributions"),
            group.create_task(conductor.follow_pulses(), name="pulses"),
            group.create_task(conductor.committer.writer.hold(), name="fence"),
        ]
        await group.create_task(conductor.conduct(), name="conduct")
        for task in followers:
            task.cancel()


async def _conductor(bus: Bus, record: RunRecord, config: RunConfig, holder: str) -> Conductor:
    plan = plan_of(record.leaves, record.fragments)
    if plan.digest != record.plan_digest:
        msg = (
            f"Run {record.run!r} was cut by another release of Skerry ({record.skerry_version}): "
            "use that release."
        )
        raise RunMismatch(msg)
    sync = config.sync
    outer = make_outer(
        config.outer.preset,
        lr=config.outer.lr,
        momentum=config.outer.momentum,
        h_steps=sync.h_steps,
    )
    writer = await StateWriter.acquire(
        bus, record.run, plan, holder=holder, now_ns=time.time_ns(), chunk_bytes=sync.chunk_bytes
    )
    shard = await Shard.load(bus, writer, plan, sync, outer)
    finals = {
        i for i, s in shard.fragments.items() if s.manifest is not None and s.manifest.commit.final
    }
    log.info(
        "shard_taken",
        run=record.run,
        fence=writer.token,
        versions=[s.version for s in shard.fragments.values()],
    )
    return Conductor(
        bus=bus,
        run=record,
        config=config,
        plan=plan,
        committer=Committer(writer, sync, outer),
        shard=shard,
        fleet=Fleet(liveness.policy_from(**config.liveness.model_dump())),
        timetable=schedule.Schedule(sync.fragments, sync.h_steps, sync.overlap_steps),
        policy=rounds.Policy(
            sync.quorum, sync.grace_gamma, sync.overlap_steps, sync.round_timeout_s
        ),
        finals=finals,
    )


def load_kernels() -> None:
    """Import, and the first time compile, what would else hold up the first round."""
    backend.cpu()
    backend.merger()


async def syncer(bus: Bus, run: str, holder: str, shutdown_s: float) -> None:
    """Serve one run until it is finished, across broker restarts; Fenced ends it."""

    async def sessions() -> None:
        while True:
            try:
                await session(bus, run, holder)
            except (BrokerUnavailable, StorageFull, BaseExceptionGroup) as error:
                cause = first_cause(error)
                if not isinstance(cause, BrokerUnavailable | StorageFull):
                    raise cause from error
                log.warning("session_restarts", cause=str(cause))
                # A traceback holds the session's frames, and those hold all its vectors.
                del cause
            else:
                return
            await asyncio.sleep(RETRY_S)

    async with bus:
        await asyncio.to_thread(load_kernels)
        await serve({"syncer": sessions}, shutdown_s=shutdown_s)
