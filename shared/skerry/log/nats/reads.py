# pyright: basic
"""Single reads of a log: the newest of a subject, of many subjects, and one by its sequence.

A single server has one copy of everything, and its direct get answers from that. In a cluster any
replica answers a direct get, one that lags too (read-after-write is promised by none of them), so
there the stream's leader has the word: it answers what decisions rest on, says how far a replica
must have come to be believed, and alone may say that a record is gone. Bulk reading stays with the
replicas. A leader that was deposed without knowing can still be wrong: whoever decides something
writes with an expectation, which only the true leader can grant.
"""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

from skerry.errors import BusError
from skerry.log.nats import errors as nats_errors
from skerry.log.nats.batch import MOST_SUBJECTS, batch_get
from skerry.log.nats.connection import Backoff
from skerry.log.nats.errors import ApiError, NoAnswer
from skerry.log.nats.records import direct_record, leader_record, status_of
from skerry.log.streams import stream_of

if TYPE_CHECKING:
    from skerry.log.base import Record
    from skerry.log.nats.connection import Connection

AVOID_S = 30.0
"""A cluster goes on handing reads to a replica that hangs until its route is given up, a minute by
default: after one that nobody answered, only the leader is asked for this long."""
LAGGING_S = 1.0
"""A replica that is still behind after this long is not waited for: the leader is asked."""


