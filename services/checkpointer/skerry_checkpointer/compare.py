"""Compare a log with a checkpoint: what the log still holds, and what the checkpoint may replace.

A fragment is *whole* when the newest version that the log knows of can be read to its last byte.
What is whole and holds what the checkpoint holds stays. What is whole but older than the checkpoint
(the broker's store was rolled back) and what is not whole (chunks or manifests are gone) is
replaced: it is written from the checkpoint as the version after the newest that the log knows of,
so that versions stay contiguous and nothing pretends to be a version that was lost. What is whole
and newer than the checkpoint is never touched; if nothing at all is lost, the command is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.errors import Overtaken, RunMismatch, StateLost, WireError, WrongPlan
from skerry.log.ledger import last_commits
from skerry.log.state import read_manifest, read_part

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit, Manifest
    from skerry.store.manifest import SavedFragment


@dataclass(frozen=True, slots=True)
class HeldFragment:
    """What the log has of a fragment: its newest commit, and its manifest where it can be read.

    ``is_whole``: every part of the manifest's version was read and is what it should be.
    """

    ledger: Commit | None
    manifest: Manifest | None
    is_whole: bool

    @property
    def newest(self) -> int:
        """The newest version that the log knows of; 0 for none."""
        return max((commit.version for commit in self._commits), default=0)

    @property
    def last(self) -> Commit | None:
        """The newest commit that the log knows of."""
        return max(self._commits, key=lambda commit: commit.version, default=None)

    @property
    def _commits(self) -> list[Commit]:
        known = (self.manifest.commit if self.manifest else None, self.ledger)
        return [commit for commit in known if commit is not None]

    @property
    def readable(self) -> int:
        """The version that can be read; 0 for none."""
        return self.manifest.commit.version if self.is_whole and self.manifest else 0

    @property
    def is_lost(self) -> bool:
        """Whether there is a newest version and it cannot be read."""
        return self.readable < self.newest

    def holds(self, saved: SavedFragment) -> bool:
        """Return True if the newest version is, vector by vector, what was saved."""
        return not self.is_lost and self.manifest is not None and matches(self.manifest, saved)


def matches(manifest: Manifest, saved: SavedFragment) -> bool:
    """Return True if a manifest names the vectors that were saved."""
    digests = {part.name: part.digest for part in manifest.parts}
    return all(digests.get(part.name) == part.digest for part in saved.parts)


async def read_held(bus: Bus, run: str, plan: Plan) -> dict[int, HeldFragment]:
    """Read every fragment of a log to its last byte; RunMismatch while a syncer commits to it."""
    commits = await last_commits(bus, run)
    found: dict[int, HeldFragment] = {}
    for fragment in plan.fragments:
        manifest = await _manifest(bus, run, plan, fragment.index)
        is_whole = manifest is not None and await _is_whole(bus, run, plan, manifest)
        found[fragment.index] = HeldFragment(commits.get(fragment.index), manifest, is_whole)
    return found


async def _manifest(bus: Bus, run: str, plan: Plan, fragment: int) -> Manifest | None:
    try:
        return await read_manifest(bus, run, plan, fragment)
    except WrongPlan:
        raise
    except WireError:
        return None


async def _is_whole(bus: Bus, run: str, plan: Plan, manifest: Manifest) -> bool:
    try:
        for part in manifest.parts:
            await read_part(bus, run, plan, manifest, part.name)
    except Overtaken as error:
        msg = f"A syncer commits to run {run!r} meanwhile: stop all of its syncers first."
        raise RunMismatch(msg) from error
    except (StateLost, WireError):
        return False
    return True


def to_replace(
    held: Mapping[int, HeldFragment], saved: Sequence[SavedFragment], origin: str
) -> frozenset[int]:
    """Return the fragments that the checkpoint replaces; RunMismatch where it must not.

    If nothing is lost and a fragment is newer than the checkpoint, there is no reason to go back.
    If a lost fragment can still be read in a version that is newer than the checkpoint's, a newer
    checkpoint is needed.
    """
    ours = {s.commit.fragment: s for s in saved}
    differing = {f for f, h in held.items() if not h.holds(ours[f])}
    newer = {f for f in differing if held[f].readable >= ours[f].commit.version}
    lost = {f for f, h in held.items() if h.is_lost}
    if newer and not lost:
        fragment = min(newer)
        msg = (
            f"The log has fragment {fragment} at version {held[fragment].newest}, which is no "
            f"older than version {ours[fragment].commit.version} of {origin}: there is nothing to "
            "go back for; restore under another --run."
        )
        raise RunMismatch(msg)
    if too_new := newer & lost:
        fragment = min(too_new)
        msg = (
            f"The log still has fragment {fragment} at version {held[fragment].readable}, and "
            f"{origin} only at {ours[fragment].commit.version}: use a newer checkpoint."
        )
        raise RunMismatch(msg)
    return frozenset(differing - newer)


def span(versions: Sequence[int]) -> str:
    """Return the versions of all fragments for a sentence: ``7`` or ``5-7``."""
    low, high = min(versions, default=0), max(versions, default=0)
    return str(low) if low == high else f"{low}-{high}"
