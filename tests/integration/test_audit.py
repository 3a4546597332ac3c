"""The audit over runs of the real syncer: a whole history holds, and replays to the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skerry.algorithm.outer import outer_of
from skerry.errors import ConfigError
from skerry.log import ledger, state
from skerry.log.base import PER_SUBJECT, Retention
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.replay import FragmentFold, first_master
from skerry.protocol.chunks import vector_digest
from skerry.protocol.contribution import Contribution, ContributionAssembler, id_of
from skerry.protocol.messages import CloseReason, Commit, Manifest, RefusalCause, Refused, Unnamed
from skerry.protocol.records import decode, encode
from skerry.protocol.shard import MOST_NAMED
from skerry.protocol.subjects import Subjects
from skerry.settings.models import OuterConfig, RunConfig
from skerry.store import checkpoint
from skerry.store.local import LocalDraft, LocalStore
from skerry_checkpointer.restore import restore
from skerry_checkpointer.service import Checkpointer
from skerry_tools.audit import verify as verifying
from skerry_tools.audit.accounts import What
from skerry_tools.audit.fork import fork
from skerry_tools.audit.log import LedgerEntry, RunLog
from skerry_tools.audit.replay import bases_of, replay
from skerry_tools.audit.survey import ReplayMoment, survey
from skerry_tools.audit.verify import AuditReport, verify
from skerry_tools.audit.whatif import Drift, WhatIfPolicy
from tests.support.audited import CONFIG, PLAN, WHOLE, create, train
from tests.support.learners import ScriptedLearner

RUN = "t"
SUBJECTS = Subjects(RUN)


async def trained(versions: int = 5, *, config: RunConfig = CONFIG, syncers: int = 1) -> MemoryBus:
    """Return the log of a run whose syncers and fake learners have stopped."""
    bus = MemoryBroker().connect()
    await create(bus, RUN, config)
    await train(bus, RUN, versions, syncers)
    return bus


async def verified(bus: MemoryBus, *, with_replay: bool = False) -> AuditReport:
    return await verify(bus, RUN, replay=with_replay)


async def log_of(bus: MemoryBus) -> RunLog:
    return RunLog.of(bus, await ledger.read_run(bus, RUN))


def kinds(report: AuditReport) -> set[What]:
    return {violation.what for violation in report.violations}


STREAMS = {
    "STATE": SUBJECTS.shard(0).stream("STATE"),
    "LEDGER": SUBJECTS.stream("LEDGER"),
    "CONTRIB": SUBJECTS.shard(0).stream("CONTRIB"),
}


def drop(bus: MemoryBus, stream: str, sequence: int) -> None:
    bus.broker.streams[STREAMS[stream]].drop(sequence)


def commits_of(bus: MemoryBus, fragment: int) -> list[tuple[int, Commit]]:
    records = bus.broker.streams[SUBJECTS.stream("LEDGER")].records
    return [
        (sequence, decode(Commit, record.payload, run=RUN))
        for sequence, record in records.items()
        if record.subject == SUBJECTS.commit(fragment)
    ]


def of_two(bus: MemoryBus) -> tuple[int, Commit]:
    """Return a commit from the middle of the history that merged two contributions."""
    return next((s, c) for s, c in commits_of(bus, 0)[1:-1] if len(c.consumed) == 2)


def tamper(bus: MemoryBus, sequence: int, payload: bytes, stream: str = "LEDGER") -> None:
    records = bus.broker.streams[STREAMS[stream]].records
    records[sequence] = replace(records[sequence], payload=payload)


async def retell(bus: MemoryBus, manifest: Manifest) -> None:
    """Make the log say otherwise what a fragment's newest version is: manifest and ledger alike."""
    fragment = manifest.commit.fragment
    sequence, _ = commits_of(bus, fragment)[-1]
    tamper(bus, sequence, encode(manifest.commit))
    await bus.publish(SUBJECTS.shard(0).manifest(fragment), encode(manifest))


