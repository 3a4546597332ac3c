"""What anybody may write into the log bars nobody, and hides nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.errors import StateLost
from skerry.log import ledger, recovery
from skerry.log.base import PER_SUBJECT, Retention
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.door import MOST_COUNT
from skerry.protocol.messages import LearnerProgress, RunState
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from tests.support.builders import commit, run_record
from tests.support.scripted_run import ScriptedRun

RUN = "run"
SUBJECTS = Subjects(RUN)
JUNK = b"junk that is no record"


async def begun() -> tuple[MemoryBus, ScriptedRun]:
    bus = MemoryBroker().connect()
    run = await ScriptedRun.begin(bus)
    await run.commit_all()
    return bus, run


@pytest.mark.parametrize("name", ["zz", "a", "a b", "x" * 3000])
async def test_a_junk_member_record_bars_no_joiner(name: str) -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.join(bus, RUN, "a", "host", 1)
    await bus.publish(f"skerry.{RUN}.member.{name}", JUNK)
    again = await ledger.join(bus, RUN, "a", "host", 2)
    other = await ledger.join(bus, RUN, "b", "host", 3)
    assert (again.incarnation, again.shard) == (2, 0)
    assert (other.incarnation, other.shard) == (1, 1)
    assert set(await ledger.members(bus, RUN)) == {"a", "b"}


async def test_a_learner_that_writes_over_its_own_records_bars_itself_alone() -> None:
    bus, run = await begun()
    plan = run.plan
    await ledger.join(bus, RUN, "b", "host", 1)
    merged = LearnerProgress("b", 1, 4, 100, 40)
    held = await run.commit(0)
    told = replace(held, commit=replace(held.commit, progress=(merged,)))
    await bus.publish(SUBJECTS.shard(0).manifest(0), encode(told))
    for _ in range(PER_SUBJECT[Retention.FEW_PER_SUBJECT]):
        await bus.publish(SUBJECTS.member("b"), JUNK)
    assert "b" not in await ledger.members(bus, RUN)
    await recovery.known_members(bus, RUN, plan, "c")
    with pytest.raises(StateLost, match="learner 'b', start 1"):
        await recovery.known_members(bus, RUN, plan, "b")


async def test_a_member_that_claims_the_last_shard_leaves_others_theirs() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    held = await ledger.join(bus, RUN, "a", "host", 1)
    await bus.publish(SUBJECTS.member("a"), encode(replace(held, shard=MOST_COUNT)))
    for number, name in enumerate("bc"):
        assert (await ledger.join(bus, RUN, name, "host", 2)).shard == number
    assert set(await ledger.members(bus, RUN)) == {"a", "b", "c"}


async def test_junk_above_a_commit_hides_it_from_no_reader_and_ends_no_history() -> None:
    bus, run = await begun()
    await bus.publish(SUBJECTS.commit(0), JUNK)
    await bus.publish(SUBJECTS.commit(99), JUNK)
    assert (await ledger.last_commits(bus, RUN))[0].version == 1
    await run.commit(0)
    assert (await ledger.last_commits(bus, RUN))[0].version == 2


async def test_a_forged_commit_that_is_ahead_is_reported_before_anything_is_committed() -> None:
    bus, run = await begun()
    held = (await ledger.last_commits(bus, RUN))[0]
    await bus.publish(SUBJECTS.commit(0), encode(replace(held, version=held.version + 1000)))
    with pytest.raises(StateLost, match="already names version 2 of fragment 0 or a later one"):
        await run.commit(0)


async def test_a_run_record_changes_nothing_but_the_runs_state() -> None:
    cut = plan([LeafSpec("w", (16, 16))], 1)
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    genuine = await ledger.create_run(bus, run_record(RUN, cut))
    subject = SUBJECTS.ledger("run")
    for forged in (
        JUNK,
        encode(replace(genuine, config_json='{"model": {"factory": "subprocess:getoutput"}}')),
        encode(replace(genuine, created_ns=genuine.created_ns + 1)),
    ):
        await bus.publish(subject, forged)
        assert await ledger.read_run(bus, RUN) == genuine
    assert await ledger.list_runs(bus) == [genuine]
    await ledger.finish_run(bus, genuine)
    assert (await ledger.read_run(bus, RUN)).state is RunState.FINISHED


async def test_one_junk_run_keeps_no_other_run_from_being_listed() -> None:
    bus = MemoryBroker().connect()
    for run in ("r1", "r2"):
        await bus.declare(specs(run))
    await bus.publish(Subjects("r1").ledger("run"), JUNK)
    genuine = await ledger.create_run(bus, run_record("r2"))
    assert await ledger.list_runs(bus) == [genuine]


async def test_what_follows_junk_names_the_record_before_it() -> None:
    bus, _ = await begun()
    await bus.publish(SUBJECTS.commit(0), JUNK)
    after = await recovery.predecessor(bus, commit(2))
    newest = await bus.last(SUBJECTS.commit(0))
    assert after is not None
    assert newest is not None
    assert after.sequence == newest.sequence
    assert after.digest
