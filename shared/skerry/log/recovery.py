"""Compare ledger and state before a service starts from them.

A new owner of a shard repairs the one difference that a crash leaves, a ledger that is one commit
short of its manifest; a service that looks for a run learns when its record is gone and its state
is not. Every other difference is a loss, and is named. The same check stands before every append,
and a learner that joins checks that the ledger knows every learner that its commits name.
"""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing, suppress
from typing import NamedTuple

import xxhash

from skerry.algorithm.fragments import Plan
from skerry.errors import (
    BrokerUnavailable,
    Denied,
    RunNotFound,
    StateLost,
    WireError,
    WrongPlan,
)
from skerry.log.base import Bus, Deliver, Expect, Record
from skerry.log.client import both
from skerry.log.ledger import (
    by_name,
    history_lost,
    last_commits,
    read_run,
    same_run,
    state_lost,
    until_granted,
)
from skerry.log.reading import LOOK_PAUSES_S
from skerry.log.run_records import NewestRecord, newest_readable, publish, readable_up_to
from skerry.log.state import read_manifest, read_manifests
from skerry.protocol.messages import Commit, Manifest, MemberRecord, RunRecord, begins_history
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from skerry.telemetry import spans, tracing

READ_S = 20.0
"""Reading up to a fence that was just taken takes no longer than this."""
SETTLED_LOOKS, SETTLED_PAUSE_S = 40, 0.5
"""How often, and how many seconds apart, the log is asked about state that has become older. No
service waits for the answer, so it is asked until a deposed leader that is cut off from the others
must have stepped down (after 10 s)."""


async def find_run(bus: Bus, run: str, *, waits: bool = False) -> RunRecord | None:
    """Return the run's record; None where the log knows nothing of such a run.

    With ``waits`` it is None also while the run is being restored: a restore writes the state
    before the record. Raises StateLost if the record is gone and state of the run is left: a new
    run over that would number learners' starts from 1 again, and take what they send for merged.
    """
    left: list[Commit | None] = []
    for pause_s in LOOK_PAUSES_S:
        await asyncio.sleep(pause_s)
        try:
            return await read_run(bus, run)
        except RunNotFound:
            left = await _left(bus, run)
        restored = all(commit is not None and begins_history(commit) for commit in left)
        if restored and (waits or not (left or (await _state_left(bus, run))[1])):
            return None
    raise await _run_lost(bus, run, left)


async def still_there(bus: Bus, record: RunRecord) -> None:
    """Raise StateLost unless the log holds this very run; for a caller that found a loss in it."""
    found = await find_run(bus, record.run)
    if found is None:
        raise _run_gone(record.run)
    same_run(found, record.created_ns)


def gaps(newest: Mapping[int, Commit], commits: Mapping[int, Commit]) -> dict[int, range]:
    """Return by fragment which versions the ledger lacks between its newest and the manifest's.

    Args:
        newest: the commits that the manifests hold.
        commits: the newest that the ledger holds; it may be one behind.
    """
    found: dict[int, range] = {}
    for fragment, commit in newest.items():
        held = commits.get(fragment)
        if held is None and begins_history(commit):
            continue
        missing = range(held.version + 1 if held else 1, commit.version)
        if missing:
            found[fragment] = missing
    return found


def _listed(missing: Mapping[int, range]) -> str:
    """Return which versions of which fragments, for a sentence."""
    words: list[str] = []
    for fragment, versions in sorted(missing.items()):
        first, last = versions.start, versions.stop - 1
        span = f"version {last}" if first == last else f"versions {first} to {last}"
        if first == 1:  # where a restored run's history began is lost too
            span = f"every version before {versions.stop}"
        words.append(f"fragment {fragment}, {span}")
    return "; ".join(words)