@pytest.mark.parametrize("syncers", [1, 3])
async def test_history_of_real_syncers_holds_and_replays(syncers: int) -> None:
    report = await verified(await trained(6, syncers=syncers), with_replay=True)
    assert report.violations == ()
    assert report.replayed is not None
    assert report.replayed.whole
    assert {f.fragment: f.reached for f in report.replayed.fragments} == report.survey.versions
    assert [row.learner for row in report.learners] == ["a", "b"]
    assert min(row.contributions for row in report.learners) > 0


# what somebody does to the log: each returns the words that a finding must have


async def loses_a_record(bus: MemoryBus) -> list[str]:
    sequence, commit = commits_of(bus, 1)[2]
    drop(bus, "LEDGER", sequence)
    version = commit.version
    gone = f"Fragment 1, version {version + 1}: came after version {version - 1}: version {version}"
    return [f"Ledger record {sequence} is missing", gone]


async def loses_the_end(bus: MemoryBus) -> list[str]:
    for sequence in sorted(bus.broker.streams[SUBJECTS.stream("LEDGER")].records)[-4:]:
        drop(bus, "LEDGER", sequence)
    return ["is missing: deleted", "the manifest is of version"]


async def gets_rubbish(bus: MemoryBus) -> list[str]:
    receipt = await bus.publish(SUBJECTS.commit(0), b"rubbish")
    return [f"{receipt.sequence} ({SUBJECTS.commit(0)})"]


async def gets_a_commit_of_another_fragment(bus: MemoryBus) -> list[str]:
    await bus.publish(SUBJECTS.commit(0), encode(commits_of(bus, 1)[-1][1]))
    return [f"A Commit of '{SUBJECTS.commit(1)}' came on '{SUBJECTS.commit(0)}'"]


async def gets_a_commit_again(bus: MemoryBus) -> list[str]:
    await bus.publish(SUBJECTS.commit(0), encode(commits_of(bus, 0)[-1][1]))
    return ["came after version", "was consumed though it had been resolved before"]


async def has_its_newest_record_changed(bus: MemoryBus) -> list[str]:
    sequence, newest = commits_of(bus, 0)[-1]
    tamper(bus, sequence, encode(replace(newest, reason=CloseReason.TIMEOUT)))
    return ["otherwise than the manifest"]


async def has_an_old_record_changed(bus: MemoryBus) -> list[str]:
    sequence, commit = commits_of(bus, 1)[2]
    tamper(bus, sequence, encode(replace(commit, syncer="somebody-else", closed_ns=1)))
    return [f"does not follow the record of version {commit.version}"]


async def has_a_record_before_its_first(bus: MemoryBus) -> list[str]:
    sequence, commit = commits_of(bus, 0)[0]
    tamper(bus, sequence, encode(replace(commit, previous=7)))
    return ["names a record before it", "version 2: its record does not follow"]


async def has_a_bit_flipped_in_the_state(bus: MemoryBus) -> list[str]:
    chunk = (await state.read_manifests(bus, RUN, PLAN))[1].parts[1].chunks[0].sequence
    payload = bytearray(
        bus.broker.streams[SUBJECTS.shard(0).stream("STATE")].records[chunk].payload
    )
    payload[-1] ^= 1
    tamper(bus, chunk, bytes(payload), "STATE")
    return ["ragment 1"]


async def loses_a_chunk(bus: MemoryBus) -> list[str]:
    manifests = await state.read_manifests(bus, RUN, PLAN)
    drop(bus, "STATE", manifests[0].parts[0].chunks[0].sequence)
    return ["ragment 0"]


def tells_another(digest_of: str, what: str) -> Callable[[MemoryBus], Awaitable[list[str]]]:
    async def digest(bus: MemoryBus) -> list[str]:
        held = (await state.read_manifests(bus, RUN, PLAN))[0]
        changes: dict[str, Any] = {f"{digest_of}_digest": 7}
        await retell(bus, replace(held, commit=replace(held.commit, **changes)))
        return [f"its {what} is another vector"]

    return digest


def lacks(part: str) -> Callable[[MemoryBus], Awaitable[list[str]]]:
    async def manifest(bus: MemoryBus) -> list[str]:
        held = (await state.read_manifests(bus, RUN, PLAN))[0]
        await retell(bus, replace(held, parts=tuple(p for p in held.parts if p.name != part)))
        return [f"its part '{part}' has no blocks"]

    return manifest


