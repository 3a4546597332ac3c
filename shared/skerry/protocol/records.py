"""Records to bytes and back: the small messages of the ledger, the state and the pulse streams.

A record is protobuf in a frame (``skerry.protocol.frame``) without payload; the frame's checksum
finds damage before protobuf parses anything.
"""

from __future__ import annotations

from typing import TypeVar

from skerry.errors import Corrupt, WrongPlan, WrongRun
from skerry.protocol import frame, proto
from skerry.protocol.messages import (
    FRAME_KINDS,
    Commit,
    Manifest,
    Pulse,
    Record,
    Round,
    RunRecord,
)

T = TypeVar("T", bound=Record)

MOST_S = 1e11
"""Three thousand years: no duration in a record is longer."""


def encode(record: Record) -> bytes:
    """Return the message for a record; equal records give equal bytes.

    Raises Oversized above 1 MiB, ValueError for a value its field cannot hold (a negative count).
    """
    return frame.write(FRAME_KINDS[type(record)], proto.encode(record))


def decode(
    kind: type[T], data: bytes | memoryview, *, run: str, plan_digest: int | None = None
) -> T:
    """Return the record of that kind that ``data`` holds; raise the WireError that says why not.

    Args:
        kind: the dataclass that the subject calls for.
        data: one whole message.
        run: the run whose subject it came from; another run's record is WrongRun.
        plan_digest: where given, a record that was made under another plan is WrongPlan.
    """
    found = frame.read(FRAME_KINDS[kind], data)
    if found.payload:
        msg = f"A record came with a payload of {len(found.payload)} bytes: it has none."
        raise Corrupt(msg)
    record = proto.decode(kind, found.header)
    origin = record.commit if isinstance(record, Manifest) else record
    check_run(origin.run, run)
    if plan_digest is not None and isinstance(origin, RunRecord | Round | Commit):
        check_plan(origin.plan_digest, plan_digest)
    return record


def believable(record: Pulse | Commit) -> bool:
    """Return True if every duration in a record is one: finite, not negative, not absurdly long.

    A frame's checksum says nothing about them, and one such value spoils every sum that it is in.
    Losses may be anything: those of a learner that diverges are.
    """
    times: tuple[float, ...]
    match record:
        case Pulse():
            rest = (record.alive_s, record.compile_s, record.recover_s, record.wait_s)
            codec = (record.encode_s, record.decode_s)
            times = (record.step_time_s, record.busy_s, record.replay_s, *rest, *codec)
        case Commit():
            times = (record.quorum_s, record.grace_s, record.merge_s)
    return all(0.0 <= seconds <= MOST_S for seconds in times)


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
