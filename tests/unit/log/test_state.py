"""The fenced double-buffer commit and the reads that start from its manifest."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.schemes import SCHEMES
from skerry.errors import Conflict, Corrupt, Fenced, Overtaken, StateLost
from skerry.log import fences, ledger, state
from skerry.log.base import Deliver, Record
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import CheckpointRecord, Commit, Manifest
from skerry.protocol.parts import KEYFRAME, MASTER
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects
from tests.support.builders import commit
from tests.support.learners import walk
from tests.support.log import newest_parts

RUN = "t"
NAMES = Subjects(RUN)
STATE = NAMES.shard(0).stream("STATE")
PLAN = plan([LeafSpec("w", (40, 100)), LeafSpec("b", (7,))], 2)


async def writer(bus: MemoryBus, holder: str = "a", now_ns: int = 1, **more: int) -> StateWriter:
    return await StateWriter.acquire(
        bus, RUN, PLAN, holder=holder, now_ns=now_ns, chunk_bytes=4096, **more
    )


def parts(version: int, fragment: int = 0) -> list[NewPart]:
    vector = walk(PLAN.fragments[fragment], version)
    return [
        NewPart.of(KEYFRAME, "bf16", vector),
        NewPart.of(MASTER, "f32", vector),
        NewPart.of("outer.count", "f32", np.zeros(256, np.float32)),
    ]


async def commit_versions(
    mine: StateWriter, *versions: int, fragment: int = 0, held: Manifest | None = None
) -> list[Manifest]:
    """Commit these versions of a fragment, one after the other."""
    found: list[Manifest] = []
    for version in versions:
        drafted = commit(version, fragment, run=RUN, plan_digest=PLAN.digest, step=version * 10)
        held = await mine.commit(drafted, parts(version, fragment), held)
        found.append(held)
    return found


async def test_a_version_reads_back_as_it_was_committed(bus: MemoryBus) -> None:
    (written,) = await commit_versions(await writer(bus), 1)
    names = [KEYFRAME, MASTER, "outer.count"]
    manifest, vectors = await newest_parts(bus, RUN, PLAN, 0, names)
    assert manifest == written
    expected = walk(PLAN.fragments[0], 1)
    np.testing.assert_array_equal(vectors[MASTER], expected)
    np.testing.assert_allclose(vectors[KEYFRAME], expected, rtol=2**-8)
    assert not np.array_equal(vectors[KEYFRAME], expected)
    assert vectors["outer.count"].size == 256
    record = await bus.last(NAMES.commit(0))
    assert record is not None
    recorded = decode(Commit, record.payload, run=RUN)
    digests = {part.name: part.digest for part in manifest.parts}
    assert (recorded.params_digest, recorded.master_digest) == (digests[KEYFRAME], digests[MASTER])


async def test_what_a_regions_cache_has_wrong_is_read_from_the_log(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of a run before this one was restored: the same sequences, other content."""
    (written,) = await commit_versions(await writer(bus), 1)
    real, asked = MemoryBus.get_each, list[int]()

    async def cached(
        self: MemoryBus, pattern: str, sequences: Sequence[int]
    ) -> AsyncGenerator[Record]:
        async for record in real(self, pattern, sequences):
            asked.append(record.sequence)
            yield replace(record, payload=record.payload[:-1] + b"x")

    monkeypatch.setattr(MemoryBus, "get_each", cached)
    vector = await state.read_part(bus, RUN, PLAN, written, MASTER)
    np.testing.assert_array_equal(vector, walk(PLAN.fragments[0], 1))
    assert asked


@pytest.mark.parametrize("scheme", SCHEMES)
@given(st.integers(0, 2**32 - 1), st.floats(-40, 30), st.sampled_from([0.0, -0.0, 1e-45, 3e38]))
@settings(max_examples=20)
def test_the_digest_of_what_is_at_hand_is_that_of_what_readers_decode(
    scheme: str, seed: int, exponent: float, special: float
) -> None:
    noise = np.random.default_rng(seed).standard_normal(PLAN.fragments[0].padded_size)
    vector = (noise * 10.0**exponent).astype(np.float32)
    vector[::7] = special

    async def write_and_read() -> None:
        bus = MemoryBroker().connect()
        await bus.declare(specs(RUN))
        written = [NewPart.of(KEYFRAME, scheme, vector), NewPart.of(MASTER, "f32", vector)]
        drafted = commit(1, run=RUN, plan_digest=PLAN.digest)
        manifest = await (await writer(bus)).commit(drafted, written, None)
        read = await state.read_part(bus, RUN, PLAN, manifest, KEYFRAME)
        assert vector_digest(read) == manifest.commit.params_digest

    asyncio.run(write_and_read())