def has_short(part: str) -> Callable[[MemoryBus], Awaitable[list[str]]]:
    async def manifest(bus: MemoryBus) -> list[str]:
        held = (await state.read_manifests(bus, RUN, PLAN))[0]
        short = [replace(p, blocks=p.blocks - 1) if p.name == part else p for p in held.parts]
        await retell(bus, replace(held, parts=tuple(short)))
        return [f"its part '{part}' has"]

    return manifest


async def names_a_part_twice(bus: MemoryBus) -> list[str]:
    held = (await state.read_manifests(bus, RUN, PLAN))[0]
    await retell(bus, replace(held, parts=(*held.parts, held.parts[0])))
    return ["names a part twice"]


PARTS = ("keyframe", "master", "outer.momentum")
DAMAGE: dict[str, tuple[Callable[[MemoryBus], Awaitable[list[str]]], set[What]]] = {
    "record lost": (loses_a_record, {What.MISSING, What.VERSIONS}),
    "rubbish": (gets_rubbish, {What.UNREADABLE}),
    "commit of another fragment": (gets_a_commit_of_another_fragment, {What.UNREADABLE}),
    "newest record changed": (has_its_newest_record_changed, {What.STATE}),
    "old record changed": (has_an_old_record_changed, {What.CHAIN}),
    "record before the first": (has_a_record_before_its_first, {What.CHAIN}),
    "bit flipped": (has_a_bit_flipped_in_the_state, {What.STATE}),
    "chunk lost": (loses_a_chunk, {What.STATE}),
    "part twice": (names_a_part_twice, {What.STATE}),
    "another params": (tells_another("params", "global fragment"), {What.STATE}),
    "another master": (tells_another("master", "part 'master'"), {What.STATE}),
    **{f"no {p}": (lacks(p), {What.STATE}) for p in PARTS},
    **{f"short {p}": (has_short(p), {What.STATE}) for p in PARTS},
}


@pytest.mark.parametrize(("damage", "what"), DAMAGE.values(), ids=DAMAGE)
async def test_damage_to_a_log_is_found_and_nothing_else(
    damage: Callable[[MemoryBus], Awaitable[list[str]]], what: set[What]
) -> None:
    bus = await trained(config=WHOLE)
    words = await damage(bus)
    report = await verified(bus)
    assert kinds(report) == what
    for sentence, said in zip(words, report.violations, strict=True):
        assert sentence in said.sentence


@pytest.mark.parametrize(
    ("damage", "what"),
    [(loses_the_end, What.STATE), (gets_a_commit_again, What.TWICE)],
)
async def test_damage_to_a_log_is_found(
    damage: Callable[[MemoryBus], Awaitable[list[str]]], what: What
) -> None:
    bus = await trained()
    words = await damage(bus)
    report = await verified(bus)
    assert what in kinds(report)
    said = "\n".join(v.sentence for v in report.violations)
    assert all(sentence in said for sentence in words)
    assert not any("gone from the window" in note for note in report.notes)


async def test_what_a_syncer_has_to_merge_again_must_be_in_the_window() -> None:
    bus = await trained(6)
    assert (await verified(bus)).violations == ()
    needed = next(c.consumed[0].sequence_last for _, c in commits_of(bus, 0) if c.version == 3)
    for sequence in [*bus.broker.streams[SUBJECTS.shard(0).stream("CONTRIB")].records]:
        if sequence <= needed:
            drop(bus, "CONTRIB", sequence)
    report = await verified(bus)
    assert report.violations == ()
    words = "Fragment 0, versions 2 to 3: the window has dropped contributions that a syncer"
    assert [words in note for note in report.notes] == [True, False]


async def test_a_merged_contribution_gone_from_the_middle_of_the_window_is_a_note() -> None:
    bus = await trained(6)
    merged = next(c.consumed[0] for _, c in commits_of(bus, 0) if c.version == 3)
    drop(bus, "CONTRIB", merged.sequence_last)
    report = await verified(bus)
    assert report.violations == ()
    (hole, uncovered) = report.notes
    assert f"Fragment 0, version 3, learner {merged.learner}: contribution" in hole
    assert "is gone from the window, which begins before it" in hole
    assert "Fragment 0, versions 2 to 3: the window has dropped" in uncovered
    assert report.survey.base == {0: 3, 1: 0}


