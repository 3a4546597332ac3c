"""A learner's place in its run: which incarnation it is, and where it goes on in its data.

What earlier incarnations sent and no commit has merged yet may still be merged, so a learner that
comes back must not train on that data again. It first publishes its ``Start`` into the stream of
the contributions: what an older incarnation completes behind it never counts. Everything that was
whole before it does count, and can be read; so the log alone says how far the data has been used.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry.errors import (
    BrokerUnavailable,
    BusError,
    Conflict,
    Superseded,
    WireError,
)
from skerry.log import base, ledger, state
from skerry.log.recovery import known_members
from skerry.protocol.contribution import Contribution, ContributionAssembler
from skerry.protocol.messages import MemberRecord, Start
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects, contributor

if TYPE_CHECKING:
    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus, Record
    from skerry.protocol.messages import Commit

STALLED_S = 2.0
"""Reading that gets nothing for this long looks whether there is still something to get."""
START_ATTEMPTS = 5
SETTLE_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class Place:
    """Where a learner goes on: ``step`` on the global clock, ``cursor`` in its data stream.

    ``member`` is its record with both filled in, and says nothing yet of the inner optimizer.
    """

    member: MemberRecord
    step: int
    cursor: int


async def take_place(
    bus: Bus, run: str, plan: Plan, learner: str, *, host: str, now_ns: int
) -> Place:
    """Join the run as a new incarnation and read from the log where ``learner`` goes on.

    Reads only fragments that hold something of this learner above their floor, from the lowest
    such floor on, and keeps chunk numbers and no payload. Waits through a broker's restart.
    Raises BusError when retention keeps dropping the learner's ``Start`` before it can be read,
    StateLost where records of members are gone.
    """
    newest = (await known_members(bus, run, plan, learner)).get(learner)
    before = newest if newest and newest.contrib_sequence else None  # it knew where it went on
    member = await ledger.join(
        bus, run, learner, host, now_ns, above=await _started(bus, run, learner)
    )
    for attempt in range(START_ATTEMPTS):
        manifests = await state.read_manifests(bus, run, plan)
        floors = {index: m.commit.contrib_floor for index, m in manifests.items()}
        start = await _publish_start(bus, member, attempt)
        sent = await _read_sent(bus, plan, member, _Sent.since(run, plan, before), start, floors)
        if sent is None:
            continue
        known = await _commits(bus, run, plan)
        cursors = [row.cursor for c in known for row in c.progress if row.learner == learner]
        cursor = max([sent, *cursors])
        step = max((c.step for c in known), default=0)
        settled = replace(member, cursor=cursor, step=step, contrib_sequence=start)
        return Place(settled, step, cursor)
    msg = (
        f"The contribution window drops records as fast as learner {learner!r} can read them:"
        " raise log.window_bytes or log.window_s of the run."
    )
    raise BusError(msg)


async def settle_in(bus: Bus, member: MemberRecord) -> None:
    """Publish the record of an incarnation once more, now that it knows where it goes on.

    Doing it again changes nothing. Raises Superseded when a newer incarnation has joined: its
    record must stay the newest, or the next one would be given its number again.
    """
    subject = Subjects(member.run).member(member.learner)
    for _ in range(SETTLE_ATTEMPTS):
        newest = await bus.last(subject)
        held = decode(MemberRecord, newest.payload, run=member.run) if newest else None
        if held == member:
            return
        if held is not None and held.incarnation > member.incarnation:
            msg = (
                f"Learner {member.learner!r} was started again on {held.host}:"
                " this one stops. Give each learner a name of its own."
            )
            raise Superseded(msg)
        try:
            await bus.publish(
                subject,
                encode(member),
                msg_id=f"settled/{member.learner}/{member.incarnation}/{member.joined_ns}",
                expect=base.Expect(subject, newest.sequence if newest else 0),
            )
        except Conflict:
            continue
        return
    msg = f"The record of learner {member.learner!r} kept changing while it was being written."
    raise BusError(msg)


async def _started(bus: Bus, run: str, learner: str) -> int:
    """Return the newest incarnation that has announced itself, 0 for none.

    Its own record may be gone, where nothing of it was merged: its number is not given again.
    """
    newest = await bus.last(Subjects(run).start(learner))
    with suppress(WireError):
        return decode(Start, newest.payload, run=run).incarnation if newest else 0
    return 0


async def _publish_start(bus: Bus, member: MemberRecord, attempt: int) -> int:
    """Publish the ``Start`` of an incarnation and return its sequence in CONTRIB."""
    start = Start(member.run, member.learner, member.incarnation, member.joined_ns)
    receipt = await bus.publish(
        Subjects(member.run).start(member.learner),
        encode(start),
        msg_id=f"start/{member.learner}/{member.incarnation}/{member.joined_ns}/{attempt}",
    )
    return receipt.sequence


async def _commits(bus: Bus, run: str, plan: Plan) -> list[Commit]:
    """Return every fragment's newest commit, as the ledger and as its manifest tell it.

    A syncer that dies between the two leaves the ledger one behind.
    """
    commits = await ledger.last_commits(bus, run)
    manifests = await state.read_manifests(bus, run, plan)
    return [*commits.values(), *(m.commit for m in manifests.values())]


async def _read_sent(
    bus: Bus, plan: Plan, member: MemberRecord, sent: _Sent, start: int, floors: dict[int, int]
) -> int | None:
    """Return the cursor behind everything that was whole before ``start``; None: read it again.

    ``floors`` were read before the ``Start`` was published: one that lies behind it was counted in
    another stream, and says nothing about this one.
    """
    if max(floors.values(), default=0) >= start:
        floors = {}
    subjects = Subjects(member.run)
    newest = await bus.last_each(subjects.contribution(learner=member.learner))
    waiting = {
        fragment: floors.get(fragment, 0)
        for record in newest
        for fragment, _ in [contributor(record.subject)]
        if 0 <= fragment < len(plan.fragments) and record.sequence > floors.get(fragment, 0)
    }
    if not waiting:
        return sent.cursor
    patterns = [
        subjects.start(member.learner),
        *(subjects.contribution(fragment, member.learner) for fragment in waiting),
    ]
    position = min(*waiting.values(), start - 1)
    while (position := await _read_until(bus, patterns, position, start, sent)) < start:
        if not await _is_there(bus, subjects, member, start):
            return None
    return sent.cursor if position == start else None


async def _read_until(bus: Bus, patterns: list[str], position: int, start: int, sent: _Sent) -> int:
    """Feed what lies between ``position`` and ``start``; return where it came to, or stalled.

    Beyond ``start`` when retention has dropped it.
    """
    follower = bus.follow(patterns, after=position)
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(STALLED_S) as stalled, aclosing(follower):
            async for record in follower:
                stalled.reschedule(loop.time() + STALLED_S)
                position = record.sequence
                if position >= start:
                    break
                sent.feed(record)
    except TimeoutError:
        pass
    return position


async def _is_there(bus: Bus, subjects: Subjects, member: MemberRecord, start: int) -> bool:
    """Return True if our ``Start`` is still in the stream, as far as the broker answers."""
    try:
        found = await bus.get(subjects.stream("CONTRIB"), start)
    except BrokerUnavailable:
        return True
    return found is not None and found.subject == subjects.start(member.learner)


@dataclass(slots=True)
class _Sent:
    """How far one learner's data is used by what it has sent whole, in the order of the stream."""

    assembler: ContributionAssembler
    cursor: int = 0

    @classmethod
    def since(cls, run: str, plan: Plan, before: MemberRecord | None) -> _Sent:
        """Begin at ``before``, the newest incarnation that knew where it went on.

        What came before that is in its cursor already, or came too late for it.
        """
        sent = cls(ContributionAssembler(run, plan, keeps_payload=False))
        if before is not None:
            sent.assembler.incarnations.note(before.learner, before.incarnation, 0)
            sent.cursor = before.cursor
        return sent

    def feed(self, stored: Record) -> None:
        """Take one message of the learner."""
        got = self.assembler.feed(stored)
        if isinstance(got, Contribution):
            self.cursor = max(self.cursor, got.header.cursor_to)
