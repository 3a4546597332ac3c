"""What one round takes of links, hub and syncers: the equations of docs/planning.md.

A round's stages are added up, which bounds its time from above. Its room bounds
``schedule.room_steps``, which goes up and down, from below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.presets import state_vectors
from skerry.algorithm.schemes import AUTO
from skerry.log.streams import AHEAD_BYTES, SEND_MOST, vectors_ahead
from skerry.models.arch import Arch
from skerry.models.axes import MeshSizes
from skerry.protocol.parts import MOST_UNCOVERED, window_bytes
from skerry.settings.models import OuterConfig, RunConfig, SyncConfig
from skerry_tools.plan.measured import DEFAULT, RAW_BITS, WIRE_BITS, Speeds, auto_bits
from skerry_tools.plan.tables import HubTable, ScenarioTables, SiteTable


@lru_cache(maxsize=256)
def largest(leaves: tuple[LeafSpec, ...], parameters: float, fragments: int) -> tuple[float, int]:
    """Return the most parameters and slices of a fragment; even shares where no leaves are known.

    Raises PlanError for leaves that cannot be cut so.
    """
    if not leaves:
        return math.ceil(parameters / fragments), 0
    cut = plan(leaves, fragments)
    return cut.largest, max(len(part.slices) for part in cut.fragments)


def due_together(sync: SyncConfig) -> int:
    """Return how many fragments are due at the same step, as ``schedule.offset`` spreads them."""
    return math.ceil(sync.fragments / sync.h_steps)


@dataclass(frozen=True, slots=True)
class SyncLoad:
    """What is synchronised and how, and what a step computes.

    ``leaves`` are empty and ``arch`` is None where only a count is known. ``token_flops`` are of a
    training step, ``frozen`` parameters are not trained. ``change`` is the learning rate times the
    square root of the width, 0 where these say nothing of deltas.
    """

    sync: SyncConfig
    parameters: float
    leaves: tuple[LeafSpec, ...] = ()
    outer: OuterConfig = field(default_factory=OuterConfig)
    token_flops: float = 0.0
    layers: int = 1  # matter to data-parallel only
    frozen: float = 0
    arch: Arch | None = None
    change: float = 0.0

    @property
    def outer_vectors(self) -> int:
        """Vectors of outer optimizer state per parameter, in f32; of ``auto`` they depend on H."""
        return state_vectors(self.outer.preset, self.sync.h_steps, self.outer.momentum)

    @property
    def fragment(self) -> float:
        """Parameters of the largest fragment, padding included."""
        return largest(self.leaves, self.parameters, self.sync.fragments)[0]

    @property
    def up_bits(self) -> float:
        """Bits per parameter of a contribution."""
        return WIRE_BITS[self.sync.contribution_scheme]

    @property
    def whole_bits(self) -> float:
        """Bits per parameter of a whole global fragment."""
        return WIRE_BITS[self.sync.global_scheme]

    @property
    def down_scheme(self) -> str:
        """What a learner in step reads of each version."""
        sync = self.sync
        return sync.global_scheme if sync.delta_scheme == "none" else sync.delta_scheme

    @property
    def down_bits(self) -> float:
        """Bits per parameter that a learner in step reads of each version."""
        if self.down_scheme == AUTO and self.change:
            return auto_bits(self.change * self.sync.h_steps)
        return WIRE_BITS[self.down_scheme]

    @property
    def delta_bits(self) -> float:
        """Bits per parameter of a delta; 0 where learners read each version whole."""
        return 0.0 if self.sync.delta_scheme == "none" else self.down_bits

    @property
    def round_trips(self) -> float:
        """Round trips of a round: one for contribution and manifest together, one to read chunks.

        Deltas of small fragments come without being asked for.
        """
        return 1.0 if self.delta_bits and vectors_ahead(self.fragment) else 2.0

    @property
    def keyframe_every(self) -> int:
        """Versions between two that are stored whole."""
        return self.sync.keyframe_every if self.delta_bits else 1

    @property
    def catch_up_bits(self) -> float:
        """Most bits per parameter that a returning learner reads: a keyframe, deltas since."""
        return self.whole_bits + (self.keyframe_every - 1) * self.delta_bits

    @property
    def snapshot_bytes(self) -> float:
        """Bytes per parameter of a master and its outer state."""
        return 4.0 + 4.0 * self.outer_vectors

    def state_bytes(self, keyframes: float, snapshots: float) -> float:
        """Return a commit's bytes per parameter, if these shares of all store such parts."""
        return (self.delta_bits + keyframes * self.whole_bits) / 8 + snapshots * self.snapshot_bytes

    def at_once(self, every: int) -> float:
        """Return what the busiest H steps store of a part of every N-th version, over the average.

        Fragments take turns (``parts.is_due``).
        """
        return every * math.ceil(self.sync.fragments / every) / self.sync.fragments

    @property
    def room_steps(self) -> float:
        """Steps of the clock that a round may last without delaying those after it.

        A shard launches one each ``gap`` steps; that with most fragments has the least.
        """
        gap = self.sync.h_steps / math.ceil(self.sync.fragments / self.sync.shards)
        return min(self.sync.h_steps, max(1.0, gap) + max(gap, self.sync.overlap_steps))

    def changed(self, **sync: int | str) -> SyncLoad:
        return replace(self, sync=self.sync.model_copy(update=sync))


