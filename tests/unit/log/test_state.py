"""The fenced double-buffer commit and the reads that start from its manifest."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.schemes import SCHEMES
from skerry.errors import Conflict, Corrupt, Fenced, Overtaken, StateLost
from skerry.log import fences, ledger, run_records, state
from skerry.log.base import Deliver, Record
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.state import MASTER, PARAMS
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import CheckpointRecord, Commit, Manifest
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects
from tests.support.builders import commit
from tests.support.learners import walk

RUN = "t"
PLAN = plan([LeafSpec("w", (40, 100)), LeafSpec("b", (7,))], 2)


def draft(fragment: int, version: int) -> Commit:
    return commit(version, fragment, run=RUN, plan_digest=PLAN.digest, step=version * 10)


async def connected() -> MemoryBus:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    return bus


async def writer(bus: MemoryBus, holder: str = "a", now_ns: int = 1) -> StateWriter:
    return await StateWriter.acquire(bus, RUN, PLAN, holder=holder, now_ns=now_ns, chunk_bytes=4096)


def parts(version: int, fragment: int = 0) -> list[NewPart]:
    vector = walk(PLAN.fragments[fragment], version)
    return [
        NewPart(PARAMS, "bf16", vector),
        NewPart(MASTER, "f32", vector),
        NewPart("outer.count", "f32", np.zeros(256, np.float32)),
    ]


async def test_master_reads_back_bit_exact() -> None:
    bus = await connected()
    await (await writer(bus)).commit(draft(0, 1), parts(1), None)
    found = await state.read_latest(bus, RUN, PLAN, PLAN.fragments[0])
    assert found is not None
    manifest, vectors = found
    assert manifest.commit.version == 1
    np.testing.assert_array_equal(vectors[MASTER], walk(PLAN.fragments[0], 1))
    assert vectors["outer.count"].size == 256


async def test_params_read_back_as_the_manifest_digests_them() -> None:
    bus = await connected()
    manifest = await (await writer(bus)).commit(draft(0, 1), parts(1), None)
    vector = await state.read_part(bus, RUN, PLAN, manifest, PARAMS)
    np.testing.assert_allclose(vector, walk(PLAN.fragments[0], 1), rtol=2**-8)
    assert not np.array_equal(vector, walk(PLAN.fragments[0], 1))


@pytest.mark.parametrize("scheme", SCHEMES)
@given(st.integers(0, 2**32 - 1), st.floats(-40, 30), st.sampled_from([0.0, -0.0, 1e-45, 3e38]))
@settings(max_examples=20)
def test_the_digest_of_what_is_at_hand_is_that_of_what_readers_decode(
    scheme: str, seed: int, exponent: float, special: float
) -> None:
    fragment = PLAN.fragments[0]
    noise = np.random.default_rng(seed).standard_normal(fragment.padded_size)
    vector = (noise * 10.0**exponent).astype(np.float32)
    vector[::7] = special

    async def write_and_read() -> None:
        bus = await connected()
        written = [NewPart(PARAMS, scheme, vector), NewPart(MASTER, "f32", vector)]
        manifest = await (await writer(bus)).commit(draft(0, 1), written, None)
        read = await state.read_part(bus, RUN, PLAN, manifest, PARAMS)
        assert vector_digest(read) == manifest.commit.params_digest

    asyncio.run(write_and_read())


async def test_next_version_goes_to_the_spare_slot() -> None:
    bus = await connected()
    mine = await writer(bus)
    first = await mine.commit(draft(0, 1), parts(1), None)
    second = await mine.commit(draft(0, 2), parts(2), first)
    assert (first.slot, second.slot) == (0, 1)
    still = await state.read_part(bus, RUN, PLAN, first, MASTER)
    np.testing.assert_array_equal(still, walk(PLAN.fragments[0], 1))


async def test_reader_of_an_overwritten_slot_is_told_so() -> None:
    bus = await connected()
    mine = await writer(bus)
    first = await mine.commit(draft(0, 1), parts(1), None)
    second = await mine.commit(draft(0, 2), parts(2), first)
    await mine.commit(draft(0, 3), parts(3), second)
    with pytest.raises(Overtaken):
        await state.read_part(bus, RUN, PLAN, first, MASTER)


async def test_overtaken_writer_is_refused_and_changes_nothing() -> None:
    bus = await connected()
    late = await writer(bus, "late", 1)
    first = await late.commit(draft(0, 1), parts(1), None)
    await writer(bus, "new", 2)
    with pytest.raises(Fenced, match="'late' steps down"):
        await late.commit(draft(0, 2), parts(2), first)
    manifests = await state.read_manifests(bus, RUN, PLAN)
    assert manifests[0] == first


async def test_recover_appends_a_commit_that_the_ledger_lacks() -> None:
    bus = await connected()
    mine = await writer(bus)
    first = await mine.commit(draft(0, 1), parts(1), None)
    manifest = dataclasses.replace(
        first, commit=dataclasses.replace(first.commit, version=2, step=20)
    )
    await bus.publish(Subjects(RUN).manifest(0), encode(manifest))
    assert (await ledger.last_commits(bus, RUN))[0].version == 1
    await (await writer(bus, "next", 2)).recover()
    assert (await ledger.last_commits(bus, RUN))[0] == manifest.commit


async def test_recover_twice_appends_once() -> None:
    bus = await connected()
    mine = await writer(bus)
    await mine.commit(draft(0, 1), parts(1), None)
    await mine.recover()
    await mine.recover()
    info = {s.name: s for s in await bus.streams()}
    assert info[Subjects(RUN).stream("LEDGER")].messages == 1


async def test_foreign_chunk_under_a_manifest_is_corrupt() -> None:
    bus = await connected()
    mine = await writer(bus)
    first = await mine.commit(draft(0, 1), parts(1), None)
    second = await mine.commit(draft(0, 2), parts(2), first)
    swapped = dataclasses.replace(second, commit=first.commit)
    with pytest.raises(Corrupt, match="another fragment, version or part"):
        await state.read_part(bus, RUN, PLAN, swapped, MASTER)


async def test_one_vector_under_two_names_is_stored_once() -> None:
    bus = await connected()
    mine = await writer(bus)
    vector = walk(PLAN.fragments[0], 1)
    both = [NewPart(PARAMS, "f32", vector), NewPart(MASTER, "f32", vector)]
    more = NewPart("outer.momentum", "f32", vector.copy())
    manifest = await mine.commit(draft(0, 1), [*both, more], None)
    params, master, outer = manifest.parts
    assert params.chunks == master.chunks
    assert not {c.sequence for c in outer.chunks} & {c.sequence for c in params.chunks}
    for name in (PARAMS, MASTER, "outer.momentum"):
        np.testing.assert_array_equal(
            await state.read_part(bus, RUN, PLAN, manifest, name), vector, strict=True
        )
    second = await mine.commit(draft(0, 2), parts(2), manifest)
    np.testing.assert_array_equal(
        await state.read_part(bus, RUN, PLAN, second, MASTER), parts(2)[1].vector
    )


async def test_chunks_of_another_part_are_refused() -> None:
    bus = await connected()
    first, second, *rest = (await (await writer(bus)).commit(draft(0, 1), parts(1), None)).parts
    held = await state.read_manifest(bus, RUN, PLAN, 0)
    assert held is not None
    swapped = (
        dataclasses.replace(first, chunks=second.chunks, scheme=second.scheme),
        dataclasses.replace(second, chunks=first.chunks, scheme=first.scheme),
    )
    odd = dataclasses.replace(held, parts=(*swapped, *rest))
    for name in (PARAMS, MASTER):
        with pytest.raises(Corrupt, match="another fragment, version or part"):
            await state.read_part(bus, RUN, PLAN, odd, name)


async def test_manifest_names_digests_of_what_is_stored() -> None:
    bus = await connected()
    manifest = await (await writer(bus)).commit(draft(0, 1), parts(1), None)
    record = await bus.last(Subjects(RUN).commit(0))
    assert record is not None
    commit = decode(Commit, record.payload, run=RUN)
    digests = {p.name: p.digest for p in manifest.parts}
    assert (commit.params_digest, commit.master_digest) == (digests[PARAMS], digests[MASTER])


async def test_overtaken_writer_is_told_without_writing_anything() -> None:
    bus = await connected()
    late = await writer(bus, "late", 1)
    holding = asyncio.ensure_future(late.hold())
    await late.check()
    await writer(bus, "new", 2)
    with pytest.raises(Fenced, match="'late' steps down"):
        await asyncio.wait_for(holding, 5)
    with pytest.raises(Fenced, match="'late' steps down"):
        await late.check()


async def test_holder_that_is_shown_an_older_fence_goes_on_until_a_newer_one_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica that lags behind shows a new consumer the predecessor's fence first."""
    bus = await connected()
    older = await writer(bus, "older", 1)
    rightful = await writer(bus, "rightful", 2)
    shown = [fences.Held(0, older.token, "older"), fences.Held(0, rightful.token, "rightful")]
    shown.append(fences.Held(0, rightful.token + 9, "newer"))
    seen: list[int] = []

    async def follow(*_: object) -> AsyncGenerator[fences.Held]:
        for held in shown:
            seen.append(held.token)
            yield held

    monkeypatch.setattr(fences, "follow_fences", follow)
    with pytest.raises(Fenced, match="'rightful' steps down"):
        await rightful.hold()
    assert seen == [held.token for held in shown]


