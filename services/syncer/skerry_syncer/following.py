"""A stand-by keeps what others serve at hand, so that it takes over without reading it all."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from skerry.errors import BusError, WireError
from skerry.log import state
from skerry.protocol.messages import Commit, Manifest
from skerry.protocol.parts import snapshot_version
from skerry.protocol.subjects import Subjects
from skerry_syncer.loading import commits_since
from skerry_syncer.restoring import Restorer

log = structlog.get_logger()


@dataclass(slots=True)
class StandbyFollower:
    """Restores each newest version of a run's fragments, as a syncer does that takes them over.

    It reads the log and writes nothing. ``commits`` are those after the held versions, by fragment
    and version.
    """

    run: str
    name: str
    restorer: Restorer
    commits: dict[int, dict[int, Commit]] = field(default_factory=dict[int, dict[int, "Commit"]])

    async def follow(self, idle: Callable[[], bool]) -> None:
        """Follow all fragments, for ever, while this syncer is ``idle``.

        One that serves shards has no memory to spare: it keeps nothing of what others serve.
        """
        restorer = self.restorer
        manifests = state.follow_manifests(restorer.bus, self.run, restorer.plan)
        async for manifest in manifests:
            if idle():
                await self._take(manifest, idle)
            elif manifest.commit.syncer != self.name:
                restorer.release(manifest.commit.fragment)

    async def _take(self, manifest: Manifest, idle: Callable[[], bool]) -> None:
        """Restore a manifest's version from the one that is held.

        Where replay gave another master than was committed, wait for the next snapshot.
        """
        index, version = manifest.commit.fragment, manifest.commit.version
        held, known = self.restorer.held.get(index), self.commits.setdefault(index, {})
        known[version] = manifest.commit
        if held is not None and held.lapse and snapshot_version(manifest) <= held.version:
            return
        begins = held.version if held else snapshot_version(manifest)
        try:
            if not known.keys() >= set(range(begins + 1, version)):
                known |= await self._commits(manifest)
            if not idle():  # it has begun to serve meanwhile
                return
            await self.restorer.restore(manifest, known)
        except (BusError, WireError) as error:  # it is read again at a take-over
            log.info("standby_restore_failed", fragment=index, version=version, cause=str(error))
        self.commits[index] = {n: commit for n, commit in known.items() if n >= version}

    async def _commits(self, manifest: Manifest) -> dict[int, Commit]:
        """Return the commits of a manifest's fragment since its snapshot."""
        bus, index = self.restorer.bus, manifest.commit.fragment
        name = Subjects(self.run).stream("LEDGER")
        last = max((info.last_seq for info in await bus.streams() if info.name == name), default=0)
        config = self.restorer.config
        found = await commits_since(bus, self.run, {index: manifest}, config, last)
        return found[index]
