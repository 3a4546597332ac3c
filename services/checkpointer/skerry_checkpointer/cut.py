"""The consistent cut: which versions make up the state after the ledger's first s records.

A cut is cheap, because it is metadata only: the manifest of every fragment, and the ledger sequence
s of the newest of their commits. It is consistent when no other commit lies at or below s. Nobody
is paused for it; a commit that comes in between only means that the next look is taken.

The ledger decides, not the manifests: where several syncers own shards of the fragments, their
commits may enter the ledger in another order than their manifests were published.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.errors import Overtaken, StateLost
from skerry.log.ledger import follow_commits, last_commits
from skerry.log.loss import state_lost
from skerry.log.state import read_manifests
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Manifest

LOOKS = 100
"""Looks at the manifests before a run is said to commit too fast to be seen whole."""
LOOK_PAUSE_S = 0.01
LEDGER_DEADLINE_S = 30.0
"""A syncer that died between a manifest and its ledger record leaves that to its successor."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Every fragment's manifest as of ``sequence``; ``sequences`` are those of their commits."""

    sequence: int
    manifests: Mapping[int, Manifest]
    sequences: Mapping[int, int]

    @property
    def oldest_first(self) -> list[int]:
        """The fragments in the order in which their slots are going to be written again."""
        return sorted(self.sequences, key=lambda fragment: self.sequences[fragment])

    def same(self, other: Cut, fragment: int) -> bool:
        """Tell whether both cuts have the fragment in one version."""
        mine, theirs = self.manifests[fragment].commit, other.manifests[fragment].commit
        return (mine.version, mine.fence) == (theirs.version, theirs.fence)


async def take_cut(bus: Bus, run: str, plan: Plan) -> Cut | None:
    """Return a cut of what the log holds now, or None while a fragment has no version.

    Raises Overtaken when the run commits faster than manifests can be read, StateLost when the
    ledger does not get the commit of a manifest.
    """
    for _ in range(LOOKS):
        # The ledger first: every commit behind this place is followed, so none can be missed.
        after = await _before_newest(bus, run)
        manifests = await read_manifests(bus, run, plan)
        if len(manifests) < len(plan.fragments):
            return None
        versions = {fragment: m.commit.version for fragment, m in manifests.items()}
        sequences = await _sequences(bus, run, versions, after)
        if sequences is not None:
            return Cut(max(sequences.values()), manifests, sequences)
        await asyncio.sleep(LOOK_PAUSE_S)
    await _refuse_rolled_back(bus, run, plan)
    msg = f"Run {run!r} commits faster than its manifests can be read: use a faster link."
    raise Overtaken(msg)


async def _refuse_rolled_back(bus: Bus, run: str, plan: Plan) -> None:
    """Raise StateLost if the ledger knows of versions that the state has no manifest of."""
    commits = await last_commits(bus, run)
    manifests = await read_manifests(bus, run, plan)  # later, so never behind by being early
    for fragment, commit in commits.items():
        held = manifests[fragment].commit.version if fragment in manifests else 0
        if held < commit.version:
            what = f"the newest manifest in the log is of version {held}"
            raise await state_lost(bus, run, fragment, commit.version, what)


async def _before_newest(bus: Bus, run: str) -> int:
    """Return a ledger sequence behind which every fragment's newest commit lies."""
    records = await bus.last_each(Subjects(run).commits())
    return min((record.sequence for record in records), default=1) - 1


async def _sequences(
    bus: Bus, run: str, versions: Mapping[int, int], after: int
) -> dict[int, int] | None:
    """Return where the ledger has each of these versions; None if it has a newer one among them.

    Waits for those that the ledger does not have yet.
    """
    found: dict[int, int] = {}
    commits = follow_commits(bus, run, after)
    try:
        async with asyncio.timeout(LEDGER_DEADLINE_S), aclosing(commits):
            async for sequence, commit in commits:
                wanted = versions.get(commit.fragment)
                if wanted is not None and commit.version > wanted:
                    return None
                if commit.version == wanted:
                    found[commit.fragment] = sequence
                if len(found) == len(versions):
                    return found
    except TimeoutError as error:
        raise _unwritten(run, versions, found) from error
    return None


def _unwritten(run: str, versions: Mapping[int, int], found: Mapping[int, int]) -> StateLost:
    fragment = min(versions.keys() - found.keys())
    msg = (
        f"The ledger of run {run!r} has no commit of fragment {fragment}, version "
        f"{versions[fragment]}, which its manifest names: the next syncer to start appends it, or"
        " says what else is missing."
    )
    return StateLost(msg)
