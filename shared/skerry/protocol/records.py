"""Records to bytes and back: the small messages of the ledger, the state and the pulse streams.

A record is protobuf in a frame (``skerry.protocol.wire``) without payload; the frame's checksum
finds damage before protobuf parses anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from skerry.algorithm import fragments
from skerry.errors import Corrupt, RunMismatch, WrongPlan, WrongRun
from skerry.protocol import door, wire
from skerry.protocol.messages import (
    FRAME_KINDS,
    CheckpointRecord,
    Commit,
    Drill,
    Evaluation,
    Fence,
    Manifest,
    MemberRecord,
    Pulse,
    Quarantine,
    Record,
    Round,
    RunRecord,
    Start,
    SyncerPulse,
)
from skerry.protocol.subjects import Subjects, drill_of

T = TypeVar("T", bound=Record)


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One stored message; ``time_ns`` is the broker's clock, in ns since the epoch.

    ``headers`` are those it was published with, and its ``Nats-Msg-Id`` if it had one.
    """

    subject: str
    sequence: int
    time_ns: int
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])


def encode(record: Record) -> bytes:
    """Return the message for a record; equal records give equal bytes.

    Raises Oversized above 1 MiB, ValueError for a value its field cannot hold (a negative count).
    """
    return wire.write(FRAME_KINDS[type(record)], wire.encode(record))


def decode(
    kind: type[T], data: bytes | memoryview, *, run: str, plan_digest: int | None = None
) -> T:
    """Return the record of that kind that ``data`` holds; raise the WireError that says why not.

    Implausible: it decodes, but no honest service writes it (``skerry.protocol.door``).

    Args:
        kind: the dataclass that the subject calls for.
        data: one whole message.
        run: the run whose subject it came from; another run's record is WrongRun.
        plan_digest: where given, a record that was made under another plan is WrongPlan.
    """
    found = wire.read(FRAME_KINDS[kind], data)
    if found.payload:
        msg = f"A record came with a payload of {len(found.payload)} bytes: records have none."
        raise Corrupt(msg)
    record = wire.decode(kind, found.header)
    origin = record.commit if isinstance(record, Manifest) else record
    check_run(origin.run, run)
    door.check(origin)
    if plan_digest is not None and isinstance(origin, RunRecord | Round | Commit):
        check_plan(origin.plan_digest, plan_digest)
    return record


def read(kind: type[T], stored: StoredMessage, *, run: str, plan_digest: int | None = None) -> T:
    """Return the record in a stored message; Corrupt where it lies on another record's subject.

    So a client that may write only about itself says nothing about others. Raises as ``decode``.
    """
    record = decode(kind, stored.payload, run=run, plan_digest=plan_digest)
    if subject_of(record) != stored.subject:
        msg = f"A {kind.__name__} of {subject_of(record)!r} came on {stored.subject!r}."
        raise Corrupt(msg)
    return record


def subject_of(record: Record) -> str:  # noqa: C901, PLR0911, PLR0912 - one line for each kind of record
    match record:
        case Manifest():
            shard = Subjects(record.commit.run).shard(record.shard)
            return shard.manifest(record.commit.fragment)
        case Commit():
            return Subjects(record.run).commit(record.fragment)
        case Round():
            return Subjects(record.run).round(record.fragment)
        case Fence():
            return Subjects(record.run).shard(record.shard).fence()
        case Pulse():
            return Subjects(record.run).pulse(record.learner)
        case Start():
            return Subjects(record.run).shard(record.shard).start(record.learner)
        case MemberRecord():
            return Subjects(record.run).member(record.learner)
        case SyncerPulse():
            return Subjects(record.run).syncer(record.syncer)
        case RunRecord():
            return Subjects(record.run).ledger("run")
        case CheckpointRecord():
            return Subjects(record.run).ledger("checkpoint")
        case Evaluation():
            return Subjects(record.run).ledger("eval")
        case Quarantine():
            return Subjects(record.run).quarantine(record.learner)
        case Drill():
            return drill_of(record.run)


def check_run(found: str, run: str) -> None:
    """Raise WrongRun unless a message belongs to ``run``."""
    if found != run:
        msg = f"The message belongs to run {found!r} and not to {run!r}."
        raise WrongRun(msg)


def check_plan(found: int, plan_digest: int) -> None:
    """Raise WrongPlan unless a message was made under the plan with that digest."""
    if found != plan_digest:
        msg = f"The message was cut by plan {found:016x} and not by {plan_digest:016x}."
        raise WrongPlan(msg)


def plan_of(record: RunRecord) -> fragments.Plan:
    """Return the fragment plan of a run.

    Raises RunMismatch if this release cuts the run's parameters differently.
    """
    plan = fragments.plan(record.leaves, record.fragments, record.shards)
    if plan.digest != record.plan_digest:
        msg = (
            f"Run {record.run!r} was cut by another release of Skerry ({record.skerry_version}):"
            " use that release."
        )
        raise RunMismatch(msg)
    return plan
