"""When a contribution is whole, and when it is refused: the one definition for every reader.

A syncer, a learner that comes back, a learner that misses an answer and the audit of a log feed
the same messages in the stream's order and get the same answers. Nothing here waits or does I/O.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import NamedTuple

from skerry.algorithm.fragments import Plan
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.planes import Planes, allocate
from skerry.errors import Corrupt, Implausible, WireError
from skerry.protocol import wire
from skerry.protocol.chunks import Coverage, PlaneAssembler, unseal
from skerry.protocol.messages import (
    ChunkHeader,
    Consumed,
    ContributionHeader,
    ContributionKind,
    LearnerProgress,
    RefusalCause,
    Refused,
    Start,
    cause_of,
)
from skerry.protocol.records import StoredMessage, read
from skerry.protocol.subjects import START, TOKEN, contributor

TRACE_PARENT = "traceparent"
MOST_OPEN = 4096
"""Contributions that may be incomplete at once, over all fragments and learners."""
MOST_SKIPPED = 1000
"""Starts of one learner that a reader may have missed; a number further ahead is implausible."""
_NUMBER, _SEQUENCE = itemgetter(0), itemgetter(1)
GENESIS_SCHEME = "f32"
"""Initial parameters are exact, whatever the scheme of outer gradients is."""


class ContributionId(NamedTuple):
    """Identifies a contribution to a fragment; newer ones of a learner sort after older ones.

    ``identity`` counts the contributions of one incarnation to the fragment from 1; it is 0 for
    bytes that cannot be assigned to a contribution.
    """

    learner: str
    incarnation: int
    identity: int


def id_of(item: ContributionHeader | Consumed | Refused | LearnerProgress) -> ContributionId:
    """Return the id of a contribution that was sent, merged, refused or counted as the newest."""
    return ContributionId(item.learner, item.incarnation, item.identity)


@dataclass(frozen=True, slots=True)
class ContributionRules:
    """What a contribution may claim, by the settings of its run; None: anything.

    ``sequence_tokens`` are the tokens of one sequence of data, the unit of cursors. ``step_tokens``
    are the most of one step: learners claim fewer steps than their data allows if some were skipped
    because the loss was not finite. ``scheme`` is that of outer gradients.
    """

    sequence_tokens: int | None = None
    step_tokens: int | None = None
    scheme: str | None = None

    def contradiction(self, item: ContributionHeader | Consumed) -> str:
        """Return how a contribution's tokens contradict its data or its steps; empty: they do not.

        Tokens are its weight, so no learner may claim more than the data that it used up.
        """
        sequences, each = item.cursor_to - item.cursor_from, self.sequence_tokens
        if each is not None and item.tokens > sequences * each:
            return f"{item.tokens} tokens of {sequences} sequences of {each}"
        if self.step_tokens is not None and item.tokens > item.steps * self.step_tokens:
            return f"{item.tokens} tokens of {item.steps} steps of {self.step_tokens}"
        return ""

    def check(self, header: ContributionHeader, scheme: str) -> None:
        """Raise Implausible for a header that claims what the run's settings rule out."""
        if text := self.contradiction(header):
            msg = f"A contribution of {header.learner!r} claims {text}."
            raise Implausible(msg)
        genesis = header.kind is ContributionKind.GENESIS
        wanted = GENESIS_SCHEME if genesis else self.scheme
        if wanted not in {None, scheme}:
            msg = f"A contribution of {header.learner!r} came as {scheme!r} instead of {wanted!r}."
            raise Implausible(msg)


@dataclass(frozen=True, slots=True)
class Contribution:
    """A whole contribution and where it lies in the CONTRIB stream.

    ``planes`` are empty where the assembler keeps no payload. ``time_ns`` is when the broker took
    its last chunk. ``trace_parent`` is the span that sent it, as its header or its message says.
    """

    header: ContributionHeader
    scheme: str
    planes: Planes
    sequence_first: int
    sequence_last: int
    time_ns: int = 0
    trace_parent: str = ""

    @property
    def id(self) -> ContributionId:
        return id_of(self.header)

    @property
    def gradient(self) -> OuterGradient:
        """The outer gradient that a merge takes, at its whole length."""
        tokens = self.header.tokens
        reach = tuple(part / tokens for part in self.header.slice_tokens) if tokens else ()
        return OuterGradient(self.scheme, self.planes, self.header.norms, reach)