async def test_manifest_that_cannot_be_read_ends_no_reader() -> None:
    bus = await connected()
    mine = await writer(bus)
    first = await mine.commit(draft(0, 1), parts(1), None)
    await bus.publish(Subjects(RUN).manifest(1), b"rubbish")
    second = await mine.commit(draft(0, 2), parts(2), first)
    manifests = run_records.follow(bus, RUN, Manifest, PLAN.digest)
    async with asyncio.timeout(5), aclosing(manifests):
        assert await anext(manifests) == second


@pytest.mark.parametrize("times", [2, 4])
async def test_outer_state_wider_than_its_fragment_reads_back(times: int) -> None:
    bus = await connected()
    wide = np.tile(walk(PLAN.fragments[0], 1), times)
    stored = [*parts(1), NewPart("outer.wide", "f32", wide)]
    manifest = await (await writer(bus)).commit(draft(0, 1), stored, None)
    found = await state.read_part(bus, RUN, PLAN, manifest, "outer.wide")
    np.testing.assert_array_equal(found, wide)


async def test_a_part_that_is_not_what_the_manifest_digests_is_refused() -> None:
    bus = await connected()
    manifest = await (await writer(bus)).commit(draft(0, 1), parts(1), None)
    other = tuple(dataclasses.replace(part, digest=part.digest ^ 1) for part in manifest.parts)
    with pytest.raises(Corrupt, match="does not match its manifest's digest"):
        await state.read_part(bus, RUN, PLAN, dataclasses.replace(manifest, parts=other), PARAMS)


