"""The ledger: the run's own record, members, commits, checkpoints and evaluations, for ever."""

from __future__ import annotations

import shlex
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from contextlib import aclosing, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

import xxhash

from skerry.errors import (
    BrokerUnavailable,
    BusError,
    Conflict,
    Denied,
    RunNotFound,
    StateLost,
    WireError,
)
from skerry.log.base import Deliver, Expect
from skerry.log.client import both
from skerry.log.reading import newest_sequence, read_up_to
from skerry.log.run_records import NewestRecord, newest_readable, publish, read_all, readable
from skerry.protocol.messages import (
    CheckpointRecord,
    Commit,
    Evaluation,
    MemberRecord,
    RunRecord,
    RunState,
)
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from skerry.log.base import Bus

T = TypeVar("T")

CAS_ATTEMPTS = 100
MOST_LOST = 1000
"""Members whose records may be gone: a data shard further beyond the known ones is a lie."""
FIRST_SPAN = 256
"""Records of the ledger that are searched one by one for a commit, the newest ones first."""


async def until_granted(attempt: Callable[[], Awaitable[T]], about: str) -> T:
    """Repeat an attempt that reads, then writes unless others wrote meanwhile, until it succeeds.

    Raises BusError if others write meanwhile each time; ``about`` is the subject of its sentence.
    """
    for _ in range(CAS_ATTEMPTS):
        try:
            return await attempt()
        except Conflict:
            continue
    msg = f"{about} kept changing under {CAS_ATTEMPTS} attempts."
    raise BusError(msg)


async def create_run(bus: Bus, record: RunRecord) -> RunRecord:
    """Create the run unless somebody has; return the record that the log holds."""
    expect = Expect(Subjects(record.run).ledger("run"), 0)
    try:
        await publish(bus, record, msg_id=f"run/{record.created_ns}", expect=expect)
    except Conflict:
        return await read_run(bus, record.run)
    return record


async def read_run(bus: Bus, run: str) -> RunRecord:
    """Return the run's record: as it was created, in its newest state.

    A later record that changes more than the state is refused: a client that may publish may not
    change what a run is. Raises RunNotFound if there is none, WireError if none can be read.
    """
    stream, subject = Subjects(run).stream("LEDGER"), Subjects(run).ledger("run")
    begins, newest = await both(bus.get(stream, 1), bus.last(subject))
    if newest is None:
        msg = f"There is no run {run!r} in this log: start it with `skerry up` or name another."
        raise RunNotFound(msg)
    # A ledger begins with its run's record, unless that was restored.
    ends = [r for r in (begins, newest) if r is not None and r.subject == subject]
    held = [r for end in ends if (r := readable(RunRecord, end, run)) is not None]
    if len(held) < 2 or replace(held[1], state=held[0].state) != held[0]:
        held = await read_all(bus, run, RunRecord)
    if not held:
        return decode(RunRecord, newest.payload, run=run)
    first = held[0]
    return next(r for r in reversed(held) if replace(r, state=first.state) == first)


async def wait_run(
    bus: Bus, run: str, counts: Callable[[RunRecord], bool] = lambda _: True
) -> RunRecord:
    """Return the run's record once somebody has created it, in the first state that ``counts``."""
    follower = bus.follow(Subjects(run).ledger("run"), deliver=Deliver.LAST_PER_SUBJECT)
    async with aclosing(follower):
        async for _ in follower:
            with suppress(RunNotFound):
                record = await read_run(bus, run)
                if counts(record):
                    return record
    msg = "The log ended while waiting for a run."
    raise BusError(msg)


async def wait_finished(bus: Bus, run: str, *, created_ns: int = 0) -> RunRecord:
    """Return the run's record once it says FINISHED.

    Raises StateLost once it is the record of another run of that id, which was not created at
    ``created_ns`` (0: any).
    """

    def finished(record: RunRecord) -> bool:
        if created_ns:
            same_run(record, created_ns)
        return record.state is RunState.FINISHED

    return await wait_run(bus, run, finished)


def same_run(record: RunRecord, created_ns: int) -> None:
    """Raise StateLost unless this is the record of the run that was created at ``created_ns``.

    The log was emptied meanwhile, and the run restored from a checkpoint or created once more:
    versions, rounds and incarnations start again there, and mean something else.
    """
    if record.created_ns != created_ns:
        msg = (
            f"Run {record.run!r} was created again in this log: the one that this process works on"
            " is lost. Start the process again, and it goes on with the new one."
        )
        raise StateLost(msg)


