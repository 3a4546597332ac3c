"""A fragment's vectors from the log: its newest snapshot, and what was contributed since."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.algorithm.outer import Outer
from skerry.algorithm.planes import Planes
from skerry.errors import ContributionGone, Corrupt, Diverged, StateLost, WireError
from skerry.log.base import Bus
from skerry.log.global_fragments import GlobalReader
from skerry.log.ledger import state_lost
from skerry.log.reading import newest_sequence, read_up_to
from skerry.log.replay import FragmentFold, Payloads, redo
from skerry.log.state import Meters, read_part
from skerry.log.window import Uncovered
from skerry.protocol.chunks import vector_digest
from skerry.protocol.contribution import ContributionAssembler
from skerry.protocol.messages import Commit, Manifest, MasterOrigin
from skerry.protocol.parts import MASTER, OUTER, kind_of, snapshot_version
from skerry.protocol.subjects import Subjects
from skerry.tasks import computed

if TYPE_CHECKING:
    from skerry.settings.models import SyncConfig

    Vector = NDArray[np.float32]

log = structlog.get_logger()

FEW_VERSIONS = 3
"""Versions whose contributions take about as many bytes as a snapshot does."""
READ_ATTEMPTS = 3
"""Attempts to read a part whose bytes are wrong: they may have been damaged on the way."""


class Lapse(NamedTuple):
    """Where vectors come from that differ from what was committed.

    ``outer_version`` is that of the outer optimizer's state, if the master has another.
    """

    origin: MasterOrigin
    outer_version: int = 0


@dataclass(slots=True)
class FragmentVectors:
    """A fragment's master f32 (padded_size,) and the outer optimizer's state of it, at a version.

    ``shared`` is the global fragment that learners have, in the run's global scheme; None where it
    is not known, and the next version is to be a keyframe. ``uncovered`` is the oldest contribution
    in them that no snapshot covers. ``lapse`` is set where they are not what was committed.
    ``moved`` is a sample of this version's change, with which the next version's contributions are
    compared; None if it is unknown.
    """

    version: int
    master: Vector
    outer: object
    shared: Planes | None = None
    uncovered: Uncovered | None = None
    lapse: Lapse | None = None
    moved: Vector | None = None


@dataclass(slots=True)
class Restorer:
    """Restores the fragments of one run from its log, each from what is held of it already.

    ``on_bytes`` hears the size of each message that is read. One restoration of a fragment waits
    for another.
    """

    bus: Bus
    plan: Plan
    config: SyncConfig
    outer: Outer
    reader: GlobalReader
    on_bytes: Callable[[int], None] | None = None
    held: dict[int, FragmentVectors] = field(default_factory=dict[int, FragmentVectors])
    _turns: dict[int, asyncio.Lock] = field(default_factory=dict[int, asyncio.Lock])

    @classmethod
    def of(cls, bus: Bus, run: str, plan: Plan, config: SyncConfig, outer: Outer) -> Restorer:
        """Return one that holds nothing yet."""
        return cls(bus, plan, config, outer, GlobalReader(bus, run, plan))

    async def restore(self, manifest: Manifest, commits: Mapping[int, Commit]) -> FragmentVectors:
        """Return the vectors of a manifest's version, and hold them.

        ``commits`` are those of the fragment's versions since its snapshot that the ledger has. If
        a contribution of one of them is gone, the fragment goes on from what learners hold, with a
        warning. Raises StateLost where the log lacks the snapshot, or both a contribution and the
        global fragment; Overtaken where a newer commit has replaced what was read.
        """
        async with self._turns.setdefault(manifest.commit.fragment, asyncio.Lock()):
            return await self._restore(manifest, commits)

    async def take(self, manifest: Manifest, commits: Mapping[int, Commit]) -> FragmentVectors:
        """Restore a fragment for a caller that will change its vectors; none is kept here."""
        vectors = await self.restore(manifest, commits)
        self.release(manifest.commit.fragment)
        return vectors

    def release(self, fragment: int) -> None:
        """Hold nothing of a fragment any more."""
        self.held.pop(fragment, None)
        self.reader.held.pop(fragment, None)

    async def _restore(self, manifest: Manifest, commits: Mapping[int, Commit]) -> FragmentVectors:
        index = manifest.commit.fragment
        start = self._known(manifest) or await self._snapshot(manifest)
        self.held.pop(index, None)
        vectors, stopped = await self._replay(start, manifest, commits)
        if start.version < snapshot_version(manifest) and (stopped or vectors.lapse):
            vectors, stopped = await self._replay(await self._snapshot(manifest), manifest, commits)
        shared = await self._shared(manifest)
        if stopped:
            vectors = await self._go_on(vectors, manifest, stopped, shared)
        scheme = self.reader.held[index].scheme if shared is not None else ""
        if scheme == self.config.global_scheme:
            vectors.shared = self.reader.held[index].planes
        self.held[index] = vectors
        return vectors

    def _known(self, manifest: Manifest) -> FragmentVectors | None:
        """Return what is held, if a replay from there reads less than one from the snapshot."""
        held = self.held.get(manifest.commit.fragment)
        if held is None or held.lapse is not None:
            return None
        least = snapshot_version(manifest) - FEW_VERSIONS
        behind = least <= held.version <= manifest.commit.version
        return held if behind else None

    async def _snapshot(self, manifest: Manifest) -> FragmentVectors:
        """Read the newest snapshot; StateLost where bytes of a part stay wrong."""
        commit, vectors = manifest.commit, dict[str, "Vector"]()
        parts = {part.name for part in manifest.parts if kind_of(part.name) == "snapshot"}
        for name in sorted({MASTER, *parts}):
            attempts = READ_ATTEMPTS
            while name not in vectors:
                try:
                    meters = Meters(self.on_bytes)
                    vectors[name] = await read_part(
                        self.bus, commit.run, self.plan, manifest, name, meters=meters
                    )
                except Corrupt as error:
                    attempts -= 1
                    if not attempts:
                        what = f"its {name!r} cannot be read ({error})"
                        raise await self._lost(manifest, what) from error
        master = vectors.pop(MASTER)
        leaves = {name.removeprefix(OUTER): vector for name, vector in vectors.items()}
        outer = self.outer.restore(master, leaves)
        return FragmentVectors(snapshot_version(manifest), master, outer)

    async def _replay(
        self, start: FragmentVectors, manifest: Manifest, commits: Mapping[int, Commit]
    ) -> tuple[FragmentVectors, str]:
        """Merge again what was contributed since; also return why that stopped, or ''."""
        last, index = manifest.commit, manifest.commit.fragment
        since = {n: commits.get(n) for n in range(start.version + 1, last.version)}
        since |= {last.version: last} if last.version > start.version else {}
        fold = FragmentFold.of(self.outer, self.plan, self.plan.fragments[index], self.config.merge)
        fold.master, fold.state, fold.recycles = start.master, start.outer, True
        vectors, stopped = replace(start), ""
        merged = [item for commit in since.values() if commit for item in commit.consumed]
        through = max((item.sequence_last for item in merged), default=0)
        after = min((item.sequence_first for item in merged), default=1) - 1
        shard = Subjects(last.run).of_fragment(index, self.plan.shards)
        pattern = shard.contribution(index)
        through = min(through, await newest_sequence(self.bus, pattern)) if through else 0
        async with aclosing(read_up_to(self.bus, pattern, through, after)) as records:
            source = Payloads(records, ContributionAssembler(last.run, self.plan), self.on_bytes)
            for version, commit in since.items():
                stopped = await self._redo(fold, version, commit, source, vectors)
                if stopped:
                    break
                if version == snapshot_version(manifest):
                    vectors.uncovered = None
        vectors.master, vectors.outer = fold.master, fold.state
        return vectors, stopped

    async def _redo(
        self,
        fold: FragmentFold,
        version: int,
        commit: Commit | None,
        source: Payloads,
        vectors: FragmentVectors,
    ) -> str:
        """Advance a fold and its vectors by one version; return why that is impossible, or ''."""
        if commit is None:
            return f"The ledger lacks the commit of version {version}"
        try:
            merged = await redo(fold, commit, source)
        except (ContributionGone, Diverged, ValueError) as error:
            return str(error).removesuffix(".")
        source.forget(commit.contrib_floor)
        vectors.version, vectors.uncovered = version, Uncovered.oldest(vectors.uncovered, merged)
        digest = await computed(vector_digest, fold.master)
        if vectors.lapse is None and digest != commit.master_digest:
            vectors.lapse = Lapse(MasterOrigin.REPLAYED)
            log.warning(
                "replay_differs",
                fragment=commit.fragment,
                version=version,
                hint="the syncer before ran on a CPU that rounds differently: learners hold what"
                " was committed, the run goes on, and its next commit stores a snapshot",
            )
        return ""

    async def _go_on(
        self, vectors: FragmentVectors, manifest: Manifest, stopped: str, shared: Vector | None
    ) -> FragmentVectors:
        """Return vectors for a fragment whose replay stopped: its master is what learners hold."""
        commit = manifest.commit
        if shared is None:
            raise await self._lost(manifest, f"{stopped}, and no keyframe is left of it")
        log.warning(
            "master_lost",
            run=commit.run,
            fragment=commit.fragment,
            version=commit.version,
            replayed=vectors.version,
            cause=f"{stopped}: fragment {commit.fragment} goes on at version {commit.version} from"
            " the global fragment that learners hold, with the outer optimizer's state of version"
            f" {vectors.version}; the next commit stores a snapshot",
            hint="raise log.window_bytes or log.window_s, and purge no stream of a run",
        )
        lapse = Lapse(MasterOrigin.GLOBAL, vectors.version)
        return replace(vectors, version=commit.version, master=shared, lapse=lapse)

    async def _shared(self, manifest: Manifest) -> Vector | None:
        """Return the global fragment that learners have; None where the log has lost it.

        They cannot read it either, and the next version makes it whole.
        """
        commit = manifest.commit
        for _ in range(READ_ATTEMPTS):
            try:
                return await self.reader.read(manifest, Meters(self.on_bytes))
            except StateLost as error:
                about = {"fragment": commit.fragment, "version": commit.version}
                log.warning("keyframe_lost", **about, cause=str(error))
                return None
            except WireError:
                continue
        return None

    async def _lost(self, manifest: Manifest, what: str) -> StateLost:
        commit = manifest.commit
        return await state_lost(self.bus, commit.run, commit.fragment, commit.version, what)