@pytest.mark.parametrize(("chunk_bytes", "chunks"), [(4096, 1), (1 << 20, 3)])
async def test_a_reader_of_some_blocks_reads_their_chunks_alone(
    bus: MemoryBus, chunk_bytes: int, chunks: int
) -> None:
    """Where chunks are not as long as the reader thinks it reads all of them."""
    (manifest,) = await commit_versions(await writer(bus), 1)
    own, sizes = state.OwnBlocks((range(3, 5),), chunk_bytes), list[int]()
    vector = await state.read_part(
        bus, RUN, PLAN, manifest, MASTER, own=own, meters=state.Meters(sizes.append)
    )
    wanted = walk(PLAN.fragments[0], 1)
    np.testing.assert_array_equal(vector[3 * 256 : 5 * 256], wanted[3 * 256 : 5 * 256])
    assert len(sizes) == chunks


async def test_versions_take_turns_in_two_slots_and_a_replaced_one_is_overtaken(
    bus: MemoryBus,
) -> None:
    mine = await writer(bus)
    first, second = await commit_versions(mine, 1, 2)
    assert [{part.slot for part in held.parts} for held in (first, second)] == [{0}, {1}]
    still = await state.read_part(bus, RUN, PLAN, first, MASTER)
    np.testing.assert_array_equal(still, walk(PLAN.fragments[0], 1))
    await commit_versions(mine, 3, held=second)
    with pytest.raises(Overtaken):
        await state.read_part(bus, RUN, PLAN, first, MASTER)


async def test_overtaken_writer_is_refused_and_changes_nothing(bus: MemoryBus) -> None:
    late = await writer(bus, "late")
    (first,) = await commit_versions(late, 1)
    holding = asyncio.ensure_future(late.hold())
    await late.check()
    await writer(bus, "new", 2)
    for refused in (commit_versions(late, 2, held=first), late.check(), holding):
        with pytest.raises(Fenced, match="'late' steps down"):
            await asyncio.wait_for(refused, 5)
    assert await state.read_manifests(bus, RUN, PLAN) == {0: first}


async def test_recovery_appends_once_a_commit_that_the_ledger_lacks(bus: MemoryBus) -> None:
    (first,) = await commit_versions(await writer(bus), 1)
    manifest = replace(first, commit=replace(first.commit, version=2, step=20))
    await bus.publish(NAMES.shard(0).manifest(0), encode(manifest))
    assert (await ledger.last_commits(bus, RUN))[0].version == 1
    successor = await writer(bus, "next", 2)
    for _ in range(2):
        await successor.recover()
    assert (await ledger.last_commits(bus, RUN))[0] == manifest.commit
    info = {s.name: s for s in await bus.streams()}
    assert info[NAMES.stream("LEDGER")].messages == 2


@pytest.mark.parametrize("times", [2, 4])
async def test_outer_state_wider_than_its_fragment_reads_back(bus: MemoryBus, times: int) -> None:
    wide = np.tile(walk(PLAN.fragments[0], 1), times)
    stored = [*parts(1), NewPart.of("outer.wide", "f32", wide)]
    drafted = commit(1, run=RUN, plan_digest=PLAN.digest)
    manifest = await (await writer(bus)).commit(drafted, stored, None)
    found = await state.read_part(bus, RUN, PLAN, manifest, "outer.wide")
    np.testing.assert_array_equal(found, wide)


def _of_another_version(held: Manifest) -> Manifest:
    return replace(held, commit=replace(held.commit, version=held.commit.version - 1))


def _with_parts_of_another_version(held: Manifest) -> Manifest:
    return replace(held, parts=tuple(replace(p, version=p.version - 1) for p in held.parts))


def _of_another_part(held: Manifest) -> Manifest:
    first, second, *rest = held.parts
    swapped = (
        replace(first, chunks=second.chunks, scheme=second.scheme),
        replace(second, chunks=first.chunks, scheme=first.scheme),
    )
    return replace(held, parts=(*swapped, *rest))


def _of_another_digest(held: Manifest) -> Manifest:
    return replace(held, parts=tuple(replace(p, digest=p.digest ^ 1) for p in held.parts))


