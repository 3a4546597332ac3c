"""The contributions that the log still holds, and how much of their window a syncer relies on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple, Self

if TYPE_CHECKING:
    from skerry.log.base import StreamInfo
    from skerry.protocol.contribution import Contribution


class Uncovered(NamedTuple):
    """The oldest contribution that a fragment's newest snapshot does not cover.

    ``sequence`` is where it lies in CONTRIB, ``time_ns`` when the broker took it.
    """

    sequence: int
    time_ns: int

    @classmethod
    def oldest(cls, known: Self | None, merged: Iterable[Contribution]) -> Self | None:
        """Return the oldest of what is known and of what a commit merges; None: there is none."""
        found = [cls(c.sequence_first, c.time_ns) for c in merged]
        found += [known] if known is not None else []
        if not found:
            return None
        return cls(min(item.sequence for item in found), min(item.time_ns for item in found))

    def share(self, stream: StreamInfo, now_ns: int) -> float:
        """Return the share of the window from it on, by bytes or by age, whichever is larger.

        Bytes are estimated from the average message. 1.0 if it is not in the window any more.
        """
        spec = stream.spec
        if not stream.first_seq <= self.sequence <= stream.last_seq:
            return 1.0
        behind = stream.last_seq - self.sequence + 1
        size = stream.bytes * behind / (stream.last_seq - stream.first_seq + 1)
        age_s = max(0, now_ns - self.time_ns) / 1e9
        return max(
            size / spec.max_bytes if spec.max_bytes > 0 else 0.0,
            age_s / spec.max_age_s if spec.max_age_s > 0 else 0.0,
        )
