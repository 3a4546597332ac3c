"""Bytes that services hold and that the log keeps: the equations of docs/planning.md."""

from __future__ import annotations

from skerry.algorithm.schedule import Schedule, learner_room
from skerry.algorithm.schemes import scheme_of
from skerry_tools.plan.traffic import Deployment, SyncLoad


def learner_bytes(load: SyncLoad) -> float:
    """Return a learner's memory, activations and gradients aside.

    f32 parameters, anchors, AdamW's two moments, and two vectors of each fragment in flight; what
    a scheme feeds back comes on top.
    """
    schedule = Schedule(load.sync.fragments, load.sync.h_steps, load.sync.overlap_steps)
    flight = 2 * learner_room(schedule, load.sync.shards) * load.fragment
    feedback = 8 * load.parameters * scheme_of(load.sync.contribution_scheme).feedback
    return 4 * (4 * load.parameters + flight) + feedback


def syncer_bytes(at: Deployment) -> float:
    """Return the memory of one shard's syncer: f32 master, outer state, result, contributions."""
    load = at.load
    whole = 4 * load.parameters * (2 + load.outer_vectors) / load.sync.shards
    return whole + at.learners * load.fragment * load.up_bits / 8


def initial_bytes(at: Deployment) -> float:
    """Return what all learners send when a run begins, in f32: more than in any round."""
    return 4 * at.learners * at.load.parameters


def window_bytes(at: Deployment, window_s: float) -> float:
    """Return the contributions of the last ``window_s``, stored once."""
    return window_s / at.period_s * at.load.parameters * at.load.up_bits / 8 * at.learners


def checkpoint_bytes(load: SyncLoad) -> float:
    """Return the size of one checkpoint: f32 parameters and outer state."""
    return 4 * (1 + load.outer_vectors) * load.parameters
