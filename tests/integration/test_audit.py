"""The audit over runs of the real syncer: a whole history holds, and replays to the last bit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from skerry.algorithm.fragments import Fragment, LeafSpec, plan
from skerry.errors import ConfigError
from skerry.log import ledger, state
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import CloseReason, Commit, Manifest, RefusalCause, Refused
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects
from skerry.settings.models import OuterConfig, RunConfig, SyncConfig
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from skerry_syncer.service import stand_by
from skerry_tools.audit.bases import CheckpointBases, usable
from skerry_tools.audit.checks import Rules
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.moment import ReplayMoment, survey
from skerry_tools.audit.replay import replay
from skerry_tools.audit.verify import AuditReport, verify
from skerry_tools.audit.violations import What
from skerry_tools.audit.whatif import WhatIfPolicy, overall
from tests.support.builders import run_record
from tests.support.learners import FakeLearner

RUN = "t"
PLAN = plan([LeafSpec("embed", (30, 64), embedding=True), LeafSpec("w", (20, 64))], 2)
CONFIG = RunConfig(
    sync=SyncConfig(fragments=2, h_steps=8, merge="rda", chunk_bytes=4096, quorum=2),
    outer=OuterConfig(preset="nesterov"),
)
FAKE = replace(Rules.of(CONFIG), sequence_tokens=None, counted=False)
"""Fake learners' tokens have nothing to do with the config's sequences."""
SUBJECTS = Subjects(RUN)


@asynccontextmanager
async def background(*coroutines: object) -> AsyncGenerator[None]:
    tasks = [asyncio.ensure_future(c) for c in coroutines]  # type: ignore[call-overload]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until_version(bus: MemoryBus, version: int) -> None:
    newest: dict[int, int] = {}
    commits = ledger.follow_commits(bus, RUN)
    async with asyncio.timeout(30), aclosing(commits):
        async for _, commit in commits:
            newest[commit.fragment] = commit.version
            if len(newest) == 2 and min(newest.values()) >= version:
                return


async def trained(versions: int = 5, *, config: RunConfig = CONFIG) -> MemoryBus:
    """Return the log of a run whose syncer and fake learners have stopped."""
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.create_run(bus, run_record(RUN, PLAN, config.model_dump_json()))
    await train(bus, versions)
    return bus


async def train(bus: MemoryBus, versions: int) -> None:
    """Let a syncer and two fake learners go on until both fragments have reached a version."""
    learners = [
        FakeLearner(bus, RUN, PLAN, n, step_s=0.005, scheme="int4").train() for n in ("a", "b")
    ]
    async with background(stand_by(bus, RUN, "s"), *learners):
        await until_version(bus, versions)


async def verified(bus: MemoryBus, *, with_replay: bool = True) -> AuditReport:
    return await verify(bus, RUN, replay=with_replay, rules=FAKE)


async def log_of(bus: MemoryBus) -> RunLog:
    return RunLog.of(bus, await ledger.read_run(bus, RUN))


def kinds(report: AuditReport) -> set[What]:
    return {violation.what for violation in report.violations}


def drop(bus: MemoryBus, stream: str, sequence: int) -> None:
    bus.broker.streams[SUBJECTS.stream(stream)].drop(sequence)  # type: ignore[arg-type]


def commits_of(bus: MemoryBus, fragment: int) -> list[tuple[int, Commit]]:
    records = bus.broker.streams[SUBJECTS.stream("LEDGER")].records
    return [
        (sequence, decode(Commit, record.payload, run=RUN))
        for sequence, record in records.items()
        if record.subject == SUBJECTS.commit(fragment)
    ]


def tamper(bus: MemoryBus, sequence: int, payload: bytes) -> None:
    records = bus.broker.streams[SUBJECTS.stream("LEDGER")].records
    records[sequence] = replace(records[sequence], payload=payload)


async def test_history_of_a_real_syncer_holds_and_replays() -> None:
    report = await verified(await trained())
    assert report.violations == ()
    assert report.replayed is not None
    assert report.replayed.whole
    assert [f.reached for f in report.replayed.fragments] == [f.version for f in report.fragments]
    assert [row.learner for row in report.learners] == ["a", "b"]
    assert min(row.contributions for row in report.learners) > 0


async def test_history_across_syncers_holds() -> None:
    bus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.create_run(bus, run_record(RUN, PLAN, CONFIG.model_dump_json()))
    learners = [FakeLearner(bus, RUN, PLAN, n, step_s=0.005).train() for n in ("a", "b")]
    async with background(*learners):
        for version in (2, 4, 6):
            async with background(stand_by(bus, RUN, "s")):
                await until_version(bus, version)
    assert (await verified(bus)).violations == ()


async def test_deleted_ledger_record_is_named_with_fragment_and_version() -> None:
    bus = await trained()
    sequence, commit = commits_of(bus, 1)[2]
    drop(bus, "LEDGER", sequence)
    report = await verified(bus, with_replay=False)
    assert kinds(report) == {What.MISSING, What.VERSIONS}
    assert f"Ledger record {sequence} is missing" in report.violations[0].sentence
    broken = report.violations[1]
    assert (broken.fragment, broken.version) == (1, commit.version + 1)
    assert f"version {commit.version} is missing" in broken.sentence


async def test_purged_end_of_the_ledger_is_missing_and_the_manifest_is_ahead() -> None:
    bus = await trained()
    held = bus.broker.streams[SUBJECTS.stream("LEDGER")]
    for sequence in sorted(held.records)[-4:]:
        drop(bus, "LEDGER", sequence)
    report = await verified(bus, with_replay=False)
    assert What.MISSING in kinds(report)
    assert What.STATE in kinds(report)


async def test_manifest_without_its_ledger_record_is_a_note() -> None:
    bus = await trained()
    stream = bus.broker.streams[SUBJECTS.stream("LEDGER")]
    last = stream.last_seq
    fragment = decode(Commit, stream.records[last].payload, run=RUN).fragment
    drop(bus, "LEDGER", last)
    stream.last_seq -= 1
    report = await verified(bus, with_replay=False)
    assert report.violations == ()
    assert [f"Fragment {fragment}," in note for note in report.notes] == [True]


async def test_bytes_that_are_no_record_are_named_by_sequence_and_subject() -> None:
    bus = await trained()
    receipt = await bus.publish(SUBJECTS.commit(0), b"rubbish")
    report = await verified(bus, with_replay=False)
    assert kinds(report) == {What.UNREADABLE}
    assert f"{receipt.sequence} ({SUBJECTS.commit(0)})" in report.violations[0].sentence


async def test_bytes_that_are_no_record_are_a_note_where_any_learner_may_write() -> None:
    bus = await trained()
    receipt = await bus.publish(SUBJECTS.member("zz"), b"rubbish")
    report = await verified(bus)
    assert report.violations == ()
    assert [f"{receipt.sequence} ({SUBJECTS.member('zz')})" in n for n in report.notes] == [True]


async def test_forged_commit_is_out_of_order_and_unlike_its_manifest() -> None:
    bus = await trained()
    _, newest = commits_of(bus, 0)[-1]
    await bus.publish(SUBJECTS.commit(0), encode(newest))
    report = await verified(bus, with_replay=False)
    assert What.VERSIONS in kinds(report)
    assert What.TWICE in kinds(report)


async def test_commit_that_was_rewritten_is_not_its_manifests() -> None:
    bus = await trained()
    sequence, newest = commits_of(bus, 0)[-1]
    tamper(bus, sequence, encode(replace(newest, reason=CloseReason.TIMEOUT)))
    report = await verified(bus, with_replay=False)
    assert kinds(report) == {What.STATE}


async def test_changed_record_of_the_past_does_not_fit_the_one_after_it() -> None:
    bus = await trained()
    sequence, commit = commits_of(bus, 1)[2]
    tamper(bus, sequence, encode(replace(commit, syncer="somebody-else", closed_ns=1)))
    (broken,) = (await verified(bus)).violations
    assert (broken.what, broken.fragment, broken.version) == (What.CHAIN, 1, commit.version + 1)
    assert f"does not follow the record of version {commit.version}" in broken.sentence


async def test_first_record_names_none_before_it() -> None:
    bus = await trained()
    sequence, commit = commits_of(bus, 0)[0]
    tamper(bus, sequence, encode(replace(commit, previous=7)))
    report = await verified(bus, with_replay=False)
    assert [(v.what, v.version) for v in report.violations] == [(What.CHAIN, 1), (What.CHAIN, 2)]


async def test_flipped_bit_in_the_state_is_found() -> None:
    bus = await trained()
    manifests = await state.read_manifests(bus, RUN, PLAN)
    sequence = manifests[1].parts[1].chunks[0].sequence
    records = bus.broker.streams[SUBJECTS.stream("STATE")].records
    payload = bytearray(records[sequence].payload)
    payload[-1] ^= 1
    records[sequence] = replace(records[sequence], payload=bytes(payload))
    report = await verified(bus, with_replay=False)
    assert [(v.what, v.fragment) for v in report.violations] == [(What.STATE, 1)]


async def test_chunk_that_is_gone_is_found() -> None:
    bus = await trained()
    manifests = await state.read_manifests(bus, RUN, PLAN)
    drop(bus, "STATE", manifests[0].parts[0].chunks[0].sequence)
    report = await verified(bus, with_replay=False)
    assert [(v.what, v.fragment) for v in report.violations] == [(What.STATE, 0)]


async def retell(bus: MemoryBus, manifest: Manifest) -> None:
    """Make the log say otherwise what a fragment's newest version is: manifest and ledger alike."""
    fragment = manifest.commit.fragment
    sequence, _ = commits_of(bus, fragment)[-1]
    tamper(bus, sequence, encode(manifest.commit))
    await bus.publish(SUBJECTS.manifest(fragment), encode(manifest))


