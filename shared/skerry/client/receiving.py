"""Reads from the log: rounds, manifests, and the global fragments that these announce."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import dataclass, field

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.client import connection
from skerry.client.connection import LearnerConnection
from skerry.client.mailbox import Fresh, Gradient, Initial
from skerry.client.processes import OtherProcesses
from skerry.errors import BrokerUnavailable, Overtaken, StateLost, WireError
from skerry.log import recovery, run_records, state
from skerry.log.global_fragments import GlobalReader
from skerry.log.reading import LOOK_PAUSES_S
from skerry.log.state import Meters
from skerry.log.streams import vectors_ahead
from skerry.protocol.learner import DoorReason
from skerry.protocol.messages import Commit, Manifest, Round
from skerry.tasks import TaskGroup, in_thread
from skerry.telemetry.spans import Interval

log = structlog.get_logger()

FAR = 0.05
"""Share of the norm by which initial parameters may differ: devices round by far less."""
STRANGE = (
    "this run begins with what another learner offered, and not with what is made here: that one"
    " has another random seed (in a loop of your own), release or model, or is hostile; find out"
    " which before you train on"
)


@dataclass(slots=True)
class FragmentReceiver:
    """Follows rounds and manifests, and reads what they announce.

    ``wanted`` is to be read, ``reading`` is being read; ``announced`` are the newest versions in
    manifests, ``recorded`` those in the ledger when it was last read; ``leaps`` are manifests that
    the ledger must confirm first. Set ``changed`` when there may be room for another fragment.
    ``others`` read their own parts. ``unasked`` are fragments whose initial parameters the trainer
    has and was not asked for, ``initial`` those that it gave.
    """

    link: LearnerConnection
    reader: GlobalReader
    others: OtherProcesses | None = None
    wanted: dict[int, Manifest] = field(default_factory=dict[int, Manifest])
    reading: set[int] = field(default_factory=set[int])
    announced: dict[int, int] = field(default_factory=dict[int, int])
    recorded: dict[int, int] = field(default_factory=dict[int, int])
    leaps: dict[int, Manifest] = field(default_factory=dict[int, Manifest])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    unasked: set[int] = field(default_factory=set[int])
    initial: dict[int, Initial] = field(default_factory=dict[int, Initial])
    _leaped: asyncio.Event = field(default_factory=asyncio.Event)
    _reported_lost: dict[int, int] = field(default_factory=dict[int, int])

    async def rounds(self) -> None:
        """Post every round that the door admits."""
        link = self.link
        rounds = run_records.follow(link.bus, link.run, Round, link.plan.digest)
        async with aclosing(rounds):
            async for opened in rounds:
                if link.door.take_round(opened) not in {None, DoorReason.EARLY}:
                    link.report_refused()
                link.mailbox.post_rounds(link.door.rounds)

    async def deltas(self) -> None:
        """Hold deltas of small fragments that the log pushes, as asking takes a round trip.

        A region's learners read from its cache instead, which reads from the hub once for all.
        """
        link = self.link
        none = self.reader.own or link.config.sync.delta_scheme == "none"
        if none or link.bus.shared_reads.region or not vectors_ahead(link.plan.largest):
            return
        deltas = state.follow_deltas(link.bus, link.run, link.plan)
        async with aclosing(deltas):
            async for record in deltas:
                link.traffic.bytes_down += self.reader.pushed.put(record)

    async def manifests(self) -> None:
        """Want the newest version of every fragment; raise StateLost if the log has gone back.

        This learner would then hold versions that the log lacks: it would take new rounds towards
        them for answered, and its captures for merged.
        """
        link = self.link
        manifests = state.follow_manifests(link.bus, link.run, link.plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                commit = manifest.commit
                known = self.announced.get(commit.fragment, 0)
                if not 0 <= commit.fragment < len(link.plan.fragments):
                    link.refuse(DoorReason.NO_SUCH_FRAGMENT)
                elif commit.version < known:
                    await recovery.not_gone_back(
                        link.bus, link.run, link.plan, commit.fragment, known
                    )
                elif commit.version > known + 1 and not self._is_recorded(commit):
                    self.leaps[commit.fragment] = manifest
                    self._leaped.set()
                else:
                    self._want(manifest)

    def _is_recorded(self, commit: Commit) -> bool:
        """Return True if the ledger confirms a manifest: it has the version before, or a later one.

        A commit is in the ledger soon after its manifest, and before the manifest that follows it.
        """
        return self.recorded.get(commit.fragment, 0) >= commit.version - 1

    def _want(self, manifest: Manifest) -> None:
        """Have a version read; forget residuals of our contributions that its commit refused."""
        link, commit = self.link, manifest.commit
        link.door.take_manifest(commit)
        self.announced[commit.fragment] = commit.version
        self.wanted[commit.fragment] = manifest
        for refused in commit.refused:
            if (refused.learner, refused.incarnation) == link.identity.start:
                link.residuals.unmerged(commit.fragment, refused.identity)
        link.mailbox.post_rounds(link.door.rounds)
        self.changed.set()

    async def prove(self) -> None:
        """Check in the ledger every manifest that skips versions of its fragment."""
        while True:
            self._leaped.clear()
            if not self.leaps:
                await self._leaped.wait()
                continue
            for pause_s in LOOK_PAUSES_S:
                await asyncio.sleep(pause_s)
                await self._read_ledger()
                if all(self._is_recorded(m.commit) for m in self.leaps.values()):
                    break
            leaps, self.leaps = self.leaps, {}
            for fragment, manifest in leaps.items():
                if not self._is_recorded(manifest.commit):
                    self.link.refuse(DoorReason.NEVER_COMMITTED)
                elif manifest.commit.version > self.announced.get(fragment, 0):
                    self._want(manifest)

    async def _read_ledger(self) -> None:
        """Note which versions the ledger has; wait for a broker that is away."""
        while True:
            try:
                commits = await run_records.newest_each(self.link.bus, self.link.run, Commit)
            except BrokerUnavailable:
                await asyncio.sleep(connection.RETRY_S)
            else:
                self.recorded = {commit.fragment: commit.version for commit in commits}
                return

    async def fragments(self) -> None:
        """Read wanted fragments, as many at once as the mailbox has room for.

        None waits for the one before: commits may follow each other faster than a distant broker
        answers.
        """
        async with TaskGroup() as group:
            while True:
                self.changed.clear()
                for fragment in [f for f in self.wanted if f not in self.reading]:
                    if self.link.mailbox.has_room(fragment, len(self.reading)):
                        self.reading.add(fragment)
                        group.create_task(self.fetch(self.wanted.pop(fragment)))
                await self.changed.wait()

    async def fetch(self, manifest: Manifest) -> None:
        """Read a global fragment and post it; if it cannot be read, want it again."""
        commit = manifest.commit
        try:
            self.link.mailbox.post_fresh(await self._read(manifest))
        except Overtaken:
            pass  # the newer manifest is announced, or about to be
        except (BrokerUnavailable, WireError, StateLost) as error:
            # Training goes on. The next commit repairs the loss, or an operator restores the
            # store; it is reported once per version.
            if not isinstance(error, StateLost):
                log.warning("fragment_unread", fragment=commit.fragment, error=str(error))
            elif self._reported_lost.get(commit.fragment) != commit.version:
                self._reported_lost[commit.fragment] = commit.version
                about = {"fragment": commit.fragment, "version": commit.version}
                log.error("fragment_lost", **about, error=str(error))  # noqa: TRY400 - a sentence
            self.wanted.setdefault(commit.fragment, manifest)
            await asyncio.sleep(connection.RETRY_S)
        finally:
            self.link.traffic.digest_mismatches = self.reader.mismatches
            self.reading.discard(commit.fragment)
            self.changed.set()

    def take_initial(self, initial: Initial) -> None:
        """Read a fragment, unless the trainer's own parameters are those that were committed.

        Nothing happens where a newer version has come meanwhile.
        """
        commit = initial.manifest.commit
        if self.announced.get(commit.fragment, 0) <= commit.version:
            self.initial[commit.fragment] = initial
            self.wanted.setdefault(commit.fragment, initial.manifest)

    async def _read(self, manifest: Manifest) -> Fresh:
        link, commit, began_ns = self.link, manifest.commit, self.link.wall_ns()
        if commit.version == 1 and commit.fragment in self.unasked:
            self.unasked.remove(commit.fragment)
            return Fresh(manifest, None)
        own: NDArray[np.float32] | None = None
        initial = self.initial.pop(commit.fragment, None)
        if initial is not None and initial.manifest.commit.version == commit.version:
            own = await in_thread(_negated, initial.gradient)
            await self.reader.hold(manifest, own)
        traffic, sizes = link.traffic, list[int]()

        def count(size: int) -> None:
            sizes.append(size)
            traffic.bytes_down += size

        def decoded(seconds: float) -> None:
            traffic.decode_s += seconds

        reading = self.reader.read(manifest, Meters(count, decoded))
        if self.others is None:
            vector = await reading
            if own is not None and await in_thread(_are_others, own, vector):
                log.warning("initial_parameters_are_others", fragment=commit.fragment, hint=STRANGE)
        else:
            vector, read = await asyncio.gather(
                reading, self.others.read(commit.fragment, commit.version)
            )
            self.others.hold(commit.fragment, commit.version, vector)
            traffic.bytes_down += read
        traffic.f32_bytes_down += link.f32_bytes(commit.fragment)
        link.telemetry.received(commit, sum(sizes), Interval(began_ns, link.wall_ns()))
        return Fresh(manifest, vector)


def _are_others(own: NDArray[np.float32], committed: NDArray[np.float32]) -> bool:
    """Return True if the committed initial parameters differ from our own by more than rounding."""
    return bool(np.linalg.norm(committed - own) > FAR * np.linalg.norm(own))


def _negated(gradient: Gradient) -> NDArray[np.float32]:
    """Return the parameters for an outer gradient relative to zero, computed as replay does."""
    return np.subtract(np.float32(0), np.asarray(gradient))
