"""What readers of a run do who are no learner: turns, from its first whole state to its end.

A turn looks at the global state and does something about it, such as saving or judging it.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

import structlog

from skerry.errors import (
    BrokerUnavailable,
    Overtaken,
    StateLost,
    StorageFull,
    StoreError,
    WireError,
    first_cause,
)
from skerry.log import ledger
from skerry.log.state import follow_manifests
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import RunRecord

log = structlog.get_logger()

RETRY_S = 1.0


async def take_turns(
    bus: Bus,
    record: RunRecord,
    plan: Plan,
    turn: Callable[[], Awaitable[object]],
    pause_s: Callable[[], float],
    failed: str,
) -> None:
    """Take a turn once every fragment has a version, then one after each pause, one at the end.

    A turn that fails (Overtaken, StateLost, WireError, StoreError) is logged as ``failed`` and
    tried again at the next; the last one raises its error. In an exception group come
    BrokerUnavailable and StorageFull, and StateLost once the log holds another run of that name:
    what is known of this one does not fit that.
    """
    run, finished = record.run, asyncio.Event()
    async with TaskGroup() as group:
        end = group.create_task(_watch_end(bus, record, finished), name="end")
        begin = group.create_task(_whole(bus, run, plan), name="begin")
        await asyncio.wait({begin, end}, return_when=asyncio.FIRST_COMPLETED)
        begin.cancel()
        while True:
            last = finished.is_set()
            try:
                await turn()
            except (StoreError, Overtaken, StateLost, WireError) as error:
                if last:
                    raise
                log.error(failed, run=run, error=str(error))  # noqa: TRY400  the sentence says it all
            if last:
                break
            await _pause(finished, pause_s())
        end.cancel()


async def outlast(session: Callable[[], Awaitable[None]]) -> None:
    """Begin a session anew whenever the broker was away or full, until one ends by itself.

    Raises whatever else ends one.
    """
    while True:
        try:
            await session()
        except (BrokerUnavailable, StorageFull, BaseExceptionGroup) as error:
            cause = first_cause(error)
            if not isinstance(cause, BrokerUnavailable | StorageFull):
                raise cause from error
            log.warning("session_restarts", cause=str(cause))
            del cause  # its traceback holds the session's frames, and those a whole checkpoint
        else:
            return
        await asyncio.sleep(RETRY_S)


async def _pause(finished: asyncio.Event, seconds: float) -> None:
    """Wait that long, or until the run is finished."""
    try:
        async with asyncio.timeout(seconds):
            await finished.wait()
    except TimeoutError:
        return


async def _watch_end(bus: Bus, record: RunRecord, finished: asyncio.Event) -> None:
    await ledger.wait_finished(bus, record.run, created_ns=record.created_ns)
    finished.set()


async def _whole(bus: Bus, run: str, plan: Plan) -> None:
    """Wait until every fragment has a version."""
    missing = {fragment.index for fragment in plan.fragments}
    manifests = follow_manifests(bus, run, plan)
    async with aclosing(manifests):
        async for manifest in manifests:
            missing.discard(manifest.commit.fragment)
            if not missing:
                return
