"""The consistent cut: the state after the ledger's first s records, read while the run goes on.

A cut is metadata: the manifest of every fragment, and the ledger sequence s of the newest of their
commits. It is consistent when no other commit is at or below s. Nothing is paused for it: a commit
that comes in between only means that the manifests are read again. The ledger decides, not the
manifests: with several shards, commits may enter the ledger in another order than their manifests
were published.

For each fragment the global parameters are read, and the newest snapshot that its manifest names,
with the ledger's commit of that version. A manifest's chunks stay readable until commits after it
write over them (``skerry.protocol.parts``: ``slot``), so the version that was committed first is
read first. If a fragment is overtaken nevertheless, a newer cut is taken, and only what has changed
is read again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.errors import Corrupt, Overtaken, StateLost
from skerry.log.base import Bus
from skerry.log.global_fragments import GlobalReader
from skerry.log.ledger import commit_of, follow_commits, last_commits, state_lost
from skerry.log.reading import newest_sequence
from skerry.log.state import read_manifests, read_part
from skerry.protocol.messages import Commit, Manifest
from skerry.protocol.parts import MASTER, kind_of, newest
from skerry.protocol.subjects import Subjects
from skerry.store.writer import Snapshot

Vector = NDArray[np.float32]
Keep = Callable[[Commit, Vector, Snapshot], Awaitable[None]]

LOOKS = 100
"""Reads of all manifests before a run counts as committing too fast."""
LOOK_PAUSE_S = 0.01
LEDGER_DEADLINE_S = 30.0
"""How long to wait for a commit's ledger record: a dead syncer leaves it to its successor."""
CUTS = 10
"""Cuts that are begun before the link counts as too slow."""


@dataclass(frozen=True, slots=True)
class ConsistentCut:
    """Every fragment's manifest as of ``sequence``; ``sequences`` are those of their commits."""

    sequence: int
    manifests: Mapping[int, Manifest]
    sequences: Mapping[int, int]


async def take_cut(bus: Bus, run: str, plan: Plan) -> ConsistentCut | None:
    """Return a cut of what the log holds now, or None while a fragment has no version.

    Raises Overtaken when the run commits faster than manifests can be read, StateLost when the
    ledger does not get the commit of a manifest, or has newer ones than the state.
    """
    for _ in range(LOOKS):
        # The ledger first: every commit after this place is followed, so none can be missed.
        newest = [record.sequence for record in await bus.last_each(Subjects(run).commit())]
        manifests = await read_manifests(bus, run, plan)
        if len(manifests) < len(plan.fragments):
            return None
        versions = {fragment: m.commit.version for fragment, m in manifests.items()}
        sequences = await _sequences(bus, run, versions, min(newest, default=1) - 1)
        if sequences is not None:
            return ConsistentCut(max(sequences.values()), manifests, sequences)
        await asyncio.sleep(LOOK_PAUSE_S)
    commits = await last_commits(bus, run)
    manifests = await read_manifests(bus, run, plan)  # read later: what is older here was lost
    for fragment, commit in commits.items():
        held = manifests[fragment].commit.version if fragment in manifests else 0
        if held < commit.version:
            what = f"the newest manifest in the log is of version {held}"
            raise await state_lost(bus, run, fragment, commit.version, what)
    msg = f"Run {run!r} commits faster than its manifests can be read: use a faster link."
    raise Overtaken(msg)


async def last_state(bus: Bus, run: str, plan: Plan) -> ConsistentCut:
    """Return what a mirror holds of a log that is gone: its streams may end at different commits.

    Raises StateLost while a fragment has no version.
    """
    manifests = await read_manifests(bus, run, plan)
    if len(manifests) < len(plan.fragments):
        msg = f"Fragments of run {run!r} are missing here: restore its newest checkpoint instead."
        raise StateLost(msg)
    behind = 1 + await newest_sequence(bus, Subjects(run).commit())
    return ConsistentCut(behind - 1, manifests, dict.fromkeys(manifests, behind))


async def read_cut(bus: Bus, run: str, plan: Plan, cut: ConsistentCut, keep: Keep) -> ConsistentCut:
    """Pass every fragment of a cut to ``keep``, one in memory at a time, and return the cut.

    That is ``cut`` itself, or a newer one where the run went on faster than it could be read; then
    ``keep`` gets changed fragments again. Raises Overtaken after CUTS cuts, StateLost when the log
    lacks what its newest manifest names, Corrupt for a snapshot that cannot be one.
    """
    kept: set[int] = set()
    for _ in range(CUTS):
        if await _read(bus, run, plan, cut, kept, keep):
            return cut
        newer = await take_cut(bus, run, plan) or cut
        kept = {f for f in kept if _version(newer.manifests[f]) == _version(cut.manifests[f])}
        cut = newer
    msg = (
        f"Run {run!r} was committed on {CUTS} times before its fragments were read: the link to "
        "the broker is too slow for this sync.h_steps, the checkpoint is tried again next turn."
    )
    raise Overtaken(msg)


def _version(manifest: Manifest) -> tuple[int, int]:
    return manifest.commit.version, manifest.commit.fence


async def _read(
    bus: Bus, run: str, plan: Plan, cut: ConsistentCut, kept: set[int], keep: Keep
) -> bool:
    """Pass on what is not kept yet; return False as soon as a fragment was overtaken."""
    # The oldest first: its slot is going to be written again before the others'.
    for fragment in sorted(cut.sequences, key=cut.sequences.__getitem__):
        if fragment in kept:
            continue
        manifest = cut.manifests[fragment]
        try:
            snapshot = await _snapshot(bus, plan, manifest)
            vector = await GlobalReader(bus, run, plan).read(manifest)
        except Overtaken:
            return False
        await keep(manifest.commit, vector, snapshot)
        kept.add(fragment)
    return True


async def _snapshot(bus: Bus, plan: Plan, manifest: Manifest) -> Snapshot:
    """Read the newest snapshot that a manifest names.

    Raises Corrupt for one that is not whole, or is not what the ledger says of its version.
    """
    commit, master = manifest.commit, newest(manifest, MASTER)
    run, fragment = commit.run, commit.fragment
    names = {p.name for p in manifest.parts if kind_of(p.name) == "snapshot"}
    found = {
        name: await read_part(bus, run, plan, manifest, name) for name in sorted(names) if master
    }
    if master is None or found[MASTER].size != plan.fragments[fragment].padded_size:
        msg = f"The manifest of fragment {fragment} of run {run!r} has no whole master."
        raise Corrupt(msg)
    if master.version != commit.version:
        earlier = await commit_of(bus, run, fragment, master.version)
        if earlier is None or earlier[1].master_digest != master.digest:
            msg = (
                f"The master of fragment {fragment} of run {run!r} is not what the ledger says of"
                f" version {master.version}: the next snapshot can be saved."
            )
            raise Corrupt(msg)
        commit = earlier[1]
    return Snapshot(commit, found)


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
        missing = min(versions.keys() - found.keys())
        msg = (
            f"The ledger of run {run!r} has no commit of fragment {missing}, version "
            f"{versions[missing]}, which its manifest names: the next syncer to start appends it,"
            " or says what else is missing."
        )
        raise StateLost(msg) from error
    return None