async def test_what_comes_while_a_log_is_read_is_not_missed_in_its_window(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bus = await trained(6)
    contributions = bus.broker.streams[SUBJECTS.shard(0).stream("CONTRIB")]
    late = [*contributions.records.values()][-12:]
    for record in late:
        contributions.drop(record.sequence)
    members = RunLog.members

    async def behind_the_window(log: RunLog) -> list[LedgerEntry]:
        for record in late:
            contributions.store(record)
        return await members(log)

    monkeypatch.setattr(RunLog, "members", behind_the_window)
    report = await verified(bus)
    assert (report.violations, report.notes) == ((), ())
    assert report.survey.base == {0: 0, 1: 0}


async def test_an_earlier_snapshot_is_the_one_that_the_ledger_tells_of() -> None:
    bus = await trained()
    held = (await state.read_manifests(bus, RUN, PLAN))[0]
    sequence, first = commits_of(bus, 0)[0]
    tamper(bus, sequence, encode(replace(first, master_digest=7)))
    report = await verified(bus)
    said = [v.sentence for v in report.violations if v.what is What.STATE]
    assert held.commit.version > 1
    assert any("its snapshot is not what the ledger says of version 1" in text for text in said)


async def test_manifest_without_its_ledger_record_is_a_note() -> None:
    bus = await trained()
    stream = bus.broker.streams[SUBJECTS.stream("LEDGER")]
    last = stream.last_seq
    fragment = decode(Commit, stream.records[last].payload, run=RUN).fragment
    drop(bus, "LEDGER", last)
    stream.last_seq -= 1
    report = await verified(bus)
    assert report.violations == ()
    assert [f"Fragment {fragment}," in note for note in report.notes] == [True]


async def test_bytes_that_are_no_record_are_a_note_where_any_learner_may_write() -> None:
    bus = await trained()
    receipt = await bus.publish(SUBJECTS.member("zz"), b"rubbish")
    report = await verified(bus)
    assert report.violations == ()
    assert [f"{receipt.sequence} ({SUBJECTS.member('zz')})" in n for n in report.notes] == [True]


async def test_a_learner_that_writes_over_all_its_starts_has_no_ledger_called_wrong() -> None:
    bus = await trained()
    member = SUBJECTS.member("a")
    for number in range(PER_SUBJECT[Retention.FEW_PER_SUBJECT]):
        await bus.publish(member, b"rubbish %d" % number)
    report = await verified(bus)
    assert report.violations == ()
    assert any(member in note for note in report.notes)


async def test_many_violations_of_one_kind_hide_none_of_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verifying, "MOST_KEPT", 3)
    bus = await trained()
    sequence, first = commits_of(bus, 0)[0]
    tamper(bus, sequence, encode(replace(first, master_digest=7)))
    for number in range(5):
        await bus.publish(SUBJECTS.ledger("eval"), b"rubbish %d" % number)
    report = await verified(bus)
    assert [v.what for v in report.violations].count(What.UNREADABLE) == 3
    assert report.broken > len(report.violations)
    assert What.STATE in kinds(report)


@pytest.mark.parametrize("refuses", [False, True])
async def test_contribution_below_the_floor_has_to_be_merged_or_refused(*, refuses: bool) -> None:
    bus = await trained()
    sequence, commit = of_two(bus)
    gone = commit.consumed[1]
    refused = Refused(RefusalCause.DIVERGED, gone.learner, gone.incarnation, gone.identity)
    told = replace(commit, consumed=commit.consumed[:1], refused=(refused,) * refuses)
    tamper(bus, sequence, encode(told))
    assert (What.UNRESOLVED in kinds(await verified(bus))) is not refuses