def _run_gone(run: str) -> StateLost:
    """Return the error for a run that the log has lost altogether."""
    return StateLost(
        f"The log has lost run {run!r} whole: its streams were deleted, or the broker has begun"
        " with an empty store. Put the broker's own store back from a copy, or restore the run with"
        f" `skerry checkpoints restore CHECKPOINT --run {run}`, and start this process again."
    )


async def _run_lost(bus: Bus, run: str, left: Sequence[Commit | None]) -> StateLost:
    """Return the error for a run whose record is gone; ``left``: the commits of its manifests."""
    newest = {commit.fragment: commit for commit in left if commit is not None}
    if newest and all(commit and begins_history(commit) for commit in left):
        origin = next(iter(newest.values())).source
        return StateLost(
            f"Run {run!r} has state but no record in the ledger: its restore from {origin} is under"
            " way, or was interrupted. Wait for it, or start it again with"
            f" `skerry checkpoints restore {shlex.quote(origin)} --run {run}`."
        )
    if not left:
        return StateLost(
            f"Run {run!r} has lost its record in the ledger, or its restore has only begun: the"
            " state holds a fence, and no fragment yet. Begin another one under another --run, or"
            " put the broker's own store back from a copy."
        )
    missing = gaps(newest, await last_commits(bus, run))
    lost = f", and commits: {_listed(missing)}" if missing else ""
    held = [f"fragment {f} at version {c.version}" for f, c in sorted(newest.items())]
    held += ["a manifest that cannot be read" for commit in left if commit is None]
    what = (
        f"Run {run!r} has lost its record in the ledger{lost}. The state still holds"
        f" {', '.join(held)}, so this is no new run, and none is created over it."
    )
    return await history_lost(bus, run, what)


async def _left(bus: Bus, run: str) -> list[Commit | None]:
    """Return the commit of every manifest in the state; None for one that cannot be read."""
    found: list[Commit | None] = []
    for record in (await _state_left(bus, run))[0]:
        try:
            found.append(decode(Manifest, record.payload, run=run).commit)
        except WireError:
            found.append(None)
    return found


async def _state_left(bus: Bus, run: str) -> tuple[list[Record], bool]:
    """Return every manifest in the state of a run, and True if any of its fences was taken.

    Only the record, which may be lost, says how many shards there are. So a shard that has neither
    manifest nor fence, or that this key may not read, is taken to come after the last one.
    """
    found: list[Record] = []
    shard = 0
    while True:
        subjects = Subjects(run).shard(shard)
        try:
            manifests = await bus.last_each(subjects.manifest())
            if not manifests and await bus.last(subjects.fence()) is None:
                return found, shard > 0
        except Denied:
            if not shard:
                raise
            return found, True
        found += manifests
        shard += 1


async def mend(
    bus: Bus, run: str, plan: Plan, own: Sequence[int], manifests: dict[int, Record]
) -> dict[int, Manifest]:
    """Return the manifests of the fragments ``own``, the ledger mended where it is one behind.

    Raises StateLost if the ledger knows of a version that the state does not hold, or if it lacks
    more than the one commit that a syncer leaves out when it dies right after a commit point.
    """
    commits = await last_commits(bus, run)
    found: dict[int, Manifest] = {}
    for fragment in own:
        held, record, known = commits.get(fragment), manifests.get(fragment), 0
        if record is not None:
            try:
                manifest = decode(Manifest, record.payload, run=run, plan_digest=plan.digest)
            except WrongPlan:
                raise
            except WireError as error:
                what, version = (
                    f"its manifest cannot be read ({error})",
                    held.version if held else 1,
                )
                raise await state_lost(bus, run, fragment, version, what) from error
            found[fragment], known = manifest, manifest.commit.version
        if held is not None and held.version > known:
            what = f"the newest manifest in the log is of version {known}"
            if not known:
                what = "its manifest is not in the log"
            raise await state_lost(bus, run, fragment, held.version, what)
    newest = {fragment: manifest.commit for fragment, manifest in found.items()}
    await _follows(bus, run, newest, commits)
    for fragment, commit in newest.items():
        held = commits.get(fragment)
        if held is None or held.version < commit.version:
            await append_commit(bus, commit)
    return found


