"""No stored message, whatever its sender put into it, blinds those who read around it."""

from __future__ import annotations

from contextlib import aclosing

import pytest

from skerry.log.base import MSG_ID, Bus, Expect
from skerry.protocol.subjects import Subjects
from tests.support.log import REAL_LOGS, all_of, newest, take
from tests.support.raw_nats import raw_publisher

STATUSES = ("100", "204", "404", "408", "409", "413", "503")
HEADERS = {
    "idle heartbeat": b"NATS/1.0 100 Idle Heartbeat\r\n\r\n",
    "not found": b"NATS/1.0 404\r\n\r\n",
    "end of batch": b"NATS/1.0 204 EOB\r\nNats-Num-Pending: 9\r\nNats-Last-Sequence: 9\r\n\r\n",
    "no responders": b"NATS/1.0 503\r\n\r\n",
    "no text in a status": b"NATS/1.0 100 \xff\xfe\r\n\r\n",
    "no text in a value": b"NATS/1.0\r\nA: \xff\xfe\r\n\r\n",
    "no text in a name": b"NATS/1.0\r\n\xff\xfe: a\r\n\r\n",
    "another message's place": b"NATS/1.0\r\nNats-Sequence: 1\r\nNats-Subject: a\r\n"
    b"Nats-Time-Stamp: never\r\n\r\n",
    "no end": b"NATS/1.0\r\nA: b",
    "no header": b"A",
    "zeros": bytes(64),
    "very long": b"NATS/1.0\r\nA: " + b"a" * 60_000 + b"\r\n\r\n",
}
TOKENS = {
    "no text": b"\xff\xfe",
    "form feed": b"a\x0cb",
    "vertical tab": b"a\x0bb",
    "control characters": b"\x01\x1b[2J",
    "very long": b"a" * 3_500,
}


async def _readable(bus: Bus, names: Subjects, around: int) -> None:
    """Check that every way of reading brings what lies around the message at a sequence."""
    stream = names.stream("LEDGER")
    total = 2 * around - 1
    async with aclosing(bus.follow(f"{names.root}.ledger.>")) as records:
        followed = await take(records, total)
    assert [record.sequence for record in followed] == list(range(1, total + 1))
    got = [await bus.get(stream, sequence) for sequence in range(1, total + 1)]
    assert [record and record.sequence for record in got] == list(range(1, total + 1))
    bulk = await all_of(bus.get_each(f"{names.root}.ledger.>", range(1, total + 1)))
    assert [record.sequence for record in bulk] == list(range(1, total + 1))
    assert (await newest(bus, names.commit(1))).sequence == total
    every = await bus.last_each(f"{names.root}.ledger.>")
    assert [record.sequence for record in every][-1] == total
    assert {around - 1, total} <= {record.sequence for record in every}
    payloads = [record.payload for record in followed]
    assert payloads == [record.payload for record in bulk]
    assert payloads[around:] == [b"after"] * (around - 1)


@pytest.mark.parametrize("status", STATUSES)
async def test_a_record_with_the_header_of_a_status_is_a_record(
    bus: Bus, names: Subjects, status: str
) -> None:
    for _ in range(10):
        await bus.publish(names.commit(0), b"before")
    subject = names.quarantine("x")
    await bus.publish(subject, b"", headers={"Status": status, "Description": "Idle Heartbeat"})
    for _ in range(10):
        await bus.publish(names.commit(1), b"after")
    await _readable(bus, names, 11)
    record = await newest(bus, subject)
    assert (record.sequence, record.payload, record.headers["Status"]) == (11, b"", status)


real = pytest.mark.parametrize("bus", REAL_LOGS, indirect=True)
"""The memory log's headers and subjects are text."""


def url_of(request: pytest.FixtureRequest, bus: Bus) -> str:
    """Return where a real log is."""
    kind = "cluster" if type(bus).__name__ == "Replicated" else "shared_nats"
    url: str = request.getfixturevalue(kind).url
    return url


