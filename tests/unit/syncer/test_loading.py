"""What a syncer reads before it conducts: state, what was settled lately, who has begun anew."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from skerry.algorithm.outer import Outer, make_outer
from skerry.errors import StateLost
from skerry.log.base import Record
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.state_writer import StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import Commit, InnerState, RefusalCause, Refused, Start
from skerry.protocol.parts import MASTER
from skerry.protocol.records import encode
from skerry.protocol.shard import Shard
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig, SyncConfig
from skerry_syncer import loading
from skerry_syncer.restoring import Restorer
from tests.support.builders import commit, evaluation, manifest, member, part
from tests.support.scripted_run import ScriptedRun

OUTER: Outer = make_outer("nesterov", lr=None, momentum=None, h_steps=8)
CONFIG = RunConfig(sync=SyncConfig(fragments=3, shards=2))


async def scripted(config: RunConfig | None = None) -> tuple[MemoryBus, ScriptedRun]:
    bus = MemoryBroker().connect()
    run = await ScriptedRun.begin(bus, config=config)
    await run.commit_all()
    return bus, run


async def loaded(bus: MemoryBus, run: ScriptedRun, shard: int = 0) -> Shard:
    writer = await StateWriter.acquire(
        bus, "run", run.plan, holder="s", now_ns=shard + 2, shard=shard
    )
    restorer = Restorer.of(bus, writer.run, run.plan, CONFIG.sync, OUTER)
    return (await loading.load(bus, writer, run.plan, CONFIG, restorer=restorer)).shard


async def test_shard_holds_its_own_fragments() -> None:
    bus, run = await scripted(CONFIG)
    assert list((await loaded(bus, run, 0)).fragments) == [0, 2]
    assert list((await loaded(bus, run, 1)).fragments) == [1]


async def test_starts_are_known_with_the_places_where_they_lie() -> None:
    bus, run = await scripted()
    for incarnation in (1, 2):
        payload = encode(Start("run", "a", incarnation, 1))
        await bus.publish(Subjects("run").shard(0).start("a"), payload)
    await bus.publish(Subjects("run").shard(0).start("b"), b"rubbish")
    shard = await loaded(bus, run)
    assert shard.assembler.incarnations.superseded("a", 1, 3)
    assert not shard.assembler.incarnations.superseded("a", 1, 2)
    assert shard.assembler.incarnations.superseded("a", 0, 2)


async def test_start_that_retention_dropped_is_known_from_the_ledger() -> None:
    bus, run = await scripted()
    for _ in range(5):
        await bus.publish(
            Subjects("run").shard(0).start("other"), encode(Start("run", "other", 1, 1))
        )
    started = member(incarnation=4, inner=InnerState.NEW, contrib_sequences=(3,))
    await bus.publish(Subjects("run").member("a"), encode(started))
    shard = await loaded(bus, run)
    assert shard.assembler.incarnations.superseded("a", 3, 4)
    assert not shard.assembler.incarnations.superseded("a", 4, 4)


async def test_what_the_newest_commits_refused_is_settled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, run = await scripted()
    draft = ScriptedRun._draft

    def refusing(self: ScriptedRun, index: int, version: int, step: int, tokens: int) -> Commit:
        told = draft(self, index, version, step, tokens)
        return dataclasses.replace(told, refused=(Refused(RefusalCause.TOO_STALE, "a", 1, 9),))

    monkeypatch.setattr(ScriptedRun, "_draft", refusing)
    await run.commit(1)
    shard = await loaded(bus, run)
    assert ("a", 1, 9) in shard.fragments[1].settled
    assert ("a", 1, 9) not in shard.fragments[0].settled


async def test_of_a_long_ledger_no_more_is_read_than_came_since_the_snapshot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, last = MemoryBroker().connect(), 1000
    await bus.declare(specs("run"))
    for version in range(1, last + 1):
        await bus.publish(Subjects("run").commit(0), encode(commit(version)))
    for _ in range(100):  # as many as fill the span that is read at once
        await bus.publish(Subjects("run").ledger("eval"), encode(evaluation()))
    follow, read = bus.follow, list[int]()

    async def counted(pattern: str, **how: Any) -> AsyncGenerator[Record]:
        async with aclosing(follow(pattern, **how)) as records:
            async for record in records:
                read.append(record.sequence)
                yield record

    monkeypatch.setattr(bus, "follow", counted)
    newest = {0: manifest(last, 0, part(MASTER, version=last - 10))}
    sync = SyncConfig(fragments=1)
    found = await loading.commits_since(bus, "run", newest, sync, last + 100)
    assert found[0].keys() >= set(range(last - 9, last))
    assert len(read) < last // 2


async def test_bytes_that_stay_wrong_are_lost_state(monkeypatch: pytest.MonkeyPatch) -> None:
    bus, run = await scripted()
    stream = bus.broker.streams[Subjects("run").shard(0).stream("STATE")]
    chunk = next(p for p in run.manifests[2].parts if p.name == "master").chunks[0].sequence
    record = stream.records[chunk]
    stream.records[chunk] = dataclasses.replace(record, payload=record.payload[:-1] + b"?")
    with pytest.raises(StateLost, match="fragment 2 at version 1: its 'master' cannot be read"):
        await loaded(bus, run)


async def test_bytes_that_were_damaged_on_the_way_are_read_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus, run = await scripted()
    get, damaged = bus.get, list[int]()

    async def noisy(stream: str, sequence: int) -> object:
        record = await get(stream, sequence)
        if record is None or damaged or not stream.endswith("STATE_0"):
            return record
        damaged.append(sequence)
        return dataclasses.replace(record, payload=record.payload[:-1] + b"?")

    monkeypatch.setattr(bus, "get", noisy)
    shard = await loaded(bus, run)
    assert damaged
    assert [s.version for s in shard.fragments.values()] == [1, 1, 1]
    assert MASTER in run.vectors[0]
