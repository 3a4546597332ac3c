"""A learner's place in its run: which incarnation it is, and where it goes on in its data.

What earlier incarnations sent and no commit has merged yet may still be merged, so a learner that
comes back must not train on that data again. It first publishes its ``Start`` into the stream of
the contributions: what an older incarnation completes after it never counts. Everything that was
whole before it does count, and can be read; so the log alone says how far the data has been used.
"""

from __future__ import annotations

from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

from skerry.errors import BrokerUnavailable, BusError, Superseded, WireError
from skerry.log import ledger, state
from skerry.log.base import Expect
from skerry.log.client import both, together
from skerry.log.reading import with_pauses
from skerry.log.recovery import known_members
from skerry.log.run_records import newest_readable, publish, readable, readable_up_to
from skerry.protocol import genesis
from skerry.protocol.contribution import Contribution, ContributionAssembler
from skerry.protocol.genesis import Candidate
from skerry.protocol.messages import MemberRecord, Pulse, Start
from skerry.protocol.records import decode, subject_of
from skerry.protocol.subjects import Subjects, contributor

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping, Sequence

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus, Record
    from skerry.protocol.messages import Manifest

STALLED_S = 2.0
"""Reading that gets nothing for this long looks whether there is still something to get."""
START_ATTEMPTS = 5


class Taken(NamedTuple):
    """The record of a learner that has joined, and the newest versions that it has found.

    ``manifests`` are those of the state by fragment, ``recorded`` the versions of the ledger.
    """

    member: MemberRecord
    manifests: dict[int, Manifest]
    recorded: dict[int, int]


async def take_place(
    bus: Bus, run: str, plan: Plan, learner: str, *, host: str, now_ns: int, offers: bool = False
) -> Taken:
    """Join the run as a new incarnation and read from the log where ``learner`` goes on.

    ``offers``: it has the run's initial parameters.

    The returned record has the ``step`` on the global clock and the ``cursor`` in the data stream,
    and nothing yet of the inner optimizer; ``settle_in`` publishes it. Independent requests are
    sent together, since each costs a round trip to a distant broker.
    Reads only fragments that hold something of this learner above their floor, from the lowest
    such floor on, and keeps chunk numbers and no payload. Waits through a broker's restart.
    Raises BusError when retention keeps dropping the learner's ``Start`` before it can be read,
    StateLost where records of members are gone.
    """
    (found, held), above = await both(
        known_members(bus, run, plan, learner), _started(bus, run, plan, learner)
    )
    newest = ledger.by_name(found).get(learner)
    before = newest if newest and newest.contrib_sequences else None  # it knew where it went on
    member = await ledger.join(
        *(bus, run, learner, host, now_ns), above=above, offers=offers, known=found
    )
    begun = await together(
        _begin(bus, plan, member, before, shard, held) for shard in range(plan.shards)
    )
    # From both: a syncer that dies between writing the two leaves the ledger one behind.
    commits, manifests = await both(
        ledger.last_commits(bus, run), state.read_manifests(bus, run, plan)
    )
    known = [*commits.values(), *(manifest.commit for manifest in manifests.values())]
    cursors = [row.cursor for c in known for row in c.progress if row.learner == learner]
    recorded = {fragment: commit.version for fragment, commit in commits.items()}
    settled = replace(
        member,
        cursor=max([*cursors, *(sent for _, sent in begun)]),
        step=max((c.step for c in known), default=0),
        contrib_sequences=tuple(sequence for sequence, _ in begun),
    )
    return Taken(settled, manifests, recorded)


async def _begin(
    bus: Bus,
    plan: Plan,
    member: MemberRecord,
    before: MemberRecord | None,
    shard: int,
    manifests: Mapping[int, Manifest],
) -> tuple[int, int]:
    """Publish an incarnation's ``Start`` to a shard, and read what was sent to the shard before.

    Return the sequence of the ``Start``, and the cursor after all that was whole by then.
    """
    run, learner, now_ns = member.run, member.learner, member.joined_ns
    floors = {
        index: m.commit.contrib_floor
        for index, m in manifests.items()
        if plan.shard_of(index) == shard
    }
    for attempt in range(START_ATTEMPTS):
        said = await publish(
            bus,
            Start(run, learner, member.incarnation, now_ns, shard),
            msg_id=f"start/{learner}/{member.incarnation}/{now_ns}/{attempt}",
        )
        sent = await _read_sent(bus, plan, member, before, (shard, said.sequence), floors)
        if sent is not None:
            return said.sequence, sent
    msg = (
        f"The contribution window drops records as fast as learner {learner!r} can read them:"
        " raise log.window_bytes or log.window_s of the run."
    )
    raise BusError(msg)