@real
@pytest.mark.parametrize(
    ("token", "header"),
    [
        *(pytest.param(b"x", header, id=name) for name, header in HEADERS.items()),
        *(pytest.param(token, b"", id=f"subject: {name}") for name, token in TOKENS.items()),
    ],
)
async def test_no_header_and_no_subject_blinds_a_reader(
    request: pytest.FixtureRequest, bus: Bus, names: Subjects, token: bytes, header: bytes
) -> None:
    for _ in range(10):
        await bus.publish(names.commit(0), b"before")
    async with raw_publisher(url_of(request, bus)) as raw:
        subject = b"%s.ledger.quarantine.%s" % (names.root.encode(), token)
        await raw.publish(subject, b"" if header else b"x", header)
    for _ in range(10):
        await bus.publish(names.commit(1), b"after")
    await _readable(bus, names, 11)
    assert token != b"x" or await bus.last(names.quarantine("x")) is not None


@real
async def test_many_very_long_subjects_hide_no_other(
    request: pytest.FixtureRequest, bus: Bus, names: Subjects
) -> None:
    await bus.publish(names.shard(0).manifest(0), b"of ours")
    async with raw_publisher(url_of(request, bus)) as raw:
        for i in range(1_200):
            long = b"a" * 3_700
            await raw.publish(b"%s.state.0.%s%d.manifest" % (names.root.encode(), long, i), b"x")
    found = await bus.last_each(names.shard(0).manifest())
    assert found[0].payload == b"of ours"
    assert len(found) == 1_201


async def test_ids_of_two_clients_never_meet(bus: Bus, stranger: Bus, names: Subjects) -> None:
    await stranger.publish(names.quarantine("x"), b"", msg_id="0/1")
    receipt = await bus.publish(names.commit(0), b"ours", msg_id="0/1")
    assert (receipt.sequence, receipt.duplicate) == (2, False)
    first, second = [await bus.get(names.stream("LEDGER"), sequence) for sequence in (1, 2)]
    assert first is not None
    assert second is not None
    assert first.headers[MSG_ID] != second.headers[MSG_ID]


@pytest.mark.parametrize("same", ["subject", "payload"])
async def test_a_duplicate_of_another_message_is_stored_under_a_fresh_id(
    bus: Bus, stranger: Bus, names: Subjects, same: str
) -> None:
    """Should somebody have guessed an id after all, or seen it in time."""
    thief, victim = (client._publisher for client in (stranger, bus))  # type: ignore[attr-defined] # of each kind
    thief.key = victim.key
    theirs = names.commit(0) if same == "subject" else names.quarantine("x")
    await stranger.publish(theirs, b"ours" if same == "payload" else b"theirs", msg_id="0/1")
    receipt = await bus.publish(names.commit(0), b"ours", msg_id="0/1")
    assert (receipt.sequence, receipt.duplicate) == (2, False)
    again = await bus.publish(names.commit(0), b"ours", msg_id="0/1")
    assert (again.sequence, again.duplicate) == (2, True)


async def test_a_duplicate_of_our_own_message_that_is_gone_is_believed(
    bus: Bus, names: Subjects
) -> None:
    first = await bus.publish(names.pulse("a"), b"old", msg_id="old")
    await bus.publish(names.pulse("a"), b"new", msg_id="new")
    again = await bus.publish(names.pulse("a"), b"old", msg_id="old")
    assert (again.sequence, again.duplicate) == (first.sequence, True)


async def test_a_taken_id_does_not_break_a_compare_and_set(
    bus: Bus, stranger: Bus, names: Subjects
) -> None:
    thief, victim = (client._publisher for client in (stranger, bus))  # type: ignore[attr-defined] # of each kind
    thief.key = victim.key
    await stranger.publish(names.shard(0).chunk(0, "snapshot", 0, 0), b"theirs", msg_id="fence/0")
    expect = Expect(names.shard(0).fence(), 0)
    receipt = await bus.publish(names.shard(0).fence(), b"ours", msg_id="fence/0", expect=expect)
    assert (receipt.sequence, receipt.duplicate) == (2, False)