def flipped(data: bytes, at: int) -> bytes:
    """Return a copy with one bit turned over."""
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize(
    "damage",
    [
        *(lambda data, at=at: flipped(data, at) for at in (9, 17, 26, 200)),
        lambda data: data[:-1],
        lambda data: data + b"\0",
    ],
    ids=["frame", "checksum", "header", "payload", "shorter", "longer"],
)
async def test_a_chunk_that_is_not_the_one_the_manifest_names_is_not_decoded(
    damage: Callable[[bytes], bytes],
) -> None:
    bus = await connected()
    manifest = await (await writer(bus)).commit(draft(0, 1), parts(1), None)
    ref = manifest.parts[0].chunks[0]
    held = bus.broker.streams[Subjects(RUN).stream("STATE")].records
    before = held[ref.sequence]
    held[ref.sequence] = dataclasses.replace(before, payload=damage(before.payload))
    with pytest.raises(Corrupt, match="does not match the manifest that names it"):
        await state.read_part(bus, RUN, PLAN, manifest, PARAMS)


def lose(bus: MemoryBus, subject: str) -> None:
    """Delete the newest message of a subject, as an operator or a truncated store does."""
    stream = bus.broker.streams[Subjects(RUN).stream("STATE")]
    stream.drop(stream.newest[subject])


async def lost_run() -> tuple[MemoryBus, Manifest]:
    """Return a log whose fragments are at version 2, with a checkpoint of version 1."""
    bus = await connected()
    mine = await writer(bus)
    for fragment in (0, 1):
        manifest = await mine.commit(draft(fragment, 1), parts(1, fragment), None)
        manifest = await mine.commit(draft(fragment, 2), parts(2, fragment), manifest)
    saved = CheckpointRecord(RUN, "/saved/step-00000010", "d", (1, 1), 10, 1, 1, 1)
    await ledger.record_checkpoint(bus, saved)
    return bus, manifest


async def recovered(bus: MemoryBus) -> dict[int, Manifest]:
    return await (await writer(bus, "next", 2)).recover()


async def test_missing_manifest_is_named_with_the_checkpoint_that_holds_the_fragment() -> None:
    bus, _ = await lost_run()
    lose(bus, Subjects(RUN).manifest(1))
    with pytest.raises(StateLost) as raised:
        await recovered(bus)
    said = str(raised.value)
    assert "Run 't' has lost fragment 1 at version 2: its manifest is not in the log" in said
    assert "/saved/step-00000010 at step 10, holds version 1" in said


async def test_missing_state_without_a_checkpoint_says_that_there_is_no_source() -> None:
    bus = await connected()
    await (await writer(bus)).commit(draft(0, 1), parts(1), None)
    lose(bus, Subjects(RUN).manifest(0))
    with pytest.raises(StateLost, match="names no checkpoint of it, and what learners hold is no"):
        await recovered(bus)


