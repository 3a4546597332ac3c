"""No message that a learner may write stops, stalls or silences anybody else.

Learner ``h`` has joined like any other, and writes to its own subjects only: its pulse, its
contributions, their chunks, its ``Start`` and its record as a member. Each kind of message is a
valid one of which one field has an extreme value, or bytes around it that cannot be. The syncer and
the other learners are the real ones, on a virtual clock.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, TypeVar

import pytest

from skerry.algorithm.merge import slice_norms
from skerry.log import ledger
from skerry.log.base import MSG_ID
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol import wire
from skerry.protocol.chunks import seal
from skerry.protocol.messages import (
    ChunkHeader,
    ContributionHeader,
    ContributionKind,
    FrameKind,
    InnerState,
    LearnerPhase,
    MemberRecord,
    Pulse,
    RunState,
    Start,
)
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry_syncer.service import stand_by
from skerry_tools.virtual import VirtualLoop
from tests.support import builders
from tests.support.audited import CONFIG, PLAN
from tests.support.builders import run_record
from tests.support.history import read_history
from tests.support.learners import TOKENS, FakeLearner, encode_vector, walk

T = TypeVar("T")

RUN, NAME = "t", "h"
SUBJECTS = Subjects(RUN)
GOES_ON_S = 60.0
"""Virtual seconds within which everybody else has to have been merged again."""
MOST = 2**64 - 1
EXTREMES: dict[str, tuple[Any, ...]] = {
    "int": (0, 2**53 + 1, MOST),
    "float": (math.nan, math.inf, -1.0, 5e-324, 1.7e308),
    "str": ("", "x" * 5000, "a", "../\x1b[2J"),
    "tuple[int, ...]": ((), (MOST,) * 99),
    "tuple[float, ...]": ((), (math.nan,), (-1.0, 1e308), (1e9,) * 999),
    "LearnerPhase": tuple(LearnerPhase),
    "ContributionKind": (ContributionKind.GENESIS,),
    "InnerState | None": tuple(InnerState),
}


class Message(NamedTuple):
    """A message that ``h`` publishes; ``headers`` are its own."""

    subject: str
    payload: bytes
    headers: dict[str, str] | None = None


@dataclass
class Hostile:
    """A run of two learners under the real syncer, and what ``h`` needs to know to join in."""

    loop: VirtualLoop = field(default_factory=VirtualLoop)
    bus: MemoryBus = field(init=False)
    tasks: list[Any] = field(default_factory=list[Any])
    version: int = 0
    identity: int = 0
    cursor: int = 0

    def __post_init__(self) -> None:
        self.bus = MemoryBroker(clock_ns=self.wall_ns).connect()
        self.do(self._begin())

    def wall_ns(self) -> int:
        return 1_700_000_000_000_000_000 + round(self.loop.time() * 1e9)

    def do(self, work: Coroutine[Any, Any, T]) -> T:
        """Let virtual time pass until this is done."""
        task = self.loop.create_task(work)
        assert self.loop.run_until(task, self.loop.time() + GOES_ON_S), "the run has stalled"
        return task.result()

    async def _begin(self) -> None:
        await self.bus.declare(specs(RUN))
        await ledger.create_run(self.bus, run_record(RUN, PLAN, CONFIG.model_dump_json()))
        others = [
            FakeLearner(self.bus, RUN, PLAN, name, step_s=0.1, wall_ns=self.wall_ns).train()
            for name in "ab"
        ]
        for work in (stand_by(self.bus, RUN, "s", wall_ns=self.wall_ns), *others):
            self.tasks.append(self.loop.create_task(work))  # type: ignore[arg-type] # awaitables of two kinds
        await self._merged()
        await ledger.join(self.bus, RUN, NAME, "host", 1)
        await self._merged()

    async def _merged(self) -> None:
        """Return once both others have been merged into every fragment again."""
        wanted = {(fragment.index, name) for fragment in PLAN.fragments for name in "ab"}
        streams = {info.name: info.last_seq for info in await self.bus.streams()}
        commits = ledger.follow_commits(self.bus, RUN, after=streams[SUBJECTS.stream("LEDGER")])
        async with aclosing(commits):
            async for _, commit in commits:
                wanted -= {(commit.fragment, c.learner) for c in commit.consumed}
                if not wanted:
                    break
        self.version = (await ledger.last_commits(self.bus, RUN))[0].version

    def strike(self, message: Message) -> None:
        """Publish a message of ``h``, and see everybody else go on."""

        async def struck() -> None:
            await self.bus.publish(message.subject, message.payload, headers=message.headers)
            await self._merged()

        self.do(struck())
        assert not any(task.done() for task in self.tasks), "somebody has ended"

    def end(self) -> None:
        """End everybody."""
        for task in self.tasks:
            task.cancel()
        self.loop.settle()
        self.loop.close()


class Runs:
    """One run for many messages; one that was broken is replaced by another."""

    held: Hostile | None = None

    def get(self) -> Hostile:
        self.held = self.held or Hostile()
        return self.held

    def drop(self) -> None:
        if self.held is not None:
            self.held.end()
            self.held = None


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    held = Runs()
    yield held
    held.drop()


def assert_merged(run: Hostile) -> None:
    """Check that a contribution in which nothing is changed is merged."""
    run.strike(contribution(run))
    commits = run.do(read_history(run.bus, RUN)).commits
    merged = {(c.learner, c.identity) for commit in commits for c in commit.consumed}
    assert (NAME, run.identity) in merged


def pulse(run: Hostile, /, **changes: Any) -> Message:
    sent = builders.pulse(NAME, run=RUN, sent_ns=run.wall_ns(), versions=(1, 1))
    return Message(SUBJECTS.pulse(NAME), encode(replace(sent, **changes)))


def start(run: Hostile, /, **changes: Any) -> Message:
    sent = Start(RUN, NAME, 1, run.wall_ns())
    return Message(SUBJECTS.shard(0).start(NAME), encode(replace(sent, **changes)))


def member(run: Hostile, /, **changes: Any) -> Message:
    sent = builders.member(NAME, run=RUN, shard=2, joined_ns=run.wall_ns())
    return Message(SUBJECTS.member(NAME), encode(replace(sent, **changes)))


def envelope(run: Hostile) -> tuple[ChunkHeader, bytes]:
    """Return a contribution of ``h`` that a syncer merges: one chunk and its packed bytes."""
    fragment, steps = PLAN.fragments[0], 4
    run.identity, run.cursor = run.identity + 1, run.cursor + steps
    vector = walk(fragment, NAME, run.identity)
    chunk, *rest = encode_vector(CONFIG.sync.contribution_scheme, vector, 2**20)
    assert not rest
    header = builders.header(
        run.identity,
        NAME,
        base_version=run.version,
        round_version=run.version + 1,
        steps=steps,
        tokens=steps * TOKENS,
        cursor_from=run.cursor - steps,
        cursor_to=run.cursor,
        norms=slice_norms(fragment, vector),
    )
    return ChunkHeader(
        run=RUN,
        plan_digest=PLAN.digest,
        fragment=0,
        version=run.version,
        sender=NAME,
        incarnation=1,
        index=0,
        count=1,
        scheme=chunk.scheme,
        first_block=0,
        blocks=chunk.blocks,
        raw_bytes=chunk.raw_bytes,
        identity=run.identity,
        contribution=header,
    ), bytes(chunk.packed)


def contribution(run: Hostile, /, **changes: Any) -> Message:
    chunk, packed = envelope(run)
    assert chunk.contribution is not None
    header = replace(chunk.contribution, **changes)
    return Message(
        SUBJECTS.shard(0).contribution(0, NAME), seal(replace(chunk, contribution=header), packed)
    )


def agreeing(run: Hostile, /, **changes: Any) -> Message:
    """Return a contribution whose envelope says what its header says."""
    chunk, packed = envelope(run)
    assert chunk.contribution is not None
    names = {"base_version": "version", "learner": "sender"}
    alike = {names.get(name, name): value for name, value in changes.items()}
    sent = replace(chunk, **alike, contribution=replace(chunk.contribution, **changes))
    return Message(SUBJECTS.shard(0).contribution(0, NAME), seal(sent, packed))


def chunk(run: Hostile, /, **changes: Any) -> Message:
    sent, packed = envelope(run)
    return Message(SUBJECTS.shard(0).contribution(0, NAME), seal(replace(sent, **changes), packed))


Make = Callable[..., Message]
Kind = Callable[[Hostile], Message]


def extremes(what: type[Any], make: Make, names: tuple[str, ...] = ()) -> dict[str, Kind]:
    """Return a kind for each extreme of each field, or of these."""
    found: dict[str, Kind] = {}
    for each in fields(what):
        for number, value in enumerate(EXTREMES.get(str(each.type), ())):
            if not names or each.name in names:
                change = {each.name: value}
                name = f"{make.__name__} {each.name} {number}"
                found[name] = lambda run, change=change: make(run, **change)
    return found


def framed(make: Make, change: Callable[[bytes], bytes]) -> Kind:
    def message(run: Hostile) -> Message:
        sent = make(run)
        return sent._replace(payload=change(sent.payload))

    return message


def parts(payload: bytes) -> tuple[FrameKind, bytes, bytes]:
    """Return a message's kind, header and payload."""
    kind = FrameKind(payload[5])
    found = wire.read(kind, payload)
    return kind, bytes(found.header), bytes(found.payload)