@dataclass(frozen=True, slots=True)
class PlannedSite:
    """A site and its steps; ``local`` if the hub is there, so that nothing crosses its link.

    ``known`` is what its learners hold of a model that is known (``memory.known_of``).
    """

    name: str
    table: SiteTable
    step_s: float
    step_tokens: float = 1.0
    local: bool = False
    mesh: MeshSizes = field(default_factory=MeshSizes)
    known: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def rates(self) -> tuple[float, float]:
        """What training gets of the link, up and down, in bit/s."""
        up = self.table.up * self.table.derating
        return up, (self.table.down or self.table.up) * self.table.derating

    @property
    def tokens_s(self) -> float:
        """Tokens a second of all its learners, where none waits for another."""
        return self.step_tokens * self.table.learners / self.step_s


class HubRound(NamedTuple):
    """What broker and syncers do on average, and seconds of one round."""

    ingress_bits_s: float
    egress_bits_s: float
    broker_bytes_s: float
    broker_most_bytes_s: float  # in those H steps in which most fragments store a snapshot
    busy_share: float  # of one syncer's time, where each shard has a syncer of its own
    busy_cores: float  # of it, for whole commits
    syncer_s: float  # decode the last contribution, merge, encode, write with a snapshot
    spared_s: float  # how much shorter that is on average, as few rounds store a snapshot
    transfer_s: float  # on the hub's own links, where all sites meet; 0 if they are not judged


class SiteRound(NamedTuple):
    """What a site's learners send and read on average, and seconds of one round."""

    up_bits_s: float
    down_bits_s: float
    upload_s: float  # from a step boundary until the syncer has the contribution
    elsewhere_s: float  # what no bandwidth shortens
    round_s: float
    factor: float | None  # by which both directions must grow for the round to end in time, if any