async def finish_run(bus: Bus, record: RunRecord) -> None:
    """Mark the run as finished; doing it twice changes nothing.

    Raises StateLost if the log holds another run of that id by now, which goes on. Raises
    BrokerUnavailable if it holds none: recovery then finds out whether the ledger is lost.
    """
    subject, about = Subjects(record.run).ledger("run"), f"The record of run {record.run!r}"

    async def finish() -> None:
        newest = await bus.last(subject)
        if newest is None:
            msg = f"{about} is not in the ledger."
            raise BrokerUnavailable(msg)
        held = await read_run(bus, record.run)
        same_run(held, record.created_ns)
        if held.state is not RunState.FINISHED:
            finished = replace(record, state=RunState.FINISHED)
            msg_id = f"run/{record.created_ns}/finished"
            await publish(bus, finished, msg_id=msg_id, expect=Expect(subject, newest.sequence))

    await until_granted(finish, about)


async def list_runs(bus: Bus) -> list[RunRecord]:
    """Return every run in this log that this client may read, oldest first."""
    prefix, suffix = "SKERRY_", "_LEDGER"
    records: list[RunRecord] = []
    for stream in await bus.streams():
        if stream.name.startswith(prefix) and stream.name.endswith(suffix):
            run = stream.name.removeprefix(prefix).removesuffix(suffix)
            try:
                records.append(await read_run(bus, run))
            except (RunNotFound, WireError, Denied):
                continue
    return sorted(records, key=lambda r: r.created_ns)


async def members(bus: Bus, run: str) -> dict[str, MemberRecord]:
    """Return the newest incarnation of every learner that ever joined, by name."""
    return by_name(await newest_readable(bus, run, MemberRecord))


def by_name(found: Iterable[NewestRecord[MemberRecord]]) -> dict[str, MemberRecord]:
    """Return the members whose record can be read, by name."""
    return {item.value.learner: item.value for item in found if item.value is not None}


async def join(
    bus: Bus,
    run: str,
    learner: str,
    host: str,
    now_ns: int,
    *,
    above: int = 0,
    offers: bool = False,
    known: Sequence[NewestRecord[MemberRecord]] | None = None,
) -> MemberRecord:
    """Register a start of ``learner`` and return it with its incarnation and data shard.

    The incarnation is higher than the recorded one, and than ``above``. ``known`` are the members'
    records if the caller has just read them. A name keeps its shard for ever; a new name takes the
    next one. The whole member table is compared-and-set through the newest of its sequences, so two
    learners that join at the same instant get different shards. If the acknowledgement of a write
    is lost, its number is skipped and the next one taken.
    """
    subjects = Subjects(run)

    async def register() -> MemberRecord:
        nonlocal known
        found = await newest_readable(bus, run, MemberRecord) if known is None else known
        known, held = None, by_name(found)  # a further attempt reads them again
        mine = held.get(learner)
        most = len(held) + MOST_LOST
        taken = (member.shard for member in held.values() if member.shard < most)
        next_shard = 1 + max(taken, default=-1)
        member = MemberRecord(
            run=run,
            learner=learner,
            incarnation=1 + max(above, mine.incarnation if mine else 0),
            host=host,
            joined_ns=now_ns,
            shard=mine.shard if mine else next_shard,
            offers=offers,
        )
        # A known name competes with itself only; a new one with every other new one.
        pattern = subjects.member(learner) if mine else subjects.member()
        rivals = (item.sequence for item in found if not mine or item.subject == pattern)
        expect = Expect(pattern, max(rivals, default=0))
        msg_id = f"member/{learner}/{member.incarnation}/{now_ns}"
        await publish(bus, member, msg_id=msg_id, expect=expect)
        return member

    return await until_granted(register, f"The members of run {run!r}")


async def last_commits(bus: Bus, run: str) -> dict[int, Commit]:
    """Return the newest commit of every fragment that has one."""
    found = await newest_readable(bus, run, Commit)
    return {item.value.fragment: item.value for item in found if item.value is not None}


async def follow_commits(
    bus: Bus, run: str, after: int = 0, *, fragment: int | None = None
) -> AsyncGenerator[tuple[int, Commit]]:
    """Yield (ledger sequence, commit) from the beginning or after a sequence, for ever.

    With ``fragment`` only the commits of that one.
    """
    subjects = Subjects(run)
    pattern = subjects.commit() if fragment is None else subjects.commit(fragment)
    async with aclosing(bus.follow(pattern, after=after)) as follower:
        async for record in follower:
            if (commit := readable(Commit, record, run)) is not None:
                yield record.sequence, commit


