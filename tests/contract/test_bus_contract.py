"""What every bus must do: the memory broker, a real nats-server, and three that replicate."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace

import pytest

from skerry.errors import BrokerUnfit, BusError, Conflict, StorageFull, StreamDrift
from skerry.log.base import (
    MSG_ID,
    PER_SUBJECT,
    Bus,
    Deliver,
    Expect,
    Receipt,
    Retention,
    Storage,
    StreamSpec,
)
from skerry.log.streams import MEMBER_BYTES
from skerry.protocol.subjects import Subjects
from tests.support.log import all_of, followed, newest, specs, take


def window(run: str, max_bytes: int) -> StreamSpec:
    return next(
        replace(spec, max_bytes=max_bytes)
        for spec in specs(run)
        if spec.retention is Retention.WINDOW
    )


async def test_the_newest_record_comes_back_as_it_was_published(bus: Bus, names: Subjects) -> None:
    await bus.publish(names.ledger("run"), b"old")
    await bus.publish(names.ledger("run"), b"new\x00\xff", msg_id="id", headers={"trace": "abc"})
    record = await newest(bus, names.ledger("run"))
    assert (record.subject, record.sequence) == (names.ledger("run"), 2)
    assert record.payload == b"new\x00\xff"
    assert record.headers["trace"] == "abc"
    assert record.headers[MSG_ID].startswith("id.")
    assert record.time_ns > 1_600_000_000_000_000_000


async def test_the_newest_record_of_a_pattern_is_the_newest_of_all_its_subjects(
    bus: Bus, names: Subjects
) -> None:
    pattern = names.shard(0).contribution(1)
    await bus.publish(names.shard(0).contribution(0, "a"), b"another fragment's")
    assert await bus.last(pattern) is None
    for learner in "aba":
        await bus.publish(names.shard(0).contribution(1, learner), learner.encode())
    await bus.publish(names.shard(0).contribution(2, "a"), b"another fragment's")
    record = await newest(bus, pattern)
    assert (record.sequence, record.payload) == (4, b"a")


async def test_an_empty_payload_is_a_record(bus: Bus, names: Subjects) -> None:
    await bus.publish(names.ledger("run"), b"")
    record = await newest(bus, names.ledger("run"))
    assert record.payload == b""
    assert await bus.last_each(names.ledger("run")) == [record]
    assert await take(bus.follow(names.ledger("run")), 1) == [record]


async def test_a_repeated_message_id_is_stored_once(bus: Bus, names: Subjects) -> None:
    first = await bus.publish(names.commit(0), b"x", msg_id="0/1")
    again = await bus.publish(names.commit(0), b"x", msg_id="0/1")
    assert (again.sequence, again.duplicate) == (first.sequence, True)
    assert await bus.get(names.stream("LEDGER"), first.sequence + 1) is None


async def test_an_account_says_how_full_it_is(bus: Bus, names: Subjects) -> None:
    async def used() -> dict[Storage, int]:
        return {room.storage: room.used_bytes for room in await bus.rooms()}

    before = await used()
    await bus.publish(names.ledger("run"), b"x" * 100_000)
    await bus.publish(names.pulse("a"), b"x" * 100_000)
    async with asyncio.timeout(10.0):
        for storage in before:  # servers of a cluster exchange this now and then
            while (await used())[storage] < before[storage] + 100_000:  # noqa: ASYNC110 - no event says so
                await asyncio.sleep(0.1)
    assert {room.limit_bytes for room in await bus.rooms()} == {0}


async def test_the_log_says_what_its_clock_says_that_dates_records(
    bus: Bus, names: Subjects
) -> None:
    await bus.publish(names.pulse("a"), b"x")
    stored = await newest(bus, names.pulse("a"))
    assert 0 <= await bus.now_ns(names.pulse("a")) - stored.time_ns < 600e9
    with pytest.raises(BusError, match="no stream SKERRY_nowhere_PULSE"):
        await bus.now_ns(Subjects("nowhere").pulse("a"))


async def test_a_failed_expectation_leaves_the_log_unchanged(bus: Bus, names: Subjects) -> None:
    subject = names.ledger("run")
    await bus.publish(subject, b"a")
    with pytest.raises(Conflict) as caught:
        await bus.publish(subject, b"b", expect=Expect(subject, 0))
    assert (caught.value.subject, caught.value.expected) == (subject, 0)
    record = await newest(bus, subject)
    assert record.payload == b"a"
    assert await bus.get(names.stream("LEDGER"), 2) is None


async def test_another_subject_can_fence_a_write(bus: Bus, names: Subjects) -> None:
    fence = await bus.publish(names.shard(0).fence(), b"one")
    held = Expect(names.shard(0).fence(), fence.sequence)
    await bus.publish(names.shard(0).chunk(0, "snapshot", 0, 0), b"chunk", expect=held)
    await bus.publish(names.shard(0).fence(), b"two", expect=held)
    with pytest.raises(Conflict):
        await bus.publish(names.shard(0).chunk(0, "snapshot", 0, 0), b"late", expect=held)
    record = await newest(bus, names.shard(0).chunk(0, "snapshot", 0, 0))
    assert record.payload == b"chunk"


async def test_a_repeated_id_whose_expectation_fails_is_stored_once(
    bus: Bus, names: Subjects
) -> None:
    """One server looks at the expectation first, a cluster at the id; callers must bear both."""
    subject = names.ledger("run")
    first = await bus.publish(subject, b"a", msg_id="id", expect=Expect(subject, 0))
    try:
        again = await bus.publish(subject, b"a", msg_id="id", expect=Expect(subject, 0))
    except Conflict:
        pass
    else:
        assert again == Receipt(first.sequence, duplicate=True)
    assert await bus.get(names.stream("LEDGER"), first.sequence + 1) is None


async def test_a_fence_lets_all_of_a_window_through(bus: Bus, names: Subjects) -> None:
    fence = await bus.publish(names.shard(0).fence(), b"one")
    shard = names.shard(0)
    held = Expect(shard.fence(), fence.sequence)
    publishing = (
        bus.publish(
            names.shard(0).chunk(0, "snapshot", 0, i), b"%d" % i, msg_id=f"{i}", expect=held
        )
        for i in range(12)
    )
    stored = await asyncio.gather(*publishing)
    assert sorted(receipt.sequence for receipt in stored) == list(range(2, 14))


async def test_a_pattern_can_fence_a_write(bus: Bus, names: Subjects) -> None:
    first = await bus.publish(names.member("a"), b"a", expect=Expect(names.member(), 0))
    with pytest.raises(Conflict):
        await bus.publish(names.member("b"), b"b", expect=Expect(names.member(), 0))
    known = Expect(names.member(), first.sequence)
    assert (await bus.publish(names.member("b"), b"b", expect=known)).sequence == 2


@pytest.mark.parametrize("over", ["subject", "pattern"])
async def test_of_eight_racing_writers_exactly_one_wins(
    bus: Bus, names: Subjects, over: str
) -> None:
    async def race(i: int) -> bool:
        subject = names.shard(0).fence() if over == "subject" else names.member(f"l{i}")
        expect = Expect(subject if over == "subject" else names.member(), 0)
        try:
            await bus.publish(subject, b"%d" % i, expect=expect)
        except Conflict:
            return False
        return True

    wins = await asyncio.gather(*(race(i) for i in range(8)))
    assert sum(wins) == 1
    found = await bus.last_each(names.shard(0).fence() if over == "subject" else names.member())
    assert [record.payload for record in found] == [b"%d" % wins.index(True)]


@pytest.mark.parametrize("declared", [True, False])
async def test_what_is_not_there_is_none(bus: Bus, run_id: str, declared: bool) -> None:
    names = Subjects(run_id)
    await bus.declare(specs(run_id) if declared else ())
    assert await bus.last(names.ledger("run")) is None
    assert await bus.last_each(names.commit()) == []
    for sequence in (0, 1, 7):
        assert await bus.get(names.stream("LEDGER"), sequence) is None


async def test_publishing_into_no_stream_says_what_to_do(bus: Bus, run_id: str) -> None:
    with pytest.raises(BusError, match="declare the run's streams first"):
        await bus.publish(Subjects(run_id).ledger("run"), b"x")


async def test_a_message_above_max_payload_is_refused_and_the_bus_lives_on(
    bus: Bus, names: Subjects
) -> None:
    with pytest.raises(BrokerUnfit, match=r"max_payload.*sync\.chunk_bytes"):
        await bus.publish(
            names.shard(0).chunk(0, "snapshot", 0, 0), bytes(bus.max_payload_bytes + 1)
        )
    assert (await bus.publish(names.shard(0).chunk(0, "snapshot", 0, 0), b"x")).sequence == 1


@pytest.mark.parametrize("count", [5, 60])
async def test_get_each_brings_what_is_there_up_to_a_gap(
    bus: Bus, names: Subjects, count: int
) -> None:
    for i in range(count):
        await bus.publish(names.shard(0).chunk(0, "snapshot", 0, i), bytes([i]) * 100_000)
        await bus.publish(names.shard(0).chunk(1, "snapshot", 0, i), b"of another fragment")
    wanted = [2 * i + 1 for i in range(count)]

    found = await all_of(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), [*wanted, 10_000]))
    assert [record.sequence for record in found] == wanted
    assert all(r.subject == names.shard(0).chunk(0, "snapshot", 0, r.payload[0]) for r in found)
    assert all(len(record.payload) == 100_000 for record in found)

    await bus.publish(names.shard(0).chunk(0, "snapshot", 0, 3), b"newer")
    found = await all_of(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted))
    assert [record.sequence for record in found] == wanted[:3]
    found = await all_of(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), wanted[4:]))
    assert [record.sequence for record in found] == wanted[4:]


async def test_get_each_finds_what_lies_elsewhere(bus: Bus, names: Subjects) -> None:
    """The pattern says where to look first, and no more."""
    for i in range(40):
        await bus.publish(names.shard(0).chunk(i % 2, "snapshot", 0, i), b"%d" % i)

    found = await all_of(bus.get_each(names.shard(0).chunk(0, "snapshot", 0), range(1, 41)))

    assert [int(record.payload) for record in found] == list(range(40))


async def test_get_each_of_a_stream_that_is_not_there_brings_nothing(bus: Bus, run_id: str) -> None:
    for count in (2, 60):
        wanted = range(1, count)
        assert (
            await all_of(bus.get_each(Subjects(run_id).shard(0).chunk(0, "snapshot", 0), wanted))
            == []
        )


async def test_last_each_is_in_sequence_order(bus: Bus, names: Subjects) -> None:
    for fragment in (3, 1, 2, 1):
        await bus.publish(names.commit(fragment), b"%d" % fragment)
    found = await bus.last_each(names.commit())
    assert [(r.sequence, r.payload) for r in found] == [(1, b"3"), (3, b"2"), (4, b"1")]


async def test_last_each_finds_more_subjects_than_one_request_may_ask_for(
    bus: Bus, names: Subjects
) -> None:
    count = 1100
    await asyncio.gather(
        *(bus.publish(names.shard(0).manifest(i), b"%d" % i) for i in range(count))
    )
    found = await bus.last_each(names.shard(0).manifest())
    assert {record.payload for record in found} == {b"%d" % i for i in range(count)}
    assert [r.sequence for r in found] == sorted(r.sequence for r in found)


async def test_last_each_finds_more_bytes_than_one_page_holds(bus: Bus, names: Subjects) -> None:
    payload, count = bytes(900_000), 24
    for i in range(count):
        await bus.publish(names.shard(0).chunk(0, "snapshot", 0, i), payload)
    found = await bus.last_each(names.shard(0).chunk(0, "snapshot", 0))
    assert [record.subject for record in found] == [
        names.shard(0).chunk(0, "snapshot", 0, i) for i in range(count)
    ]


async def test_last_per_subject_keeps_only_the_newest(bus: Bus, names: Subjects) -> None:
    for i in range(3):
        await bus.publish(names.shard(0).manifest(0), b"%d" % i)
    await bus.publish(names.shard(0).manifest(1), b"other")
    assert await bus.get(names.shard(0).stream("STATE"), 2) is None
    assert [r.payload for r in await bus.last_each(names.shard(0).manifest())] == [b"2", b"other"]


async def test_a_window_drops_the_oldest_of_any_subject(bus: Bus, run_id: str) -> None:
    names = Subjects(run_id)
    await bus.declare((window(run_id, 10_000),))
    for i in range(6):
        await bus.publish(names.shard(0).contribution(i, "a"), bytes(3_000))
    kept = await bus.last_each(names.shard(0).contribution())
    assert [record.sequence for record in kept] == [4, 5, 6]


async def test_a_stream_that_may_not_drop_says_that_it_is_full(bus: Bus, run_id: str) -> None:
    names = Subjects(run_id)
    ledger = next(s for s in specs(run_id) if s.retention is Retention.EVERYTHING)
    await bus.declare((replace(ledger, max_bytes=5_000),))
    await bus.publish(names.commit(0), bytes(3_000))
    with pytest.raises(StorageFull):
        await bus.publish(names.commit(1), bytes(3_000))
    assert [r.sequence for r in await bus.last_each(names.commit())] == [1]


async def test_a_stream_of_members_keeps_the_newest_few_of_each(bus: Bus, names: Subjects) -> None:
    await bus.publish(names.member("a"), b"a")
    few = PER_SUBJECT[Retention.FEW_PER_SUBJECT]
    for i in range(few + 6):
        await bus.publish(names.member("b"), b"%d" % i)
    found = await followed(bus, names.member(), few + 1)
    assert [r.payload for r in found] == [b"a", *(b"%d" % i for i in range(6, few + 6))]
    assert [r.payload for r in await bus.last_each(names.member())] == [b"a", b"%d" % (few + 5)]


async def test_a_message_that_is_too_long_for_its_stream_is_refused(
    bus: Bus, names: Subjects
) -> None:
    with pytest.raises(BusError, match=r"longer than|exceeds"):
        await bus.publish(names.member("a"), bytes(MEMBER_BYTES + 1))
    await bus.publish(names.member("a"), bytes(MEMBER_BYTES - 1000))
    assert len((await newest(bus, names.member())).payload) == MEMBER_BYTES - 1000


async def test_declaring_twice_changes_nothing(bus: Bus, names: Subjects) -> None:
    await bus.publish(names.ledger("run"), b"x")
    assert await bus.declare(specs(names.run)) == ()
    assert await bus.last(names.ledger("run")) is not None


async def test_two_services_can_declare_at_once(bus: Bus, run_id: str) -> None:
    both = await asyncio.gather(bus.declare(specs(run_id)), bus.declare(specs(run_id)))
    assert list(both) == [(), ()]


async def test_a_difference_is_changed_and_reported(bus: Bus, names: Subjects) -> None:
    wanted = specs(names.run, window_bytes=10_000_000)
    (sentence,) = await bus.declare(wanted)
    assert "max_bytes is 67108864, should be 10000000" in sentence
    assert await bus.declare(wanted) == ()


@pytest.mark.parametrize(
    ("name", "value"),
    [("storage", Storage.MEMORY), ("retention", Retention.EVERYTHING)],
)
async def test_what_cannot_be_changed_in_place_is_drift(
    bus: Bus, names: Subjects, name: str, value: str
) -> None:
    state = next(s for s in specs(names.run) if "STATE" in s.name)
    with pytest.raises(StreamDrift, match=r"another run id.*loses what it holds") as caught:
        await bus.declare((replace(state, **{name: value}),))
    is_, should = getattr(state, name), value
    assert caught.value.drift == (f"stream {state.name}: {name} is {is_}, should be {should}",)
    assert await bus.declare((state,)) == ()


async def test_streams_lists_what_is_in_the_log(bus: Bus, names: Subjects) -> None:
    await bus.publish(names.commit(0), b"a")
    await bus.publish(names.commit(0), b"b")
    found = {i.name: i for i in await bus.streams() if f"_{names.run}_" in i.name}
    assert sorted(found) == sorted(spec.name for spec in specs(names.run))
    ledger = found[names.stream("LEDGER")]
    assert (ledger.messages, ledger.first_seq, ledger.last_seq) == (2, 1, 2)
    assert ledger.bytes > 2
    assert ledger.spec == specs(names.run)[0]


async def test_a_follower_sees_old_and_new_in_order(bus: Bus, names: Subjects) -> None:
    for i in range(50):
        await bus.publish(names.commit(i % 3), b"%d" % i)
    async with aclosing(bus.follow(names.commit())) as records:
        old = await take(records, 50)
        for i in range(50, 100):
            await bus.publish(names.commit(i % 3), b"%d" % i)
        new = await take(records, 50)
    assert [int(record.payload) for record in old + new] == list(range(100))


async def test_a_waiting_follower_hears_of_a_new_message(bus: Bus, names: Subjects) -> None:
    async with aclosing(bus.follow(names.pulse())) as records:
        waiting = asyncio.ensure_future(take(records, 1))
        await asyncio.sleep(0)
        await bus.publish(names.pulse("a"), b"x")
        assert [record.payload for record in await waiting] == [b"x"]


async def test_a_follower_sees_only_its_subjects(bus: Bus, names: Subjects) -> None:
    await bus.publish(names.ledger("run"), b"run")
    await bus.publish(names.commit(0), b"commit")
    await bus.publish(names.quarantine("a"), b"quarantine")
    found = await followed(bus, (names.ledger("run"), names.quarantine()), 2)
    assert [record.payload for record in found] == [b"run", b"quarantine"]


@pytest.mark.parametrize("deliver", [Deliver.NEW, Deliver.LIVE])
async def test_a_follower_of_the_new_skips_the_old(
    bus: Bus, names: Subjects, deliver: Deliver
) -> None:
    await bus.publish(names.commit(0), b"old")
    async with aclosing(bus.follow(names.commit(), deliver=deliver)) as records:
        waiting = asyncio.ensure_future(anext(records))
        published = 0
        async with asyncio.timeout(10.0):
            while not waiting.done():
                published += 1
                await bus.publish(names.commit(0), b"new %d" % published)
                await asyncio.sleep(0.01)
        assert (await waiting).payload.startswith(b"new")


async def test_a_follower_of_the_newest_gets_one_per_subject_then_all(
    bus: Bus, names: Subjects
) -> None:
    for i in range(4):
        await bus.publish(names.commit(i % 2), b"%d" % i)
    follower = bus.follow(names.commit(), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower) as records:
        found = await take(records, 2)
        for i in range(4, 7):
            await bus.publish(names.commit(0), b"%d" % i)
        while found[-1].sequence < 7:
            found += await take(records, 1)
    # A replica that lags begins with what was newest there.
    exact = found if type(bus).__name__ != "Replicated" else found[-5:]
    assert [int(record.payload) for record in exact] == [2, 3, 4, 5, 6]


async def test_a_follower_goes_on_behind_a_sequence(bus: Bus, names: Subjects) -> None:
    for i in range(5):
        await bus.publish(names.commit(0), b"%d" % i)
    found = await followed(bus, names.commit(), 2, deliver=Deliver.NEW, after=3)
    assert [record.sequence for record in found] == [4, 5]


async def test_a_follower_skips_what_retention_dropped(bus: Bus, run_id: str) -> None:
    names = Subjects(run_id)
    await bus.declare((window(run_id, 10_000),))
    for _ in range(6):
        await bus.publish(names.shard(0).contribution(0, "a"), bytes(3_000))
    found = list[int]()
    async with asyncio.timeout(20.0):  # a replica drops a message a moment after the leader
        while found != [4, 5, 6]:
            records = await followed(bus, names.shard(0).contribution(), 3, after=1)
            found = [record.sequence for record in records]


async def test_a_follower_waits_for_a_stream_that_is_not_there(bus: Bus, run_id: str) -> None:
    names = Subjects(run_id)
    async with aclosing(bus.follow(names.commit())) as records:
        waiting = asyncio.ensure_future(take(records, 1))
        await asyncio.sleep(0)
        await bus.declare(specs(run_id))
        await bus.publish(names.commit(0), b"x")
        assert [record.payload for record in await waiting] == [b"x"]


async def test_a_follower_behind_the_end_of_a_newer_stream_starts_over(
    bus: Bus, names: Subjects
) -> None:
    await bus.publish(names.pulse("a"), b"x")
    found = await followed(bus, names.pulse(), 1, after=1_000)
    assert [record.sequence for record in found] == [1]


async def test_a_follower_carries_large_messages_in_bulk(bus: Bus, names: Subjects) -> None:
    count = 60
    for i in range(count):
        subject = names.shard(0).contribution(i, "a")
        await bus.publish(subject, bytes([i]) * 600_000, msg_id=f"{i}")
    found = await followed(bus, names.shard(0).contribution(), count)
    assert [(r.sequence, r.payload[0], len(r.payload)) for r in found] == [
        (i + 1, i, 600_000) for i in range(count)
    ]


async def test_two_followers_do_not_share_messages(bus: Bus, names: Subjects) -> None:
    for i in range(10):
        await bus.publish(names.commit(0), b"%d" % i)
    one, two = await asyncio.gather(*(followed(bus, names.commit(), 10) for _ in range(2)))
    assert one == two
