"""Reads of a log: the newest of a subject, of many subjects, and messages by their sequences.

A single server has one copy of everything, and its direct get answers from that. In a cluster any
replica may answer a direct get, even one that lags: read-after-write is not promised. There the
stream's leader answers the reads that decisions rest on, and alone may say that a message is gone;
a message found by its sequence is the same on every replica. A leader that was deposed without
knowing can still be wrong, so every decision is written with an expectation, which only the true
leader can grant.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from nats.errors import Error as NatsError

from skerry.errors import BusError, StateLost
from skerry.log.base import Deliver, Record
from skerry.log.client import AT_ONCE, Cursor, NoAnswer, Retries, one_by_one, together
from skerry.log.nats.cache import ChunkCache
from skerry.log.nats.connection import NatsInbox
from skerry.log.nats.follow import FAILURES, Puller
from skerry.log.nats.jetstream import (
    NOT_THERE,
    STREAM_NOT_FOUND,
    direct_record,
    leader_record,
    nanoseconds,
    status_of,
)
from skerry.log.nats.session import cancellable
from skerry.protocol.subjects import stream_of
from skerry.tasks import now_s

if TYPE_CHECKING:
    from skerry.log.nats.connection import Connection

AVOID_S = 30.0
"""After a consumer that could not be made or fell silent, or a replica that did not answer, none is
tried for this long: a cluster goes on handing reads to a node that hangs until its route is given
up, a minute by default."""
MOST_SUBJECTS = 1024
"""Subjects that one batch get may match; the server refuses more."""
PAGE_BYTES = 16 * 1024**2
MANY = 16
"""A consumer is worth making for this many messages or more. It costs the server half of what
single requests for them do, and a client a third less, but a request or two to make."""


class Leader:
    """Asks the leaders of streams, and remembers the newest sequence acknowledged in each."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._acknowledged: dict[str, int] = {}
        self._replicated: dict[str, bool] = {}

    def saw(self, stream: str, sequence: int) -> None:
        """Note that a publish of this client was stored under that sequence."""
        self._acknowledged[stream] = max(sequence, self._acknowledged.get(stream, 0))

    async def info(self, stream: str, deadline: float | None = None) -> dict[str, Any]:
        """Return settings and state of a stream; empty if there is no such stream."""
        name, absent = f"STREAM.INFO.{stream}", (STREAM_NOT_FOUND,)
        about = f"a look at stream {stream}"
        reply = await self._connection.api(name, about=about, empty_for=absent, deadline=deadline)
        if reply:
            self._replicated[stream] = reply["config"].get("num_replicas", 1) > 1
        return reply

    async def now_ns(self, stream: str) -> int:
        """Return the time by its clock; BusError if there is no such stream."""
        if info := await self.info(stream):
            return nanoseconds(info["ts"])
        msg = f"There is no stream {stream}."
        raise BusError(msg)

    async def replicated(self, stream: str, deadline: float) -> bool:
        """Return True if a stream has several copies, any of which may answer a direct get.

        The stream says so itself, since a single server with a leaf node's remote greets as one of
        a cluster. A stream that is not there counts as replicated.
        """
        await self._connection.ready(deadline)
        if self._connection.clustered and stream not in self._replicated:
            await self.info(stream, deadline)
        return self._connection.clustered and self._replicated.get(stream, True)

    async def newest(self, stream: str, deadline: float) -> int | None:
        """Return the last sequence of a stream once it has all that this client had acknowledged.

        A new leader may need a moment, and a deposed one never gets there. Raises StateLost if a
        stream in files stays shorter; one in memory may lose what it holds. None: no stream.
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
    """Reads through one connection, each given up after a while."""

    def __init__(self, connection: Connection) -> None:
        self.leader = Leader(connection)
        self.cache = ChunkCache(connection)
        self._connection = connection
        self._avoid_until = 0.0

    async def last(self, subject: str) -> Record | None:
        """Return the newest message on this subject, or on any that matches a pattern, or None."""
        stream, deadline, wanted = stream_of(subject), self._deadline(), {"last_by_subj": subject}
        if await self.leader.replicated(stream, deadline):
            return await self.leader.record(stream, wanted, deadline)
        return await self._direct(stream, wanted, deadline, replicated=False)

    async def get(self, stream: str, sequence: int) -> Record | None:
        """Return the message with that sequence, or None if it is gone or not there yet."""
        if sequence < 1:
            return None
        deadline, wanted = self._deadline(), {"seq": sequence}
        replicated, record = await self.leader.replicated(stream, deadline), None
        if not replicated or now_s() >= self._avoid_until:
            record = await self._direct(stream, wanted, deadline, replicated=replicated)
        if record is not None or not replicated:
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
        if self.cache.serves(pattern):
            async with aclosing(one_by_one(self._shared, stream, left)) as records:
                async for record in records:
                    yield record
            return
        if len(left) >= MANY and now_s() >= self._avoid_until:
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
        """Return the newest message of every subject that matches, in sequence order.

        In a cluster a replica is believed only if it says that it is as far as the leader, which
        it does not say when it finds nothing. Otherwise the leader is asked for every subject.
        """
        stream, deadline = stream_of(pattern), self._deadline()
        replicated, goal = await self.leader.replicated(stream, deadline), 0
        if replicated:
            newest = await self.leader.newest(stream, deadline)
            if newest is None:
                return []
            goal = newest
        found: list[Record] | None = None
        if not replicated or now_s() >= self._avoid_until:
            found, reached = await self._batch(stream, [pattern], deadline, replicated=replicated)
            found = found if reached >= goal else None
        if found is None:
            found = []
            subjects = await self.leader.subjects(stream, pattern, deadline)
            if replicated:
                for some in _pages(subjects, self._connection.max_payload, AT_ONCE):
                    wanted = ({"last_by_subj": subject} for subject in some)
                    records = await together(
                        self.leader.record(stream, w, deadline) for w in wanted
                    )
                    found += [record for record in records if record is not None]
            else:
                for page in _pages(subjects, self._connection.max_payload // 2, MOST_SUBJECTS):
                    found += (await self._batch(stream, page, deadline, replicated=False))[0] or []
        return sorted(found, key=lambda record: record.sequence)

    async def _shared(self, stream: str, sequence: int) -> Record | None:
        """Return a message from the region's cache, or else from the hub."""
        if (record := await self.cache.get(stream, sequence)) is not None:
            return record
        return await self.get(stream, sequence)

    def _deadline(self) -> float:
        return now_s() + self._connection.options.waits_s

    async def _pulled(
        self, stream: str, pattern: str, sequences: Sequence[int]
    ) -> AsyncGenerator[Record]:
        """Yield as many messages as are wanted, from the first on, for as long as all goes well."""
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
                self._avoid_until = now_s() + AVOID_S
            await puller.close()

    async def _direct(
        self, stream: str, wanted: dict[str, Any], deadline: float, *, replicated: bool
    ) -> Record | None:
        """Return one message as any replica has it; None also if none in a cluster answered."""
        retries, body = Retries(deadline), json.dumps(wanted).encode()
        subject = f"$JS.API.DIRECT.GET.{stream}"
        while True:
            try:
                answer = await self._connection.request(subject, body, deadline=deadline)
            except NoAnswer as e:
                if e.sent and replicated:
                    self._avoid_until = now_s() + AVOID_S
                    return None
                if await self._absent(e, stream, retries):
                    return None
                continue
            status = status_of(answer)
            if not status:
                return direct_record(answer)
            if status == "404":
                return None
            msg = f"The broker refused a read of {stream} (status {status})."
            raise BusError(msg)

    async def _batch(
        self, stream: str, subjects: list[str], deadline: float, *, replicated: bool
    ) -> tuple[list[Record] | None, int]:
        """Return the newest message of each subject as any replica has it, and how far it has come.

        None where there are too many subjects, and where none of a cluster's replicas answered.
        """
        retries, sequence, found = Retries(deadline), 0, list[Record]()
        reached = sys.maxsize
        while True:
            try:
                page, end = await _page(self._connection, stream, subjects, sequence, deadline)
            except NoAnswer as e:
                if e.sent and replicated:
                    self._avoid_until = now_s() + AVOID_S
                    return None, 0
                if await self._absent(e, stream, retries):
                    return found, 0
                continue
            found += page
            status = end.get("Status", "")
            if status == "413":
                return None, 0
            reached = min(reached, int(end.get("Nats-UpTo-Sequence", 0)))
            if status != "204" or int(end.get("Nats-Num-Pending", 0)) == 0:
                return found, reached if status == "204" else 0
            sequence = int(end["Nats-Last-Sequence"]) + 1

    async def _absent(self, failed: NoAnswer, stream: str, retries: Retries) -> bool:
        """Return True if no answer will come because there is no stream.

        Otherwise waits a little; BrokerUnavailable if there is no time left to ask again.
        """
        if not failed.sent and not await self.leader.info(stream, retries.deadline):
            return True
        if not await retries.pause():
            raise self._connection.unavailable(self._connection.options.waits_s) from failed
        return False


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
        with session.hearing(path, inbox.deny):
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


def _pages(subjects: Sequence[str], most_bytes: int, most: int) -> Iterator[list[str]]:
    """Cut a list of subjects into requests: anybody may have published on very long ones."""
    page, size = list[str](), 0
    for subject in subjects:
        own = len(json.dumps(subject)) + 2
        if page and (len(page) == most or size + own > most_bytes):
            yield page
            page, size = [], 0
        page.append(subject)
        size += own
    if page:
        yield page
