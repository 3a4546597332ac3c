"""What one round asks of links, syncers and time.

A link has two bounds. *Throughput*: in the H steps after which a fragment's turn comes again, all
fragments must have passed once. *Deadline*: one round, from a learner's capture until it holds the
new fragment, should be over before it holds up the rounds after it: within the *room* that the
schedule has for a round, R steps of the clock. The larger of the two is what full hiding needs.

With N parameters, b bits each on the wire, m learners behind one link, and a clock of t seconds a
step (that of the K-th fastest learner)::

    throughput = m b N / (H t)
    round      = encode + m b_up F / up + decode + merge + encode + write + m b_down F / down
                 + decode + 2 RTT
    deadline   = up x (transfers) / (R t - everything else), both links in proportion

F is the largest fragment, times those that are due at the same step where P > H. The stages are
taken one after another, though chunks flow through some of them at once: a bound from above.

Sources: Streaming DiLoCo (arXiv 2501.18512), on overlapping; Decoupled DiLoCo (2604.21428), on the
slack ``tau * step - (quorum + sync)``. Ours has R for its tau (``schedule.room_steps``), since no
learner stops for a result; R is tau or more. What is reckoned with is a bound of it from below
that only grows with H and tau, and shrinks with P: the schedule's own goes up and down in between.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from skerry.algorithm.schedule import Schedule
from skerry_tools.plan.measured import WIRE_BITS, decode_s, encode_s, merge_s

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry_tools.plan.models import Size

RTTS = 2.0
"""Round trips in a round: half for the contribution, half for the manifest, one to read chunks."""


@dataclass(frozen=True, slots=True)
class Workload:
    """What is synchronised and how: the settings of a run that links and syncers feel.

    ``outer_vectors`` are f32 vectors of outer optimizer state per parameter.
    """

    size: Size
    fragments: int
    h_steps: int
    overlap_steps: int
    quorum: int
    shards: int
    up_scheme: str
    down_scheme: str
    outer_vectors: int

    @property
    def schedule(self) -> Schedule:
        return Schedule(self.fragments, self.h_steps, self.overlap_steps)

    @property
    def parameters(self) -> float:
        return self.size.parameters

    @property
    def fragment(self) -> float:
        """Parameters of the largest fragment."""
        return self.size.largest_fragment(self.fragments)

    @property
    def up_bits(self) -> float:
        """Bits per parameter of a contribution."""
        return WIRE_BITS[self.up_scheme]

    @property
    def down_bits(self) -> float:
        """Bits per parameter of a global fragment."""
        return WIRE_BITS[self.down_scheme]

    @property
    def state_bytes(self) -> float:
        """Bytes per parameter that a commit writes: what learners read, master, outer state.

        In f32 learners read the master.
        """
        read = 0.0 if self.down_scheme == "f32" else self.down_bits / 8
        return read + 4 + 4 * self.outer_vectors


@dataclass(frozen=True, slots=True)
class Link:
    """A site as a round sees it; ``local`` if the hub is there, so that no bit is counted."""

    name: str
    learners: int
    up_bits_s: float
    down_bits_s: float
    rtt_s: float
    step_s: float
    cores: int
    local: bool = False


@dataclass(frozen=True, slots=True)
class HubLimits:
    """What the hub has, bit/s and B/s; None: not judged."""

    down_bits_s: float | None = None
    up_bits_s: float | None = None
    write_bytes_s: float | None = None
    cores: int = 1


@dataclass(frozen=True)
class Rounds:
    """A workload on these links: every figure of every round.

    ``within_tau``: a round should be over within tau steps, not only in its room.
    """

    load: Workload
    links: Mapping[str, Link]
    hub: HubLimits
    within_tau: bool = False

    @cached_property
    def learners(self) -> int:
        return sum(link.learners for link in self.links.values())

    @cached_property
    def fragment(self) -> float:
        return self.load.fragment

    @cached_property
    def clock_s(self) -> float:
        """Seconds per step of the K-th fastest learner, as ``schedule.global_clock`` follows it."""
        steps = sorted(link.step_s for link in self.links.values() for _ in range(link.learners))
        return steps[min(self.load.quorum, len(steps)) - 1]

    @property
    def period_s(self) -> float:
        """Seconds in which every fragment has its turn: H steps of the clock."""
        return self.load.h_steps * self.clock_s

    def up_throughput(self, link: Link) -> float:
        """Return what the link's learners send, bit/s on average."""
        return 0.0 if link.local else self._average(self.load.up_bits) * link.learners

    def down_throughput(self, link: Link) -> float:
        """Return what they read, bit/s on average."""
        return 0.0 if link.local else self._average(self.load.down_bits) * link.learners

    def _average(self, bits: float) -> float:
        return bits * self.load.parameters / self.period_s

    @property
    def ingress(self) -> float:
        """What reaches the hub from other sites, bit/s on average."""
        return sum(self.up_throughput(link) for link in self.links.values())

    @property
    def egress(self) -> float:
        """What leaves the hub to other sites, bit/s on average."""
        return sum(self.down_throughput(link) for link in self.links.values())

    @property
    def on_schedule(self) -> float:
        """Share of the schedule's rounds that every link can carry; the rest come later."""
        ratios = [
            ratio
            for link in self.links.values()
            for ratio in (
                self.up_throughput(link) / link.up_bits_s,
                self.down_throughput(link) / link.down_bits_s,
            )
        ]
        return 1 / max(1.0, *ratios)

    @property
    def broker_write(self) -> float:
        """Bytes a second that the broker stores: contributions and committed state."""
        load = self.load
        contributions = self.learners * load.up_bits / 8
        return (contributions + load.state_bytes) * load.parameters / self.period_s

    @cached_property
    def together(self) -> int:
        """Fragments that are due at one and the same step, as ``schedule.offset`` spreads them."""
        return math.ceil(self.load.fragments / self.load.h_steps)

    @property
    def burst(self) -> float:
        """Parameters that are due together."""
        return self.together * self.fragment

    @cached_property
    def syncer_s(self) -> float:
        """Seconds of a syncer in one round: decode the last one, merge, encode, write."""
        load, cores = self.load, self.hub.cores
        params = math.ceil(self.together / load.shards) * self.fragment
        write = self.hub.write_bytes_s
        return (
            decode_s(load.up_scheme, params, cores)
            + merge_s(load.up_scheme, params, self.learners)
            + encode_s(load.down_scheme, params, cores)
            + (self.burst * load.state_bytes / write if write else 0.0)
        )

    @property
    def syncer_busy(self) -> float:
        """Share of one syncer's time that is work, where each shard has a syncer of its own."""
        load, whole, cores = self.load, self.load.parameters, self.hub.cores
        work = (
            self.learners * decode_s(load.up_scheme, whole, cores)
            + merge_s(load.up_scheme, whole, self.learners)
            + encode_s(load.down_scheme, whole, cores)
        )
        return work / load.shards / self.period_s

    def transfer_s(self, link: Link) -> float:
        """Return seconds of a round on the site's own link."""
        if link.local:
            return 0.0
        up, down = self.load.up_bits / link.up_bits_s, self.load.down_bits / link.down_bits_s
        return link.learners * self.burst * (up + down)

    @cached_property
    def hub_transfer_s(self) -> float:
        """Seconds of a round on the hub's own links, where all sites meet; 0 if not judged."""
        remote = sum(link.learners for link in self.links.values() if not link.local)
        up = _over(self.load.up_bits, self.hub.down_bits_s)
        return remote * self.burst * (up + _over(self.load.down_bits, self.hub.up_bits_s))

    def elsewhere_s(self, link: Link) -> float:
        """Return seconds of a round that no bandwidth shortens."""
        load = self.load
        rtt = 0.0 if link.local else RTTS * link.rtt_s
        return (
            encode_s(load.up_scheme, self.burst, link.cores)
            + self.syncer_s
            + decode_s(load.down_scheme, self.burst, link.cores)
            + rtt
        )

    def round_s(self, link: Link) -> float:
        """Return seconds from a learner's capture until it holds the new fragment."""
        hub = 0.0 if link.local else self.hub_transfer_s
        return max(self.transfer_s(link), hub) + self.elsewhere_s(link)

    @cached_property
    def room_steps(self) -> float:
        """For how many steps of the clock a round may live without holding up those after it."""
        most, each, usual = self._room
        return min(most, each + max(usual, self.load.overlap_steps))

    @property
    def _room(self) -> tuple[float, float, float]:
        """H, the steps from one launch of a shard to the next, and those less what comes together.

        ``schedule.room_steps`` is H / P times the rounds that may be open, ``ceil(tau P / H)`` and
        ``ceil(P / H)``; the bound takes each for what is in it or for one, whichever is more.
        """
        load = self.load
        gap = load.h_steps / math.ceil(load.fragments / load.shards)
        return load.h_steps, max(1.0, gap), gap

    @property
    def deadline_s(self) -> float:
        """Seconds that a round may take."""
        steps = self.load.overlap_steps if self.within_tau else self.room_steps
        return steps * self.clock_s

    def slack_steps(self, link: Link) -> float:
        """Return what a round leaves of its room, in steps of the clock; negative: it is late."""
        return self.room_steps - self.round_s(link) / self.clock_s

    def tau_that_fits(self, link: Link) -> int | None:
        """Return the least tau whose room holds a round; None if none below H does."""
        most, each, usual = self._room
        steps = self.round_s(link) / self.clock_s - 1e-9
        tau = 1 if steps <= each + usual else max(1, math.ceil(steps - each))
        return tau if steps <= most and tau < self.load.h_steps else None

    def wire_s(self, link: Link) -> float:
        """Return what of the room is left for the wire; not above 0: no bandwidth helps."""
        return self.deadline_s - self.elsewhere_s(link)

    def deadline_factor(self, link: Link) -> float | None:
        """Return by what both links must grow for a round to be in time; None: they cannot help."""
        left = self.wire_s(link)
        return self.transfer_s(link) / left if left > 0 else None

    @cached_property
    def hub_factor(self) -> float:
        """By what the hub's links must grow for every round to be in time, where links can help."""
        left = [self.wire_s(link) for link in self.links.values() if not link.local]
        return self.hub_transfer_s / min((wire for wire in left if wire > 0), default=math.inf)


def _over(bits: float, rate: float | None) -> float:
    return bits / rate if rate else 0.0
