"""What a log still holds of each fragment, and what of it a checkpoint may replace: the one rule.

A fragment is *whole* when the newest version that the log knows of can be read to its last byte.
What is whole and holds what the checkpoint holds stays. What is whole but older than the checkpoint
(the broker's store was rolled back) and what is not whole (chunks or manifests are gone) is written
anew from the checkpoint, as the version after the newest that the log knows of: versions stay
contiguous, and nothing pretends to be a version that was lost. What is whole and newer than the
checkpoint is never touched: where nothing is lost, the whole command is refused instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.errors import Overtaken, RunMismatch, StateLost, WireError, WrongPlan
from skerry.log.ledger import last_commits
from skerry.log.state import read_part
from skerry.protocol.messages import Manifest
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit
    from skerry.store.manifest import SavedFragment


@dataclass(frozen=True, slots=True)
class Held:
    """What the log has of a fragment: its newest commit, and its manifest where it can be read.

    ``whole`` says that every part of the manifest's version was read and is what it should be.
    """

    fragment: int
    ledger: Commit | None
    manifest: Manifest | None
    whole: bool

    @property
    def newest(self) -> int:
        """The newest version that the log knows of; 0 for none."""
        return max(
            self.ledger.version if self.ledger else 0,
            self.manifest.commit.version if self.manifest else 0,
        )

    @property
    def last(self) -> Commit | None:
        """The newest commit that the log knows of."""
        if self.manifest is not None and self.manifest.commit.version == self.newest:
            return self.manifest.commit
        return self.ledger

    @property
    def intact(self) -> bool:
        """Whether the newest version can be read."""
        return (
            self.whole and self.manifest is not None and self.manifest.commit.version == self.newest
        )

    @property
    def readable(self) -> int:
        """The version that can be read; 0 for none."""
        return self.manifest.commit.version if self.whole and self.manifest else 0


async def survey(bus: Bus, run: str, plan: Plan) -> dict[int, Held]:
    """Read every fragment of a log to its last byte; RunMismatch while somebody commits to it."""
    commits = await last_commits(bus, run)
    found: dict[int, Held] = {}
    for fragment in plan.fragments:
        manifest = await _manifest(bus, run, plan, fragment.index)
        whole = manifest is not None and await _whole(bus, run, plan, manifest)
        found[fragment.index] = Held(fragment.index, commits.get(fragment.index), manifest, whole)
    return found


async def _manifest(bus: Bus, run: str, plan: Plan, fragment: int) -> Manifest | None:
    record = await bus.last(Subjects(run).manifest(fragment))
    if record is None:
        return None
    try:
        return decode(Manifest, record.payload, run=run, plan_digest=plan.digest)
    except WrongPlan:
        raise
    except WireError:
        return None


async def _whole(bus: Bus, run: str, plan: Plan, manifest: Manifest) -> bool:
    try:
        for part in manifest.parts:
            await read_part(bus, run, plan, manifest, part.name)
    except Overtaken as error:
        msg = f"Somebody commits to run {run!r} meanwhile: stop all of its syncers first."
        raise RunMismatch(msg) from error
    except (StateLost, WireError):
        return False
    return True


def to_replace(
    held: Mapping[int, Held], saved: Sequence[SavedFragment], origin: str
) -> frozenset[int]:
    """Return the fragments that the checkpoint replaces; RunMismatch where it must not.

    Nothing is lost and a fragment is newer: there is no reason to go back. A fragment is lost and
    an older version of it than the ledger's can be read, which is newer than the checkpoint's: a
    newer checkpoint is needed.
    """
    ours = {s.commit.fragment: s for s in saved}
    lost = {f for f, h in held.items() if h.newest and not h.intact}
    newer = {
        f for f, h in held.items() if h.readable >= ours[f].commit.version and not holds(h, ours[f])
    }
    if newer and not lost:
        fragment = min(newer)
        msg = (
            f"The log has fragment {fragment} at version {held[fragment].newest}, which is no "
            f"older than version {ours[fragment].commit.version} of {origin}: there is nothing to "
            "go back for; restore under another --run."
        )
        raise RunMismatch(msg)
    if behind := newer & lost:
        fragment = min(behind)
        msg = (
            f"The log still has fragment {fragment} at version {held[fragment].readable}, and "
            f"{origin} only at {ours[fragment].commit.version}: use a newer checkpoint."
        )
        raise RunMismatch(msg)
    return frozenset(f for f, h in held.items() if f not in newer and not holds(h, ours[f]))


def holds(held: Held, saved: SavedFragment) -> bool:
    """Tell whether the newest version in the log is, vector by vector, what was saved."""
    if not held.intact or held.manifest is None:
        return False
    digests = {part.name: part.digest for part in held.manifest.parts}
    return all(digests.get(part.name) == part.digest for part in saved.parts)


def spread(versions: Sequence[int]) -> str:
    """Return the versions of all fragments for a sentence: ``7`` or ``5-7``."""
    low, high = min(versions, default=0), max(versions, default=0)
    return str(low) if low == high else f"{low}-{high}"
