"""Taking a place in a run: data goes on exactly where the log says, whoever else still sends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import BrokerUnavailable, BusError, Superseded
from skerry.log import ledger, place
from skerry.log.base import Deliver, Record
from skerry.log.contributions import seal_contribution
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.place import settle_in, take_place
from skerry.log.streams import specs
from skerry.protocol import messages
from skerry.protocol.codec import Chunk
from skerry.protocol.contribution import Contribution, ContributionAssembler
from skerry.protocol.messages import (
    ContributionHeader,
    ContributionKind,
    InnerState,
    LearnerProgress,
    MemberRecord,
)
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects
from skerry_tools.virtual import VirtualLoop
from tests.support.builders import manifest
from tests.support.learners import encode_vector, walk
from tests.support.virtual_time import broker_of, far_of, simulate

RUN = "t"
PLAN = plan([LeafSpec("w", (24, 256))], 2)
NAMES = Subjects(RUN)
CONTRIB = NAMES.shard(0).stream("CONTRIB")
CHUNKS: list[list[Chunk]] = [
    list(encode_vector("int4", walk(fragment, "sent"), 900)) for fragment in PLAN.fragments
]
COUNT = len(CHUNKS[0])


@pytest.fixture
async def begun(bus: MemoryBus) -> MemoryBus:
    """A log in which learner ``a`` has started once."""
    await joined(bus)
    return bus


async def joined(bus: MemoryBus, learner: str = "a") -> MemberRecord:
    """Take a place and settle in: from here on the incarnation may send."""
    found = await joining(bus, learner)
    await settle_in(bus, replace(found, inner=InnerState.NEW))
    return found


async def joining(bus: MemoryBus, learner: str = "a") -> MemberRecord:
    """Take a place, and die before anybody has heard where it is."""
    async with asyncio.timeout(20):
        return (await take_place(bus, RUN, PLAN, learner, host="h", now_ns=1)).member


def told(
    incarnation: int, identity: int, cursor_from: int, cursor_to: int, *, fragment: int = 0
) -> ContributionHeader:
    return ContributionHeader(
        kind=ContributionKind.OUTER_GRADIENT,
        learner="a",
        incarnation=incarnation,
        identity=identity,
        fragment=fragment,
        base_version=1,
        round_version=2,
        step=cursor_to,
        steps=cursor_to - cursor_from,
        tokens=cursor_to - cursor_from,
        cursor_from=cursor_from,
        cursor_to=cursor_to,
        loss=1.0,
        captured_ns=1,
    )


async def send_chunk(bus: MemoryBus, header: ContributionHeader, index: int) -> None:
    """Publish one chunk of a contribution, as ``contributions.Sender`` does them all."""
    data = seal_contribution(RUN, PLAN, header, CHUNKS[header.fragment][index])
    await bus.publish(NAMES.shard(0).contribution(header.fragment, header.learner), data)


async def send(bus: MemoryBus, header: ContributionHeader, chunks: int = COUNT) -> None:
    for index in range(chunks):
        await send_chunk(bus, header, index)


async def committed(
    bus: MemoryBus,
    fragment: int,
    version: int,
    *,
    floor: int = 0,
    rows: Sequence[LearnerProgress] = (),
) -> None:
    """Publish a manifest without payload: what it says of contributions is all that counts here."""
    record = manifest(
        version,
        fragment,
        run=RUN,
        plan_digest=PLAN.digest,
        step=10 * version,
        contrib_floor=floor,
        progress=tuple(rows),
    )
    await bus.publish(NAMES.shard(0).manifest(fragment), encode(record))


async def test_first_start_begins_at_zero_and_says_so_in_the_stream(bus: MemoryBus) -> None:
    found = await joined(bus)
    assert (found.incarnation, found.step, found.cursor) == (1, 0, 0)
    record = await bus.get(CONTRIB, found.contrib_sequences[0])
    assert record is not None
    start = decode(messages.Start, record.payload, run=RUN)
    assert (start.learner, start.incarnation) == ("a", 1)


@pytest.mark.parametrize(
    ("sent", "cursor"),
    [
        ([(told(1, 1, 0, 8), COUNT), (told(1, 1, 0, 12, fragment=1), COUNT)], 12),
        ([(told(1, 1, 0, 8), COUNT), (told(1, 2, 8, 16), COUNT - 1)], 8),
    ],
    ids=["whole", "in part"],
)
async def test_what_was_sent_whole_counts_as_used_before_it_is_merged(
    begun: MemoryBus, sent: list[tuple[ContributionHeader, int]], cursor: int
) -> None:
    for header, chunks in sent:
        await send(begun, header, chunks)
    assert (await joined(begun)).cursor == cursor


async def test_the_last_chunk_of_a_zombie_behind_the_start_comes_too_late(begun: MemoryBus) -> None:
    zombie = told(1, 1, 0, 8)
    await send(begun, zombie, COUNT - 1)
    second = await joined(begun)
    await send_chunk(begun, zombie, COUNT - 1)
    third = await joined(begun)
    assert (second.cursor, third.cursor) == (0, 0)


async def test_zombie_that_sends_before_the_start_counts_and_behind_it_does_not(
    begun: MemoryBus,
) -> None:
    await ledger.join(
        begun, RUN, "a", "h", 2
    )  # the next one has joined; its Start is not there yet
    await send(begun, told(1, 1, 0, 8))
    third = await joined(begun)
    await send(begun, told(1, 2, 8, 50))
    await send(begun, told(3, 1, 8, 20, fragment=1))
    assert (third.cursor, (await joined(begun)).cursor) == (8, 20)


async def test_zombie_that_came_too_late_once_comes_too_late_for_ever(begun: MemoryBus) -> None:
    second = await joined(begun)
    await send(begun, told(1, 1, 0, 8))
    await committed(begun, 0, 2, floor=second.contrib_sequences[0])
    await joined(begun)
    assert (await joined(begun)).cursor == 0


async def test_start_of_one_that_died_while_joining_cuts_off_its_predecessors(
    begun: MemoryBus,
) -> None:
    await send(begun, told(1, 1, 0, 8))
    await joining(begun)
    await send(begun, told(1, 2, 8, 50))
    assert (await joined(begun)).cursor == 8


async def test_chunks_count_in_whatever_order_and_however_often_they_come(begun: MemoryBus) -> None:
    for index in (*range(COUNT - 1, 0, -1), 1, 0):
        await send_chunk(begun, told(1, 1, 0, 8), index)
    assert (await joined(begun)).cursor == 8


async def test_commits_tell_what_is_no_longer_in_the_stream(bus: MemoryBus) -> None:
    for learner in "ab":
        await joined(bus, learner)
    await committed(bus, 0, 3, rows=[LearnerProgress("a", 1, 4, 100, 40)])
    await committed(bus, 1, 5, rows=[LearnerProgress("b", 1, 4, 100, 90)])
    found = await joined(bus)
    assert (found.step, found.cursor) == (50, 40)


class Counting(MemoryBus):
    """Counts what following costs, and from where it began."""

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.began: list[int] = []
        self.patterns: list[str] = []

    def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        self.began.append(after)
        self.patterns += [pattern] if isinstance(pattern, str) else pattern
        return super().follow(pattern, deliver=deliver, after=after)


async def test_reading_begins_at_the_floor_of_what_waits(begun: MemoryBus) -> None:
    for identity in range(1, 4):
        await send(begun, told(1, identity, 8 * identity - 8, 8 * identity))
        await send(begun, told(1, identity, 0, 1, fragment=1))
    floor = 1 + 4 * COUNT
    await committed(begun, 0, 3, floor=floor, rows=[LearnerProgress("a", 1, 2, 0, 16)])
    await committed(begun, 1, 3, floor=1 + 6 * COUNT)
    counted = Counting(begun.broker)
    assert (await joined(counted)).cursor == 24
    assert counted.began == [floor]
    assert NAMES.shard(0).contribution(1, "a") not in counted.patterns


async def test_nothing_is_read_where_all_is_resolved(begun: MemoryBus) -> None:
    await send(begun, told(1, 1, 0, 8))
    await committed(begun, 0, 3, floor=1 + COUNT, rows=[LearnerProgress("a", 1, 1, 0, 8)])
    counted = Counting(begun.broker)
    assert (await joined(counted)).cursor == 8
    assert counted.began == []


async def test_floors_of_another_stream_are_not_believed(begun: MemoryBus) -> None:
    await committed(begun, 0, 3, floor=1000, rows=[LearnerProgress("a", 1, 1, 0, 8)])
    await send(begun, told(1, 2, 8, 16))
    assert (await joined(begun)).cursor == 16


async def test_stream_whose_head_has_aged_out_is_read_from_what_is_left(begun: MemoryBus) -> None:
    await send(begun, told(1, 1, 0, 8))
    stream = begun.broker.streams[CONTRIB]
    for sequence in list(stream.records)[:-2]:
        stream.drop(sequence)
    await send(begun, told(1, 2, 8, 16))
    assert (await joined(begun)).cursor == 16


class Dropping(MemoryBus):
    """Loses the newest ``Start`` and all before it, ``times`` times, when it is being read."""

    times = 1

    async def last_each(self, pattern: str) -> list[Record]:
        if self.times > 1 and pattern == NAMES.shard(0).contribution(learner="a"):
            await send(self, told(1, 1, 0, 8))  # there is always something to read
        return await super().last_each(pattern)

    def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        stream = self.broker.streams[CONTRIB]
        if self.times:
            self.times -= 1
            for sequence in list(stream.records):
                stream.drop(sequence)
        return super().follow(pattern, deliver=deliver, after=after)


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place, "STALLED_S", 0.01)


@pytest.mark.usefixtures("_impatient")
async def test_start_that_retention_drops_while_it_is_read_is_said_again(begun: MemoryBus) -> None:
    await send(begun, told(1, 1, 0, 8))
    found = await joined(Dropping(begun.broker))
    assert await begun.get(CONTRIB, found.contrib_sequences[0]) is not None
    assert found.cursor == 0, "what was dropped unmerged can never be merged"


@pytest.mark.usefixtures("_impatient")
async def test_window_that_drops_every_start_is_named(begun: MemoryBus) -> None:
    dropping = Dropping(begun.broker)
    dropping.times = 100
    with pytest.raises(BusError, match=r"raise log\.window_bytes"):
        await joined(dropping)


class Restarting(MemoryBus):
    """A broker that is away for a while: a follower gets nothing, a request gets no answer."""

    away = 3

    def __init__(self, broker: MemoryBroker) -> None:
        super().__init__(broker)
        self.back = asyncio.Event()

    async def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        await self.back.wait()
        async with aclosing(super().follow(pattern, deliver=deliver, after=after)) as records:
            async for record in records:
                yield record

    async def get(self, stream: str, sequence: int) -> Record | None:
        self.away -= 1
        if self.away:
            msg = "No server answers."
            raise BrokerUnavailable(msg)
        self.back.set()
        return await super().get(stream, sequence)


@pytest.mark.usefixtures("_impatient")
async def test_broker_that_restarts_meanwhile_is_waited_for(begun: MemoryBus) -> None:
    await send(begun, told(1, 1, 0, 8))
    found = await joined(Restarting(begun.broker))
    assert found.cursor == 8
    assert found.contrib_sequences == (2 + COUNT,), "the Start is not said again"


class Slow(MemoryBus):
    """A client whose link takes longer for each message than reading waits for one."""

    async def follow(
        self, pattern: str | Sequence[str], *, deliver: Deliver = Deliver.ALL, after: int = 0
    ) -> AsyncGenerator[Record]:
        async with aclosing(super().follow(pattern, deliver=deliver, after=after)) as records:
            async for record in records:
                await asyncio.sleep(3 * place.STALLED_S)
                yield record


def test_what_was_sent_comes_over_a_slow_link_too() -> None:
    async def rejoin(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        await broker.connect().declare(specs(RUN))
        await joined(broker.connect())
        await send(broker.connect(), told(1, 1, 0, 8))
        async with asyncio.timeout(100 * place.STALLED_S):  # on the loop's own clock
            found = await take_place(Slow(broker), RUN, PLAN, "a", host="h", now_ns=2)
        assert found.member.cursor == 8

    simulate(rejoin)


async def test_bytes_that_nobody_would_merge_count_for_nothing(begun: MemoryBus) -> None:
    await begun.publish(NAMES.shard(0).contribution(0, "a"), b"noise")
    await begun.publish(NAMES.shard(0).contribution(7, "a"), b"noise")
    await begun.publish(NAMES.shard(0).start("a"), b"noise")
    await send(begun, told(1, 1, 0, 8))
    assert (await joined(begun)).cursor == 8


async def test_settling_in_says_where_the_same_incarnation_goes_on(bus: MemoryBus) -> None:
    found = await joining(bus)
    member = replace(found, inner="warm", inner_age_steps=7)
    await settle_in(bus, member)
    await settle_in(bus, member)
    assert (await ledger.members(bus, RUN))["a"] == member
    assert (await joined(bus)).incarnation == 2


async def test_junk_on_its_own_subject_keeps_no_learner_from_settling_in(bus: MemoryBus) -> None:
    found = await joining(bus)
    await bus.publish(NAMES.member("a"), b"junk")
    await settle_in(bus, found)
    assert (await ledger.members(bus, RUN))["a"] == found


async def test_overtaken_learner_never_hides_the_newer_incarnation(bus: MemoryBus) -> None:
    first = await joining(bus)
    await joined(bus)
    with pytest.raises(Superseded, match="started again on h"):
        await settle_in(bus, first)
    assert (await joined(bus)).incarnation == 3


class Reference:
    """A syncer reduced to what counts here: reads in order, refuses what comes behind a Start."""

    def __init__(self, bus: MemoryBus) -> None:
        self.bus = bus
        self.assembler = ContributionAssembler(RUN, PLAN)
        self.position = 0
        self.incarnation = 0
        self.versions = [0, 0]
        self.waiting: list[list[Contribution]] = [[], []]
        self.merged: list[ContributionHeader] = []

    async def read(self, limit: int) -> None:
        """Read up to ``limit`` records."""
        last = self.bus.broker.streams[CONTRIB].last_seq
        for sequence in range(self.position + 1, min(last, self.position + limit) + 1):
            self.position = sequence
            record = await self.bus.get(CONTRIB, sequence)
            assert record is not None
            if record.subject == NAMES.shard(0).start("a"):
                start = decode(messages.Start, record.payload, run=RUN)
                self.incarnation = max(self.incarnation, start.incarnation)
                continue
            got = self.assembler.feed(record)
            if isinstance(got, Contribution) and got.header.incarnation >= self.incarnation:
                self.waiting[got.header.fragment].append(got)

    async def commit(self, fragment: int) -> None:
        self.merged += [c.header for c in self.waiting[fragment]]
        self.waiting[fragment] = []
        self.versions[fragment] += 1
        mine = [h for h in self.merged if h.fragment == fragment]
        unfinished = self.assembler.incomplete_from(fragment)
        rows = [LearnerProgress("a", 1, 1, 0, max(h.cursor_to for h in mine))] if mine else []
        floor = self.position if unfinished is None else unfinished - 1
        await committed(self.bus, fragment, self.versions[fragment], floor=floor, rows=rows)


class Life:
    """One incarnation: trains, and sends the chunks of one contribution after another."""

    def __init__(self, place: MemberRecord) -> None:
        self.incarnation, self.cursor = place.incarnation, place.cursor
        self.began = place.cursor
        self.origin = [place.cursor, place.cursor]
        self.identity = [0, 0]
        self.sending: list[tuple[ContributionHeader, int] | None] = [None, None]

    async def send(self, bus: MemoryBus, fragment: int, chunks: int) -> None:
        """Go on sending; a contribution that is done is followed by one of new work."""
        for _ in range(chunks):
            self.cursor += 1
            now = self.sending[fragment]
            if now is None:
                self.identity[fragment] += 1
                header = told(
                    self.incarnation,
                    self.identity[fragment],
                    self.origin[fragment],
                    self.cursor,
                    fragment=fragment,
                )
                self.origin[fragment] = self.cursor
                now = (header, 0)
            header, index = now
            await send_chunk(bus, header, index)
            self.sending[fragment] = (header, index + 1) if index + 1 < COUNT else None


ACTIONS = st.one_of(
    st.tuples(st.just("send"), st.integers(0, 2), st.integers(0, 1), st.integers(1, 2 * COUNT)),
    st.tuples(st.just("read"), st.just(0), st.just(0), st.integers(1, 4 * COUNT)),
    st.tuples(st.just("commit"), st.just(0), st.integers(0, 1), st.just(0)),
    st.tuples(st.just("restart"), st.just(0), st.just(0), st.just(0)),
)


@settings(max_examples=150)
@given(st.lists(ACTIONS, max_size=40))
def test_no_data_counts_twice_and_none_is_left_out(
    actions: list[tuple[str, int, int, int]],
) -> None:
    asyncio.run(check_interleaving(actions))


async def check_interleaving(actions: list[tuple[str, int, int, int]]) -> None:
    """Play a schedule in which older incarnations go on sending, then let the syncer finish."""
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    syncer, lives = Reference(bus), [Life(await joined(bus))]
    for kind, back, fragment, amount in actions:
        match kind:
            case "send":
                await lives[max(0, len(lives) - 1 - back)].send(bus, fragment, amount)
            case "read":
                await syncer.read(amount)
            case "commit":
                await syncer.commit(fragment)
            case _:
                lives.append(Life(await joined(bus)))
    await syncer.read(1_000_000)
    await syncer.commit(0)
    await syncer.commit(1)
    known = 0
    for life in lives:
        assert life.began == known, "used twice if less, left out if more"
        mine = [h for h in syncer.merged if h.incarnation == life.incarnation]
        known = max([known, *(h.cursor_to for h in mine)])


def test_a_far_learner_joins_in_five_round_trips_whatever_the_number_of_shards() -> None:
    took_s = list[float]()

    async def main(loop: VirtualLoop) -> None:
        for shards in (1, 8):
            bus, cut = far_of(broker_of(loop), 0.25), plan([LeafSpec("w", (24, 256))], 8, shards)
            await bus.declare(specs(RUN, shards=shards))
            began_s = loop.time()
            for _ in range(2):  # the second one finds what the first has left
                await take_place(bus, RUN, cut, "a", host="h", now_ns=1)
            took_s.append(loop.time() - began_s)

    simulate(main)
    assert took_s == pytest.approx([2 * 5 * 2 * 0.25] * 2)