class Predecessor(NamedTuple):
    """The newest commit record of a fragment in the ledger: its sequence, and its bytes' digest."""

    sequence: int
    digest: int


async def predecessor(bus: Bus, commit: Commit) -> Predecessor | None:
    """Return the record that a commit follows in the ledger; None where the ledger has the commit.

    Raises StateLost if the ledger lacks the version before it: a history with a hole is not
    continued.
    """
    fragment = commit.fragment
    while True:
        newest = await _newest_commit(bus, commit.run, fragment)
        held = newest.value if newest else None
        if held is not None and held.version >= commit.version:
            return None
        known = {fragment: held} if held else {}
        if not await _follows(bus, commit.run, {fragment: commit}, known):
            if newest is None or held is None:
                return Predecessor(newest.sequence if newest else 0, 0)
            digest = xxhash.xxh3_64_intdigest(newest.stored.payload)
            return Predecessor(newest.sequence, digest)


async def _newest_commit(bus: Bus, run: str, fragment: int) -> NewestRecord[Commit] | None:
    newest = await bus.last(Subjects(run).commit(fragment))
    return None if newest is None else await readable_up_to(bus, run, Commit, newest)


async def append_commit(bus: Bus, commit: Commit, after: Predecessor | None = None) -> None:
    """Append a commit of a manifest unless the ledger has it; safe to repeat.

    ``after`` is what ``predecessor`` returned, if the caller has asked already. Raises StateLost as
    that does.
    """

    async def append() -> None:
        nonlocal after
        before, after = after or await predecessor(bus, commit), None
        if before is not None:
            await publish(
                bus,
                commit,
                msg_id=f"{commit.fragment}/{commit.version}",
                expect=Expect(Subjects(commit.run).commit(commit.fragment), before.sequence),
                headers=tracing.headers_for(commit.trace_id, spans.COMMIT),
            )

    await until_granted(append, f"The ledger of fragment {commit.fragment}")


async def _follows(
    bus: Bus, run: str, newest: Mapping[int, Commit], commits: dict[int, Commit]
) -> bool:
    """Return True if the ledger had to be read again, which updates ``commits``.

    Raises StateLost unless the ledger holds the versions before these of ``newest``.
    """
    for looked, pause_s in enumerate(LOOK_PAUSES_S):
        await asyncio.sleep(pause_s)
        missing = gaps(newest, commits)
        if not missing:
            return looked > 0
        for fragment in missing:
            held = await _newest_commit(bus, run, fragment)
            if held is not None and held.value is not None:
                commits[fragment] = held.value
    missing = gaps(newest, commits)
    if not missing:
        return True
    if not await _left(bus, run) and await find_run(bus, run) is None:
        raise _run_gone(run)
    what = (
        f"The ledger of run {run!r} has lost commits that came before those of its manifests:"
        f" {_listed(missing)}. The newest state is still in the log, how it came about is not."
    )
    raise await history_lost(bus, run, what)


async def not_gone_back(bus: Bus, run: str, plan: Plan, fragment: int, version: int) -> None:
    """Return once the log is found to hold this version of a fragment, or a newer one.

    For a caller that saw that version, then an older one, which a replica that lags shows, too.
    Waits through a broker's restart. Raises StateLost if the log keeps showing an older version.
    """
    looks, held = 0, 0
    while looks < SETTLED_LOOKS:
        with suppress(BrokerUnavailable, WireError):
            manifest = await read_manifest(bus, run, plan, fragment)
            held, looks = manifest.commit.version if manifest else 0, looks + 1
            if held >= version:
                return
        await asyncio.sleep(SETTLED_PAUSE_S)
    msg = (
        f"The log of run {run!r} has gone back: fragment {fragment} was at version {version} and is"
        f" at {held}, so an older copy of the broker's store was put in its place, or a power"
        " cut took the end of it. Start this process again, and it goes on from there; or stop the"
        " run first and put back what a checkpoint has newer with `skerry checkpoints restore"
        f" CHECKPOINT --run {run} --replace`."
    )
    raise StateLost(msg)