def of_another_kind(payload: bytes) -> bytes:
    kind, header, packed = parts(payload)
    return wire.write(next(k for k in FrameKind if k is not kind), header, packed)


def no_text(payload: bytes) -> bytes:
    """Return a message whose names are no UTF-8."""
    kind, header, packed = parts(payload)
    return wire.write(kind, header.replace(b"\x01h", b"\x01\xff"), packed)


FRAMES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "rubbish": lambda _: b"rubbish" * 99,
    "zeros": lambda p: bytes(len(p)),
    "cut short": lambda p: p[:-1],
    "only a prefix": lambda p: p[:8],
    "longer": lambda p: p + b"x",
    "a bit turned": lambda p: p[:-1] + bytes([p[-1] ^ 1]),
    "a future version": lambda p: p[:4] + bytes([p[4] + 1]) + p[5:],
    "another kind": of_another_kind,
    "no text": no_text,
    "junk for a header": lambda p: wire.write(FrameKind(p[5]), b"\xff" * 99),
    "nothing in it": lambda p: wire.write(FrameKind(p[5]), b""),
}
MAKES: tuple[Make, ...] = (pulse, contribution, start, member)
STATUSES = ("100", "204", "404", "408", "409", "503")


def with_status(status: str, subject: str) -> Kind:
    return lambda _: Message(subject, b"", {"Status": status, "Description": "Idle Heartbeat"})


