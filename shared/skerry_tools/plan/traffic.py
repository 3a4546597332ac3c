"""What one round takes of links, hub and syncers: the equations of docs/planning.md.

A link has two bounds. *Throughput*: in the H steps after which a fragment's turn comes again, all
fragments must have passed once. *Deadline*: a round, from a learner's capture until it holds the
new fragment, should end within the *room* that the schedule has for it, before it delays the rounds
after it. Its stages are added up, though chunks flow through some of them at once: a bound from
above. The room is a bound of ``schedule.room_steps``, which goes up and down, from below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

from skerry.settings.models import SyncConfig
from skerry_tools.plan.measured import WIRE_BITS, decode_s, encode_s, merge_s
from skerry_tools.plan.tables import HubTable, PlanTable, SiteTable

if TYPE_CHECKING:  # imports numpy
    from skerry.algorithm.fragments import LeafSpec

ROUND_TRIPS = 2.0
"""In a round: half for the contribution, half for the manifest, one to read chunks."""


@lru_cache(maxsize=256)
def largest_fragment(leaves: tuple[LeafSpec, ...], parameters: float, fragments: int) -> float:
    """Return the parameters of the largest fragment; an even share where no leaves are known."""
    if not leaves:
        return math.ceil(parameters / fragments)
    from skerry.algorithm.fragments import plan

    return max(part.padded_size for part in plan(leaves, fragments).fragments)


@dataclass(frozen=True, slots=True)
class SyncLoad:
    """What is synchronised and how; ``leaves`` are empty where only a count is known.

    ``outer_vectors`` are f32 vectors of outer optimizer state per parameter.
    """

    sync: SyncConfig
    parameters: float
    leaves: tuple[LeafSpec, ...] = ()
    outer_vectors: int = 0

    @property
    def fragment(self) -> float:
        """Parameters of the largest fragment, padding included."""
        return largest_fragment(self.leaves, self.parameters, self.sync.fragments)

    @property
    def up_bits(self) -> float:
        """Bits per parameter of a contribution."""
        return WIRE_BITS[self.sync.contribution_scheme]

    @property
    def down_bits(self) -> float:
        """Bits per parameter of a global fragment."""
        return WIRE_BITS[self.sync.global_scheme]

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter that a commit stores: master, outer state, what learners read.

        In f32 learners read the master.
        """
        read = 0.0 if self.sync.global_scheme == "f32" else self.down_bits / 8
        return read + 4 + 4 * self.outer_vectors

    @property
    def launch_gap_steps(self) -> float:
        """Steps from one launch of a shard to the next, of the shard with most fragments."""
        return self.sync.h_steps / math.ceil(self.sync.fragments / self.sync.shards)

    @property
    def room_steps(self) -> float:
        """Steps of the clock that a round may last without delaying those after it."""
        gap = self.launch_gap_steps
        return min(self.sync.h_steps, max(1.0, gap) + max(gap, self.sync.overlap_steps))

    def changed(self, **sync: int | str) -> SyncLoad:
        """Return the load with these of its settings changed."""
        return replace(self, sync=self.sync.model_copy(update=sync))


@dataclass(frozen=True, slots=True)
class PlannedSite:
    """A site and its steps; ``local`` if the hub is there, so that nothing crosses its link."""

    name: str
    table: SiteTable
    step_s: float
    step_tokens: float = 1.0
    local: bool = False

    @property
    def learners(self) -> int:
        return self.table.learners

    @property
    def up_bits_s(self) -> float:
        return self.table.up * self.table.derating

    @property
    def down_bits_s(self) -> float:
        return (self.table.down or self.table.up) * self.table.derating

    @property
    def tokens_s(self) -> float:
        """Tokens a second of all its learners, where none waits for another."""
        return self.step_tokens * self.learners / self.step_s


@dataclass(frozen=True, slots=True)
class HubRound:
    """What broker and syncers do on average, and seconds of one round.

    ``busy_share``: of one syncer's time, where each shard has a syncer of its own. ``syncer_s``:
    decode the last contribution, merge, encode, write. ``transfer_s``: on the hub's own links,
    where all sites meet; 0 if they are not judged.
    """

    ingress_bits_s: float
    egress_bits_s: float
    broker_bytes_s: float
    busy_share: float
    syncer_s: float
    transfer_s: float


@dataclass(frozen=True, slots=True)
class SiteRound:
    """What a site's learners send and read on average, and seconds of one round.

    ``elsewhere_s`` is what no bandwidth shortens; ``upload_s`` from a step boundary until the
    syncer has the contribution. ``factor``: by what both directions must grow for the round to end
    in time; None: they cannot help.
    """

    up_bits_s: float
    down_bits_s: float
    upload_s: float
    elsewhere_s: float
    round_s: float
    slack_steps: float
    factor: float | None


