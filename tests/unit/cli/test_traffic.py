"""Bytes counted from the log."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.traffic import data_parallel_bytes
from skerry.cli.traffic import Downlink, measure_uplink, parameters
from skerry.log import contributions, recovery
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.protocol.codec import Chunk, encode_vector
from skerry.protocol.messages import (
    ChunkRef,
    Commit,
    Consumed,
    ContributionHeader,
    ContributionKind,
    Manifest,
    Part,
)
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from tests.support.puppet import run_record, walk

RUN = "t"
PLAN = plan([LeafSpec("w", (64, 256))], 2)
RECORD = run_record(RUN, PLAN, "{}")


def header(learner: str, identity: int, kind: ContributionKind) -> ContributionHeader:
    fragment = PLAN.fragments[0]
    return ContributionHeader(
        kind=kind,
        learner=learner,
        incarnation=1,
        identity=identity,
        fragment=0,
        base_version=identity,
        round_version=identity + 1,
        step=10,
        steps=10,
        tokens=1000,
        cursor_from=0,
        cursor_to=10,
        loss=2.0,
        captured_ns=1,
        norms=slice_norms(fragment, walk(fragment, identity)),
    )


def commit(version: int, reason: str, *consumed: Consumed) -> Commit:
    return Commit(
        run=RUN,
        plan_digest=PLAN.digest,
        fragment=0,
        version=version,
        step=0,
        reason=reason,
        syncer="s",
        fence=1,
        opened_ns=0,
        closed_ns=0,
        quorum_s=0.0,
        grace_s=0.0,
        consumed=consumed,
        refused=(),
        contrib_floor=0,
        progress=(),
        params_digest=0,
        master_digest=0,
    )


def consumed(learner: str, first: int, last: int) -> Consumed:
    return Consumed(learner, 1, 1, first, last, 0, 0, 0, 1, 1, 0, 1, 1.0, 1.0)


def test_parameters_are_counted_without_padding() -> None:
    assert (
        parameters(run_record(RUN, plan([LeafSpec("w", (3, 5)), LeafSpec("b", ())], 1), "")) == 16
    )


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
        await contributions.Sender(bus, RUN, PLAN).send(header("a", identity, kind), chunks)
        lasts.append(next(s.last_seq for s in await bus.streams() if s.name == name))
    await recovery.append_commit(bus, commit(1, "genesis", consumed("a", 1, lasts[0])))
    await recovery.append_commit(bus, commit(2, "quorum", consumed("a", lasts[0] + 1, lasts[1])))
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
            group.create_task(sender.send(header(learner, 1, kind), chunks))
    name = Subjects(RUN).stream("CONTRIB")
    last = next(s.last_seq for s in await bus.streams() if s.name == name)
    stored = [await bus.get(name, sequence) for sequence in range(1, last + 1)]
    of = {x: [r.sequence for r in stored if r and r.subject.endswith(x)] for x in "ab"}
    assert max(of["a"][0], of["b"][0]) < min(of["a"][-1], of["b"][-1]), "they do not overlap"
    both = (consumed(x, of[x][0], of[x][-1]) for x in "ab")
    await recovery.append_commit(bus, commit(1, "quorum", *both))
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
        await contributions.Sender(bus, RUN, PLAN).send(header("a", identity, kind), chunks)
        now_ns += 5_000_000_000
    last = await bus.get(Subjects(RUN).stream("CONTRIB"), 2)
    assert last is not None
    uplink = await measure_uplink(bus, RECORD, since_s=2.0)
    assert uplink.bytes_sent == len(last.payload)


async def test_a_log_without_contributions_sent_nothing() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    uplink = await measure_uplink(bus, RECORD)
    assert (uplink.bytes_sent, uplink.bits_per_param) == (0, None)


def test_bits_down_count_what_learners_read_and_not_what_the_syncer_keeps() -> None:
    def part(name: str, size: int, sequence: int) -> Part:
        return Part(name, "bf16", 0, (ChunkRef(sequence, size, 0),))

    downlink = Downlink()
    assert downlink.bits_per_param is None
    parts = (part("params", 1000, 1), part("master", 5000, 2))
    downlink.add(PLAN, Manifest(commit(1, "genesis"), 0, parts))
    downlink.add(PLAN, Manifest(commit(2, "quorum"), 0, parts))
    assert downlink.state_bytes == 12_000
    assert downlink.bits_per_param is not None
    assert math.isclose(downlink.bits_per_param, 8000 / PLAN.fragments[0].size)