@pytest.mark.parametrize("name", [KEYFRAME, MASTER])
@pytest.mark.parametrize(
    ("forge", "refusal"),
    [
        (_with_parts_of_another_version, "another fragment, version or part"),
        (_of_another_part, "another fragment, version or part"),
        (_of_another_digest, "does not match its manifest's digest"),
        (lambda held: replace(held, parts=()), "has no part"),
    ],
)
async def test_chunks_that_are_not_what_the_manifest_says_are_refused(
    bus: MemoryBus, forge: Callable[[Manifest], Manifest], refusal: str, name: str
) -> None:
    *_, held = await commit_versions(await writer(bus), 1, 2)
    with pytest.raises(Corrupt, match=refusal):
        await state.read_part(bus, RUN, PLAN, forge(held), name)


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
    bus: MemoryBus, damage: Callable[[bytes], bytes]
) -> None:
    (manifest,) = await commit_versions(await writer(bus), 1)
    sequence = manifest.parts[0].chunks[0].sequence
    held = bus.broker.streams[STATE].records
    held[sequence] = replace(held[sequence], payload=damage(held[sequence].payload))
    with pytest.raises(Corrupt, match="does not match the manifest that names it"):
        await state.read_part(bus, RUN, PLAN, manifest, KEYFRAME)