async def commit_of(bus: Bus, run: str, fragment: int, version: int) -> tuple[int, Commit] | None:
    """Return (ledger sequence, commit) of a fragment's version; None where the ledger has none.

    Versions grow with the sequence: one that is not among the newest records is found by halving.
    """
    pattern = Subjects(run).commit(fragment)

    async def between(after: int, through: int) -> AsyncGenerator[tuple[int, Commit]]:
        async with aclosing(read_up_to(bus, pattern, through, after)) as records:
            async for record in records:
                if (commit := readable(Commit, record, run)) is not None:
                    yield record.sequence, commit

    after, through = 0, await newest_sequence(bus, pattern)
    middle = max(0, through - FIRST_SPAN)
    while middle > after:
        async with aclosing(between(middle, through)) as commits:
            first = await anext(commits, None)
        if first is None or first[1].version > version:
            through = middle
        else:
            after = middle
        middle = (after + through) // 2 if through - after > FIRST_SPAN else after
    async with aclosing(between(after, through)) as commits:
        async for sequence, commit in commits:
            if commit.version == version:
                return sequence, commit
    return None


async def begun_ns(bus: Bus, run: str) -> int:
    """Return when the broker stored the run's first commit in this log, waiting for it."""
    async with aclosing(bus.follow(Subjects(run).commit())) as follower:
        async for record in follower:
            if readable(Commit, record, run) is not None:
                return record.time_ns
    msg = "The log ended while waiting for a run's first commit."
    raise BusError(msg)


async def record_checkpoint(bus: Bus, record: CheckpointRecord) -> None:
    """Note in the ledger that a checkpoint was written and read back."""
    await publish(bus, record, msg_id=f"checkpoint/{record.path}/{record.digest}")


async def last_checkpoint(bus: Bus, run: str) -> CheckpointRecord | None:
    """Return the newest checkpoint of the run that can be read, or None."""
    found = await newest_readable(bus, run, CheckpointRecord)
    return found[0].value if found else None


async def state_lost(bus: Bus, run: str, fragment: int, version: int, what: str) -> StateLost:
    """Return the error for a fragment whose newest version cannot be read any more.

    ``what`` is the sentence's subject and verb: what is missing or wrong, without a full stop.
    """
    lost = f"Run {run!r} has lost fragment {fragment} at version {version}: {what}."
    saved = await last_checkpoint(bus, run)
    if saved is None or fragment >= len(saved.versions):
        return StateLost(
            f"{lost} The ledger names no checkpoint of it, and what learners hold is no source: put"
            " the broker's own store back from a copy, or begin a new run."
        )
    path = shlex.quote(saved.path)
    return StateLost(
        f"{lost} Its newest checkpoint, {saved.path} at step {saved.step}, holds version"
        f" {saved.versions[fragment]}; what learners hold is no source: stop the run and put it"
        f" back with `skerry checkpoints restore {path} --run {run} --replace`, begin another"
        f" one from it with `skerry up --from {path} --run NEW`, or put the broker's own"
        " store back from a copy."
    )


async def history_lost(bus: Bus, run: str, what: str) -> StateLost:
    """Return the error for history that is gone, which no checkpoint holds.

    ``what`` are the sentences that say what is gone.
    """
    saved = await last_checkpoint(bus, run)
    if saved is None:
        path, known = "CHECKPOINT", "The ledger names no checkpoint; `skerry checkpoints list` may"
    else:
        path = shlex.quote(saved.path)
        known = f"Its newest checkpoint is {saved.path} at step {saved.step}"
    return StateLost(
        f"{what} {known}: put the broker's own store back from a copy, or begin another run from"
        f" the checkpoint with `skerry up --from {path} --run NEW`."
    )


async def record_evaluation(bus: Bus, record: Evaluation) -> None:
    """Record an evaluation unless the ledger has one of the same state on the same text.

    Only records after the commit before the state's version of fragment 0 are searched, since a run
    of weeks has a hundred thousand evaluations; the ledger may still lack that version's commit.
    """
    run, subject = record.run, Subjects(record.run).ledger("eval")
    fact = (record.versions, record.text_digest)
    state = xxhash.xxh3_64_hexdigest(",".join(map(str, record.versions)).encode())
    msg_id = f"eval/{state}/{record.text_digest:016x}"

    async def note() -> None:
        newest, before = await both(
            bus.last(subject), commit_of(bus, run, 0, record.versions[0] - 1)
        )
        through, after = newest.sequence if newest else 0, before[0] if before else 0
        async with aclosing(read_up_to(bus, subject, through, after)) as records:
            async for stored in records:
                known = readable(Evaluation, stored, run)
                if known is not None and fact == (known.versions, known.text_digest):
                    return
        await publish(bus, record, msg_id=msg_id, expect=Expect(subject, through))

    await until_granted(note, f"The evaluations of run {run!r}")