async def test_state_stream_that_was_removed_is_lost_and_not_begun_anew() -> None:
    bus, _ = await lost_run()
    del bus.broker.streams[Subjects(RUN).stream("STATE")]
    await bus.declare(specs(RUN))
    with pytest.raises(StateLost, match="fragment 0 at version 2"):
        await recovered(bus)


async def test_state_that_is_older_than_the_ledger_is_lost() -> None:
    bus, manifest = await lost_run()
    older = dataclasses.replace(manifest, commit=dataclasses.replace(manifest.commit, version=1))
    await bus.publish(Subjects(RUN).manifest(1), encode(older))
    with pytest.raises(
        StateLost, match="version 2: the newest manifest in the log is of version 1"
    ):
        await recovered(bus)


async def test_manifest_that_cannot_be_read_is_lost_state() -> None:
    bus, _ = await lost_run()
    await bus.publish(Subjects(RUN).manifest(0), b"rubbish")
    with pytest.raises(StateLost, match="fragment 0 at version 2: its manifest cannot be read"):
        await recovered(bus)


async def test_missing_chunk_of_the_newest_version_is_lost_and_not_overtaken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "LOST_PAUSE_S", 0.0)
    bus, manifest = await lost_run()
    part = next(part for part in manifest.parts if part.name == MASTER)
    bus.broker.streams[Subjects(RUN).stream("STATE")].drop(part.chunks[0].sequence)
    with pytest.raises(StateLost) as raised:
        await state.read_latest(bus, RUN, PLAN, PLAN.fragments[1])
    where = f"the chunk of its 'master' at sequence {part.chunks[0].sequence} of SKERRY_t_STATE"
    assert f"fragment 1 at version 2: {where} is not in the log" in str(raised.value)


async def test_chunk_that_a_lagging_replica_does_not_have_yet_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(state, "LOST_PAUSE_S", 0.0)
    bus, manifest = await lost_run()
    get, asked = bus.get, list[int]()

    async def lagging(stream: str, sequence: int) -> object:
        asked.append(sequence)
        return None if asked.count(sequence) < 4 else await get(stream, sequence)

    monkeypatch.setattr(bus, "get", lagging)
    vector = await state.read_part(bus, RUN, PLAN, manifest, MASTER)
    np.testing.assert_array_equal(vector, walk(PLAN.fragments[1], 2))


async def test_recovery_reads_up_to_its_own_fence_whatever_a_replica_answers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, manifest = await lost_run()

    async def nothing(_pattern: str) -> list[object]:
        return []

    mine = await writer(bus, "next", 2)
    monkeypatch.setattr(bus, "last_each", nothing)
    assert (await mine.recover())[1] == manifest


async def test_recovery_goes_on_reading_behind_an_older_fence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replica that lags yields what was newest there first, and the rest as it comes."""
    bus, manifest = await lost_run()
    older = await bus.last(Subjects(RUN).fence(0))
    mine = await writer(bus, "next", 2)
    follow = bus.follow

    async def lagging(pattern: list[str], *, deliver: Deliver) -> AsyncGenerator[Record | None]:
        yield older
        follower = follow(pattern, deliver=deliver)
        async with aclosing(follower):
            async for record in follower:
                yield record

    async def nothing(_pattern: str) -> list[object]:
        return []

    monkeypatch.setattr(bus, "follow", lagging)
    monkeypatch.setattr(bus, "last_each", nothing)
    assert (await mine.recover())[1] == manifest


async def test_writer_of_a_shard_minds_its_own_fragments_only() -> None:
    bus, _ = await lost_run()
    lose(bus, Subjects(RUN).manifest(1))
    mine = await StateWriter.acquire(bus, RUN, PLAN, holder="a", now_ns=5, shard=0, shards=2)
    assert list(await mine.recover()) == [0]
    assert [f.index for f in mine.fragments] == [0]


async def test_fences_of_different_shards_refuse_nobody_else() -> None:
    bus = await connected()
    first = await StateWriter.acquire(bus, RUN, PLAN, holder="a", now_ns=1, shard=0, shards=2)
    await StateWriter.acquire(bus, RUN, PLAN, holder="b", now_ns=1, shard=1, shards=2)
    await first.check()
    await first.commit(draft(0, 1), parts(1), None)


async def test_fence_is_taken_over_from_the_token_that_was_known_only() -> None:
    bus = await connected()
    held = await StateWriter.acquire(bus, RUN, PLAN, holder="a", now_ns=1, over=0)
    with pytest.raises(Conflict):
        await StateWriter.acquire(bus, RUN, PLAN, holder="b", now_ns=2, over=0)
    taken = await StateWriter.acquire(bus, RUN, PLAN, holder="b", now_ns=2, over=held.token)
    assert taken.token > held.token
