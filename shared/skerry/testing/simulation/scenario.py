"""What a seed decides beside its faults: how many take part, and by which settings."""

from __future__ import annotations

import random
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from skerry.chaos.plan import Kind, random_plan
from skerry.settings import DataConfig, LivenessConfig, OuterConfig, RunConfig, SyncConfig
from skerry.testing.puppet import TOKENS

if TYPE_CHECKING:
    from skerry.chaos.plan import FaultPlan

FAULTS_S = 4.0
"""Faults begin within this time,"""
TRAINING_S = 6.0
"""and training goes on for this long, or until the last fault is over and a while longer."""
RATE_S = 1.2
HEAL_S = 1.5
TARGETS = ("learner", "learner", "syncer", "syncer", "any", "checkpointer", "broker")
PULSE_S = 0.5


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cluster; ``config_json`` is the run's config."""

    learners: int
    syncers: int
    scheme: str
    step_s: float
    steps: int
    overlap_steps: int
    config_json: str
    shards: int
    pulse_s: float = PULSE_S


def draw_plan(seed: int) -> FaultPlan:
    """Draw the faults of a seed: a handful within a few virtual seconds."""
    return random_plan(seed, RATE_S, FAULTS_S, tuple(Kind), TARGETS, heal_s=HEAL_S)


@cache
def _config(shards: int, quorum: int, overlap: int, staleness: int, merge: str) -> str:
    return RunConfig(
        sync=SyncConfig.model_validate(
            {
                "fragments": 2,
                "h_steps": 6,
                "overlap_steps": overlap,
                "shards": shards,
                "lease_s": 1.0,
                "quorum": quorum,
                "round_timeout_s": 2.0,
                "max_staleness": staleness,
                "merge": merge,
                "contribution_scheme": "int4",
            }
        ),
        data=DataConfig(seq_len=TOKENS),
        outer=OuterConfig(preset="direct"),
        liveness=LivenessConfig(pulse_s=PULSE_S),
    ).model_dump_json()


def scenario_of(plan: FaultPlan) -> Scenario:
    """Return the cluster that a plan's seed stands for; training outlasts the faults."""
    draw = random.Random(f"scenario/{plan.seed}").random  # noqa: S311 - a schedule, no secret
    learners = 2 + int(draw() * 2)
    quorum = 1 + int(draw() * 2)
    overlap = 1 + int(draw() * 2)
    syncers = 1 + int(draw() * 3)
    shards = 1 + int(draw() * 2)
    staleness = int(draw() * 4)
    merge = "rda" if draw() < 0.3 else "average"
    scheme = "int4" if draw() < 0.7 else "f32"
    step_s = 0.2
    training_s = max(TRAINING_S, plan.end_s + plan.heal_s)
    return Scenario(
        learners,
        syncers,
        scheme,
        step_s,
        round(training_s / step_s),
        overlap,
        _config(shards, quorum, overlap, staleness, merge),
        shards,
    )
