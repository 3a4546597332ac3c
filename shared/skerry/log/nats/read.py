"""Reads of a log: the newest of a subject, of many subjects, and messages by their sequences.

A single server has one copy of everything, and its direct get answers from that. In a cluster any
replica answers a direct get, one that lags too (read-after-write is promised by none of them), so
there the stream's leader has the word: it answers what decisions rest on, says how far a replica
must have come to be believed, and alone may say that a record is gone. Bulk reading stays with the
replicas. A leader that was deposed without knowing can still be wrong: whatever is decided is
written with an expectation, which only the true leader can grant.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError

from skerry.errors import BusError, StateLost
from skerry.log.base import Deliver
from skerry.log.client import Cursor, NoAnswer, Retries, one_by_one
from skerry.log.nats.connection import NatsInbox, cancellable
from skerry.log.nats.follow import FAILURES, Puller
from skerry.log.nats.jetstream import (
    NOT_THERE,
    STREAM_NOT_FOUND,
    direct_record,
    leader_record,
    status_of,
)
from skerry.protocol.subjects import stream_of

if TYPE_CHECKING:
    from skerry.log.base import Record
    from skerry.log.nats.connection import Connection

AVOID_S = 30.0
"""A cluster goes on handing reads to a replica that hangs until its route is given up, a minute by
default: after one that did not answer, only the leader is asked for this long."""
LAGGING_S = 1.0
"""A replica that is still behind after this long is not waited for: the leader is asked."""
MOST_SUBJECTS = 1024
"""Subjects that one batch get may match; the server refuses more."""
PAGE_BYTES = 16 * 1024**2
MANY = 16
"""From so many messages on a consumer is worth making. It costs the server half of what single
requests for the same messages do, and a client a third less, but a request or two to make."""


class Leader:
    """What a stream's leader knows of it, and how far this client was acknowledged."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._acknowledged: dict[str, int] = {}

    def saw(self, stream: str, sequence: int) -> None:
        """Note that a publish of this client was stored under that sequence."""
        self._acknowledged[stream] = max(sequence, self._acknowledged.get(stream, 0))

    async def info(self, stream: str, deadline: float | None = None) -> dict[str, Any]:
        """Return settings and state of a stream; empty if there is no such stream."""
        name, absent = f"STREAM.INFO.{stream}", (STREAM_NOT_FOUND,)
        about = f"a look at stream {stream}"
        return await self._connection.api(name, about=about, empty_for=absent, deadline=deadline)

    async def newest(self, stream: str, deadline: float) -> int | None:
        """Return the last sequence of a stream once that is all this client was acknowledged.

        A new leader may need a moment, and a deposed one never gets there. Raises StateLost when
        a file holds less for good; streams in memory may lose what they hold. None: no stream.
        """
        goal = self._acknowledged.get(stream, 0)
        last_look = deadline - self._connection.options.request_timeout_s  # which takes time too
        retries = Retries(last_look)
        while info := await self.info(stream, deadline):
            last: int = info["state"]["last_seq"]
            if last >= goal or info["config"]["storage"] == "memory":
                return last
            if not await retries.pause():
                msg = (
                    f"Stream {stream} ends at sequence {last}, but the broker had acknowledged"
                    f" {goal}: it came back with an older copy. Restore the run from its newest"
                    " checkpoint, and set `sync_interval: always` in the jetstream block of its"
                    " config file."
                )
                raise StateLost(msg)
        return None

    async def record(self, stream: str, wanted: dict[str, Any], deadline: float) -> Record | None:
        """Return one message, or None."""
        name, about = f"STREAM.MSG.GET.{stream}", f"a read of stream {stream}"
        reply = await self._connection.api(
            name, wanted, about=about, empty_for=NOT_THERE, deadline=deadline
        )
        return leader_record(reply["message"]) if reply else None

    async def subjects(self, stream: str, pattern: str, deadline: float) -> list[str]:
        """List the subjects that match in a stream."""
        found, name = set[str](), f"STREAM.INFO.{stream}"
        while True:
            body = {"subjects_filter": pattern, "offset": len(found)}
            about = f"the subjects of stream {stream}"
            reply = await self._connection.api(name, body, about=about, deadline=deadline)
            page: dict[str, int] = reply["state"].get("subjects") or {}
            before = len(found)
            found |= page.keys()
            if len(found) >= reply.get("total", 0) or len(found) == before:
                return sorted(found)