class Reads:
    """Reads through one connection, each given up after ``patience_s``.

    Whoever answers must have come as far as this client was acknowledged.
    """

    def __init__(self, connection: Connection, patience_s: float) -> None:
        self._connection = connection
        self._patience_s = patience_s
        self._acknowledged: dict[str, int] = {}
        self._avoid_until = 0.0

    def saw(self, stream: str, sequence: int) -> None:
        """Note that a publish of this client was stored under that sequence."""
        self._acknowledged[stream] = max(sequence, self._acknowledged.get(stream, 0))

    async def last(self, subject: str) -> Record | None:
        """Return the newest message on this subject, or on any that matches a pattern, or None."""
        stream, deadline = stream_of(subject), self._deadline()
        wanted = {"last_by_subj": subject}
        if await self._clustered(deadline):
            return await self._ask_leader(stream, wanted, deadline)
        return await self._direct(stream, stream, json.dumps(wanted).encode(), deadline)

    async def last_each(self, pattern: str) -> list[Record]:
        """Return the newest message of every subject that matches, in sequence order."""
        stream, deadline = stream_of(pattern), self._deadline()
        goal = 0
        if await self._clustered(deadline):
            state = await self._led_state(stream, deadline)
            if state is None:
                return []
            goal = state["last_seq"]
        found: dict[str, Record] = {}
        if not await self._last_of(stream, [pattern], found, goal, deadline):
            subjects = await self._subjects(stream, pattern, deadline)
            for i in range(0, len(subjects), MOST_SUBJECTS):
                page = subjects[i : i + MOST_SUBJECTS]
                await self._last_of(stream, page, found, goal, deadline)
        return sorted(found.values(), key=lambda record: record.sequence)

    async def get(self, stream: str, sequence: int) -> Record | None:
        """Return the message with that sequence, or None if it is gone or not there yet."""
        if sequence < 1:
            return None
        record: Record | None = None
        deadline = self._deadline()
        clustered = await self._clustered(deadline)
        if not clustered or self._now() > self._avoid_until:
            body = json.dumps({"seq": sequence}).encode()
            record = await self._direct(stream, stream, body, deadline)
        if record is not None or not clustered:
            return record
        if await self._led_state(stream, deadline) is None:
            return None
        return await self._ask_leader(stream, {"seq": sequence}, deadline)

    async def exists(self, stream: str, deadline: float) -> bool:
        """Tell whether there is a stream of that name."""
        return await self._info(stream, deadline) is not None

    def _now(self) -> float:
        return asyncio.get_running_loop().time()

    def _deadline(self) -> float:
        return self._now() + self._patience_s

    def _avoid(self, unanswered: NoAnswer) -> bool:
        """Tell whether the leader is to be asked instead: a replica of a cluster was silent."""
        if not (unanswered.sent and self._connection.clustered):
            return False
        self._avoid_until = self._now() + AVOID_S
        return True

    async def _clustered(self, deadline: float) -> bool:
        await self._connection.ready(deadline)
        return self._connection.clustered

    async def _info(self, stream: str, deadline: float) -> dict[str, Any] | None:
        """Return what the stream's leader says of it, or None if there is no such stream."""
        try:
            return await self._connection.api(f"STREAM.INFO.{stream}", deadline=deadline)
        except ApiError as e:
            if e.err_code == nats_errors.STREAM_NOT_FOUND:
                return None
            raise nats_errors.translate(e, f"a look at stream {stream}") from e

    async def _led_state(self, stream: str, deadline: float) -> dict[str, Any] | None:
        """Return the state of a stream at its leader once that holds all we were acknowledged.

        A new leader may need a moment, and a deposed one never gets there. Raises StateLost when
        a file holds less for good. Streams in memory may lose what they hold.
        """
        goal = self._acknowledged.get(stream, 0)
        backoff = Backoff(
            deadline - self._connection.options.request_timeout_s
        )  # leaves the last look time
        while True:
            info = await self._info(stream, deadline)
            if info is None:
                return None
            state: dict[str, Any] = info["state"]
            if state["last_seq"] >= goal or info["config"]["storage"] == "memory":
                return state
            if not await backoff.pause():
                raise nats_errors.lost_acknowledged(stream, goal, state["last_seq"])

    async def _ask_leader(
        self, stream: str, wanted: dict[str, Any], deadline: float
    ) -> Record | None:
        """Return one message as the stream's leader has it, or None."""
        try:
            name = f"STREAM.MSG.GET.{stream}"
            reply = await self._connection.api(name, wanted, deadline=deadline)
        except ApiError as e:
            if e.err_code in nats_errors.NOT_THERE:
                return None
            raise nats_errors.translate(e, f"a read of stream {stream}") from e
        return leader_record(reply["message"])

    async def _direct(self, stream: str, path: str, body: bytes, deadline: float) -> Record | None:
        """Return one message as any replica has it; None also when none of a cluster's answered."""
        backoff = Backoff(deadline)
        while True:
            try:
                answer = await self._connection.request(
                    f"$JS.API.DIRECT.GET.{path}", body, deadline=deadline
                )
            except NoAnswer as e:
                if self._avoid(e) or (not e.sent and not await self.exists(stream, deadline)):
                    return None
                if not await backoff.pause():
                    raise self._connection.unavailable(self._patience_s) from e
                continue
            status = status_of(answer)
            if not status:
                return direct_record(answer)
            if status == "404":
                return None
            msg = f"The broker refused a read of {path} (status {status})."
            raise BusError(msg)

    async def _subjects(self, stream: str, pattern: str, deadline: float) -> list[str]:
        """List the subjects that match in a stream, as its leader has them."""
        found: set[str] = set()
        while True:
            body = {"subjects_filter": pattern, "offset": len(found)}
            reply = await self._connection.api(f"STREAM.INFO.{stream}", body, deadline=deadline)
            page = reply["state"].get("subjects") or {}
            before = len(found)
            found |= page.keys()
            if len(found) >= reply.get("total", 0) or len(found) == before:
                return sorted(found)

    async def _last_of(
        self, stream: str, subjects: list[str], found: dict[str, Record], goal: int, deadline: float
    ) -> bool:
        """Add the newest record of each subject; False if there are too many of them.

        A replica that has not come as far as ``goal``, and one that found nothing, which does not
        say how far it has come, are not believed: the leader is asked for one after the other.
        """
        soon = Backoff(min(deadline, self._now() + LAGGING_S))
        while True:
            if goal and self._now() < self._avoid_until:
                await self._last_of_leader(stream, subjects, found, deadline)
                return True
            records, status, reached = await self._batch(stream, subjects, deadline)
            if status == "413":
                return False
            if not goal or (status == "204" and reached >= goal):
                found.update({record.subject: record for record in records})
                return True
            if status != "204" or not await soon.pause():
                await self._last_of_leader(stream, subjects, found, deadline)
                return True

    async def _batch(
        self, stream: str, subjects: list[str], deadline: float
    ) -> tuple[list[Record], str, int]:
        """Get every page of a batch; returns records, the last status, and how far it is true."""
        backoff, sequence, reached = Backoff(deadline), 0, sys.maxsize
        found: list[Record] = []
        while True:
            try:
                page, told = await batch_get(self._connection, stream, subjects, sequence, deadline)
            except NoAnswer as e:
                if self._avoid(e) or (not e.sent and not await self.exists(stream, deadline)):
                    return found, "404", 0
                if not await backoff.pause():
                    raise self._connection.unavailable(self._patience_s) from e
                continue
            found += page
            status = told.get("Status", "")
            reached = min(reached, int(told.get("Nats-UpTo-Sequence", 0)))
            if status != "204" or int(told.get("Nats-Num-Pending", 0)) == 0:
                return found, status, reached
            sequence = int(told["Nats-Last-Sequence"]) + 1

    async def _last_of_leader(
        self, stream: str, patterns: list[str], found: dict[str, Record], deadline: float
    ) -> None:
        for pattern in patterns:
            for subject in await self._subjects(stream, pattern, deadline):
                record = await self._ask_leader(stream, {"last_by_subj": subject}, deadline)
                if record is not None:
                    found[subject] = record
