"""What a plan takes of memory, disk, time and money."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.algorithm.schedule import learner_room
from skerry_tools.plan.figures import Figure, Kind, Sheet, derived
from skerry_tools.plan.measured import COMMIT_BYTES, STATE_COPIES

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.settings.models import CheckpointConfig, LogConfig
    from skerry_tools.plan.baselines import Fleet, Pace
    from skerry_tools.plan.links import Rounds, Workload
    from skerry_tools.plan.sites import Scene

LEARNER_VECTORS = 4
"""f32 per parameter of a learner: parameters, anchors, AdamW's two moments."""
FLIGHT_VECTORS = 2
"""f32 vectors of the largest fragment in a learner, for each that it has room for in flight."""
TOKENS_PER_PARAMETER = 20
"""Tokens to train on where nobody says: Hoffmann et al. 2022, about."""
GB = 1e9


def learner_bytes(load: Workload) -> float:
    """Return a learner's memory, activations and gradients aside."""
    feedback = 8 * load.parameters if load.up_scheme == "int2" else 0.0
    flight = FLIGHT_VECTORS * learner_room(load.schedule, load.shards) * load.fragment
    return 4 * (LEARNER_VECTORS * load.parameters + flight) + feedback


def memory(rounds: Rounds, chips: Mapping[str, int]) -> Sheet:
    """Return the memory of each service."""
    load = rounds.load
    learner = learner_bytes(load)
    contributions = rounds.learners * rounds.fragment * load.up_bits / 8
    shard = load.parameters / load.shards
    room = learner_room(load.schedule, load.shards)
    held = (
        f"f32 parameters, anchors, 2 AdamW moments, 2 vectors of {room} fragments; no activations"
    )
    per_chip = {
        f"learner_at_{name}_per_chip": derived(learner / count, "B", f"over {count} chips, evenly")
        for name, count in chips.items()
    }
    return Sheet(
        "memory",
        "Memory",
        {
            "learner": derived(learner, "B", held),
            **per_chip,
            "syncer_of_a_shard": derived(
                4 * (2 + load.outer_vectors) * shard + contributions,
                "B",
                "f32 master, outer state and a merge's result, and one round's contributions",
            ),
            "checkpointer": derived(
                4 * load.parameters + 4 * (1 + load.outer_vectors) * rounds.fragment,
                "B",
                "f32 parameters and the fragment in hand",
            ),
            "evaluator": derived(
                8 * load.parameters, "B", "f32 parameters and their copy on the device"
            ),
            "health_monitor": derived(
                None, "B", "holds no parameters: a few hundred bytes for each round that it shows"
            ),
        },
    )


def first_offers_bytes(rounds: Rounds) -> float:
    """Return what all learners offer a run at its beginning, in bytes: more than any round."""
    return 4 * rounds.learners * rounds.load.parameters


def disk(rounds: Rounds, log: LogConfig, checkpoint: CheckpointConfig, wall_s: float) -> Sheet:
    """Return the disk of broker and checkpoints."""
    load = rounds.load
    state = STATE_COPIES * load.state_bytes * load.parameters * log.replicas
    in_window = log.window_s / rounds.period_s * load.parameters * load.up_bits / 8
    contributions = rounds.learners * in_window
    commits = wall_s / rounds.period_s * load.fragments
    one = 4 * (1 + load.outer_vectors) * load.parameters
    hours = log.window_s / 3600
    return Sheet(
        "disk",
        f"Disk ({log.replicas} replica{'s' * (log.replicas > 1)})",
        {
            "state": derived(
                state, "B", f"{STATE_COPIES} x parameters (unless f32), master, outer state"
            ),
            "contributions": derived(
                contributions * log.replicas, "B", f"all of the last {hours:g} h (log.window_s)"
            ),
            "contributions_at_least": derived(
                first_offers_bytes(rounds) * log.replicas,
                "B",
                "all learners' initial parameters, f32: log.window_bytes must not be less",
            ),
            "ledger": derived(
                commits * COMMIT_BYTES * log.replicas,
                "B",
                f"{COMMIT_BYTES} B a commit, {commits:,.0f} commits",
            ),
            "checkpoints": derived(
                one * checkpoint.keep_newest,
                "B",
                f"the newest {checkpoint.keep_newest}; each {one / GB:,.1f} GB in f32",
            ),
        },
    )


@dataclass(frozen=True, slots=True)
class Bill:
    """Seconds to the last token and what it costs; None where prices are missing."""

    wall_s: float
    chips: float | None
    egress: float | None

    @property
    def total(self) -> float | None:
        if self.chips is None:
            return None
        return self.chips + (self.egress or 0.0)


def bill(pace: Pace, fleet: Fleet, rounds: Rounds, scene: Scene, tokens: float) -> Bill:
    """Return time and money until ``tokens`` are trained on, at this pace."""
    wall_s = tokens / (pace.tokens_s * pace.goodput * scene.plan.goodput)
    hours = wall_s / 3600
    prices = [site.price_chip_hour for site in scene.sites.values()]
    chips = None
    if all(price is not None for price in prices):
        chips = hours * (scene.hub.price_hour or 0.0) + sum(
            hours * (site.price_chip_hour or 0.0) * site.chips * site.learners
            for site in scene.sites.values()
        )
    return Bill(wall_s, chips, _egress(pace, fleet, rounds, scene, tokens))


def _egress(pace: Pace, fleet: Fleet, rounds: Rounds, scene: Scene, tokens: float) -> float | None:
    """Price what leaves each site, and, where there is a hub in it, what leaves that."""
    ring = "data-parallel" in pace.name
    cycles = tokens / fleet.step_tokens / rounds.load.h_steps
    if pace.utilisation == 1.0 and not ring:  # nobody waits: rounds follow the clock
        cycles = tokens / pace.tokens_s / rounds.period_s
    total, priced = 0.0, False
    for name, site in scene.sites.items():
        if site.price_egress_gb is not None:
            up = pace.bits if ring else rounds.up_throughput(fleet.links[name]) * rounds.period_s
            total += up / 8 / GB * cycles * site.price_egress_gb
            priced = True
    if scene.hub.price_egress_gb is not None and not ring:
        down = rounds.egress * rounds.period_s / 8 / GB
        total += down * cycles * scene.hub.price_egress_gb
        priced = True
    return total if priced else None


def money(value: float | None, currency: str, convention: str) -> Figure:
    """Return a price; None says that prices are missing."""
    missing = "no prices given: sites.<name>.price_chip_hour, price_egress_gb"
    return Figure(value, currency, Kind.DERIVED, convention if value is not None else missing)
