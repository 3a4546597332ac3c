"""The ledger: the run's own record, members, commits, checkpoints and evaluations, for ever."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

import xxhash

from skerry.errors import (
    BrokerUnavailable,
    BusError,
    Conflict,
    RunNotFound,
    StateLost,
    WireError,
)
from skerry.log.base import Deliver, Expect
from skerry.log.rejections import readable
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    RunRecord,
    RunState,
)
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from skerry.log.base import Bus, Record

T = TypeVar("T", MemberRecord, Commit, CheckpointRecord, Evaluation)

CAS_ATTEMPTS = 100


@dataclass(frozen=True, slots=True)
class NewestRecord(Generic[T]):
    """The newest message of a subject, and the newest one there that can be read.

    ``sequence`` is that of the newest message, ``stored`` the one that holds ``value``; None where
    none can be read.
    """

    subject: str
    sequence: int
    stored: Record
    value: T | None


async def newest_readable(bus: Bus, kind: type[T], pattern: str, run: str) -> list[NewestRecord[T]]:
    """Return the newest record of each subject that can be read, whatever lies above it.

    The ledger denies deletes, so what somebody has written there stays: it must not bar readers.
    """
    return [await readable_up_to(bus, kind, r, run) for r in await bus.last_each(pattern)]


async def readable_up_to(bus: Bus, kind: type[T], newest: Record, run: str) -> NewestRecord[T]:
    """Return the newest record of a subject that can be read, given its newest message."""
    subject, last = newest.subject, newest.sequence
    if (value := readable(kind, newest, run)) is not None:
        return NewestRecord(subject, last, newest, value)
    found: NewestRecord[T] = NewestRecord(subject, last, newest, None)
    follower = bus.follow(subject, deliver=Deliver.ALL)
    async with aclosing(follower):
        async for stored in follower:
            if stored.sequence >= last:
                break
            if (value := readable(kind, stored, run)) is not None:
                found = NewestRecord(subject, last, stored, value)
    return found


async def create_run(bus: Bus, record: RunRecord) -> RunRecord:
    """Create the run unless somebody has; return the record that the log holds."""
    subject = Subjects(record.run).ledger("run")
    try:
        await bus.publish(
            subject,
            encode(record),
            msg_id=f"run/{record.created_ns}",
            expect=Expect(subject, 0),
        )
    except Conflict:
        return await read_run(bus, record.run)
    return record


async def read_run(bus: Bus, run: str) -> RunRecord:
    """Return the run's record: as it was created, in its newest state.

    A later record that says anything else than the state is refused: a client that may publish may
    not change what a run is. Raises RunNotFound if there is none.
    """
    held = await _run_records(bus, run)
    if not held:
        msg = f"There is no run {run!r} in this log: start it with `skerry up` or name another."
        raise RunNotFound(msg)
    return held[-1]


async def _run_records(bus: Bus, run: str) -> list[RunRecord]:
    """Return the run's records that count, oldest first; WireError if none can be read."""
    subject = Subjects(run).ledger("run")
    newest = await bus.last(subject)
    if newest is None:
        return []
    found: list[RunRecord] = []
    follower = bus.follow(subject, deliver=Deliver.ALL)
    async with aclosing(follower):
        async for stored in follower:
            record = readable(RunRecord, stored, run)
            if record is not None and (not found or _is_next(found[0], record)):
                found.append(record)
            if stored.sequence >= newest.sequence:
                break
    return found or [decode(RunRecord, newest.payload, run=run)]


def _is_next(first: RunRecord, record: RunRecord) -> bool:
    """Return True if a record differs from the run's first one in nothing but its state."""
    return replace(record, state=first.state) == first


async def follow_run(bus: Bus, run: str) -> AsyncGenerator[RunRecord]:
    """Yield the run's newest record once there is one, then each change of it."""
    follower = bus.follow(Subjects(run).ledger("run"), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower):
        async for _ in follower:
            if records := await _run_records(bus, run):
                yield records[-1]


