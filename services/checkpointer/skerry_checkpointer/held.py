"""What a log holds of a run, what works on it, and what a checkpoint may replace.

A fragment is *whole* when all that learners read of the newest version that the log knows of, and
the newest snapshot, can be read to the last byte. A whole fragment that holds what the checkpoint
holds stays. One that is older than the checkpoint (the broker's store was rolled back), or not
whole (chunks or manifests are gone), is replaced: it is written from the checkpoint as the version
after the newest that the log knows of, so that versions stay contiguous and nothing pretends to be
a version that was lost. A whole fragment that is newer than the checkpoint is never touched; if
nothing at all is lost, the command is refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from skerry.algorithm.fragments import Plan
from skerry.algorithm.liveness import Activity
from skerry.errors import Overtaken, RunMismatch, StateLost, WireError, WrongPlan
from skerry.log.base import Bus, Deliver
from skerry.log.global_fragments import GlobalReader
from skerry.log.ledger import last_commits
from skerry.log.run_records import newest_each
from skerry.log.state import read_manifest, read_part
from skerry.protocol.messages import Commit, LearnerPhase, Manifest, Pulse, activity
from skerry.protocol.parts import KEYFRAME, MASTER, kind_of, newest
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from skerry.settings.models import RunConfig
    from skerry.store.checkpoint import SavedFragment, SavedSnapshot

LONGEST_S = 60.0
"""Listening ends after this time, however slow a learner's steps are."""


class Beginning(NamedTuple):
    """Where a restored fragment goes on: as it was after ``commit``.

    ``master`` names the saved vector that becomes its master; ``digests`` are, by part name, those
    of the snapshot that is written.
    """

    commit: Commit
    master: str
    digests: Mapping[str, int]


def beginning(saved: SavedFragment, snapshot: SavedSnapshot, *, exact: bool) -> Beginning:
    """Return where a fragment goes on from a checkpoint.

    That is its newest version. Where its snapshot is older, what learners had becomes the master,
    which differs by no more than one quantisation, and the outer optimizer stays that much behind:
    less is lost than the rounds in between. ``exact``: it goes back to the snapshot instead.
    """
    digests = {part.name: part.digest for part in snapshot.parts}
    if exact or snapshot.commit.version == saved.commit.version:
        return Beginning(snapshot.commit, MASTER, digests)
    return Beginning(saved.commit, KEYFRAME, digests | {MASTER: saved.digest})


@dataclass(frozen=True, slots=True)
class HeldFragment:
    """What the log has of a fragment: the newest commit that it knows of, and what can be read.

    ``readable`` is the manifest's version if all that learners and syncers need of it was read and
    is what it should be, else 0.
    """

    last: Commit | None
    manifest: Manifest | None
    readable: int

    @property
    def newest(self) -> int:
        """The newest version that the log knows of; 0 for none."""
        return self.last.version if self.last else 0

    @property
    def is_lost(self) -> bool:
        """Whether there is a newest version and it cannot be read."""
        return self.readable < self.newest

    def holds(self, wanted: Beginning) -> bool:
        """Return True if the newest version is what was saved, or what was written of it."""
        if self.manifest is None or self.is_lost:
            return False
        commit, saved = self.manifest.commit, wanted.commit
        if (commit.version, commit.params_digest) == (saved.version, saved.params_digest):
            return True
        written = {p.name: p.digest for p in self.manifest.parts if p.version == commit.version}
        return written.items() >= wanted.digests.items()


async def read_held(bus: Bus, run: str, plan: Plan) -> dict[int, HeldFragment]:
    """Read every fragment of a log to its last byte; RunMismatch while a syncer commits to it."""
    commits = await last_commits(bus, run)
    found: dict[int, HeldFragment] = {}
    for fragment in plan.fragments:
        manifest, readable = None, 0
        try:
            manifest = await read_manifest(bus, run, plan, fragment.index)
            if manifest is not None:
                await GlobalReader(bus, run, plan).read(manifest)
                for part in manifest.parts:
                    if kind_of(part.name) == "snapshot":
                        await read_part(bus, run, plan, manifest, part)
                readable = manifest.commit.version if newest(manifest, MASTER) else 0
        except Overtaken as error:
            msg = f"A syncer commits to run {run!r} meanwhile: stop all of its syncers first."
            raise RunMismatch(msg) from error
        except WrongPlan:
            raise
        except (StateLost, WireError):
            pass
        known = [c for c in (manifest and manifest.commit, commits.get(fragment.index)) if c]
        last = max(known, key=lambda commit: commit.version, default=None)
        found[fragment.index] = HeldFragment(last, manifest, readable)
    return found


def to_replace(
    held: Mapping[int, HeldFragment], ours: Mapping[int, Beginning], origin: str
) -> frozenset[int]:
    """Return the fragments that the checkpoint replaces; RunMismatch where it must not.

    If nothing is lost and a fragment is newer than the checkpoint, there is no reason to go back.
    If a lost fragment can still be read in a version that is newer than the checkpoint's, a newer
    checkpoint is needed.
    """
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


async def refuse_if_alive(bus: Bus, run: str, config: RunConfig) -> None:
    """Listen, and raise RunMismatch naming the learners and syncers that are alive.

    No clock is compared. It listens for a syncer's lease, and long enough for each learner's next
    step boundary, even where the log has no sign of life: a broker that has just restarted has
    forgotten its pulses, and a live run sends new ones. A stopped learner's last pulse is none.
    """
    subjects = Subjects(run)
    steps = [
        pulse.step_time_s
        for pulse in await newest_each(bus, run, Pulse)
        if activity(pulse.phase) in {Activity.TRAINING, Activity.WAITING}
    ]
    window_s = max(config.sync.lease_s, 3 * config.liveness.pulse_s, 2 * max(steps, default=0.0))
    found: set[str] = set()
    records = bus.follow((subjects.pulse(), subjects.syncer()), deliver=Deliver.NEW)
    with suppress(TimeoutError):
        async with asyncio.timeout(min(window_s, LONGEST_S)), aclosing(records):
            async for record in records:
                *_, kind, name = record.subject.split(".")
                if kind == "pulse":
                    with suppress(WireError):
                        pulse = decode(Pulse, record.payload, run=run)
                        if pulse.phase is LearnerPhase.STOPPED:
                            continue
                found.add(f"{kind.replace('pulse', 'learner')} {name}")
    if found:
        msg = (
            f"Run {run!r} is alive: {', '.join(sorted(found))} just said so. Stop all of it first,"
            " or restore under another --run."
        )
        raise RunMismatch(msg)