async def settle_in(bus: Bus, member: MemberRecord) -> None:
    """Publish the record of an incarnation once more, now that it knows where it goes on.

    Doing it again changes nothing. Raises Superseded when a newer incarnation has joined: the newer
    one's record must stay the newest, or its number would be given again.
    """
    subject = subject_of(member)

    async def settle() -> None:
        newest = await bus.last(subject)
        found = newest and await readable_up_to(bus, member.run, MemberRecord, newest)
        held = found.value if found else None
        if held is not None and held.incarnation > member.incarnation:
            msg = (
                f"Learner {member.learner!r} was started again on {held.host}:"
                " this one stops. Give each learner a name of its own."
            )
            raise Superseded(msg)
        if held != member:
            await publish(
                bus,
                member,
                msg_id=f"settled/{member.learner}/{member.incarnation}/{member.joined_ns}",
                expect=Expect(subject, newest.sequence if newest else 0),
            )

    await ledger.until_granted(settle, f"The record of learner {member.learner!r}")


async def first_to_offer(bus: Bus, run: str, pulse_s: float) -> str | None:
    """Return the learner that offers the run's initial parameters; None where none lives.

    It follows from the records of members and from the broker's times.
    """
    stored = await bus.last_each(Subjects(run).pulse())
    pulses = [(r.time_ns, p) for r in stored if (p := readable(Pulse, r, run)) is not None]
    heard = {(p.learner, p.incarnation): (time, p.contributions > 0) for time, p in pulses}
    found = [(i.value, i.stored) for i in await newest_readable(bus, run, MemberRecord)]
    candidates = [
        Candidate(m.learner, m.shard, *heard.get((m.learner, m.incarnation), (at.time_ns, False)))
        for m, at in found
        if m is not None and m.offers
    ]
    return genesis.first_to_offer(candidates, max((t for t, _ in pulses), default=0), pulse_s)


async def _started(bus: Bus, run: str, plan: Plan, learner: str) -> int:
    """Return the newest incarnation that has announced itself, 0 for none.

    Its own record may be gone if nothing of it was merged, but its number is not given again.
    """
    found, shards = [0], map(Subjects(run).shard, range(plan.shards))
    for newest in await together(bus.last(shard.start(learner)) for shard in shards):
        with suppress(WireError):
            found += [decode(Start, newest.payload, run=run).incarnation] if newest else []
    return max(found)


async def _read_sent(
    bus: Bus,
    plan: Plan,
    member: MemberRecord,
    before: MemberRecord | None,
    begins: tuple[int, int],
    floors: dict[int, int],
) -> int | None:
    """Return the cursor after all that was whole before a ``Start``; None if the Start is gone.

    ``begins`` are the shard of the ``Start``, and its sequence in that shard's CONTRIB.

    ``before`` is the newest incarnation that knew where it went on: what came before that is in its
    cursor already, or came too late for it. ``floors`` were read before the ``Start`` was
    published: a floor after it was counted in another stream, and says nothing about this one.
    """
    shard, start = begins
    assembler, cursor = ContributionAssembler(member.run, plan, keeps_payload=False), 0
    if before is not None:
        assembler.incarnations.note(before.learner, before.incarnation, 0)
        cursor = before.cursor
    if max(floors.values(), default=0) >= start:
        floors = {}
    subjects = Subjects(member.run).shard(shard)
    newest = await bus.last_each(subjects.contribution(learner=member.learner))
    waiting = {
        fragment: floors.get(fragment, 0)
        for record in newest
        for fragment, _ in [contributor(record.subject)]
        if 0 <= fragment < len(plan.fragments) and record.sequence > floors.get(fragment, 0)
    }
    if not waiting:
        return cursor
    own = subjects.start(member.learner)
    patterns = [own, *(subjects.contribution(f, member.learner) for f in waiting)]

    def feed(record: Record) -> None:
        nonlocal cursor
        got = assembler.feed(record)
        if isinstance(got, Contribution):
            cursor = max(cursor, got.header.cursor_to)

    async def is_there() -> bool:
        try:
            held = await bus.get(subjects.stream("CONTRIB"), start)
        except BrokerUnavailable:
            return True
        return held is not None and held.subject == own

    position = min(*waiting.values(), start - 1)
    position = await read_until(bus, patterns, position, start, feed, is_there)
    return cursor if position == start else None


async def read_until(
    bus: Bus,
    patterns: Sequence[str],
    position: int,
    last: int,
    feed: Callable[[Record], object],
    is_there: Callable[[], Awaitable[bool]],
) -> int:
    """Feed the messages after ``position`` up to ``last``; return the sequence of the last one fed.

    Whenever nothing comes for a while it asks whether ``last`` ``is_there``. The result is below
    ``last`` if it is not, and above if retention has dropped it.
    """
    async with aclosing(with_pauses(bus.follow(patterns, after=position), STALLED_S)) as records:
        async for record in records:
            if record is None:
                if not await is_there():
                    return position
                continue
            position = record.sequence
            feed(record)
            if position >= last:
                return position
    msg = "The log was closed while it was read."
    raise BrokerUnavailable(msg)
