"""Contributions on their way: a learner sends one as chunks, a syncer puts it together again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING

from skerry.core.fragments import BLOCK
from skerry.errors import Corrupt, WireError, first_cause
from skerry.wire.codec import PlaneAssembler
from skerry.wire.envelope import seal, unseal
from skerry.wire.messages import ChunkHeader
from skerry.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skerry.bus.base import Bus, Record
    from skerry.core.fragments import Plan
    from skerry.core.quantise import Planes
    from skerry.wire.codec import Chunk
    from skerry.wire.messages import ContributionHeader


SEND_WINDOW = 4


async def send(
    bus: Bus,
    run: str,
    plan: Plan,
    header: ContributionHeader,
    chunks: Iterable[Chunk],
) -> int:
    """Publish a contribution chunk by chunk and return the bytes sent.

    Chunks are made in a thread, ``SEND_WINDOW`` at a time, so that memory stays flat and a distant
    broker costs one round trip per window. Message ids are deterministic: sending the same
    contribution twice stores it once.
    """
    subject = Subjects(run).contribution(header.fragment, header.learner)
    prefix = f"{header.learner}/{header.incarnation}/{header.fragment}/{header.identity}"
    source = iter(chunks)
    sent = 0
    while batch := await asyncio.to_thread(lambda: list(islice(source, SEND_WINDOW))):
        sealed = [(c.index, seal(_envelope(run, plan, header, c), c.packed)) for c in batch]
        try:
            async with asyncio.TaskGroup() as group:
                for index, data in sealed:
                    group.create_task(bus.publish(subject, data, msg_id=f"{prefix}/{index}"))
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        sent += sum(len(data) for _, data in sealed)
    return sent


def _envelope(run: str, plan: Plan, header: ContributionHeader, chunk: Chunk) -> ChunkHeader:
    return ChunkHeader(
        run=run,
        plan_digest=plan.digest,
        fragment=header.fragment,
        version=header.base_version,
        sender=header.learner,
        incarnation=header.incarnation,
        index=chunk.index,
        count=chunk.count,
        scheme=chunk.scheme,
        first_block=chunk.first_block,
        blocks=chunk.blocks,
        raw_bytes=chunk.raw_bytes,
        identity=header.identity,
        contribution=header if chunk.index == 0 else None,
    )


@dataclass(frozen=True, slots=True)
class Contribution:
    """A whole contribution and where it lies in the CONTRIB stream."""

    header: ContributionHeader
    scheme: str
    planes: Planes
    sequence_first: int
    sequence_last: int


@dataclass(frozen=True, slots=True)
class Refusal:
    """Bytes that were not taken: ``cause`` is the label they are counted under."""

    cause: str
    detail: str
    sequence: int
    subject: str


@dataclass(slots=True)
class _Partial:
    assembler: PlaneAssembler
    base_version: int
    first: int
    last: int
    header: ContributionHeader | None = None


@dataclass(slots=True)
class Inbox:
    """Puts chunks together; holds at most one unfinished contribution per fragment and learner.

    A newer contribution of the same learner to the same fragment replaces an unfinished older one:
    its learner was replaced half way and will not finish it.
    """

    run: str
    plan: Plan
    open: dict[tuple[int, str], tuple[tuple[int, int], _Partial]] = field(
        default_factory=dict[tuple[int, str], "tuple[tuple[int, int], _Partial]"]
    )

    def feed(self, record: Record) -> Contribution | Refusal | None:
        """Take one record: a whole contribution, a refusal, or None while chunks are missing."""
        try:
            return self._take(record)
        except WireError as error:
            return Refusal(error.cause, str(error), record.sequence, record.subject)

    def expire(self, fragment: int, oldest_base: int) -> list[str]:
        """Give up unfinished contributions whose base is older; return their learners."""
        old = [
            key
            for key, (_, partial) in self.open.items()
            if key[0] == fragment and partial.base_version < oldest_base
        ]
        for key in old:
            del self.open[key]
        return [learner for _, learner in old]

    def unfinished_from(self, fragment: int) -> int | None:
        """Return the lowest sequence of an unfinished contribution to ``fragment``, or None."""
        firsts = [p.first for (f, _), (_, p) in self.open.items() if f == fragment]
        return min(firsts, default=None)

    def _take(self, record: Record) -> Contribution | Refusal | None:
        header, packed = unseal(record.payload, run=self.run, plan=self.plan)
        if record.subject != Subjects(self.run).contribution(header.fragment, header.sender):
            msg = f"A contribution of {header.sender!r} came on the subject {record.subject!r}."
            raise Corrupt(msg)
        key = (header.fragment, header.sender)
        partial = self._partial(key, header, record.sequence)
        if partial is None:
            return Refusal("incomplete", "A newer one has begun.", record.sequence, record.subject)
        partial.first = min(partial.first, record.sequence)
        partial.last = max(partial.last, record.sequence)
        if header.contribution is not None:
            partial.header = _checked(header, self.plan)
        if not partial.assembler.add(header, packed):
            return None
        del self.open[key]
        if partial.header is None:
            msg = f"A contribution of {header.sender!r} came without its header."
            raise Corrupt(msg)
        return Contribution(
            partial.header, header.scheme, partial.assembler.planes, partial.first, partial.last
        )

    def _partial(self, key: tuple[int, str], header: ChunkHeader, sequence: int) -> _Partial | None:
        """Return the unfinished contribution this chunk belongs to; None if it is outdated."""
        mark = (header.incarnation, header.identity)
        held = self.open.get(key)
        if held is not None and held[0] > mark:
            return None
        if held is None or held[0] < mark:
            blocks = self.plan.fragments[header.fragment].padded_size // BLOCK
            assembler = PlaneAssembler(header.scheme, blocks)
            held = (mark, _Partial(assembler, header.version, sequence, sequence))
            self.open[key] = held
        return held[1]


def _checked(header: ChunkHeader, plan: Plan) -> ContributionHeader:
    """Return the contribution's header if it agrees with its envelope and with itself."""
    told = header.contribution
    if told is None:
        msg = "A first chunk came without its contribution header."
        raise Corrupt(msg)
    same = (told.fragment, told.learner, told.incarnation, told.identity, told.base_version) == (
        header.fragment,
        header.sender,
        header.incarnation,
        header.identity,
        header.version,
    )
    slices = len(plan.fragments[header.fragment].slices)
    sane = (
        len(told.norms) in {0, slices}
        and all(isfinite(n) and n >= 0 for n in told.norms)
        and min(told.steps, told.tokens, told.cursor_from) >= 0
        and told.cursor_to >= told.cursor_from
    )
    if not same or not sane:
        msg = f"The contribution header of {header.sender!r} contradicts itself or its envelope."
        raise Corrupt(msg)
    return told
