"""Which moment of a run is meant, where each fragment is then, and where a replay can start."""

from __future__ import annotations

import re
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from skerry.errors import ConfigError
from skerry.protocol.messages import CheckpointRecord, Commit
from skerry.store.finding import normal, parent_of
from skerry_tools.audit.log import newest
from skerry_tools.audit.window import Reach, read_window

if TYPE_CHECKING:
    from skerry.log.base import Record
    from skerry_tools.audit.log import RunLog
    from skerry_tools.audit.window import Window

UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
NANOSECONDS = 1_000_000_000
FORMS = (
    "v17 (every fragment at version 17, or its newest before that), f3@17 (the moment at which"
    " fragment 3 reached version 17), seq:1234 (the ledger up to that sequence), a time such as"
    " 2026-03-01T12:00:00Z (UTC where it names no zone), or -5m (s, m, h, d ago)"
)


@dataclass(frozen=True, slots=True)
class ReplayMoment:
    """One moment; exactly one of ``version``, ``sequence`` and ``at_ns`` is set, or none: the end.

    ``version`` belongs to ``fragment``, or to each of them where that is None. ``at_ns`` is by the
    broker's clock.
    """

    version: int | None = None
    fragment: int | None = None
    sequence: int | None = None
    at_ns: int | None = None

    def takes(self, commit: Commit, raw: Record) -> bool:
        """Return True if a commit belongs to the state at this moment, as far as it alone shows.

        All up to the one that ``is_reached_by`` names belong to a fragment's version.
        """
        if self.sequence is not None:
            return raw.sequence <= self.sequence
        if self.at_ns is not None:
            return raw.time_ns <= self.at_ns
        return self.fragment is not None or self.version is None or commit.version <= self.version

    def is_reached_by(self, commit: Commit) -> bool:
        """Return True if this commit brings its fragment to the version that is meant."""
        return (commit.fragment, commit.version) == (self.fragment, self.version)


def parse(text: str, now_ns: int) -> ReplayMoment:
    """Return what a person means by ``--to``; ConfigError lists the forms."""
    if found := re.fullmatch(r"v(\d+)", text):
        return ReplayMoment(version=int(found[1]))
    if found := re.fullmatch(r"f(\d+)@v?(\d+)", text):
        return ReplayMoment(version=int(found[2]), fragment=int(found[1]))
    if found := re.fullmatch(r"seq:(\d+)", text):
        return ReplayMoment(sequence=int(found[1]))
    if found := re.fullmatch(r"-(\d+(?:\.\d+)?)([smhd])", text):
        return ReplayMoment(at_ns=now_ns - int(float(found[1]) * UNITS_S[found[2]] * NANOSECONDS))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        msg = f"--to {text!r} is no moment of a run: use {FORMS}."
        raise ConfigError(msg, path="to") from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return ReplayMoment(at_ns=int(moment.timestamp() * NANOSECONDS))


@dataclass(slots=True)
class Survey:
    """What a replay may do: ``versions`` is where each fragment is at the moment asked for.

    ``reach`` says from which version on the window allows a replay up to there; ``sequence`` is
    the last commit's in the ledger; ``folders`` are where checkpoints were written, by its records.
    """

    window: Window
    versions: dict[int, int] = field(default_factory=dict[int, int])
    reach: dict[int, Reach] = field(default_factory=dict[int, Reach])
    sequence: int = 0
    folders: list[str] = field(default_factory=list[str])

    @property
    def base(self) -> dict[int, int]:
        """The version that a checkpoint must hold at least, by fragment; 0: genesis will do."""
        return {index: reach.base for index, reach in self.reach.items()}

    @property
    def raise_window_to(self) -> int:
        """Bytes of window that would have kept every contribution; 0 if none was dropped."""
        return max((reach.raise_to() for reach in self.reach.values()), default=0)

    def commit(self, commit: Commit, raw: Record) -> None:
        """Take the next commit of the ledger."""
        self.versions[commit.fragment] = commit.version
        reach = self.reach.setdefault(commit.fragment, Reach(self.window))
        reach.commit(commit, raw.time_ns)
        self.sequence = raw.sequence

    def lost_sentence(self, fragment: int) -> str:
        """Return why a fragment cannot be replayed from where it was asked to be, and the fix."""
        reach = self.reach[fragment]
        if not reach.lost:
            return (
                f"Fragment {fragment} begins at version {reach.base} in this log, where the run was"
                " restored: name that checkpoint with --from."
            )
        return (
            f"The window has dropped contributions to fragment {fragment} up to version"
            f" {reach.base}: name a checkpoint of version {reach.base} or newer with --from; a"
            f" log.window_bytes of about {reach.raise_to()} would have kept all."
        )


async def survey(log: RunLog, moment: ReplayMoment) -> Survey:
    """Find the moment in the ledger; ConfigError where the run has no such moment."""
    found, reached = Survey(await read_window(log)), moment.fragment is None
    entries = log.ledger(await newest(log.bus, log.subjects.commit()))
    async with aclosing(entries):
        async for entry in entries:
            value = entry.value
            if isinstance(value, CheckpointRecord):
                folder = parent_of(normal(value.path))[0]
                found.folders += [] if folder in found.folders else [folder]
            elif isinstance(value, Commit) and not (moment.fragment is not None and reached):
                reached = reached or moment.is_reached_by(value)
                if moment.takes(value, entry.raw):
                    found.commit(value, entry.raw)
    if not reached:
        msg = (
            f"Fragment {moment.fragment} of run {log.run!r} has no version {moment.version}:"
            " `skerry ledger verify` says which versions there are."
        )
        raise ConfigError(msg, path="to")
    if not found.versions:
        msg = f"Run {log.run!r} had committed nothing yet at that moment: choose a later --to."
        raise ConfigError(msg, path="to")
    return found