async def wait_run(bus: Bus, run: str) -> RunRecord:
    """Return the run's record, waiting until somebody has created it."""
    records = follow_run(bus, run)
    async with aclosing(records):
        async for record in records:
            return record
    msg = "The log ended while waiting for a run."
    raise BusError(msg)


async def wait_finished(bus: Bus, run: str, *, created_ns: int = 0) -> RunRecord:
    """Return the run's record once it says FINISHED.

    Raises StateLost once it is the record of another run of that id than the one that was created
    at ``created_ns`` (0: any).
    """
    records = follow_run(bus, run)
    async with aclosing(records):
        async for record in records:
            if created_ns:
                same_run(record, created_ns)
            if record.state is RunState.FINISHED:
                return record
    msg = "The log ended while waiting for a run's end."
    raise BusError(msg)


def same_run(record: RunRecord, created_ns: int) -> None:
    """Raise StateLost unless this is the record of the run that was created at ``created_ns``.

    The log was emptied meanwhile, and the run restored from a checkpoint or created once more:
    versions, rounds and incarnations start again there, and mean something else.
    """
    if record.created_ns == created_ns:
        return
    msg = (
        f"Run {record.run!r} was created again in this log: the one that this process works on is"
        " lost. Start the process again, and it goes on with the new one."
    )
    raise StateLost(msg)


async def finish_run(bus: Bus, record: RunRecord) -> None:
    """Mark the run as finished; doing it twice changes nothing.

    Raises StateLost where the log holds another run of that id by now: that one goes on. Where it
    holds none, BrokerUnavailable: who then recovers sees whether the ledger is lost.
    """
    subject = Subjects(record.run).ledger("run")
    finished = encode(replace(record, state=RunState.FINISHED))
    for _ in range(CAS_ATTEMPTS):
        newest = await bus.last(subject)
        if newest is None:
            msg = f"The record of run {record.run!r} is not in the ledger."
            raise BrokerUnavailable(msg)
        held = await read_run(bus, record.run)
        same_run(held, record.created_ns)
        if held.state is RunState.FINISHED:
            return
        try:
            await bus.publish(
                subject,
                finished,
                msg_id=f"run/{record.created_ns}/finished",
                expect=Expect(subject, newest.sequence),
            )
        except Conflict:
            continue
        return
    msg = f"The record of run {record.run!r} kept changing under {CAS_ATTEMPTS} attempts."
    raise BusError(msg)


async def list_runs(bus: Bus) -> list[RunRecord]:
    """Return every run in this log, oldest first."""
    suffix = "_LEDGER"
    names = [s.name for s in await bus.streams() if s.name.startswith("SKERRY_")]
    runs = [n.removeprefix("SKERRY_").removesuffix(suffix) for n in names if n.endswith(suffix)]
    records: list[RunRecord] = []
    for run in runs:
        try:
            records.append(await read_run(bus, run))
        except (RunNotFound, WireError):
            continue
    return sorted(records, key=lambda r: r.created_ns)


async def members(bus: Bus, run: str) -> dict[str, MemberRecord]:
    """Return the newest incarnation of every learner that ever joined, by name."""
    found = await newest_readable(bus, MemberRecord, Subjects(run).member(), run)
    return {item.value.learner: item.value for item in found if item.value is not None}