async def test_holder_that_is_shown_an_older_fence_goes_on_until_a_newer_one_comes(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A replica that lags behind shows a new consumer the predecessor's fence first."""
    older, rightful = await writer(bus, "older", 1), await writer(bus, "rightful", 2)
    shown = [
        fences.HeldFence(0, older.token, "older"),
        fences.HeldFence(0, rightful.token, "rightful"),
    ]
    shown.append(fences.HeldFence(0, rightful.token + 9, "newer"))
    seen: list[int] = []

    async def follow(*_: object) -> AsyncGenerator[fences.HeldFence]:
        for held in shown:
            seen.append(held.token)
            yield held

    monkeypatch.setattr(fences, "follow_fence", follow)
    with pytest.raises(Fenced, match="'rightful' steps down"):
        await rightful.hold()
    assert seen == [held.token for held in shown]


async def test_manifest_that_cannot_be_read_ends_no_reader(bus: MemoryBus) -> None:
    mine = await writer(bus)
    (first,) = await commit_versions(mine, 1)
    await bus.publish(NAMES.shard(0).manifest(1), b"rubbish")
    (second,) = await commit_versions(mine, 2, held=first)
    async with (
        asyncio.timeout(5),
        aclosing(state.follow_manifests(bus, RUN, PLAN)) as manifests,
    ):
        assert await anext(manifests) == second


@pytest.fixture
async def manifest(bus: MemoryBus) -> Manifest:
    """The manifest of fragment 1: both are at version 2, and a checkpoint holds version 1."""
    mine = await writer(bus)
    await commit_versions(mine, 1, 2)
    *_, manifest = await commit_versions(mine, 1, 2, fragment=1)
    saved = CheckpointRecord(RUN, "/saved/step-00000010", "d", (1, 1), 10, 1, 1, 1)
    await ledger.record_checkpoint(bus, saved)
    return manifest


async def _manifest_gone(bus: MemoryBus, _: Manifest) -> None:
    stream = bus.broker.streams[STATE]
    stream.drop(stream.newest[NAMES.shard(0).manifest(1)])


async def _stream_gone(bus: MemoryBus, _: Manifest) -> None:
    del bus.broker.streams[STATE]
    await bus.declare(specs(RUN))


async def _manifest_older(bus: MemoryBus, held: Manifest) -> None:
    await bus.publish(NAMES.shard(0).manifest(1), encode(_of_another_version(held)))


async def _manifest_unreadable(bus: MemoryBus, _: Manifest) -> None:
    await bus.publish(NAMES.shard(0).manifest(0), b"rubbish")


@pytest.mark.parametrize(
    ("damage", "lost"),
    [
        (_manifest_gone, "Run 't' has lost fragment 1 at version 2: its manifest is not in the"),
        (_stream_gone, "fragment 0 at version 2"),
        (_manifest_older, "version 2: the newest manifest in the log is of version 1"),
        (_manifest_unreadable, "fragment 0 at version 2: its manifest cannot be read"),
    ],
)
async def test_state_that_the_ledger_knows_and_the_log_lacks_is_named_with_its_source(
    bus: MemoryBus, manifest: Manifest, damage: Callable[..., Awaitable[None]], lost: str
) -> None:
    await damage(bus, manifest)
    with pytest.raises(StateLost, match=lost) as raised:
        await (await writer(bus, "next", 2)).recover()
    assert "/saved/step-00000010 at step 10, holds version 1" in str(raised.value)


async def test_missing_state_without_a_checkpoint_has_no_source(bus: MemoryBus) -> None:
    (manifest,) = await commit_versions(await writer(bus), 1, fragment=1)
    await _manifest_gone(bus, manifest)
    with pytest.raises(StateLost, match="names no checkpoint of it, and what learners hold is no"):
        await (await writer(bus, "next", 2)).recover()


async def test_missing_chunk_of_the_newest_version_is_lost_and_not_overtaken(
    bus: MemoryBus, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LOOK_PAUSES_S", (0.0,) * 8)
    part = next(part for part in manifest.parts if part.name == MASTER)
    sequence = part.chunks[0].sequence
    bus.broker.streams[STATE].drop(sequence)
    where = f"the chunk of its 'master' at sequence {sequence} of SKERRY_t_STATE_0"
    with pytest.raises(StateLost, match=f"fragment 1 at version 2: {where} is not in the log"):
        await newest_parts(bus, RUN, PLAN, 1, [MASTER])


async def test_chunk_that_a_lagging_replica_does_not_have_yet_is_asked_for_again(
    bus: MemoryBus, manifest: Manifest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "LOOK_PAUSES_S", (0.0,) * 8)
    get, asked = bus.get, list[int]()

    async def lagging(stream: str, sequence: int) -> object:
        asked.append(sequence)
        return None if asked.count(sequence) < 4 else await get(stream, sequence)

    monkeypatch.setattr(bus, "get", lagging)
    vector = await state.read_part(bus, RUN, PLAN, manifest, MASTER)
    np.testing.assert_array_equal(vector, walk(PLAN.fragments[1], 2))


@pytest.mark.parametrize("shows_an_older_fence_first", [False, True])
async def test_recovery_reads_up_to_its_own_fence_whatever_a_replica_answers(
    bus: MemoryBus,
    manifest: Manifest,
    monkeypatch: pytest.MonkeyPatch,
    *,
    shows_an_older_fence_first: bool,
) -> None:
    older, mine, follow = (
        await bus.last(NAMES.shard(0).fence()),
        await writer(bus, "next", 2),
        bus.follow,
    )

    async def lagging(pattern: list[str], *, deliver: Deliver) -> AsyncGenerator[Record | None]:
        if shows_an_older_fence_first:
            yield older
        async with aclosing(follow(pattern, deliver=deliver)) as follower:
            async for record in follower:
                yield record

    async def nothing(_pattern: str) -> list[object]:
        return []

    monkeypatch.setattr(bus, "follow", lagging)
    monkeypatch.setattr(bus, "last_each", nothing)
    assert (await mine.recover())[1] == manifest


async def test_shards_share_no_stream(bus: MemoryBus) -> None:
    dealt = replace(PLAN, shards=2)
    await bus.declare(specs(RUN, shards=2))
    first, second = [
        await StateWriter.acquire(bus, RUN, dealt, holder="a", now_ns=1, shard=shard)
        for shard in range(2)
    ]
    (held,) = await commit_versions(first, 1)
    (other,) = await commit_versions(second, 1, fragment=1)
    async with aclosing(state.follow_manifests(bus, RUN, dealt)) as manifests:
        found = [await anext(manifests) for _ in range(2)]
    assert sorted(found, key=lambda m: m.shard) == [held, other]
    assert await state.read_manifests(bus, RUN, dealt) == {0: held, 1: other}

    stream = bus.broker.streams[NAMES.shard(1).stream("STATE")]
    stream.drop(stream.newest[NAMES.shard(1).manifest(1)])
    with pytest.raises(StateLost, match="lost fragment 1 at version 1"):
        await second.recover()
    assert await first.recover() == {0: held}
    await first.check()
    await commit_versions(first, 2, held=held)


async def test_fence_is_taken_over_from_the_token_that_was_known_only(bus: MemoryBus) -> None:
    held = await writer(bus, over=0)
    with pytest.raises(Conflict):
        await writer(bus, "b", 2, over=0)
    taken = await writer(bus, "b", 2, over=held.token)
    assert taken.token > held.token