@pytest.mark.parametrize("part", ["params", "master"])
async def test_state_that_differs_from_its_commit_is_found(part: str) -> None:
    bus = await trained()
    held = (await state.read_manifests(bus, RUN, PLAN))[0]
    told = replace(held.commit, **{f"{part}_digest": 7})  # type: ignore[arg-type]
    await retell(bus, replace(held, commit=told))
    report = await verified(bus, with_replay=False)
    assert [(v.what, v.fragment) for v in report.violations] == [(What.STATE, 0)]
    assert f"its part '{part}' is another vector" in report.violations[0].sentence


@pytest.mark.parametrize("part", ["params", "master", "outer.momentum"])
async def test_part_that_the_manifest_lacks_or_has_short_is_found(part: str) -> None:
    bus = await trained()
    held = (await state.read_manifests(bus, RUN, PLAN))[0]
    await retell(bus, replace(held, parts=tuple(p for p in held.parts if p.name != part)))
    report = await verified(bus, with_replay=False)
    assert [(v.what, v.fragment) for v in report.violations] == [(What.STATE, 0)]
    assert f"lacks its part '{part}'" in report.violations[0].sentence
    short = [replace(p, blocks=p.blocks - 1) if p.name == part else p for p in held.parts]
    await retell(bus, replace(held, parts=tuple(short)))
    report = await verified(bus, with_replay=False)
    assert f"its part '{part}' has" in report.violations[0].sentence


