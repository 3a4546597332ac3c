"""Before a run is marked as finished: does the log hold contributions that nobody has resolved?"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from skerry.errors import BrokerUnavailable
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.log.base import Bus

OTHERS_PATIENCE = 3
"""Timeouts of a round for which another shard is waited for: one in which it gives up what is not
whole, one for its last round, and one in which both are heard of."""


class EndReason(StrEnum):
    """Why a run may be marked as finished, or not yet."""

    UNREAD = "unread"
    LATE = "late"
    LEFT = "left"
    """Another shard's contributions were given up."""
    RESOLVED = "resolved"


@dataclass(slots=True)
class Tail:
    """Where in CONTRIB the newest message to each fragment lies.

    ``end`` is where the stream ended when ``newest`` was read: reading it takes one chunk of each
    fragment, so that is done only once the stream has grown.
    """

    bus: Bus
    run: str
    end: int = 0
    newest: dict[int, int] = field(default_factory=dict[int, int])

    async def beyond(self, known: Mapping[int, int]) -> frozenset[int]:
        """Return the fragments to which something lies beyond the sequence that is given.

        Raises BrokerUnavailable where the broker does not tell of the stream, as a cluster does not
        while it elects who leads it: what it holds must not be taken for nothing.
        """
        subjects = Subjects(self.run)
        name = subjects.stream("CONTRIB")
        ends = [info.last_seq for info in await self.bus.streams() if info.name == name]
        if not ends:
            msg = f"The broker does not say how far stream {name} goes: is it electing its leader?"
            raise BrokerUnavailable(msg)
        if ends != [self.end]:
            (self.end,), self.newest = ends, {}
        for fragment in [f for f, sequence in known.items() if sequence < self.end]:
            if fragment not in self.newest:
                found = await self.bus.last(subjects.contributions(fragment))
                self.newest[fragment] = 0 if found is None else found.sequence
        return frozenset(f for f, sequence in known.items() if self.newest.get(f, 0) > sequence)


def may_end(
    waited_s: float, patience_s: float, *, unread: bool, late: bool
) -> tuple[bool, EndReason]:
    """Return whether a run may be marked as finished by now, and why.

    Args:
        waited_s: how long something has held up the end.
        patience_s: how long a shard waits for an answer to a round.
        unread: this shard has contributions that it has not read, or not to their end.
        late: another shard has contributions beyond those that its newest commit has resolved. Its
            owner collects them in a last round, and gives up what is not whole within
            ``patience_s``; an answer without steps it leaves, so the end does not wait for ever.
    """
    if unread:
        return False, EndReason.UNREAD
    if late:
        given_up = waited_s >= OTHERS_PATIENCE * patience_s
        return given_up, EndReason.LEFT if given_up else EndReason.LATE
    return True, EndReason.RESOLVED