async def join(
    bus: Bus, run: str, learner: str, host: str, now_ns: int, *, above: int = 0
) -> MemberRecord:
    """Register a start of ``learner`` and return it with its incarnation and data shard.

    Its number is higher than its record's, and than ``above``. A name keeps its shard for ever; a
    new name takes the next one. The whole member table is compared-and-set through a count kept on
    the newest record, so two learners that join at the same instant get different shards. Where
    the acknowledgement of a write was lost, its number is left out and the next one taken: nothing
    else ever used it.
    """
    subjects = Subjects(run)
    subject = subjects.member(learner)
    for _ in range(CAS_ATTEMPTS):
        found = await newest_readable(bus, MemberRecord, subjects.member(), run)
        known = {i.value.learner: (i.value, i.sequence) for i in found if i.value is not None}
        mine = known.get(learner)
        unread = next((i.sequence for i in found if i.subject == subject), 0)
        member = MemberRecord(
            run=run,
            learner=learner,
            incarnation=1 + max(above, mine[0].incarnation if mine else 0),
            host=host,
            joined_ns=now_ns,
            shard=mine[0].shard
            if mine
            else 1 + max((m.shard for m, _ in known.values()), default=-1),
        )
        # A known name competes with itself only; a new one with every other new one.
        newest = max((item.sequence for item in found), default=0)
        expect = Expect(subject, unread) if mine else Expect(subjects.member(), newest)
        try:
            await bus.publish(
                subject,
                encode(member),
                msg_id=f"member/{learner}/{member.incarnation}/{now_ns}",
                expect=expect,
            )
        except Conflict:
            continue
        return member
    msg = f"Learner {learner!r} could not join: others joined {CAS_ATTEMPTS} times meanwhile."
    raise BusError(msg)


async def follow_members(bus: Bus, run: str) -> AsyncGenerator[MemberRecord]:
    """Yield the newest incarnation of every learner, then each new one."""
    follower = bus.follow(Subjects(run).member(), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower):
        async for record in follower:
            if (member := readable(MemberRecord, record, run)) is not None:
                yield member


async def last_commits(bus: Bus, run: str) -> dict[int, Commit]:
    """Return the newest commit of every fragment that has one."""
    found = await newest_readable(bus, Commit, Subjects(run).commit(), run)
    return {item.value.fragment: item.value for item in found if item.value is not None}


async def follow_starts(bus: Bus, run: str) -> AsyncGenerator[tuple[Record, MemberRecord]]:
    """Yield every start of every learner, old ones too, with the record that says when it was."""
    follower = bus.follow(Subjects(run).member(), deliver=Deliver.ALL)
    async with aclosing(follower):
        async for record in follower:
            if (member := readable(MemberRecord, record, run)) is not None:
                yield record, member


async def starts(bus: Bus, run: str) -> list[tuple[Record, MemberRecord]]:
    """Return every start that the ledger holds by now, with its record, oldest first."""
    newest = max((r.sequence for r in await bus.last_each(Subjects(run).member())), default=0)
    found: list[tuple[Record, MemberRecord]] = []
    if not newest:
        return found
    follower = bus.follow(Subjects(run).member(), deliver=Deliver.ALL)
    async with aclosing(follower):
        async for record in follower:
            if (member := readable(MemberRecord, record, run)) is not None:
                found.append((record, member))
            if record.sequence >= newest:
                break
    return found


async def newest_commits(bus: Bus, run: str) -> list[tuple[Record, Commit]]:
    """Return every fragment's newest commit, with the record that says when it was stored.

    Unlike ``last_commits`` without those that cannot be read: for who only shows the run.
    """
    records = await bus.last_each(Subjects(run).commit())
    found = ((record, readable(Commit, record, run)) for record in records)
    return [(record, commit) for record, commit in found if commit is not None]


async def follow_commits(
    bus: Bus, run: str, after: int = 0, *, fragment: int | None = None
) -> AsyncGenerator[tuple[int, Commit]]:
    """Yield (ledger sequence, commit) from the beginning or behind ``after``, for ever.

    ``fragment``: of this one only.
    """
    commits = follow_stored_commits(bus, run, after, fragment=fragment)
    async with aclosing(commits):
        async for record, commit in commits:
            yield record.sequence, commit


