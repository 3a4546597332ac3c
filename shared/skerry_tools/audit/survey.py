"""Which moment of a run is meant, where each fragment is then, and where a replay can start."""

from __future__ import annotations

import re
from contextlib import aclosing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from skerry.algorithm.fragments import shard_of
from skerry.errors import ConfigError
from skerry.log.base import Record
from skerry.log.reading import newest_sequence
from skerry.protocol.messages import Commit, is_from_checkpoint

if TYPE_CHECKING:
    from skerry_tools.audit.log import RunLog

NANOSECONDS = 1_000_000_000
FORMS = (
    "v17 (every fragment at version 17, or its newest before that), seq:1234 (the ledger up to that"
    " sequence), or a time such as 2026-03-01T12:00:00Z (UTC where it names no zone)"
)


@dataclass(frozen=True, slots=True)
class ReplayMoment:
    """A moment by its last version, ledger sequence or broker time; None sets no bound."""

    version: int | None = None
    sequence: int | None = None
    at_ns: int | None = None

    def takes(self, commit: Commit, raw: Record) -> bool:
        """Return True if a commit belongs to the state at this moment."""
        bounds = (
            (commit.version, self.version),
            (raw.sequence, self.sequence),
            (raw.time_ns, self.at_ns),
        )
        return all(last is None or value <= last for value, last in bounds)


def parse(text: str, option: str = "--to") -> ReplayMoment:
    """Return what a person means by an option; ConfigError lists the forms."""
    if found := re.fullmatch(r"v(\d{1,18})", text):
        return ReplayMoment(version=int(found[1]))
    if found := re.fullmatch(r"seq:(\d{1,18})", text):
        return ReplayMoment(sequence=int(found[1]))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        msg = f"{option} {text!r} is no moment of a run: use {FORMS}."
        raise ConfigError(msg, path=option.lstrip("-")) from None
    moment = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return ReplayMoment(at_ns=int(moment.timestamp() * NANOSECONDS))


@dataclass(frozen=True, slots=True)
class Window:
    """What CONTRIB of all shards holds: its use and its bound in bytes.

    ``since_ns`` is its oldest message's time, ``first_sequences`` where each shard's begins.
    """

    bytes: int
    window_bytes: int
    messages: int
    first_sequences: tuple[int, ...]
    since_ns: int

    @classmethod
    async def read(cls, log: RunLog) -> Window:
        """Return what CONTRIB holds now."""
        streams = [await log.stream(shard.stream("CONTRIB")) for shard in log.shards]
        oldest = [await log.bus.get(info.name, info.first_seq) for info in streams]
        return cls(
            sum(info.bytes for info in streams),
            sum(info.spec.max_bytes for info in streams),
            sum(info.messages for info in streams),
            tuple(info.first_seq for info in streams),
            min((record.time_ns for record in oldest if record), default=0),
        )

    def first_sequence(self, fragment: int) -> int:
        """Return where the stream of a fragment's contributions begins."""
        return self.first_sequences[shard_of(fragment, len(self.first_sequences))]


@dataclass(slots=True)
class Survey:
    """What a replay may do: ``versions`` is where each fragment is at the moment asked for.

    ``base`` is the version that a replay of a fragment must begin at or after, 0 for genesis.
    ``sequence`` is the last commit's in the ledger, ``step`` the global clock's.
    """

    window: Window
    versions: dict[int, int] = field(default_factory=dict[int, int])
    base: dict[int, int] = field(default_factory=dict[int, int])
    sequence: int = 0
    step: int = 0

    def commit(self, commit: Commit, sequence: int, *, is_whole: bool = True) -> None:
        """Take the next commit of the ledger; ``is_whole``: the window holds what it merged."""
        fragment = commit.fragment
        self.versions[fragment], self.sequence = commit.version, sequence
        self.step = max(self.step, commit.step)
        self.base.setdefault(fragment, 0)
        first = min((c.sequence_first for c in commit.consumed), default=0)
        begins = is_from_checkpoint(commit) or commit.master_origin is not None
        if begins or not is_whole or 0 < first < self.window.first_sequence(fragment):
            self.base[fragment] = commit.version

    def unreachable(self, fragment: int) -> str:
        """Return why a fragment cannot be replayed from an earlier version, and the fix."""
        base = self.base[fragment]
        return (
            f"Fragment {fragment} can be replayed from version {base} on: before it, the run was"
            " restored, a syncer took over from another master than was committed, or the window"
            f" has dropped contributions. Name a checkpoint of version {base} or newer with --from;"
            " a larger log.window_bytes keeps more."
        )


async def survey(log: RunLog, moment: ReplayMoment) -> Survey:
    """Find the moment in the ledger; ConfigError for one that the run never had."""
    found, pattern = Survey(await Window.read(log)), log.subjects.commit()
    entries = log.ledger(await newest_sequence(log.bus, pattern), pattern)
    async with aclosing(entries):
        async for entry in entries:
            if isinstance(entry.value, Commit) and moment.takes(entry.value, entry.raw):
                found.commit(entry.value, entry.raw.sequence)
    if not found.versions:
        msg = f"Run {log.run!r} had committed nothing yet at that moment: choose a later one."
        raise ConfigError(msg, path="to")
    if moment.version is not None and moment.version > (newest := max(found.versions.values())):
        msg = f"Run {log.run!r} has come to v{newest} only: choose a version up to that."
        raise ConfigError(msg, path="to")
    return found
