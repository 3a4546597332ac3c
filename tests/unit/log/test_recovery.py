"""A ledger that does not go with its state: mended by one commit, else named and never made up."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Sequence

import pytest
import xxhash

from skerry.errors import RunNotFound, StateLost
from skerry.log import ledger, place, recovery
from skerry.log.base import Record
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.recovery import find_run, gaps
from skerry.log.state import read_manifests
from skerry.protocol.messages import CheckpointRecord, Commit, CommitOrigin, LearnerProgress
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects
from tests.support.builders import commit
from tests.support.scripted_run import ScriptedRun

RUN = "run"
SUBJECTS = Subjects(RUN)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "LOOK_PAUSES_S", (0.0,) * 8)


async def begun(versions: int) -> ScriptedRun:
    """A run whose three fragments are at that version."""
    run = await ScriptedRun.begin(MemoryBroker().connect(), RUN)
    for step in range(versions):
        await run.commit_all(step=step)
    return run


def bus_of(run: ScriptedRun) -> MemoryBus:
    assert isinstance(run.bus, MemoryBus)
    return run.bus


def lose(run: ScriptedRun, prefix: str = "ledger.", last: int | None = None) -> None:
    """Purge the records on these subjects; ``last``: only so many, from the end."""
    kind = "MEMBERS" if prefix.startswith("member") else "LEDGER"
    stream = bus_of(run).broker.streams[SUBJECTS.stream(kind)]
    found = [q for q, r in stream.records.items() if r.subject.startswith(f"skerry.{RUN}.{prefix}")]
    for sequence in found[-last if last else 0 :]:
        stream.drop(sequence)
    stream.seen.clear()
    for record in stream.records.values():
        stream.newest[record.subject] = record.sequence


async def origin_given(run: ScriptedRun, fragment: int, origin: CommitOrigin) -> None:
    """Have a fragment's manifest say that it was restored."""
    held = run.manifests[fragment]
    commit = dataclasses.replace(held.commit, origin=origin, reason=None, source="/saved/s-1")
    await run.bus.publish(
        SUBJECTS.shard(0).manifest(fragment), encode(dataclasses.replace(held, commit=commit))
    )


async def merged(run: ScriptedRun, *rows: LearnerProgress) -> None:
    """Commit fragment 0, and have its manifest say that these learners were in it."""
    held = await run.commit(0)
    told = dataclasses.replace(held, commit=dataclasses.replace(held.commit, progress=rows))
    await run.bus.publish(SUBJECTS.shard(0).manifest(0), encode(told))


async def check(run: ScriptedRun, learner: str) -> None:
    await recovery.known_members(run.bus, RUN, run.plan, learner)


def lagging(
    monkeypatch: pytest.MonkeyPatch, run: ScriptedRun, method: str, subject: str, nothing: object
) -> list[str]:
    """Let a replica that lags answer the first two reads of a subject; return what is asked."""
    read, asked = getattr(run.bus, method), list[str]()

    async def late(pattern: str) -> object:
        asked.append(pattern)
        behind = pattern == subject and asked.count(subject) < 3
        return nothing if behind else await read(pattern)

    monkeypatch.setattr(run.bus, method, late)
    return asked


class TestMend:
    async def test_genesis_that_the_ledger_lacks_is_appended(self) -> None:
        run = await begun(1)
        lose(run, "ledger.commit")
        await run.writer.recover()
        assert len(await ledger.last_commits(run.bus, RUN)) == 3

    async def test_one_version_behind_is_appended(self) -> None:
        run = await begun(3)
        lose(run, "ledger.commit", last=3)
        await run.writer.recover()
        commits = await ledger.last_commits(run.bus, RUN)
        assert {c.version for c in commits.values()} == {3}

    async def test_two_versions_behind_is_named_and_nothing_is_appended(self) -> None:
        run = await begun(3)
        saved = CheckpointRecord(RUN, "/saved/s-1", "d", (1, 1, 1), 10, 1, 1, 1)
        await ledger.record_checkpoint(run.bus, saved)
        lose(run, "ledger.commit.1", last=2)
        with pytest.raises(StateLost) as raised:
            await run.writer.recover()
        said = str(raised.value)
        assert "has lost commits that came before those of its manifests: fragment 1, v" in said
        assert "fragment 1, version 2. The newest state is still in the log" in said
        assert "begin another run from the checkpoint with `skerry up --from /saved/s-1" in said
        assert (await ledger.last_commits(run.bus, RUN))[1].version == 1

    @pytest.mark.parametrize(
        ("gone", "origin", "said"),
        [
            (
                {"ledger.commit.0": None, "ledger.commit.2": 3},
                None,
                "0, every version before 5; fragment 2, versions 3 t",
            ),
            ({"ledger.commit": None}, None, "no checkpoint; `skerry checkpoints list` may"),
            (
                {"ledger.commit.1": None},
                CommitOrigin.REPLACED,  # put back into a run that has a history
                "fragment 1, every version before 5",
            ),
        ],
        ids=["two fragments", "every commit", "put back"],
    )
    async def test_what_the_ledger_lacks_is_named(
        self, gone: dict[str, int | None], origin: CommitOrigin | None, said: str
    ) -> None:
        run = await begun(5)
        for prefix, last in gone.items():
            lose(run, prefix, last)
        if origin is not None:
            await origin_given(run, 1, origin)
        before = await ledger.last_commits(run.bus, RUN)
        with pytest.raises(StateLost, match=re.escape(said)):
            await run.writer.recover()
        assert await ledger.last_commits(run.bus, RUN) == before

    async def test_restored_fragment_begins_its_ledger_at_any_version(self) -> None:
        run = await begun(4)
        lose(run, "ledger.commit.1")
        await origin_given(run, 1, CommitOrigin.RESTORED)
        await run.writer.recover()
        assert (await ledger.last_commits(run.bus, RUN))[1].version == 4

    async def test_replica_that_lags_behind_is_asked_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = await begun(3)
        last_each = run.bus.last_each

        async def nothing(pattern: str) -> list[Record]:
            return [] if pattern == SUBJECTS.commit() else await last_each(pattern)

        monkeypatch.setattr(run.bus, "last_each", nothing)
        asked = lagging(monkeypatch, run, "last", SUBJECTS.commit(1), None)
        assert len(await run.writer.recover()) == 3
        assert asked.count(SUBJECTS.commit(1)) == 3


