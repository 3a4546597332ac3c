"""One shard in the hands of this process: take its fence, load it, conduct it, give it up."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

import structlog

from skerry.errors import BrokerUnavailable, Conflict, Fenced, Overtaken, StorageFull, first_cause
from skerry.log import fences
from skerry.log.state_writer import StateWriter
from skerry_syncer.work import conduct

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry_syncer.conductor import Conductor
    from skerry_syncer.work import Work

log = structlog.get_logger()

RETRY_S = 1.0
PASSING = (BrokerUnavailable, StorageFull, Overtaken)
"""Troubles after which the same process begins the shard again, from the log."""


class Ending(StrEnum):
    """How a tenure ended."""

    FINISHED = "finished"
    LEFT = "left"
    NOT_TAKEN = "not_taken"
    OVERTAKEN = "overtaken"


@dataclass(slots=True)
class Tenure:
    """The service of one shard, across troubles with the broker.

    ``token`` is the fence that it takes over, then the one it holds; ``taken`` says which. All it
    knows can be rebuilt from the log, so every trouble begins it anew under a new fence: behind
    that, nothing can arrive any more of what it had under way. ``asked_ns`` is what it has written
    into the newest fence that it asked for. ``changed`` is called when ``taken`` has changed.
    """

    work: Work
    shard: int
    token: int
    changed: Callable[[], None]
    taken: bool = False
    leaving: bool = False
    conductor: Conductor | None = None
    writer: StateWriter | None = None
    loaded_bytes: int = 0
    sessions: int = 0
    asked_ns: int = 0

    async def serve(self) -> Ending:
        """Serve the shard until the run is finished, it is left, or its fence is another one.

        Raises what a person must mend.
        """
        while not self.leaving:
            try:
                return await self._session()
            except (*PASSING, Conflict, Fenced, BaseExceptionGroup) as error:
                cause = first_cause(error)
                if isinstance(cause, Conflict) and await self._stored():
                    continue
                if isinstance(cause, Conflict | Fenced):
                    return await self._overtaken(cause)
                if not isinstance(cause, PASSING):
                    raise cause from error
                log.warning("session_restarts", shard=self.shard, cause=str(cause))
                # A traceback holds the session's frames, and those hold all its vectors.
                del cause
            self.conductor = self.writer = None
            if not self.taken:
                await asyncio.sleep(RETRY_S)
                return Ending.NOT_TAKEN
            await asyncio.sleep(RETRY_S)
        return Ending.LEFT

    def leave(self) -> None:
        """Give the shard up as soon as the commit in hand is done."""
        self.leaving = True
        if self.conductor is not None:
            self.conductor.leave()

    def wake(self) -> None:
        """Have the conductor look again."""
        if self.conductor is not None:
            self.conductor.wake.set()

    @property
    def progress(self) -> tuple[int, ...]:
        """What changes as long as the tenure is not stuck."""
        turns = self.conductor.turns if self.conductor is not None else 0
        published = self.writer.published if self.writer is not None else 0
        return self.sessions, turns, published, self.loaded_bytes

    async def _session(self) -> Ending:
        work = self.work
        self.sessions += 1
        await work.declare()
        self.asked_ns = work.wall_ns()
        self.writer = await StateWriter.acquire(
            work.bus,
            work.record.run,
            work.plan,
            holder=work.name,
            now_ns=self.asked_ns,
            shard=self.shard,
            shards=work.config.sync.shards,
            over=self.token,
            chunk_bytes=work.config.sync.chunk_bytes,
        )
        self.token, self.taken = self.writer.token, True
        log.info("shard_taken", run=work.record.run, shard=self.shard, fence=self.token)
        self.changed()
        conductor = await work.conductor(self.writer, self._on_bytes)
        self.conductor = conductor
        if self.leaving:
            return Ending.LEFT
        return Ending.FINISHED if await conduct(conductor) else Ending.LEFT

    def _on_bytes(self, number: int) -> None:
        self.loaded_bytes += number

    async def _stored(self) -> bool:
        """Tell whether a fence that was refused is our own, whose acknowledgement was lost."""
        try:
            held = await fences.newest(self.work.bus, self.work.record.run, self.shard)
        except BrokerUnavailable:
            return False
        asked = self.work.name, self.asked_ns
        if held is None or held.token <= self.token or (held.holder, held.taken_ns) != asked:
            return False
        self.token = held.token
        return True

    async def _overtaken(self, cause: BaseException) -> Ending:
        if self.taken:
            return Ending.OVERTAKEN
        log.info("shard_not_taken", shard=self.shard, cause=str(cause))
        await asyncio.sleep(RETRY_S)
        return Ending.NOT_TAKEN
