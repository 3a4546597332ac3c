"""The window of contributions: what of a run's history can still be replayed, and from where."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.protocol.messages import is_from_checkpoint

if TYPE_CHECKING:
    from skerry.log.base import StreamInfo
    from skerry.protocol.messages import Commit
    from skerry_tools.audit.log import RunLog


@dataclass(frozen=True, slots=True)
class Window:
    """What CONTRIB holds: its bounds and its use in bytes; ``since_ns`` is its oldest message's.

    ``since_ns`` is 0 while it is empty.
    """

    bytes: int
    window_bytes: int
    window_s: float
    messages: int
    first_sequence: int
    last_sequence: int
    since_ns: int = 0

    @classmethod
    def of(cls, info: StreamInfo, since_ns: int) -> Window:
        spec = info.spec
        return cls(
            info.bytes,
            spec.max_bytes,
            spec.max_age_s,
            info.messages,
            info.first_seq,
            info.last_seq,
            since_ns,
        )

    def bytes_from(self, sequence: int) -> int:
        """Estimate the bytes of all from a sequence on, by the size of what is still there."""
        if not self.messages:
            return 0
        return -(-self.bytes * (self.last_sequence - sequence + 1) // self.messages)


@dataclass(slots=True)
class Reach:
    """From which version on a fragment can be replayed; feed it the fragment's commits in order.

    ``base`` is the version that a replay must begin at or after, 0 for genesis. ``lost`` is the
    lowest sequence of a contribution that would be needed and has left the window, 0 for none.
    """

    window: Window
    base: int = 0
    lost: int = 0
    since_ns: int = 0

    def commit(self, commit: Commit, at_ns: int) -> None:
        """Take the next commit, which the broker stored at ``at_ns``."""
        first = min((c.sequence_first for c in commit.consumed), default=0)
        gone = 0 < first < self.window.first_sequence
        if is_from_checkpoint(commit) or gone:
            self.base, self.since_ns = commit.version, at_ns
            self.lost = first if gone and not self.lost else self.lost
        if not self.since_ns:
            self.since_ns = at_ns

    def raise_to(self) -> int:
        """Estimate the log.window_bytes that would have kept everything; 0 if nothing is lost."""
        return self.window.bytes_from(self.lost) if self.lost else 0


async def read_window(log: RunLog) -> Window:
    """Return what CONTRIB holds now."""
    info = await log.stream("CONTRIB")
    oldest = await log.bus.get(info.name, info.first_seq)
    return Window.of(info, oldest.time_ns if oldest else 0)