async def test_part_that_the_manifest_names_twice_is_found() -> None:
    bus = await trained()
    held = (await state.read_manifests(bus, RUN, PLAN))[0]
    await retell(bus, replace(held, parts=(*held.parts, held.parts[0])))
    report = await verified(bus, with_replay=False)
    assert "names a part twice" in report.violations[0].sentence


async def test_an_unresolved_contribution_below_the_floor_is_found() -> None:
    bus = await trained()
    sequence, commit = next((s, c) for s, c in commits_of(bus, 0)[1:-1] if len(c.consumed) == 2)
    kept = replace(commit, consumed=commit.consumed[:1])
    tamper(bus, sequence, encode(kept))
    report = await verified(bus, with_replay=False)
    assert What.UNRESOLVED in kinds(report)


async def test_refusal_accounts_for_a_contribution() -> None:
    bus = await trained()
    sequence, commit = next((s, c) for s, c in commits_of(bus, 0)[1:-1] if len(c.consumed) == 2)
    gone = commit.consumed[1]
    refused = Refused(RefusalCause.DIVERGED, gone.learner, gone.incarnation, gone.identity)
    tamper(bus, sequence, encode(replace(commit, consumed=commit.consumed[:1], refused=(refused,))))
    report = await verified(bus, with_replay=False)
    assert What.UNRESOLVED not in kinds(report)