@dataclass(frozen=True, slots=True)
class Refusal:
    """A refused message: ``refused`` has the cause, and the contribution's numbers if known.

    If ``refused`` has no identity it is about bytes, not about a contribution, which may still come
    whole. ``round_version`` is the version of the round that it was made for, 0 if unknown.
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


def refused_as(cause: RefusalCause, item: ContributionHeader | ContributionId) -> Refused:
    """Return the record of a refusal, with what is known about the contribution.

    Numbers that are implausible are not repeated: the ledger adds up what it is given.
    """
    if isinstance(item, ContributionId) or cause is RefusalCause.IMPLAUSIBLE:
        return Refused(cause, item.learner, item.incarnation, item.identity)
    return Refused(cause, *id_of(item), item.tokens, item.cursor_from, item.cursor_to)


@dataclass(slots=True)
class Incarnations:
    """Where in a shard's CONTRIB each learner's starts lie, in whatever order they are read.

    ``starts`` has (incarnation, sequence) of each learner's newest ``MOST_SKIPPED``, ascending in
    both: a start after that of a newer incarnation says nothing, and is left out.
    """

    starts: dict[str, list[tuple[int, int]]] = field(
        default_factory=dict[str, list[tuple[int, int]]]
    )

    def start(self, start: Start, sequence: int) -> None:
        """Note a ``Start`` that lies at ``sequence``.

        Raises Implausible for a number that is far above all that are known: a learner counts its
        starts.
        """
        known = self.starts.get(start.learner)
        if start.incarnation > MOST_SKIPPED + (known[-1][0] if known else 0):
            msg = f"Start {start.incarnation} of {start.learner!r} is far above those known."
            raise Implausible(msg)
        self.note(start.learner, start.incarnation, sequence)

    def note(self, learner: str, incarnation: int, sequence: int) -> None:
        """Note where an incarnation began, by the ledger's own record of it."""
        known = self.starts.setdefault(learner, [])
        stop = bisect_left(known, incarnation, key=_NUMBER)
        if stop < len(known) and known[stop][1] <= sequence:
            return
        first = bisect_left(known, sequence, hi=stop, key=_SEQUENCE)
        stop = bisect_right(known, incarnation, lo=stop, key=_NUMBER)
        known[first:stop] = [(incarnation, sequence)]
        del known[:-MOST_SKIPPED]

    def passed(self, learner: str, incarnation: int) -> None:
        """Forget the starts before one that the reading has passed."""
        known = self.starts[learner]
        del known[: bisect_left(known, incarnation, key=_NUMBER)]

    def superseded(self, learner: str, incarnation: int, sequence: int) -> bool:
        """Return True if a newer incarnation had begun before what became whole at ``sequence``."""
        known = self.starts.get(learner, ())
        newer = bisect_right(known, incarnation, key=_NUMBER)
        return newer < len(known) and known[newer][1] < sequence


@dataclass(slots=True)
class _Partial:
    """A contribution some of whose chunks are here."""

    id: ContributionId
    chunks: Coverage
    base_version: int
    first: int
    last: int
    header: ContributionHeader | None = None
    trace_parent: str = ""

    def refused(self, cause: RefusalCause) -> Refused:
        return refused_as(cause, self.header or self.id)


