"""One look over the ledger before a replay: where each fragment stops, and where it can start."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from skerry.errors import ConfigError
from skerry.protocol.messages import CheckpointRecord, Commit
from skerry.store.opening import normal, parent_of
from skerry_tools.audit.log import newest
from skerry_tools.audit.window import Reach

if TYPE_CHECKING:
    from skerry_tools.audit.log import Entry, Log
    from skerry_tools.audit.target import Target
    from skerry_tools.audit.window import Window


@dataclass(frozen=True, slots=True)
class Survey:
    """What a replay may do: ``versions`` is where each fragment is at the moment asked for.

    ``reach`` says from which version on the window allows a replay up to there; ``sequence`` is
    the last commit's in the ledger; ``folders`` are where checkpoints were written, by its records.
    """

    window: Window
    versions: dict[int, int]
    reach: dict[int, Reach]
    sequence: int = 0
    folders: tuple[str, ...] = ()

    @property
    def base(self) -> dict[int, int]:
        """The version that a checkpoint must hold at least, by fragment; 0: genesis will do."""
        return {index: reach.base for index, reach in self.reach.items()}


@dataclass(slots=True)
class _Looking:
    target: Target
    window: Window
    versions: dict[int, int] = field(default_factory=dict[int, int])
    reach: dict[int, Reach] = field(default_factory=dict[int, Reach])
    sequence: int = 0
    folders: dict[str, None] = field(default_factory=dict[str, None])

    def take(self, entry: Entry) -> None:
        commit, raw = entry.value, entry.raw
        if isinstance(commit, CheckpointRecord):
            self.folders[parent_of(normal(commit.path))[0]] = None
        if not isinstance(commit, Commit):
            return
        if self.target.takes(commit, raw.sequence, raw.time_ns):
            self.versions[commit.fragment] = commit.version
            self.reach.setdefault(commit.fragment, Reach(self.window)).commit(commit, raw.time_ns)
            self.sequence = raw.sequence


async def survey(log: Log, target: Target, window: Window) -> Survey:
    """Find the moment in the ledger; ConfigError where the run has no such moment."""
    through = await newest(log.bus, log.subjects.commits())
    if target.fragment is not None:
        target = await _moment(log, target, through)
    looking = _Looking(target, window)
    entries = log.ledger(through)
    async with aclosing(entries):
        async for entry in entries:
            looking.take(entry)
    if not looking.versions:
        msg = f"Run {log.run!r} had committed nothing yet at that moment: choose a later --to."
        raise ConfigError(msg, path="to")
    folders = tuple(looking.folders)
    return Survey(window, looking.versions, looking.reach, looking.sequence, folders)


async def _moment(log: Log, target: Target, through: int) -> Target:
    """Return the sequence of the ledger at which a fragment reached a version."""
    entries = log.ledger(through)
    async with aclosing(entries):
        async for entry in entries:
            commit = entry.value
            if (
                isinstance(commit, Commit)
                and commit.fragment == target.fragment
                and commit.version == target.version
            ):
                return replace(target, fragment=None, version=None, sequence=entry.raw.sequence)
    msg = (
        f"Fragment {target.fragment} of run {log.run!r} has no version {target.version}:"
        " `skerry ledger verify` says which versions there are."
    )
    raise ConfigError(msg, path="to")
