"""Contributions on their way: a learner sends one as chunks, a syncer puts it together again."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from math import isfinite
from typing import TYPE_CHECKING

from skerry.algorithm.fragments import BLOCK
from skerry.errors import Corrupt, WireError, first_cause
from skerry.protocol.codec import PlaneAssembler
from skerry.protocol.envelope import seal, unseal
from skerry.protocol.messages import ChunkHeader, RefusalCause, Refused, Start, cause_of
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects, contributor
from skerry.tasks import TaskGroup
from skerry.telemetry import tracing

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from opentelemetry.trace import SpanContext

    from skerry.algorithm.fragments import Plan
    from skerry.algorithm.planes import Planes
    from skerry.log.base import Bus, Record
    from skerry.protocol.codec import Chunk
    from skerry.protocol.messages import ContributionHeader


SEND_WINDOW = 4
"""Chunks that one learner has on their way at once, until the log has said that it has them.

Fewer than the bus lets out, so that pulses find a way past them.
"""


class Sender:
    """Sends one learner's contributions, each chunk by chunk and one behind the other.

    A contribution leaves when all of the one before it has left, not when the log has it: a distant
    broker costs one round trip per ``SEND_WINDOW`` chunks, however many contributions these are,
    and where the link's rate is what counts the first still arrives before the second.
    """

    def __init__(self, bus: Bus, run: str, plan: Plan) -> None:
        self._bus = bus
        self._run = run
        self._plan = plan
        self._turn = asyncio.Lock()
        self._window = asyncio.Semaphore(SEND_WINDOW)

    async def send(
        self,
        header: ContributionHeader,
        chunks: Iterable[Chunk],
        on_turn: Callable[[], None] | None = None,
    ) -> int:
        """Publish a contribution and return the bytes sent, once the log has all of it.

        ``on_turn`` is called when those before it have left and it begins to.

        Chunks are made in a thread, each when there is room for it, so that memory stays flat.
        Message ids are deterministic: sending the same contribution twice stores it once. The first
        chunk, which holds the header, carries the trace context too: a contribution is one message
        in a trace, however many chunks it has.
        """
        source, sent = iter(chunks), 0
        try:
            async with TaskGroup() as group, self._turn:
                if on_turn is not None:
                    on_turn()
                while (chunk := await asyncio.to_thread(next, source, None)) is not None:
                    data = seal(_envelope(self._run, self._plan, header, chunk), chunk.packed)
                    await self._window.acquire()
                    task = group.create_task(self._publish(header, chunk.index, data))
                    task.add_done_callback(lambda _: self._window.release())
                    sent += len(data)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None
        return sent

    async def _publish(self, header: ContributionHeader, index: int, data: bytes) -> None:
        subject = Subjects(self._run).contribution(header.fragment, header.learner)
        prefix = f"{header.learner}/{header.incarnation}/{header.fragment}/{header.identity}"
        origin = tracing.parse(header.trace_parent) if index == 0 else None
        await self._bus.publish(
            subject, data, msg_id=f"{prefix}/{index}", headers=tracing.headers(origin)
        )


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
    """A whole contribution and where it lies in the CONTRIB stream.

    ``origin`` is the span that sent it, as its header or its message says; None if neither does.
    """

    header: ContributionHeader
    scheme: str
    planes: Planes
    sequence_first: int
    sequence_last: int
    origin: SpanContext | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """What was not taken: ``refused`` names its cause, and its numbers as far as they are known.

    Where ``refused`` has no identity it is about bytes, not about a contribution: that one may
    still come whole. ``round_version`` is the version that its sender made it towards, 0 where
    that is not known.
    """

    refused: Refused
    detail: str
    sequence: int
    subject: str
    round_version: int = 0

    @property
    def cause(self) -> RefusalCause:
        """The label it is counted under."""
        return self.refused.cause


Mark = tuple[int, int]
"""Incarnation and identity: what tells a learner's contributions to one fragment apart."""


def refusal(
    cause: RefusalCause, learner: str, told: ContributionHeader | Mark | None = None
) -> Refused:
    """Return the record of a refusal, with what is ``told`` about the contribution."""
    if told is None:
        return Refused(cause, learner)
    if isinstance(told, tuple):
        return Refused(cause, learner, *told)
    return Refused(
        cause,
        learner,
        told.incarnation,
        told.identity,
        told.tokens,
        told.cursor_from,
        told.cursor_to,
    )


@dataclass(slots=True)
class _Partial:
    mark: Mark
    assembler: PlaneAssembler
    base_version: int
    first: int
    last: int
    header: ContributionHeader | None = None
    origin: SpanContext | None = None

    def refused(self, cause: RefusalCause, learner: str) -> Refused:
        return refusal(cause, learner, self.header or self.mark)