async def follow_stored_commits(
    bus: Bus, run: str, after: int = 0, *, fragment: int | None = None
) -> AsyncGenerator[tuple[Record, Commit]]:
    """Yield commits as ``follow_commits`` does, with the record that says when each was stored."""
    subjects = Subjects(run)
    pattern = subjects.commit() if fragment is None else subjects.commit(fragment)
    follower = bus.follow(pattern, deliver=Deliver.ALL, after=after)
    async with aclosing(follower):
        async for record in follower:
            if (commit := readable(Commit, record, run)) is not None:
                yield record, commit


async def begun_ns(bus: Bus, run: str) -> int:
    """Return when the broker stored the run's first commit in this log, waiting for it."""
    follower = bus.follow(Subjects(run).commit(), deliver=Deliver.ALL)
    async with aclosing(follower):
        async for record in follower:
            if readable(Commit, record, run) is not None:
                return record.time_ns
    msg = "The log ended while waiting for a run's first commit."
    raise BusError(msg)


async def record_checkpoint(bus: Bus, record: CheckpointRecord) -> None:
    """Note in the ledger that a checkpoint was written and read back."""
    subject = Subjects(record.run).ledger("checkpoint")
    await bus.publish(subject, encode(record), msg_id=f"checkpoint/{record.path}/{record.digest}")


async def last_checkpoint(bus: Bus, run: str) -> CheckpointRecord | None:
    """Return the newest checkpoint of the run, or None."""
    found = await bus.last(Subjects(run).ledger("checkpoint"))
    return decode(CheckpointRecord, found.payload, run=run) if found else None


async def follow_checkpoints(bus: Bus, run: str) -> AsyncGenerator[CheckpointRecord]:
    """Yield every checkpoint of the run, then each new one."""
    follower = bus.follow(Subjects(run).ledger("checkpoint"), deliver=Deliver.ALL)
    async with aclosing(follower):
        async for record in follower:
            if (checkpoint := readable(CheckpointRecord, record, run)) is not None:
                yield checkpoint


async def record_evaluation(bus: Bus, record: Evaluation) -> None:
    """Note what a state is worth; the same state on the same text is one fact, from anyone."""
    subject = Subjects(record.run).ledger("eval")
    fact = (record.versions, record.text_digest)
    state = xxhash.xxh3_64_hexdigest(",".join(map(str, record.versions)).encode())
    for _ in range(CAS_ATTEMPTS):
        newest = await bus.last(subject)
        known = await evaluations(bus, record.run)
        if fact in {(other.versions, other.text_digest) for other in known}:
            return
        try:
            await bus.publish(
                subject,
                encode(record),
                msg_id=f"eval/{state}/{record.text_digest:016x}",
                expect=Expect(subject, newest.sequence if newest else 0),
            )
        except Conflict:
            continue
        return
    msg = f"The evaluations of run {record.run!r} kept changing under {CAS_ATTEMPTS} attempts."
    raise BusError(msg)


async def last_evaluation(bus: Bus, run: str) -> Evaluation | None:
    """Return the newest evaluation of the run, None where there is none or it cannot be read."""
    found = await bus.last(Subjects(run).ledger("eval"))
    return readable(Evaluation, found, run) if found else None


async def evaluations(bus: Bus, run: str) -> list[Evaluation]:
    """Return all evaluations that the ledger holds by now, oldest first; unreadable ones not."""
    subject = Subjects(run).ledger("eval")
    newest = await bus.last(subject)
    found: list[Evaluation] = []
    if newest is None:
        return found
    follower = bus.follow(subject, deliver=Deliver.ALL)
    async with aclosing(follower):
        async for record in follower:
            if (evaluation := readable(Evaluation, record, run)) is not None:
                found.append(evaluation)
            if record.sequence >= newest.sequence:
                break
    return found


async def follow_evaluations(bus: Bus, run: str) -> AsyncGenerator[Evaluation]:
    """Yield every evaluation of the run, then each new one."""
    follower = bus.follow(Subjects(run).ledger("eval"), deliver=Deliver.ALL)
    async with aclosing(follower):
        async for record in follower:
            if (evaluation := readable(Evaluation, record, run)) is not None:
                yield evaluation