@dataclass(slots=True)
class ContributionAssembler:
    """Puts the chunks of a shard's contributions together, in the order of its stream.

    Holds at most one incomplete contribution per fragment and learner, and ``MOST_OPEN`` in all. A
    newer one of the same learner replaces an older one, whose sender was replaced half way;
    ``replaced`` collects (fragment, refusal) of these until the caller takes them. ``screen``
    returns the cause to refuse a contribution at its first chunk, before anything is allocated.
    """

    run: str
    plan: Plan
    rules: ContributionRules = field(default_factory=ContributionRules)
    keeps_payload: bool = True
    screen: Callable[[ChunkHeader], RefusalCause | None] = lambda _: None
    open: dict[tuple[int, str], _Partial] = field(default_factory=dict[tuple[int, str], "_Partial"])
    replaced: list[tuple[int, Refused]] = field(default_factory=list[tuple[int, Refused]])
    incarnations: Incarnations = field(default_factory=Incarnations)

    def feed(self, stored: StoredMessage) -> Contribution | Refusal | None:
        """Take one message; return a whole contribution, a refusal, or None if chunks are missing.

        None also for a learner's ``Start``, which is noted.
        """
        _, learner = contributor(stored.subject)
        place = stored.subject.split(".")[3:]
        try:
            if place[1] == START:
                start = read(Start, stored, run=self.run)
                self.incarnations.start(start, stored.sequence)
                self.incarnations.passed(learner, start.incarnation)
                return None
            header, packed = unseal(stored.payload, run=self.run, plan=self.plan)
            shard = self.plan.shard_of(header.fragment)
            if place != [str(shard), str(header.fragment), header.sender]:
                msg = f"A contribution of {header.sender!r} came on the subject {stored.subject!r}."
                raise Corrupt(msg)
        except WireError as error:
            named = learner if TOKEN.fullmatch(learner) else ""
            refused = Refused(cause_of(error), named, sequence=stored.sequence)
            return Refusal(refused, str(error), stored.sequence, stored.subject)
        return self._take(stored, header, packed)

    def expire(self, fragment: int, oldest_base: int) -> list[Refused]:
        """Give up incomplete contributions with a base below ``oldest_base``; return refusals."""
        old = [
            key
            for key, partial in self.open.items()
            if key[0] == fragment and partial.base_version < oldest_base
        ]
        return [self.give_up(key) for key in old]

    def give_up(self, key: tuple[int, str]) -> Refused:
        """Forget an incomplete contribution by (fragment, learner), and return what it was."""
        return self.open.pop(key).refused(RefusalCause.INCOMPLETE)

    def incomplete_from(self, fragment: int) -> int | None:
        """Return the lowest sequence of an incomplete contribution to ``fragment``, or None."""
        return min((p.first for (f, _), p in self.open.items() if f == fragment), default=None)

    def _take(
        self, stored: StoredMessage, header: ChunkHeader, packed: memoryview
    ) -> Contribution | Refusal | None:
        key = header.fragment, header.sender
        partial, cause = self._partial(key, header, stored.sequence)
        if partial is None:
            claimed: ContributionHeader | None = None
            with suppress(WireError):
                claimed = _agreed(header)
            refused = refused_as(cause, claimed or _id(header))
            version, detail = claimed.round_version if claimed else 0, _DETAIL.get(cause, "")
            return Refusal(refused, detail, stored.sequence, stored.subject, version)
        partial.first = min(partial.first, stored.sequence)
        partial.last = max(partial.last, stored.sequence)
        try:
            if header.contribution is not None:
                partial.header = _agreed(header)
                # NATS keeps the case that a sender chose for keys.
                carried = {key.lower(): value for key, value in stored.headers.items()}
                partial.trace_parent = partial.header.trace_parent or carried.get(TRACE_PARENT, "")
                self.rules.check(partial.header, header.scheme)
            if not partial.chunks.add(header, packed, wire.checksum(stored.payload)):
                return None
            if partial.header is None:
                msg = f"A contribution of {header.sender!r} came without its header."
                raise Corrupt(msg)
        except WireError as error:
            # It contradicts itself or its run: it will never be taken.
            del self.open[key]
            version = partial.header.round_version if partial.header else 0
            refused = partial.refused(cause_of(error))
            return Refusal(refused, str(error), stored.sequence, stored.subject, version)
        del self.open[key]
        return self._whole(partial, partial.header, header.scheme, stored)

    def _whole(
        self, partial: _Partial, header: ContributionHeader, scheme: str, stored: StoredMessage
    ) -> Contribution | Refusal:
        if self.incarnations.superseded(header.learner, header.incarnation, partial.last):
            refused = refused_as(RefusalCause.SUPERSEDED, header)
            detail = f"{header.learner!r} had been started again."
            return Refusal(refused, detail, stored.sequence, stored.subject, header.round_version)
        chunks = partial.chunks
        planes = chunks.planes if isinstance(chunks, PlaneAssembler) else allocate(scheme, 0)
        where = partial.first, partial.last, stored.time_ns
        return Contribution(header, scheme, planes, *where, partial.trace_parent)

    def _partial(
        self, key: tuple[int, str], header: ChunkHeader, sequence: int
    ) -> tuple[_Partial | None, RefusalCause]:
        """Return the incomplete contribution of a chunk, or None and the cause."""
        mine, held = _id(header), self.open.get(key)
        if held is not None and held.id == mine:
            return held, RefusalCause.INCOMPLETE
        if held is not None and held.id > mine:
            return None, RefusalCause.INCOMPLETE
        if header.scheme not in {self.rules.scheme or header.scheme, GENESIS_SCHEME}:
            return None, RefusalCause.WRONG_SCHEME
        if (cause := self.screen(header)) is not None:
            return None, cause
        if held is None and len(self.open) >= MOST_OPEN:
            key_of_oldest = min(self.open, key=lambda k: self.open[k].first)
            self.replaced.append((key_of_oldest[0], self.give_up(key_of_oldest)))
        if held is not None:
            self.replaced.append((header.fragment, held.refused(RefusalCause.INCOMPLETE)))
        blocks = self.plan.fragments[header.fragment].blocks
        chunks = (PlaneAssembler if self.keeps_payload else Coverage)(header.scheme, blocks)
        self.open[key] = partial = _Partial(mine, chunks, header.version, sequence, sequence)
        return partial, RefusalCause.INCOMPLETE


_DETAIL = {
    RefusalCause.INCOMPLETE: "A newer one has begun.",
    RefusalCause.WRONG_SCHEME: "The run uses another scheme.",
    RefusalCause.BASE_IN_FUTURE: "Its base is a version that was never committed.",
    RefusalCause.GENESIS: "The fragment has its initial parameters.",
    RefusalCause.TOO_MANY: "Too many wait already.",
    RefusalCause.QUARANTINED: "Its learner is in quarantine.",
}


def _id(header: ChunkHeader) -> ContributionId:
    return ContributionId(header.sender, header.incarnation, header.identity)


def _agreed(header: ChunkHeader) -> ContributionHeader:
    """Return the contribution's header if it agrees with its envelope."""
    claim = header.contribution
    if claim is None:
        msg = "A first chunk came without its contribution header."
        raise Corrupt(msg)
    if (id_of(claim), claim.base_version) != (_id(header), header.version):
        msg = f"The contribution header of {header.sender!r} contradicts its envelope."
        raise Corrupt(msg)
    return claim
