"""This process leads one shard: take its fence, load it, serve it, give it up."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

import structlog

from skerry.errors import BrokerUnavailable, Conflict, Fenced, Overtaken, StorageFull, first_cause
from skerry.log import fences
from skerry.log.state_writer import StateWriter
from skerry.tasks import Computations, count_computations
from skerry_syncer.serving import ShardServer

if TYPE_CHECKING:
    from skerry_syncer.run import ServedRun

log = structlog.get_logger()

RETRY_S = 1.0
PASSING = (BrokerUnavailable, StorageFull, Overtaken)
"""Troubles after which the same process begins the shard again, from the log."""


class LeadershipEnd(StrEnum):
    """How a leadership ended."""

    FINISHED = "finished"
    LEFT = "left"
    NOT_TAKEN = "not_taken"
    OVERTAKEN = "overtaken"


@dataclass(slots=True)
class Leadership:
    """The service of one shard, across troubles with the broker.

    ``token`` is the fence that it takes over, then the one it holds; ``taken`` says which. All it
    knows can be rebuilt from the log, so every trouble begins it again under a new fence: after
    that, nothing that it had under way can arrive any more. ``asked_ns`` is the time that it wrote
    into the newest fence that it asked for. ``changed`` is called when ``taken`` has changed.
    """

    served: ServedRun
    shard: int
    token: int
    changed: Callable[[], None]
    taken: bool = False
    leaving: bool = False
    server: ShardServer | None = None
    writer: StateWriter | None = None
    loaded_bytes: int = 0
    sessions: int = 0
    asked_ns: int = 0
    computations: Computations = field(default_factory=Computations)

    async def serve(self) -> LeadershipEnd:
        """Serve the shard until the run is finished, it is left, or its fence is another one.

        Raises what a person must repair.
        """
        count_computations(self.computations)
        while not self.leaving:
            try:
                return await self._session()
            except (*PASSING, Conflict, Fenced, BaseExceptionGroup) as error:
                cause = first_cause(error)
                if isinstance(cause, Conflict) and await self._stored():
                    continue
                if isinstance(cause, Conflict | Fenced):
                    if self.taken:
                        return LeadershipEnd.OVERTAKEN
                    log.info("shard_not_taken", shard=self.shard, cause=str(cause))
                    await asyncio.sleep(RETRY_S)
                    return LeadershipEnd.NOT_TAKEN
                if not isinstance(cause, PASSING):
                    raise cause from error
                log.warning("session_restarts", shard=self.shard, cause=str(cause))
                # A traceback holds the session's frames, and those hold all its vectors.
                del cause
            self.server = self.writer = None
            await asyncio.sleep(RETRY_S)
            if not self.taken:
                return LeadershipEnd.NOT_TAKEN
        return LeadershipEnd.LEFT

    def leave(self) -> None:
        """Give the shard up as soon as the commit in hand is done."""
        self.leaving = True
        if self.server is not None:
            self.server.leave()

    def wake(self) -> None:
        """Have the server look again."""
        if self.server is not None:
            self.server.wake.set()

    @property
    def progress(self) -> tuple[int, ...]:
        """What changes as long as the leadership is not stuck: a merge may take minutes."""
        turns = self.server.turns if self.server is not None else 0
        published = self.writer.published if self.writer is not None else 0
        computes_ns = time.monotonic_ns() if self.computations.count else 0
        return self.sessions, turns, published, self.loaded_bytes, computes_ns

    async def _session(self) -> LeadershipEnd:
        served = self.served
        self.sessions += 1
        await served.declare()
        self.asked_ns = served.wall_ns()
        self.writer = await StateWriter.acquire(
            served.bus,
            served.record.run,
            served.plan,
            holder=served.name,
            now_ns=self.asked_ns,
            shard=self.shard,
            over=self.token,
            chunk_bytes=served.config.sync.chunk_bytes,
            every=served.config.sync.keyframe_every,
        )
        self.token, self.taken = self.writer.token, True
        log.info("shard_taken", run=served.record.run, shard=self.shard, fence=self.token)
        self.changed()
        server = await served.server(self.writer, self._on_bytes)
        self.server = server
        if self.leaving:
            return LeadershipEnd.LEFT
        return LeadershipEnd.FINISHED if await server.serve() else LeadershipEnd.LEFT

    def _on_bytes(self, number: int) -> None:
        self.loaded_bytes += number

    async def _stored(self) -> bool:
        """Return True if a fence that was refused is our own, whose acknowledgement was lost."""
        try:
            held = await fences.newest(self.served.bus, self.served.record.run, self.shard)
        except BrokerUnavailable:
            return False
        asked = self.served.name, self.asked_ns
        if held is None or held.token <= self.token or (held.holder, held.taken_ns) != asked:
            return False
        self.token = held.token
        return True