class KnownRun(NamedTuple):
    """A run's member records and manifests, as the log held them at one look."""

    members: list[NewestRecord[MemberRecord]]
    manifests: dict[int, Manifest]


async def known_members(bus: Bus, run: str, plan: Plan, learner: str) -> KnownRun:
    """Return the members' records, and the manifests that name them, for a learner that will join.

    Raises StateLost if it must not join, because records are gone: manifests name a learner, or a
    start of one, that no record names. A start that was numbered a second time would send what
    counts as merged already, and a new name would be given a data shard that another reads. A
    learner whose own record is as new as the manifests know may join. One that has written
    something else over its own records bars itself alone.
    """
    lost: dict[str, int] = {}
    for pause_s in LOOK_PAUSES_S:
        await asyncio.sleep(pause_s)
        # A learner that joins between the two is no loss: the next look knows it.
        manifests, found = await both(
            read_manifests(bus, run, plan), newest_readable(bus, run, MemberRecord)
        )
        known = by_name(found)
        lost = _unknown((m.commit for m in manifests.values()), known)
        named = Subjects(run).member
        spoiled = {item.subject for item in found if item.value is None} - {named(learner)}
        lost = {name: start for name, start in lost.items() if named(name) not in spoiled}
        if not lost or (learner in known and learner not in lost):
            return KnownRun(found, manifests)
    names = "; ".join(f"learner {name!r}, start {start}" for name, start in sorted(lost.items()))
    what = (
        f"Run {run!r} has lost records of its members: {names}. Which data they read"
        " is not known without them, so they do not join, and no new name does."
    )
    raise await history_lost(bus, run, what)


def _unknown(commits: Iterable[Commit], members: Mapping[str, MemberRecord]) -> dict[str, int]:
    """Return by learner the newest start that commits name and the members' records do not.

    A row of a restored run names no start. A learner whose record was lost before has no data shard
    in the checkpoint: nothing more can be known of it, and it begins as a new name.
    """
    found: dict[str, int] = {}
    for row in (row for commit in commits for row in commit.progress):
        held = members.get(row.learner)
        if (held.incarnation if held else 0) < row.incarnation:
            found[row.learner] = max(row.incarnation, found.get(row.learner, 0))
    return found


async def read_behind(
    bus: Bus, run: str, own: Sequence[int], shard: int, token: int
) -> tuple[dict[int, Record], int]:
    """Return the newest manifests of the fragments ``own``, and the shard's newest token.

    They are read in the stream's own order up to the fence ``token``, after which no older writer
    can write: a replica that lags may answer any other request with what was true before. What the
    fence's own writer has written since is added.
    """
    subjects = Subjects(run).shard(shard)
    wanted = {subjects.manifest(fragment): fragment for fragment in own}
    found: dict[str, Record] = {}
    follower = bus.follow([subjects.fence(), *wanted], deliver=Deliver.LAST_PER_SUBJECT)
    newest = 0
    try:
        async with asyncio.timeout(READ_S), aclosing(follower):
            async for record in follower:
                if record.subject not in wanted:
                    newest = record.sequence
                    if newest >= token:
                        break
                found[record.subject] = record
    except TimeoutError as error:
        msg = f"The fence of shard {shard} of run {run!r} could not be read within {READ_S:g} s."
        raise BrokerUnavailable(msg) from error
    for record in await bus.last_each(subjects.manifest()):
        held = found.get(record.subject)
        if held is None or held.sequence < record.sequence:
            found[record.subject] = record
    return {wanted[s]: record for s, record in found.items() if s in wanted}, newest