async def test_flood_of_more_refusals_than_a_commit_names_breaks_no_promise() -> None:
    bus = MemoryBroker().connect()
    await create(bus, RUN)
    await ledger.join(bus, RUN, "flood", "host", 1)
    flood = ScriptedLearner(bus, RUN, PLAN, "flood", scheme="int4", versions={0: 999})
    for _ in range(MOST_NAMED + 7):
        await flood.send_gradient(0, 1000)
    await train(bus, RUN, 3)
    report = await verify(bus, RUN)
    assert report.violations == ()
    (unnamed,) = [c.unnamed for _, c in commits_of(bus, 0) if c.unnamed]
    assert unnamed == (Unnamed("flood", 7),)


async def test_commit_with_other_weights_does_not_replay() -> None:
    bus = await trained()
    sequence, commit = of_two(bus)
    rows = tuple(replace(c, weight=w) for c, w in zip(commit.consumed, (0.9, 0.1), strict=True))
    tamper(bus, sequence, encode(replace(commit, consumed=rows)))
    assert What.REPLAY in kinds(await verified(bus, with_replay=True))


async def test_replay_to_a_version_gives_what_was_committed_then() -> None:
    bus = await trained()
    vectors: dict[int, np.ndarray] = {}

    def keep(fold: FragmentFold, last: Commit) -> None:
        assert last.version == 3
        vectors[fold.fragment.index] = fold.master

    log = await log_of(bus)
    replayed = await replay(log, known=await survey(log, ReplayMoment(version=3)), sink=keep)
    assert replayed.whole
    assert replayed.wrong == ()
    for index in (0, 1):
        (commit,) = [c for _, c in commits_of(bus, index) if c.version == 3]
        assert vector_digest(vectors[index]) == commit.master_digest


async def test_a_fork_is_the_run_as_it_was_and_starts_as_another(tmp_path: Path) -> None:
    bus = await trained()
    log, store = await log_of(bus), LocalStore(tmp_path / "then")
    written = await fork(log, ReplayMoment(version=3), "then", store)
    assert written.checkpoint.versions == (3, 3)
    assert written.name == f"step-{written.checkpoint.step:08d}"
    there = MemoryBroker().connect()
    await restore(there, store.where(written.name), "then")
    for index in (0, 1):
        (commit,) = [c for _, c in commits_of(bus, index) if c.version == 3]
        restored = await state.read_manifest(there, "then", PLAN, index)
        assert restored is not None
        assert restored.commit.version == 3
        assert restored.commit.master_digest == commit.master_digest
        assert restored.commit.progress != ()


async def test_a_fork_that_is_interrupted_as_it_begins_to_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log, store = await log_of(await trained()), LocalStore(tmp_path / "then")
    forking = asyncio.create_task(fork(log, ReplayMoment(version=3), "then", store))
    loop, draft = asyncio.get_running_loop(), store.draft

    def interrupted(name: str) -> LocalDraft:
        begun = draft(name)
        loop.call_soon_threadsafe(forking.cancel)
        return begun

    monkeypatch.setattr(store, "draft", interrupted)
    with pytest.raises(asyncio.CancelledError):
        await forking
    assert LocalStore(tmp_path).folders() == []


async def test_a_fork_without_a_learner_merges_the_others_alone(tmp_path: Path) -> None:
    bus = await trained()
    log, store = await log_of(bus), LocalStore(tmp_path / "clean")
    written = await fork(log, ReplayMoment(version=3), "clean", store, without="b")
    for saved, vectors in checkpoint.fragments(store, written.name):
        fragment = PLAN.fragments[saved.commit.fragment]
        fold = FragmentFold.of(outer_of(CONFIG, PLAN), PLAN, fragment, CONFIG.sync.merge)
        assembler, sent = ContributionAssembler(RUN, PLAN), {}
        records = bus.broker.streams[STREAMS["CONTRIB"]].records.values()
        for got in map(assembler.feed, records):
            if isinstance(got, Contribution) and got.header.fragment == fragment.index:
                sent[got.id] = got
        for _, commit in commits_of(bus, fragment.index)[:3]:
            merged = [sent[id_of(item)] for item in commit.consumed]
            kept = [one.gradient for one in merged if one.header.learner == "a"]
            if commit.version == 1:
                fold.begin(first_master(merged[0], fold.fragment), None)
            elif kept:
                work = [1.0 / len(kept)] * len(kept)
                assert len(kept) == 1
                fold.merge(kept, work)
        assert np.array_equal(vectors["master"], fold.master)
        assert [row.learner for row in saved.commit.progress] == ["a"]
    with pytest.raises(ConfigError, match="never had a learner 'x'"):
        await fork(log, ReplayMoment(version=3), "clean", store, without="x")