async def test_a_commit_with_other_weights_does_not_replay() -> None:
    bus = await trained()
    sequence, commit = next((s, c) for s, c in commits_of(bus, 0)[1:] if len(c.consumed) == 2)
    rows = tuple(replace(c, weight=w) for c, w in zip(commit.consumed, (0.9, 0.1), strict=True))
    tamper(bus, sequence, encode(replace(commit, consumed=rows)))
    report = await verified(bus)
    assert What.REPLAY in kinds(report)


async def test_replay_to_a_version_gives_what_was_committed_then() -> None:
    bus = await trained()
    vectors: dict[int, np.ndarray] = {}

    def keep(fragment: Fragment, vector: np.ndarray) -> None:
        vectors[fragment.index] = vector

    replayed = await replay(await log_of(bus), moment=ReplayMoment(version=3), sink=keep)
    assert replayed.whole
    assert replayed.wrong == ()
    for index in (0, 1):
        (commit,) = [c for _, c in commits_of(bus, index) if c.version == 3]
        assert vector_digest(vectors[index]) == commit.master_digest


async def test_replay_to_the_moment_of_one_fragment_is_a_cut_of_the_ledger() -> None:
    bus = await trained()
    sequence, _ = commits_of(bus, 1)[2]
    replayed = await replay(await log_of(bus), moment=ReplayMoment(version=3, fragment=1))
    other = [c.version for s, c in commits_of(bus, 0) if s <= sequence]
    assert [f.reached for f in replayed.fragments] == [other[-1], 3]
    assert replayed.whole


async def test_moment_before_the_first_commit_is_refused() -> None:
    bus = await trained(1)
    with pytest.raises(ConfigError, match="choose a later --to"):
        await replay(await log_of(bus), moment=ReplayMoment(sequence=1))


async def test_what_the_window_has_dropped_is_reported_per_fragment() -> None:
    bus = await trained(6)
    needed = next(c.consumed[0].sequence_last for _, c in commits_of(bus, 0) if c.version == 3)
    held = bus.broker.streams[SUBJECTS.stream("CONTRIB")]
    for sequence in [s for s in held.records if s <= needed]:
        drop(bus, "CONTRIB", sequence)
    replayed = await replay(await log_of(bus))
    assert not replayed.whole
    assert "name a checkpoint of version 3" in replayed.fragments[0].stopped
    report = await verified(bus, with_replay=False)
    assert report.violations == ()
    assert report.fragments[0].replayable_from == 3
    assert report.raise_window_to > 0


async def test_same_policy_does_not_drift() -> None:
    bus = await trained()
    replayed = await replay(await log_of(bus), policy=WhatIfPolicy(merge="rda", outer="nesterov"))
    drift = overall([f.curve for f in replayed.fragments if f.curve])
    assert drift.distance == 0
    assert drift.cosine == pytest.approx(1)


async def test_another_optimizer_drifts_and_says_how_far() -> None:
    bus = await trained()
    replayed = await replay(await log_of(bus), policy=WhatIfPolicy(outer="direct"))
    curves = [f.curve for f in replayed.fragments if f.curve]
    assert replayed.wrong == ()
    assert overall(curves).distance > 0
    assert [p.version for p in curves[0].points] == [
        c.version for _, c in commits_of(bus, 0) if c.version > 1
    ]


async def test_smaller_quorum_merges_everything_all_the_same_but_later() -> None:
    bus = await trained(6)
    replayed = await replay(await log_of(bus), policy=WhatIfPolicy(quorum=1))
    assert replayed.whole
    for fragment in replayed.fragments:
        assert fragment.curve is not None
        merged = sum(p.merged for p in fragment.curve.points)
        real = sum(len(c.consumed) for _, c in commits_of(bus, fragment.fragment)[1:])
        assert 0 < merged <= real


