"""What waits in the window of contributions: whole contributions by their headers alone.

Chunks are checked against their envelopes and forgotten, so that memory holds one small record per
contribution of the window and no payload.
"""

from __future__ import annotations

from bisect import insort
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.protocol.contribution import Contribution, ContributionAssembler

if TYPE_CHECKING:
    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Record
    from skerry.protocol.messages import ContributionHeader

ContributionId = tuple[int, int]
"""Incarnation and identity: what tells two contributions of one learner to a fragment apart."""


@dataclass(frozen=True, slots=True)
class Offer:
    """A whole contribution in CONTRIB; ``time_ns`` is when the broker took its last chunk."""

    header: ContributionHeader
    first: int
    last: int
    time_ns: int

    @property
    def number(self) -> ContributionId:
        return self.header.incarnation, self.header.identity


@dataclass(slots=True)
class Collector:
    """Finds the contributions of the window that are whole, by every reader's one definition."""

    run: str
    plan: Plan
    assembler: ContributionAssembler = field(init=False)

    def __post_init__(self) -> None:
        self.assembler = ContributionAssembler(self.run, self.plan, keeps_payload=False)

    def feed(self, record: Record) -> Offer | None:
        """Take one message of CONTRIB; bytes that no syncer would take count for nothing.

        What a newer incarnation has superseded counts: a commit has to name it as refused.
        """
        if record.subject.split(".")[-2:-1] == ["start"]:
            return None
        got = self.assembler.feed(record)
        if not isinstance(got, Contribution):
            return None
        return Offer(got.header, got.sequence_first, got.sequence_last, got.time_ns)


@dataclass(slots=True)
class Waiting:
    """One fragment's offers that no commit has resolved yet."""

    unresolved: dict[tuple[str, ContributionId], Offer] = field(
        default_factory=dict[tuple[str, "ContributionId"], Offer]
    )
    order: list[tuple[int, str, ContributionId]] = field(
        default_factory=list[tuple[int, str, "ContributionId"]]
    )
    checked: int = 0

    def add(self, offer: Offer) -> None:
        """Take an offer of the window; offers come before the first commit."""
        key = (offer.header.learner, offer.number)
        if key not in self.unresolved:
            self.unresolved[key] = offer
            insort(self.order, (offer.last, *key))

    def resolve(self, learner: str, number: ContributionId) -> None:
        """Note that a commit has consumed or refused a contribution."""
        self.unresolved.pop((learner, number), None)

    def dropped(self, floor: int, at_ns: int) -> list[Offer]:
        """Return what lies at or below the floor of a commit that was stored at ``at_ns``.

        Nothing may: a floor says that all of it is resolved. What was stored later than the commit
        lies in another stream than the one that its floor was counted in.
        """
        found: list[Offer] = []
        while self.checked < len(self.order) and self.order[self.checked][0] <= floor:
            _, learner, number = self.order[self.checked]
            offer = self.unresolved.get((learner, number))
            if offer is not None and offer.time_ns > at_ns:
                break
            if offer is not None:
                found.append(offer)
            self.checked += 1
        return found