async def test_replay_to_a_sequence_is_a_cut_of_the_ledger() -> None:
    bus = await trained()
    sequence, commit = commits_of(bus, 1)[2]
    log = await log_of(bus)
    replayed = await replay(log, known=await survey(log, ReplayMoment(sequence=sequence)))
    other = [c.version for s, c in commits_of(bus, 0) if s <= sequence]
    assert [f.reached for f in replayed.fragments] == [other[-1], commit.version]
    assert replayed.whole
    with pytest.raises(ConfigError, match="choose a later one"):
        await survey(log, ReplayMoment(sequence=1))


async def test_a_version_that_no_fragment_has_come_to_is_refused() -> None:
    log = await log_of(await trained())
    newest = max((await survey(log, ReplayMoment())).versions.values())
    with pytest.raises(ConfigError, match=f"has come to v{newest} only"):
        await survey(log, ReplayMoment(version=newest + 1))
    assert newest in (await survey(log, ReplayMoment(version=newest))).versions.values()


async def test_what_the_window_has_dropped_is_reported_per_fragment() -> None:
    bus = await trained(6)
    needed = next(c.consumed[0].sequence_last for _, c in commits_of(bus, 0) if c.version == 3)
    for sequence in [*bus.broker.streams[SUBJECTS.shard(0).stream("CONTRIB")].records]:
        if sequence <= needed:
            drop(bus, "CONTRIB", sequence)
    replayed = await replay(await log_of(bus))
    assert not replayed.whole
    assert "Name a checkpoint of version 3" in replayed.fragments[0].stopped
    report = await verified(bus)
    assert report.violations == ()
    assert report.survey.base[0] == 3


@pytest.mark.parametrize(
    ("policy", "drifts"),
    [
        (WhatIfPolicy(merge="rda", outer="nesterov"), False),
        (WhatIfPolicy(outer="direct"), True),
    ],
)
async def test_only_another_policy_drifts(policy: WhatIfPolicy, *, drifts: bool) -> None:
    replayed = await replay(await log_of(await trained()), policy=policy)
    assert replayed.wrong == ()
    drift = reduce(Drift.and_of, [f.drift for f in replayed.fragments if f.drift])
    assert (drift.distance > 0) is drifts
    assert drift.cosine is not None
    assert drift.cosine == pytest.approx(1) or drifts


async def saved(bus: MemoryBus, folder: Path) -> str:
    """Write a checkpoint of the run, and return where it is."""
    record, store = await ledger.read_run(bus, RUN), LocalStore(folder / RUN)
    written = await Checkpointer.of(bus, record, store).save()
    assert written is not None
    return store.where(written.name)


async def test_checkpoint_is_where_a_replay_begins_when_the_window_has_moved_on(
    tmp_path: Path,
) -> None:
    bus = await trained(3, config=WHOLE)
    path = await saved(bus, tmp_path)
    for sequence in [*bus.broker.streams[SUBJECTS.shard(0).stream("CONTRIB")].records]:
        drop(bus, "CONTRIB", sequence)
    await train(bus, RUN, 7)
    log = await log_of(bus)
    replayed = await replay(log, bases=bases_of(path, log))
    assert replayed.wrong == ()
    assert replayed.whole
    assert min(f.reached - f.base for f in replayed.fragments) > 0
    assert min(f.base for f in replayed.fragments) > 0


async def test_checkpoint_of_another_history_is_found_by_its_digest(tmp_path: Path) -> None:
    path = await saved(await trained(3), tmp_path)
    forged = await trained(6, config=CONFIG.model_copy(update={"outer": OuterConfig(lr=0.1)}))
    log = await log_of(forged)
    replayed = await replay(log, bases=bases_of(path, log))
    assert "name one of this run" in replayed.wrong[0].sentence
