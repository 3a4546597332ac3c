"""The ledger: runs are created once, members keep their shard, commits are appended once."""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import RunNotFound, StateLost
from skerry.log import ledger, run_records
from skerry.log.memory import MemoryBus
from skerry.log.streams import specs
from skerry.protocol.messages import Evaluation, RunState
from skerry.protocol.subjects import Subjects
from skerry_tools.virtual import VirtualLoop
from tests.support.builders import commit, evaluation, run_record
from tests.support.virtual_time import broker_of, far_of, simulate

RUN = "t"
PLAN = plan([LeafSpec("w", (4, 4))], 1)


async def test_first_creator_wins_and_the_second_gets_its_record(bus: MemoryBus) -> None:
    first = run_record(RUN, PLAN, config_json='{"a": 1}')
    assert await ledger.create_run(bus, first) == first
    second = dataclasses.replace(first, config_json="{}", created_ns=first.created_ns + 1)
    assert await ledger.create_run(bus, second) == first


async def test_unknown_run_is_named(bus: MemoryBus) -> None:
    with pytest.raises(RunNotFound, match="'t'"):
        await ledger.read_run(bus, RUN)


def test_the_record_of_a_distant_run_is_read_in_one_round_trip() -> None:
    async def main(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        near, far = broker.connect(), far_of(broker, 0.5)
        await near.declare(specs(RUN))
        record = await ledger.create_run(near, run_record(RUN, PLAN, config_json="{}"))
        assert await ledger.read_run(far, RUN) == record
        assert loop.time() == pytest.approx(1.0)
        await ledger.finish_run(near, record)
        assert (await ledger.read_run(far, RUN)).state is RunState.FINISHED
        assert loop.time() == pytest.approx(2.0)

    simulate(main)


async def test_the_record_of_a_run_whose_ledger_begins_otherwise_is_found(bus: MemoryBus) -> None:
    await run_records.publish(bus, commit(4, run=RUN))
    record = await ledger.create_run(bus, run_record(RUN, PLAN, config_json="{}"))
    assert await ledger.read_run(bus, RUN) == record


def test_the_streams_of_a_distant_run_are_declared_in_one_round_trip() -> None:
    async def main(loop: VirtualLoop) -> None:
        await far_of(broker_of(loop), 0.5).declare(specs(RUN, shards=16))
        assert loop.time() == pytest.approx(1.0)

    simulate(main)


async def test_waiting_for_a_run_ends_when_it_is_created(bus: MemoryBus) -> None:
    waiting = asyncio.create_task(ledger.wait_run(bus, RUN))
    record = run_record(RUN, PLAN, config_json="{}")
    await ledger.create_run(bus, record)
    assert await waiting == record


async def test_finishing_twice_changes_the_record_once(bus: MemoryBus) -> None:
    record = run_record(RUN, PLAN, config_json="{}")
    await ledger.create_run(bus, record)
    await ledger.finish_run(bus, record)
    await ledger.finish_run(bus, record)
    assert (await ledger.wait_finished(bus, RUN)).state is RunState.FINISHED
    assert [r.run for r in await ledger.list_runs(bus)] == [RUN]


async def test_run_that_was_begun_anew_is_neither_awaited_nor_ended_by_the_one_before(
    bus: MemoryBus,
) -> None:
    before = run_record(RUN, PLAN, config_json="{}")
    anew = dataclasses.replace(before, created_ns=before.created_ns + 1)
    await ledger.create_run(bus, anew)
    with pytest.raises(StateLost, match="Run 't' was created again in this log"):
        await ledger.wait_finished(bus, RUN, created_ns=before.created_ns)
    with pytest.raises(StateLost, match="Start the process again"):
        await ledger.finish_run(bus, before)
    assert await ledger.read_run(bus, RUN) == anew


async def test_restarted_learner_gets_a_new_incarnation_and_its_old_shard(bus: MemoryBus) -> None:
    await ledger.join(bus, RUN, "a", "h", 1)
    await ledger.join(bus, RUN, "b", "h", 2)
    again = await ledger.join(bus, RUN, "b", "h", 3)
    assert (again.incarnation, again.shard) == (2, 1)


async def test_learners_that_join_at_once_get_different_shards(bus: MemoryBus) -> None:
    names = [f"l{i}" for i in range(8)]
    joined = await asyncio.gather(
        *(ledger.join(bus, RUN, name, "h", i) for i, name in enumerate(names))
    )
    assert sorted(m.shard for m in joined) == list(range(8))


@pytest.mark.parametrize("span", [1, 3, 256])
async def test_a_commit_is_found_by_its_version_however_old(
    bus: MemoryBus, span: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "FIRST_SPAN", span)
    assert await ledger.commit_of(bus, RUN, 1, 1) is None
    placed: dict[int, int] = {}
    for version in (*range(500, 520), 2**50):  # a restored run's ledger begins anywhere
        for fragment in range(2):
            record = commit(version, fragment, run=RUN)
            receipt = await run_records.publish(bus, record, msg_id=f"{fragment}/{version}")
            placed[version] = receipt.sequence
        await bus.publish(Subjects(RUN).commit(1), b"no commit")
    for version, sequence in placed.items():
        found = await ledger.commit_of(bus, RUN, 1, version)
        assert found == (sequence, commit(version, 1, run=RUN))
    for version in (0, 499, 520, 2**50 - 1, 2**50 + 1):
        assert await ledger.commit_of(bus, RUN, 1, version) is None


def judged(version: int, **changes: Any) -> Evaluation:
    return evaluation(run=RUN, versions=(version, version), **changes)


async def test_one_state_on_one_text_is_evaluated_once_whoever_says_it(bus: MemoryBus) -> None:
    said = [judged(1), judged(1, evaluator="other"), judged(2), judged(2, text_digest=8)]
    for record in said:
        await ledger.record_evaluation(bus, record)
    assert await run_records.read_all(bus, RUN, Evaluation) == [said[0], said[2], said[3]]
    assert await run_records.newest(bus, RUN, Evaluation, Subjects(RUN).ledger("eval")) == said[3]


async def test_no_evaluation_older_than_a_state_is_compared_with_that_of_it(bus: MemoryBus) -> None:
    lie = judged(3)
    await run_records.publish(bus, lie)
    for version in (1, 2):  # the ledger may lack the newest
        await run_records.publish(bus, commit(version, run=RUN))
    await ledger.record_evaluation(bus, lie)
    await ledger.record_evaluation(bus, lie)
    assert await run_records.read_all(bus, RUN, Evaluation) == [lie, lie]


async def test_an_evaluation_that_cannot_be_read_ends_no_reader(bus: MemoryBus) -> None:
    assert await run_records.read_all(bus, RUN, Evaluation) == []
    await bus.publish(Subjects(RUN).ledger("eval"), b"no evaluation")
    assert await run_records.newest(bus, RUN, Evaluation, Subjects(RUN).ledger("eval")) is None
    await ledger.record_evaluation(bus, judged(1))
    await bus.publish(Subjects(RUN).ledger("eval"), b"no evaluation either")
    assert await run_records.read_all(bus, RUN, Evaluation) == [judged(1)]
    assert await anext(run_records.follow(bus, RUN, Evaluation)) == judged(1)