async def test_larger_quorum_takes_early_what_was_merged_late_and_the_rest_still_replays() -> None:
    few = CONFIG.model_copy(update={"sync": CONFIG.sync.model_copy(update={"quorum": 1})})
    replayed = await replay(
        await log_of(await trained(6, config=few)), policy=WhatIfPolicy(quorum=2)
    )
    assert replayed.whole
    assert replayed.wrong == ()


def set_syncers_clock(bus: MemoryBus, by_ns: int) -> None:
    """Make every commit tell its times as a syncer would whose clock is that far off."""
    for fragment in (0, 1):
        for sequence, commit in commits_of(bus, fragment):
            rows = tuple(
                replace(c, arrived_ns=c.arrived_ns + by_ns if c.arrived_ns else 0)
                for c in commit.consumed
            )
            told = replace(
                commit,
                opened_ns=commit.opened_ns + by_ns,
                closed_ns=commit.closed_ns + by_ns,
                consumed=rows,
            )
            tamper(bus, sequence, encode(told))


@pytest.mark.parametrize("off_s", [-300, 300])
@pytest.mark.parametrize("dated", [True, False])
async def test_quorum_does_not_take_a_syncers_clock_for_the_brokers(
    off_s: int, *, dated: bool
) -> None:
    bus = await trained(6)
    if not dated:  # as releases before that field
        for fragment in (0, 1):
            for sequence, commit in commits_of(bus, fragment):
                rows = tuple(replace(c, arrived_ns=0) for c in commit.consumed)
                tamper(bus, sequence, encode(replace(commit, consumed=rows)))
    policy = WhatIfPolicy(quorum=1)
    right = await replay(await log_of(bus), policy=policy)
    set_syncers_clock(bus, off_s * 1_000_000_000)
    wrong = await replay(await log_of(bus), policy=policy)
    assert [f.curve for f in wrong.fragments] == [f.curve for f in right.fragments]
    merged = [p.merged for f in wrong.fragments if f.curve for p in f.curve.points]
    assert sum(merged) > 0


async def test_checkpoint_is_where_a_replay_begins_when_the_window_has_moved_on(
    tmp_path: Path,
) -> None:
    bus = await trained(3)
    record, store = await ledger.read_run(bus, RUN), LocalStore(tmp_path / RUN)
    written = await Checkpointer.of(bus, record, store).save()
    assert written is not None
    held = bus.broker.streams[SUBJECTS.stream("CONTRIB")]
    for sequence in list(held.records):
        drop(bus, "CONTRIB", sequence)
    await train(bus, 7)
    log = await log_of(bus)
    found = await survey(log, ReplayMoment())
    assert found.folders == [str(store.root)], "the ledger tells where else to look"
    assert usable(tmp_path / "elsewhere", log, found) == store.where(written.name)
    denied = tmp_path / ("x" * 300)  # no disk looks there, whoever asks
    assert usable(denied, log, found) == store.where(written.name)
    path = usable(tmp_path / RUN, log, found)
    assert path is not None
    assert path == store.where(written.name)
    replayed = await replay(log, bases=CheckpointBases(path, log), known=found)
    assert replayed.wrong == ()
    assert replayed.whole
    assert min(f.reached - f.base for f in replayed.fragments) > 0
    assert min(f.base for f in replayed.fragments) > 0


async def test_a_checkpoint_of_another_history_is_found_by_its_digest(tmp_path: Path) -> None:
    other = await trained(3)
    record, store = await ledger.read_run(other, RUN), LocalStore(tmp_path / RUN)
    written = await Checkpointer.of(other, record, store).save()
    assert written is not None
    forged = await trained(3, config=CONFIG.model_copy(update={"outer": OuterConfig(lr=0.1)}))
    await train(forged, 6)
    log = await log_of(forged)
    replayed = await replay(log, bases=CheckpointBases(Path(store.where(written.name)), log))
    assert "name one of this run" in replayed.wrong[0].sentence