class Reads:
    """Reads through one connection, each given up after a while.

    Whatever answers must have come as far as this client was acknowledged.
    """

    def __init__(self, connection: Connection) -> None:
        self.leader = Leader(connection)
        self._connection = connection
        self._avoid_replicas_until = 0.0
        self._avoid_consumers_until = 0.0

    async def last(self, subject: str) -> Record | None:
        """Return the newest message on this subject, or on any that matches a pattern, or None."""
        stream, deadline = stream_of(subject), self._deadline()
        wanted = {"last_by_subj": subject}
        if await self._clustered(deadline):
            return await self.leader.record(stream, wanted, deadline)
        return await self._direct(stream, wanted, deadline)

    async def get(self, stream: str, sequence: int) -> Record | None:
        """Return the message with that sequence, or None if it is gone or not there yet."""
        if sequence < 1:
            return None
        record: Record | None = None
        deadline, wanted = self._deadline(), {"seq": sequence}
        clustered = await self._clustered(deadline)
        if not clustered or _now() > self._avoid_replicas_until:
            record = await self._direct(stream, wanted, deadline)
        if record is not None or not clustered:
            return record
        if await self.leader.newest(stream, deadline) is None:
            return None
        return await self.leader.record(stream, wanted, deadline)

    async def get_each(self, pattern: str, sequences: Sequence[int]) -> AsyncGenerator[Record]:
        """Yield messages by ascending sequence up to the first gap; raises as ``get``.

        A consumer may be on a replica that lags, or lose its connection: whatever it does not
        bring is asked for message by message, which says for certain what is gone.
        """
        stream, left = stream_of(pattern), deque(sequences)
        if len(left) >= MANY and _now() >= self._avoid_consumers_until:
            async with aclosing(self._pulled(stream, pattern, sequences)) as records:
                async for record in records:
                    if left and record.sequence == left[0]:
                        left.popleft()
                        yield record
                    elif left and record.sequence > left[0]:
                        break
        async with aclosing(one_by_one(self.get, stream, left)) as records:
            async for record in records:
                yield record

    async def last_each(self, pattern: str) -> list[Record]:
        """Return the newest message of every subject that matches, in sequence order."""
        stream, deadline = stream_of(pattern), self._deadline()
        goal: int | None = 0
        if await self._clustered(deadline):
            goal = await self.leader.newest(stream, deadline)
        if goal is None:
            return []
        found: dict[str, Record] = {}
        if not await self._last_of(stream, [pattern], found, goal, deadline):
            subjects = await self.leader.subjects(stream, pattern, deadline)
            for page in _pages(subjects, self._connection.max_payload // 2):
                await self._last_of(stream, page, found, goal, deadline)
        return sorted(found.values(), key=lambda record: record.sequence)

    def _deadline(self) -> float:
        return _now() + self._connection.options.waits_s

    async def _clustered(self, deadline: float) -> bool:
        await self._connection.ready(deadline)
        return self._connection.clustered

    async def _give_up(self, failed: NoAnswer, stream: str, retries: Retries) -> bool:
        """Return True if no answer will come: there is no stream, or a replica hangs.

        Otherwise waits a little; BrokerUnavailable if there is no time left to ask again.
        """
        if failed.sent and self._connection.clustered:
            self._avoid_replicas_until = _now() + AVOID_S
            return True
        if not failed.sent and not await self.leader.info(stream, retries.deadline):
            return True
        if not await retries.pause():
            raise self._connection.unavailable(self._connection.options.waits_s) from failed
        return False

    async def _pulled(
        self, stream: str, pattern: str, sequences: Sequence[int]
    ) -> AsyncGenerator[Record]:
        """Yield as many messages as are wanted, from the first on, for as long as all goes well.

        After a consumer that could not be made or fell silent none is tried for AVOID_S: in a
        cluster it may have been placed on a node that hangs, as the next one may.
        """
        puller = Puller(self._connection, stream, most=len(sequences))
        try:
            await puller.open((pattern,), Cursor(Deliver.ALL, sequences[0] - 1))
            for _ in sequences:
                record = await puller.next()
                if record is None:
                    break
                yield record
        except FAILURES:
            puller.silent = True
        finally:
            if puller.silent:
                self._avoid_consumers_until = _now() + AVOID_S
            await puller.close()

    async def _direct(self, stream: str, wanted: dict[str, Any], deadline: float) -> Record | None:
        """Return one message as any replica has it; None also when none of a cluster's answered."""
        retries, body = Retries(deadline), json.dumps(wanted).encode()
        while True:
            try:
                answer = await self._connection.request(
                    f"$JS.API.DIRECT.GET.{stream}", body, deadline=deadline
                )
            except NoAnswer as e:
                if await self._give_up(e, stream, retries):
                    return None
                continue
            status = status_of(answer)
            if not status:
                return direct_record(answer)
            if status == "404":
                return None
            msg = f"The broker refused a read of {stream} (status {status})."
            raise BusError(msg)

    async def _last_of(
        self, stream: str, subjects: list[str], found: dict[str, Record], goal: int, deadline: float
    ) -> bool:
        """Add the newest record of each subject; False if there are too many of them.

        A replica that has not come as far as ``goal``, and one that found nothing, which does not
        say how far it has come, are not believed: the leader is asked for one after the other.
        """
        soon = Retries(min(deadline, _now() + LAGGING_S))
        while not goal or _now() >= self._avoid_replicas_until:
            records, status, reached = await self._batch(stream, subjects, deadline)
            if status == "413":
                return False
            if not goal or (status == "204" and reached >= goal):
                found.update({record.subject: record for record in records})
                return True
            if status != "204" or not await soon.pause():
                break
        for pattern in subjects:
            for subject in await self.leader.subjects(stream, pattern, deadline):
                wanted = {"last_by_subj": subject}
                if (record := await self.leader.record(stream, wanted, deadline)) is not None:
                    found[subject] = record
        return True

    async def _batch(
        self, stream: str, subjects: list[str], deadline: float
    ) -> tuple[list[Record], str, int]:
        """Get every page of a batch; returns records, the last status, and how far it is true."""
        retries, sequence, reached = Retries(deadline), 0, sys.maxsize
        found: list[Record] = []
        while True:
            try:
                page, end = await _page(self._connection, stream, subjects, sequence, deadline)
            except NoAnswer as e:
                if await self._give_up(e, stream, retries):
                    return found, "404", 0
                continue
            found += page
            status = end.get("Status", "")
            reached = min(reached, int(end.get("Nats-UpTo-Sequence", 0)))
            if status != "204" or int(end.get("Nats-Num-Pending", 0)) == 0:
                return found, status, reached
            sequence = int(end["Nats-Last-Sequence"]) + 1


async def _page(
    connection: Connection, stream: str, subjects: list[str], sequence: int, deadline: float
) -> tuple[list[Record], dict[str, str]]:
    """Return a page of JetStream's batch get and the headers of the status that ends it.

    Raises NoAnswer when there was none in time.
    """
    session, inbox = await connection.ready(deadline), NatsInbox(connection)
    body = {"multi_last": subjects, "batch": MOST_SUBJECTS, "max_bytes": PAGE_BYTES}
    if sequence:
        body["seq"] = sequence
    page: list[Record] = []
    try:
        await inbox.open()
        path = f"$JS.API.DIRECT.GET.{stream}"
        with cancellable():
            await session.client.publish(path, json.dumps(body).encode(), inbox.subject)
        while (msg := await inbox.next(connection.options.request_timeout_s)) is not None:
            if not (status := status_of(msg)):
                page.append(direct_record(msg))
            elif status == "503":
                raise NoAnswer(status, sent=False)
            else:
                return page, msg.headers or {}
    except (TimeoutError, NatsError) as e:
        raise NoAnswer(str(e)) from e
    finally:
        await inbox.close()
    raise NoAnswer


def _pages(subjects: Sequence[str], most_bytes: int) -> Iterator[list[str]]:
    """Cut a list of subjects into requests: anybody may have published on very long ones."""
    page, size = list[str](), 0
    for subject in subjects:
        own = len(json.dumps(subject)) + 2
        if page and (len(page) == MOST_SUBJECTS or size + own > most_bytes):
            yield page
            page, size = [], 0
        page.append(subject)
        size += own
    if page:
        yield page


def _now() -> float:
    return asyncio.get_running_loop().time()