@dataclass(frozen=True)
class Deployment:
    """A model that sites train, and its load on them and on a hub.

    ``run`` has the settings that no choice changes. ``within_tau``: a round should end within tau
    steps, not only in its room.
    """

    load: SyncLoad
    sites: Mapping[str, PlannedSite]
    hub: HubTable
    tables: ScenarioTables
    run: RunConfig = field(default_factory=RunConfig)
    within_tau: bool = False
    speeds: Speeds = DEFAULT

    @cached_property
    def learners(self) -> int:
        return sum(site.table.learners for site in self.sites.values())

    @cached_property
    def clock_s(self) -> float:
        """Seconds per step of the K-th fastest learner, which ``schedule.global_clock`` follows."""
        steps = (site.step_s for site in self.sites.values() for _ in range(site.table.learners))
        return sorted(steps)[min(self.load.sync.quorum, self.learners) - 1]

    @property
    def slowest_s(self) -> float:
        return max(site.step_s for site in self.sites.values())

    @property
    def period_s(self) -> float:
        """Seconds in which every fragment has its turn: H steps of the clock."""
        return self.load.sync.h_steps * self.clock_s

    @property
    def deadline_s(self) -> float:
        steps = self.load.sync.overlap_steps if self.within_tau else self.load.room_steps
        return steps * self.clock_s

    @property
    def contributed_bytes(self) -> float:
        """Bytes that all learners contribute in H steps."""
        return self.learners * self.load.parameters * self.load.up_bits / 8

    @property
    def window_bytes(self) -> float:
        """Bytes of contributions that the log keeps."""
        about = self.load.sync.contribution_scheme, self.load.sync.snapshot_every
        wanted = window_bytes(math.ceil(self.load.parameters), self.learners, *about)
        return float(self.run.log.bytes_for(wanted))

    @property
    def uncovered(self) -> int:
        """Most versions from a snapshot to the next: N, or as many as the window has room for.

        The rule is ``parts.is_snapshot_due``.
        """
        filled = self.window_bytes / self.contributed_bytes, self.run.log.window_s / self.period_s
        return min(self.load.sync.snapshot_every, max(1, int(MOST_UNCOVERED * min(*filled, 1e9))))

    @property
    def snapshots(self) -> float:
        """Share of the versions that store a snapshot."""
        every = self.load.sync.snapshot_every
        return math.ceil(every / self.uncovered) / every

    @cached_property
    def hub_round(self) -> HubRound:
        load, hub = self.load, self.hub
        whole, burst = load.parameters, due_together(load.sync)
        up, down = load.sync.contribution_scheme, load.down_scheme
        remote = sum(site.table.learners for site in self.sites.values() if not site.local)
        keyframes, snapshots = 1 / load.keyframe_every, self.snapshots
        all_parts, state = load.state_bytes(1, 1), load.state_bytes(keyframes, snapshots)
        keyframes *= load.at_once(load.keyframe_every)
        most = load.state_bytes(keyframes, snapshots * load.at_once(load.sync.snapshot_every))

        speeds, cores = self.speeds, hub.cores
        busy_s = speeds.work_s(up, down, whole, self.learners, cores) / load.sync.shards
        beside_s = speeds.beside_s[load.outer_vectors > 0] * whole
        beside_s += speeds.round_s * load.sync.fragments
        commit_s = speeds.work_s(up, down, whole, self.learners, 1) + beside_s
        last = math.ceil(burst / load.sync.shards) * load.fragment
        syncer_s = speeds.work_s(up, down, last, self.learners, cores)
        syncer_s -= speeds.decode_s(up, last, cores) * (self.learners - 1)  # as they come
        syncer_s += burst * load.fragment * all_parts / hub.write
        ways = ((load.up_bits, hub.down), (load.down_bits, hub.up))
        return HubRound(
            ingress_bits_s=remote * load.up_bits * whole / self.period_s,
            egress_bits_s=remote * load.down_bits * whole / self.period_s,
            broker_bytes_s=(self.contributed_bytes + state * whole) / self.period_s,
            broker_most_bytes_s=(self.contributed_bytes + most * whole) / self.period_s,
            busy_share=busy_s / self.period_s,
            busy_cores=commit_s / load.sync.shards / self.period_s,
            syncer_s=syncer_s,
            spared_s=burst * load.fragment * (all_parts - state) / hub.write,
            transfer_s=sum(remote * burst * load.fragment * b / rate for b, rate in ways if rate),
        )

    def link(self, site: PlannedSite) -> tuple[float, float]:
        """Return what a site's learners get of its link, up and down, in bit/s.

        Each has a bounded amount on its way, so a round trip bounds its rate, too.
        """
        scheme, way = self.load.sync.contribution_scheme, 8 * site.table.learners / site.table.rtt
        sent = SEND_MOST * self.load.sync.chunk_bytes * WIRE_BITS[scheme] / RAW_BITS[scheme]
        up, down = site.rates
        return min(up, min(sent, AHEAD_BYTES) * way), min(down, AHEAD_BYTES * way)

    @cached_property
    def site_rounds(self) -> dict[str, SiteRound]:
        return {name: self._site_round(site) for name, site in self.sites.items()}

    def _site_round(self, site: PlannedSite) -> SiteRound:
        load = self.load
        burst = due_together(load.sync) * load.fragment
        upload_s = self.speeds.encode_s(load.sync.contribution_scheme, burst, site.table.cores)
        read_s = self.speeds.decode_s(load.down_scheme, burst, site.table.cores)
        elsewhere_s = upload_s + self.hub_round.syncer_s + read_s
        average, wire_s, round_s = 0.0, 0.0, elsewhere_s
        if not site.local:
            average = site.table.learners * load.parameters / self.period_s
            up, down = self.link(site)
            up_s = site.table.learners * burst * load.up_bits / up
            wire_s = up_s + site.table.learners * burst * load.down_bits / down
            upload_s += up_s + site.table.rtt
            elsewhere_s += load.round_trips * site.table.rtt
            round_s = elsewhere_s + max(wire_s, self.hub_round.transfer_s)
        ways = average * load.up_bits, average * load.down_bits
        left_s = self.deadline_s - elsewhere_s
        factor = wire_s / left_s if left_s > 0 else None
        return SiteRound(*ways, upload_s, elsewhere_s, round_s, factor)

    @property
    def cycle_s(self) -> float:
        """How long H steps take learners that stop for rounds: P stops, for the slowest."""
        stop_s = max(one.round_s for one in self.site_rounds.values()) - self.hub_round.spared_s
        return self.load.sync.h_steps * self.slowest_s + self.load.sync.fragments * stop_s

    @property
    def utilisation(self) -> float:
        """Share of time in which learners compute, on average: 1 unless they stop."""
        if self.load.sync.overlap_steps:
            return 1.0
        steps_s = sum(site.step_s * site.table.learners for site in self.sites.values())
        return self.load.sync.h_steps * steps_s / self.learners / self.cycle_s