@dataclass(slots=True)
class Inbox:
    """Puts chunks together, in the order of the stream.

    Holds at most one unfinished contribution per fragment and learner: a newer one of the same
    learner replaces it, since whoever sent it was replaced half way. ``replaced`` collects those
    until somebody takes note of them. ``starts`` is, by learner, where which incarnation began:
    what an older one completes behind that does not count.
    """

    run: str
    plan: Plan
    open: dict[tuple[int, str], _Partial] = field(default_factory=dict[tuple[int, str], "_Partial"])
    replaced: list[tuple[int, Refused]] = field(default_factory=list[tuple[int, Refused]])
    starts: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict[str, list[tuple[int, int]]]
    )

    def feed(self, record: Record) -> Contribution | Refusal | None:
        """Take one record: a whole contribution, a refusal, or None while chunks are missing.

        None also for a learner's ``Start``, which is taken note of.
        """
        _, learner = contributor(record.subject)
        try:
            if record.subject == Subjects(self.run).starts().replace("*", learner):
                incarnation = decode(Start, record.payload, run=self.run).incarnation
                self.start(learner, incarnation, record.sequence)
                self._forget_starts(learner, incarnation)
                return None
            header, packed = self._unseal(record)
        except WireError as error:
            return _bytes_refused(cause_of(error), learner, str(error), record)
        return self._take(record, header, packed)

    def start(self, learner: str, incarnation: int, sequence: int) -> None:
        """Take note of where in the stream an incarnation began; in any order, also again."""
        known = self.starts.setdefault(learner, [])
        if (incarnation, sequence) not in known:
            known.append((incarnation, sequence))

    def superseded(self, learner: str, incarnation: int, sequence: int) -> bool:
        """Tell whether a newer incarnation had begun before what became whole at ``sequence``."""
        return any(
            newer > incarnation and began < sequence
            for newer, began in self.starts.get(learner, ())
        )

    def expire(self, fragment: int, oldest_base: int) -> list[Refused]:
        """Give up unfinished contributions whose base is older, and return what they were."""
        old = [
            key
            for key, partial in self.open.items()
            if key[0] == fragment and partial.base_version < oldest_base
        ]
        return [self.open.pop(key).refused(RefusalCause.INCOMPLETE, key[1]) for key in old]

    def unfinished_from(self, fragment: int) -> int | None:
        """Return the lowest sequence of an unfinished contribution to ``fragment``, or None."""
        return min((p.first for (f, _), p in self.open.items() if f == fragment), default=None)

    def _forget_starts(self, learner: str, incarnation: int) -> None:
        """Forget older incarnations' starts, now that the reading has passed a newer one's."""
        known = self.starts[learner]
        self.starts[learner] = [(other, began) for other, began in known if other >= incarnation]

    def _unseal(self, record: Record) -> tuple[ChunkHeader, memoryview]:
        header, packed = unseal(record.payload, run=self.run, plan=self.plan)
        if contributor(record.subject) != (header.fragment, header.sender):
            msg = f"A contribution of {header.sender!r} came on the subject {record.subject!r}."
            raise Corrupt(msg)
        return header, packed

    def _take(
        self, record: Record, header: ChunkHeader, packed: memoryview
    ) -> Contribution | Refusal | None:
        key, mark = (header.fragment, header.sender), (header.incarnation, header.identity)
        partial = self._partial(key, header, record.sequence)
        if partial is None:
            told = _told(header, self.plan)
            refused = refusal(RefusalCause.INCOMPLETE, header.sender, told or mark)
            detail = "A newer one has begun."
            return Refusal(refused, detail, record.sequence, record.subject, _towards(told))
        partial.first = min(partial.first, record.sequence)
        partial.last = max(partial.last, record.sequence)
        try:
            if header.contribution is not None:
                partial.header = _checked(header, self.plan)
                partial.origin = tracing.parse(partial.header.trace_parent) or tracing.extract(
                    record.headers
                )
            if not partial.assembler.add(header, packed):
                return None
            if partial.header is None:
                msg = f"A contribution of {header.sender!r} came without its header."
                raise Corrupt(msg)
        except WireError as error:
            # It contradicts itself: it will never be whole.
            del self.open[key]
            refused, towards = (
                partial.refused(cause_of(error), header.sender),
                _towards(partial.header),
            )
            return Refusal(refused, str(error), record.sequence, record.subject, towards)
        del self.open[key]
        return self._whole(partial, partial.header, header.scheme, record)

    def _whole(
        self, partial: _Partial, told: ContributionHeader, scheme: str, record: Record
    ) -> Contribution | Refusal:
        if self.superseded(told.learner, told.incarnation, partial.last):
            refused = refusal(RefusalCause.SUPERSEDED, told.learner, told)
            detail = f"{told.learner!r} had been started again."
            return Refusal(refused, detail, record.sequence, record.subject, told.round_version)
        planes = partial.assembler.planes
        return Contribution(told, scheme, planes, partial.first, partial.last, partial.origin)

    def _partial(self, key: tuple[int, str], header: ChunkHeader, sequence: int) -> _Partial | None:
        """Return the unfinished contribution this chunk belongs to; None if it is outdated."""
        mark = (header.incarnation, header.identity)
        held = self.open.get(key)
        if held is not None and held.mark > mark:
            return None
        if held is None or held.mark < mark:
            if held is not None:
                self.replaced.append(
                    (header.fragment, held.refused(RefusalCause.INCOMPLETE, header.sender))
                )
            blocks = self.plan.fragments[header.fragment].padded_size // BLOCK
            assembler = PlaneAssembler(header.scheme, blocks)
            held = _Partial(mark, assembler, header.version, sequence, sequence)
            self.open[key] = held
        return held


def _told(header: ChunkHeader, plan: Plan) -> ContributionHeader | None:
    """Return what a chunk tells of its contribution, as far as that can be believed."""
    try:
        return _checked(header, plan)
    except WireError:
        return None


def _towards(told: ContributionHeader | None) -> int:
    return 0 if told is None else told.round_version


def _bytes_refused(cause: RefusalCause, learner: str, detail: str, record: Record) -> Refusal:
    refused = Refused(cause, learner, sequence=record.sequence)
    return Refusal(refused, detail, record.sequence, record.subject)


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