def with_id_of(learner: str) -> Kind:
    return lambda _: Message(
        SUBJECTS.shard(0).contribution(0, NAME), b"", {MSG_ID: f"{learner}/1/0/{10**6}/0"}
    )


AGREED = ("incarnation", "identity", "fragment", "base_version", "learner")
KINDS: dict[str, Kind] = {
    **extremes(Pulse, pulse),
    **extremes(ContributionHeader, contribution),
    **extremes(ContributionHeader, agreeing, AGREED),
    **extremes(ChunkHeader, chunk),
    **extremes(Start, start),
    **extremes(MemberRecord, member),
    **{
        f"{make.__name__} {name}": framed(make, change)
        for make in MAKES
        for name, change in FRAMES.items()
    },
    **{
        f"status {status} {kind}": with_status(status, subject)
        for status in STATUSES
        for kind, subject in (
            ("pulse", SUBJECTS.pulse(NAME)),
            ("contribution", SUBJECTS.shard(0).contribution(0, NAME)),
        )
    },
    "chunk of another run": lambda run: chunk(run, run="other"),
    "chunk of an unknown scheme": lambda run: chunk(run, scheme="int3"),
    "chunk of another scheme": lambda run: chunk(run, scheme="f32"),
    "first of many chunks": lambda run: chunk(run, count=9),
    "chunk after the last": lambda run: chunk(run, index=7),
    "contribution without a header": lambda run: chunk(run, contribution=None),
    "contribution on another fragment's subject": lambda run: contribution(run)._replace(
        subject=SUBJECTS.shard(0).contribution(1, NAME)
    ),
    "contribution on no fragment's subject": lambda run: contribution(run)._replace(
        subject=SUBJECTS.shard(0).contribution(10**30, NAME)
    ),
    "contribution that reads backwards": lambda run: contribution(run, cursor_from=9, cursor_to=1),
    "contribution of more tokens than data": lambda run: contribution(run, tokens=10**6),
    "message id of another learner": with_id_of("a"),
    "message id of its own": with_id_of(NAME),
}


def test_kinds_are_seventy_or_more() -> None:
    print(f"{len(KINDS)} kinds of hostile messages")
    assert len(KINDS) >= 70


def test_message_in_which_nothing_is_changed_is_merged() -> None:
    """So each hostile one is one change away from it; none is held against the learner yet."""
    fresh = Runs()
    assert_merged(fresh.get())
    fresh.drop()


@pytest.mark.parametrize("kind", KINDS)
def test_hostile_message_stops_stalls_and_silences_nobody(runs: Runs, kind: str) -> None:
    run = runs.get()
    try:
        run.strike(KINDS[kind](run))
    except BaseException:
        runs.drop()
        raise


def test_a_learner_ends_no_run_while_the_others_are_away() -> None:
    run = Hostile()

    async def alone() -> None:
        for task in run.tasks[1:]:
            task.cancel()
        for beat in range(1, 101):
            claim = pulse(
                run,
                phase=LearnerPhase.FINISHED,
                step=10**9,
                steps=10**9,
                step_time_s=1e-6,
                alive_s=2.0 * beat,
            )
            await run.bus.publish(claim.subject, claim.payload)
            await asyncio.sleep(2.0)

    run.loop.run_until(run.loop.create_task(alone()), run.loop.time() + 250.0)
    record = run.do(ledger.read_run(run.bus, RUN))
    run.end()
    assert record.state is RunState.OPEN
