"""How many bytes a run moved, counted message by message in its log."""

from __future__ import annotations

from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.algorithm.fragments import plan
from skerry.log import run_records
from skerry.log.base import Deliver
from skerry.protocol.messages import Commit, CommitOrigin, Manifest
from skerry.protocol.subjects import TOKEN, Subjects
from skerry.status.sources import MessageCounts, Sources

if TYPE_CHECKING:
    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import RunRecord

PARAMS = "params"


@dataclass(frozen=True, slots=True)
class Uplink:
    """Contributions in the log: all of their bytes, and those of merged outer gradients alone."""

    bytes_sent: int
    bytes_merged: int
    params_merged: int

    @property
    def bits_per_param(self) -> float | None:
        return 8 * self.bytes_merged / self.params_merged if self.params_merged else None


@dataclass(slots=True)
class Downlink:
    """Every global fragment that was committed after genesis: what one learner reads of it.

    ``state_bytes`` is what the syncer wrote altogether, master parameters and outer state included.
    """

    params: int = 0
    bytes: int = 0
    state_bytes: int = 0

    @property
    def bits_per_param(self) -> float | None:
        return 8 * self.bytes / self.params if self.params else None

    def add(self, cut: Plan, manifest: Manifest) -> None:
        """Count one committed version of a fragment that the plan has."""
        if manifest.commit.fragment >= len(cut.fragments):
            return
        sizes = {part.name: sum(c.size for c in part.chunks) for part in manifest.parts}
        stored = {c.sequence: c.size for part in manifest.parts for c in part.chunks}
        self.state_bytes += sum(stored.values())
        if manifest.commit.origin is not CommitOrigin.GENESIS:
            self.params += cut.fragments[manifest.commit.fragment].size
            self.bytes += sizes.get(PARAMS, 0)


def plan_of(record: RunRecord) -> Plan:
    """Return the fragment plan of a run."""
    return plan(record.leaves, record.fragments)


async def measure_downlink(bus: Bus, record: RunRecord, into: Downlink) -> None:
    """Count every manifest from now on, until cancelled."""
    cut = plan_of(record)
    manifests = run_records.follow(bus, record.run, Manifest, cut.digest)
    async with aclosing(manifests):
        async for manifest in manifests:
            into.add(cut, manifest)


async def measure_uplink(bus: Bus, record: RunRecord, since_s: float = 0.0) -> Uplink:
    """Read the contributions that the log still holds and count their bytes.

    ``bytes_sent`` counts those stored after ``since_s`` (seconds since the epoch), so that a run
    that was resumed is compared with the steps of the same session.
    """
    subjects, cut = Subjects(record.run), plan_of(record)
    name = subjects.stream("CONTRIB")
    last = next((s.last_seq for s in await bus.streams() if s.name == name and s.messages), 0)
    # Chunks of two contributions may lie between one another: each counts with its subject.
    merged: set[tuple[int, str]] = set()
    params = 0
    commits = Sources(bus, record.run, MessageCounts(), record.fragments).stored(Commit)
    async with aclosing(commits):
        async for _, commit in commits:
            for consumed in () if commit.origin is CommitOrigin.GENESIS else commit.consumed:
                if TOKEN.fullmatch(consumed.learner) is None:
                    continue
                params += cut.fragments[commit.fragment].size
                subject = subjects.contribution(commit.fragment, consumed.learner)
                whole = range(consumed.sequence_first, min(last, consumed.sequence_last) + 1)
                merged.update((sequence, subject) for sequence in whole)
    sent = useful = 0
    if not last:
        return Uplink(sent, useful, params)
    records = bus.follow(subjects.contribution(), deliver=Deliver.ALL)
    async with aclosing(records):
        async for stored in records:
            sent += len(stored.payload) * (stored.time_ns >= since_s * 1e9)
            useful += len(stored.payload) * ((stored.sequence, stored.subject) in merged)
            if stored.sequence >= last:
                break
    return Uplink(sent, useful, params)