@dataclass(frozen=True)
class Deployment:
    """A load on sites and a hub; ``layers`` of the model matter to data-parallel only.

    ``window_bytes``: log.window_bytes where it is set. ``within_tau``: a round should end within
    tau steps, not only in its room.
    """

    load: SyncLoad
    sites: Mapping[str, PlannedSite]
    hub: HubTable
    plan: PlanTable
    layers: int = 1
    window_bytes: float | None = None
    within_tau: bool = False

    @cached_property
    def learners(self) -> int:
        return sum(site.learners for site in self.sites.values())

    @cached_property
    def clock_s(self) -> float:
        """Seconds per step of the K-th fastest learner, which ``schedule.global_clock`` follows."""
        steps = sorted(site.step_s for site in self.sites.values() for _ in range(site.learners))
        return steps[min(self.load.sync.quorum, len(steps)) - 1]

    @property
    def slowest_s(self) -> float:
        return max(site.step_s for site in self.sites.values())

    @property
    def period_s(self) -> float:
        """Seconds in which every fragment has its turn: H steps of the clock."""
        return self.load.sync.h_steps * self.clock_s

    @property
    def deadline_s(self) -> float:
        """Seconds that a round may take."""
        steps = self.load.sync.overlap_steps if self.within_tau else self.load.room_steps
        return steps * self.clock_s

    @property
    def due_together(self) -> int:
        """Fragments that are due at the same step, as ``schedule.offset`` spreads them."""
        return math.ceil(self.load.sync.fragments / self.load.sync.h_steps)

    @cached_property
    def hub_round(self) -> HubRound:
        load, hub, whole, cores = self.load, self.hub, self.load.parameters, self.hub.cores
        remote = sum(site.learners for site in self.sites.values() if not site.local)
        stored = self.learners * load.up_bits / 8 + load.state_bytes
        params = math.ceil(self.due_together / load.sync.shards) * load.fragment
        busy_s = self.learners * decode_s(load.sync.contribution_scheme, whole, cores)
        busy_s += merge_s(load.sync.contribution_scheme, whole, self.learners)
        syncer_s = decode_s(load.sync.contribution_scheme, params, cores)
        syncer_s += merge_s(load.sync.contribution_scheme, params, self.learners)
        syncer_s += encode_s(load.sync.global_scheme, params, cores)
        burst = self.due_together * load.fragment
        ways = ((load.up_bits, hub.down), (load.down_bits, hub.up))
        return HubRound(
            ingress_bits_s=remote * load.up_bits * whole / self.period_s,
            egress_bits_s=remote * load.down_bits * whole / self.period_s,
            broker_bytes_s=stored * whole / self.period_s,
            busy_share=(busy_s + encode_s(load.sync.global_scheme, whole, cores))
            / load.sync.shards
            / self.period_s,
            syncer_s=syncer_s + (burst * load.state_bytes / hub.write if hub.write else 0.0),
            transfer_s=sum(remote * burst * bits / rate for bits, rate in ways if rate),
        )

    @cached_property
    def site_rounds(self) -> dict[str, SiteRound]:
        return {name: self._site_round(site) for name, site in self.sites.items()}

    def _site_round(self, site: PlannedSite) -> SiteRound:
        load, cores = self.load, site.table.cores
        burst = self.due_together * load.fragment
        upload_s = encode_s(load.sync.contribution_scheme, burst, cores)
        read_s = decode_s(load.sync.global_scheme, burst, cores)
        elsewhere_s = upload_s + self.hub_round.syncer_s + read_s
        average, wire_s, round_s = 0.0, 0.0, elsewhere_s
        if not site.local:
            average = site.learners * load.parameters / self.period_s
            up_s = site.learners * burst * load.up_bits / site.up_bits_s
            wire_s = up_s + site.learners * burst * load.down_bits / site.down_bits_s
            upload_s += up_s + site.table.rtt
            elsewhere_s += ROUND_TRIPS * site.table.rtt
            round_s = elsewhere_s + max(wire_s, self.hub_round.transfer_s)
        steps, left_s = round_s / self.clock_s, self.deadline_s - elsewhere_s
        return SiteRound(
            up_bits_s=average * load.up_bits,
            down_bits_s=average * load.down_bits,
            upload_s=upload_s,
            elsewhere_s=elsewhere_s,
            round_s=round_s,
            slack_steps=load.room_steps - steps,
            factor=wire_s / left_s if left_s > 0 else None,
        )

    @property
    def cycle_s(self) -> float:
        """How long H steps take learners that stop for rounds: P stops, for the slowest."""
        stop_s = max(one.round_s for one in self.site_rounds.values())
        return self.load.sync.h_steps * self.slowest_s + self.load.sync.fragments * stop_s

    @property
    def utilisation(self) -> float:
        """Share of time in which learners compute, on average: 1 unless they stop."""
        if self.load.sync.overlap_steps:
            return 1.0
        steps_s = sum(site.step_s * site.learners for site in self.sites.values())
        return self.load.sync.h_steps * steps_s / self.learners / self.cycle_s
