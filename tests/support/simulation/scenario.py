"""What a seed decides beside its faults: how many take part, and by which settings."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.settings.models import (
    DataConfig,
    LivenessConfig,
    OuterConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
)
from skerry_tools.chaos.plan import DRAWN, SHARES, Fault, FaultPlan, Kind, random_plan
from tests.support.learners import TOKENS

FAULTS_S = 3.0
"""Faults begin within this time,"""
TRAINING_S = 4.6
"""and training goes on for this long, or until the last fault is over and a while longer."""
RATE_S = 0.9
HEAL_S = 1.2
OFTEN = (Kind.KILL, Kind.PAUSE, Kind.PARTITION)
"""What strikes one process at a bad moment, which takes many tries."""
KINDS = (*DRAWN, *OFTEN, *OFTEN)
TARGETS = ("learner", "learner", "syncer", "syncer", "syncer", "any", "checkpointer", "broker")
PULSE_S = 0.6
PLAN = plan((LeafSpec("embed", (8, 16), embedding=True), LeafSpec("w", (100,))), 2)
"""Two fragments of a block each: every contribution and every part is one chunk."""
WIDE = plan((LeafSpec("embed", (8, 256), embedding=True), LeafSpec("w", (2048,))), 2)
"""Two fragments of eight blocks, so that a message can be lost within a contribution or a part."""
WIDE_SHARE = 0.2
"""Share of the clusters whose fragments are wide; each of their messages costs time."""
STATE_CHUNK_BYTES = 4096
"""The least there may be: two chunks of parameters and three of master for a wide fragment."""
SENT_BLOCKS = 4
"""In a chunk of a contribution: two chunks for a wide fragment."""


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
    plan: Plan = PLAN
    pulse_s: float = PULSE_S


def draw_plan(seed: int) -> FaultPlan:
    """Draw the faults of a seed: a handful within a few virtual seconds, each with time to bite."""
    drawn = random_plan(seed, RATE_S, FAULTS_S, KINDS, TARGETS, heal_s=HEAL_S)
    return replace(drawn, faults=tuple(_biting(fault) for fault in drawn.faults))


def _biting(fault: Fault) -> Fault:
    """Let a fault last long enough for its kind, and damage only what can be damaged."""
    if fault.kind in {Kind.CORRUPT, Kind.REDELIVER}:
        return replace(fault, target="learner", duration_s=2.0, amount=max(0.5, fault.amount))
    if fault.kind in SHARES or fault.kind is Kind.SLOW:
        return replace(fault, duration_s=round(fault.duration_s + 0.8, 3))
    if fault.kind in OFTEN:
        return replace(fault, duration_s=round(0.3 + 3 * fault.duration_s, 3))
    return fault


@cache
def _config(
    steps: int, shards: int, quorum: int, overlap: int, staleness: int, merge: str, scheme: str
) -> str:
    return RunConfig(
        sync=SyncConfig.model_validate(
            {
                "fragments": 2,
                "h_steps": 6,
                "overlap_steps": overlap,
                "shards": shards,
                "lease_s": 0.8,
                "quorum": quorum,
                "round_timeout_s": 2.0,
                "max_staleness": staleness,
                "merge": merge,
                "contribution_scheme": scheme,
                "chunk_bytes": STATE_CHUNK_BYTES,
            }
        ),
        data=DataConfig(seq_len=TOKENS, batch=1),
        train=TrainConfig(steps=steps),
        outer=OuterConfig(preset="direct"),
        liveness=LivenessConfig(pulse_s=PULSE_S),
    ).model_dump_json()


def scenario_of(faults: FaultPlan) -> Scenario:
    """Return the cluster that a plan's seed stands for; training outlasts the faults."""
    draw = random.Random(f"scenario/{faults.seed}").random
    wide = random.Random(f"chunks/{faults.seed}").random()
    learners = 2 + int(draw() < 0.3)
    quorum = 1 + int(draw() * 2)
    overlap = 1 + int(draw() * 2)
    syncers = 1 + int(draw() < 0.8) + int(draw() < 0.2)
    shards = 1 + int(draw() * 2)
    staleness = int(draw() * 4)
    merge = "rda" if draw() < 0.3 else "average"
    scheme = "int4" if draw() < 0.7 else "f32"
    step_s = 0.1
    steps = round(max(TRAINING_S, faults.end_s + faults.heal_s) / step_s)
    return Scenario(
        learners,
        syncers,
        scheme,
        step_s,
        steps,
        overlap,
        _config(steps, shards, quorum, overlap, staleness, merge, scheme),
        shards,
        WIDE if wide < WIDE_SHARE else PLAN,
    )
