"""Bytes counted from the log."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.goodput import data_parallel_bytes
from skerry.algorithm.merge import slice_norms
from skerry.cli.traffic import Downlink, measure_uplink
from skerry.log import contributions, recovery
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.protocol.codec import Chunk, encode_vector
from skerry.protocol.messages import (
    ChunkRef,
    Commit,
    CommitOrigin,
    Consumed,
    ContributionHeader,
    ContributionKind,
)
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from tests.support.builders import commit, consumed, header, manifest, part, run_record
from tests.support.learners import walk

RUN = "t"
PLAN = plan([LeafSpec("w", (64, 256))], 2)
RECORD = run_record(RUN, PLAN, "{}")


def offered(learner: str, identity: int, kind: ContributionKind) -> ContributionHeader:
    norms = slice_norms(PLAN.fragments[0], walk(PLAN.fragments[0], identity))
    return header(identity, learner, kind=kind, base_version=identity, norms=norms)


def committed(version: int, *merged: Consumed, **changes: Any) -> Commit:
    return commit(version, run=RUN, plan_digest=PLAN.digest, consumed=merged, **changes)


def merged(learner: str, first: int, last: int) -> Consumed:
    return consumed(learner, sequence_first=first, sequence_last=last)


def test_all_reduce_sends_twice_the_share_of_the_others_per_step() -> None:
    assert data_parallel_bytes(1000, {"a": 10, "b": 10}, 2) == 2 * 1 * 1000 * 4 * 20 // 2
    assert data_parallel_bytes(1000, {"a": 10}, 1) == 0
    assert data_parallel_bytes(1000, {"a": 1}, 4) == 6000


async def test_bits_up_count_only_what_was_merged() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    fragment, name = PLAN.fragments[0], Subjects(RUN).stream("CONTRIB")
    kinds = (ContributionKind.GENESIS, ContributionKind.OUTER_GRADIENT)
    lasts: list[int] = []
    for identity, kind in enumerate((*kinds, kinds[1])):
        scheme = "f32" if kind is ContributionKind.GENESIS else "int4"
        chunks = encode_vector(scheme, walk(fragment, identity), 2048)
        await contributions.Sender(bus, RUN, PLAN).send(offered("a", identity, kind), chunks)
        lasts.append(next(s.last_seq for s in await bus.streams() if s.name == name))
    await recovery.append_commit(bus, committed(1, merged("a", 1, lasts[0])))
    await recovery.append_commit(bus, committed(2, merged("a", lasts[0] + 1, lasts[1])))
    stored = [await bus.get(name, sequence) for sequence in range(1, lasts[2] + 1)]
    sizes = [len(record.payload) for record in stored if record is not None]
    uplink = await measure_uplink(bus, RECORD)
    assert uplink.bytes_sent == sum(sizes)
    assert uplink.bytes_merged == sum(sizes[lasts[0] : lasts[1]])
    assert uplink.bits_per_param == pytest.approx(8 * uplink.bytes_merged / fragment.size)


async def test_contributions_that_lie_between_one_another_are_both_counted() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    kind, vector = ContributionKind.OUTER_GRADIENT, walk(PLAN.fragments[0], 1)
    together = threading.Barrier(2)

    def paced() -> Iterator[Chunk]:
        for chunk in encode_vector("int4", vector, 2048):
            together.wait(60)
            yield chunk

    async with TaskGroup() as group:
        for learner in "ab":
            chunks, sender = paced(), contributions.Sender(bus, RUN, PLAN)
            group.create_task(sender.send(offered(learner, 1, kind), chunks))
    name = Subjects(RUN).stream("CONTRIB")
    last = next(s.last_seq for s in await bus.streams() if s.name == name)
    stored = [await bus.get(name, sequence) for sequence in range(1, last + 1)]
    of = {x: [r.sequence for r in stored if r and r.subject.endswith(x)] for x in "ab"}
    assert max(of["a"][0], of["b"][0]) < min(of["a"][-1], of["b"][-1]), "they do not overlap"
    both = (merged(x, of[x][0], of[x][-1]) for x in "ab")
    await recovery.append_commit(bus, committed(1, *both, origin=CommitOrigin.ROUND))
    uplink = await measure_uplink(bus, RECORD)
    assert uplink.bytes_merged == uplink.bytes_sent


async def test_what_was_sent_before_a_resumed_session_is_not_of_it() -> None:
    now_ns = 1_000_000_000
    bus = MemoryBroker(clock_ns=lambda: now_ns).connect()
    await bus.declare(specs(RUN))
    kind = ContributionKind.OUTER_GRADIENT
    for identity in (1, 2):
        vector = walk(PLAN.fragments[0], identity)
        chunks = encode_vector("int4", vector, 65536)
        await contributions.Sender(bus, RUN, PLAN).send(offered("a", identity, kind), chunks)
        now_ns += 5_000_000_000
    last = await bus.get(Subjects(RUN).stream("CONTRIB"), 2)
    assert last is not None
    uplink = await measure_uplink(bus, RECORD, since_s=2.0)
    assert uplink.bytes_sent == len(last.payload)


async def test_absurd_commits_and_manifests_neither_end_nor_hang_what_counts_bytes() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    fragment = PLAN.fragments[0]
    chunks = encode_vector("int4", walk(fragment, 1), 65536)
    sender = contributions.Sender(bus, RUN, PLAN)
    await sender.send(offered("a", 1, ContributionKind.OUTER_GRADIENT), chunks)
    odd = (merged("a", 1, 2**63), merged("no.name", 1, 1))
    await bus.publish(Subjects(RUN).commit(0), encode(committed(2, *odd)))
    elsewhere = replace(committed(2, merged("a", 1, 1)), fragment=2**40)
    await bus.publish(Subjects(RUN).commit(2**40), encode(elsewhere))
    uplink = await measure_uplink(bus, RECORD)
    assert (uplink.bytes_merged, uplink.params_merged) == (uplink.bytes_sent, fragment.size)
    downlink = Downlink()
    downlink.add(PLAN, manifest(2, 2**40, part("params", ChunkRef(1, 2**62, 0))))
    assert downlink == Downlink()


async def test_a_log_without_contributions_sent_nothing() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    uplink = await measure_uplink(bus, RECORD)
    assert (uplink.bytes_sent, uplink.bits_per_param) == (0, None)


def test_bits_down_count_what_learners_read_and_not_what_the_syncer_keeps() -> None:
    downlink = Downlink()
    assert downlink.bits_per_param is None
    parts = (part("params", ChunkRef(1, 1000, 0)), part("master", ChunkRef(2, 5000, 0)))
    downlink.add(PLAN, manifest(1, 0, *parts))
    downlink.add(PLAN, manifest(2, 0, *parts))
    assert downlink.state_bytes == 12_000
    assert downlink.bits_per_param is not None
    assert math.isclose(downlink.bits_per_param, 8000 / PLAN.fragments[0].size)