class TestMembers:
    """Learner ``a`` has started twice, and its rows in commits say so."""

    async def test_learner_that_commits_name_and_no_record_is_named(self) -> None:
        run = await begun(0)
        await merged(run, LearnerProgress("a", 1, 4, 100, 40), LearnerProgress("b", 2, 1, 9, 4))
        with pytest.raises(StateLost, match=r"its members: learner 'b', start 2\. Which data they"):
            await check(run, "b")

    async def test_start_that_would_be_numbered_a_second_time_is_named(self) -> None:
        run = await begun(0)
        await merged(run, LearnerProgress("a", 2, 4, 100, 40))
        await check(run, "a")
        lose(run, "member.a", last=1)
        with pytest.raises(StateLost, match="learner 'a', start 2"):
            await check(run, "a")

    async def test_manifest_that_the_ledger_lacks_names_starts_too(self) -> None:
        run = await begun(2)
        lose(run, "member.a", last=1)
        lose(run, "ledger.commit")
        with pytest.raises(StateLost, match="learner 'a', start 2"):
            await check(run, "a")

    async def test_no_new_name_joins_a_run_that_has_lost_a_member(self) -> None:
        run = await begun(1)
        lose(run, "member")
        with pytest.raises(StateLost, match="and no new name does"):
            await place.take_place(run.bus, RUN, run.plan, "b", host="h", now_ns=1)
        assert await ledger.members(run.bus, RUN) == {}

    async def test_who_has_a_record_of_its_own_joins_whatever_others_have_lost(self) -> None:
        run = await begun(0)
        await merged(run, LearnerProgress("a", 2, 4, 100, 40), LearnerProgress("b", 2, 1, 9, 4))
        await check(run, "a")

    async def test_learner_of_a_restored_run_that_no_record_is_left_of_begins_as_a_new_name(
        self,
    ) -> None:
        run = await begun(0)
        await merged(run, LearnerProgress("b", 0, 0, 100, 40))
        found, *_ = await place.take_place(run.bus, RUN, run.plan, "b", host="h", now_ns=1)
        assert (found.incarnation, found.shard, found.cursor) == (1, 1, 40)

    async def test_new_name_is_given_no_data_shard_that_another_has(self) -> None:
        run = await begun(0)
        await ledger.join(run.bus, RUN, "b", "h", 1)
        lose(run, "member.a")
        await merged(run, LearnerProgress("a", 0, 0, 100, 40))
        found, *_ = await place.take_place(run.bus, RUN, run.plan, "a", host="h", now_ns=1)
        assert found.shard == 2

    async def test_start_that_nothing_was_merged_of_does_not_give_its_number_away(self) -> None:
        run = await begun(1)
        third, *_ = await place.take_place(run.bus, RUN, run.plan, "a", host="h", now_ns=1)
        lose(run, "member.a", last=1)
        fourth, *_ = await place.take_place(run.bus, RUN, run.plan, "a", host="h", now_ns=2)
        assert [third.incarnation, fourth.incarnation] == [3, 4]

    async def test_members_that_a_replica_has_not_yet_are_looked_for_again(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = await begun(1)
        asked = lagging(monkeypatch, run, "last_each", SUBJECTS.member(), [])
        await check(run, "a")
        assert asked.count(SUBJECTS.member()) == 3


class TestCommit:
    async def test_writer_at_work_does_not_go_on_with_a_ledger_that_was_emptied(self) -> None:
        run = await begun(3)
        lose(run)
        with pytest.raises(StateLost, match=r"lost commits.*: fragment 1, every version before 4"):
            await run.commit(1)
        assert await ledger.last_commits(run.bus, RUN) == {}
        manifests = await read_manifests(run.bus, RUN, run.plan)
        assert manifests[1].commit.version == 3, "it is refused before its commit point"

    async def test_writer_at_work_does_not_leave_a_hole_in_the_ledger(self) -> None:
        run = await begun(3)
        lose(run, "ledger.commit.1", last=1)
        with pytest.raises(StateLost, match=r"fragment 1, version 3\. The newest state is still"):
            await run.commit(1)
        assert (await ledger.last_commits(run.bus, RUN))[1].version == 2

    async def test_replica_that_lags_behind_is_no_loss(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = await begun(3)
        lagging(monkeypatch, run, "last", SUBJECTS.commit(1), None)
        await run.commit(1)
        assert (await ledger.last_commits(run.bus, RUN))[1].version == 4


async def test_each_commit_names_the_record_before_it_though_its_syncer_died() -> None:
    run = await begun(2)
    lose(run, "ledger.commit.1", last=1)
    await run.writer.recover()
    await run.commit(1)
    stream = bus_of(run).broker.streams[SUBJECTS.stream("LEDGER")]
    records = [r.payload for r in stream.records.values() if r.subject == SUBJECTS.commit(1)]
    commits = [decode(Commit, payload, run=RUN) for payload in records]
    digests = [xxhash.xxh3_64_intdigest(payload) for payload in records]
    assert [commit.previous for commit in commits] == [0, *digests[:-1]]


@pytest.mark.parametrize(
    ("held", "newest", "missing"),
    [
        (None, 1, None),
        (None, 2, range(1, 2)),
        (7, 7, None),
        (7, 8, None),
        (7, 9, range(8, 9)),
        (7, 12, range(8, 12)),
        (9, 7, None),
    ],
)
def test_gap_is_what_lies_between_ledger_and_manifest(
    held: int | None, newest: int, missing: range | None
) -> None:
    commits = {} if held is None else {0: commit(held)}
    assert gaps({0: commit(newest)}, commits) == ({} if missing is None else {0: missing})


class TestFindRun:
    @pytest.mark.parametrize("waits", [False, True])
    async def test_log_that_knows_nothing_of_a_run_says_so(self, *, waits: bool) -> None:
        assert await find_run(MemoryBroker().connect(), RUN, waits=waits) is None

    @pytest.mark.parametrize("waits", [False, True])
    @pytest.mark.parametrize("way", ["purged", "removed", "record"])
    async def test_state_without_a_record_is_a_loss_with_versions(
        self, way: str, *, waits: bool
    ) -> None:
        run = await begun(2)
        if way == "removed":
            del bus_of(run).broker.streams[SUBJECTS.stream("LEDGER")]
        else:
            lose(run, "ledger.run" if way == "record" else "ledger.")
        with pytest.raises(StateLost) as raised:
            await find_run(run.bus, RUN, waits=waits)
        said = str(raised.value)
        assert f"Run {RUN!r} has lost its record in the ledger" in said
        assert "fragment 0 at version 2, fragment 1 at version 2, fragment 2 at version 2" in said
        assert ("fragment 1, every version before 2" in said) == (way != "record")

    async def test_fence_alone_refuses_whoever_would_create_and_nobody_who_waits(self) -> None:
        run = await begun(0)
        lose(run)
        assert await find_run(run.bus, RUN, waits=True) is None
        with pytest.raises(StateLost, match="holds a fence, and no fragment yet"):
            await find_run(run.bus, RUN)

    async def test_restore_under_way_is_waited_for_and_never_created_over(self) -> None:
        run = await begun(3)
        for fragment in range(3):
            await origin_given(run, fragment, CommitOrigin.RESTORED)
        lose(run, "ledger.run")
        assert await find_run(run.bus, RUN, waits=True) is None
        with pytest.raises(StateLost, match=f"checkpoints restore /saved/s-1 --run {RUN}`"):
            await find_run(run.bus, RUN)

    async def test_manifest_that_cannot_be_read_is_state_too(self) -> None:
        run = await begun(0)
        await run.bus.publish(SUBJECTS.shard(0).manifest(1), b"rubbish")
        lose(run)
        with pytest.raises(StateLost, match="still holds a manifest that cannot be read"):
            await find_run(run.bus, RUN)

    async def test_run_that_another_learner_creates_meanwhile_is_found(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        run = await begun(1)
        looks: Sequence[object] = list[object]()

        async def created_late(bus: MemoryBus, name: str) -> object:
            assert isinstance(looks, list)
            looks.append(name)
            if len(looks) == 1:
                raise RunNotFound(name)
            await asyncio.sleep(0)
            return run.record

        monkeypatch.setattr(recovery, "read_run", created_late)
        assert await find_run(run.bus, RUN) == run.record
