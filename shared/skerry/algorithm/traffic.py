"""The bytes of synchronising every step, with which a run's own bytes are compared."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

FLOAT32_BYTES = 4


def data_parallel_bytes(params: int, steps_by_learner: Mapping[str, int], learners: int) -> int:
    """Return the bytes that a ring all-reduce of f32 gradients would have sent for the same steps.

    ``learners`` is M, the number that a run is planned for (``sync.learners``): some names in its
    log replaced others. Each of M workers sends 2 (M - 1) / M times the gradient per step
    (Patarasuk and Yuan, 2009).
    """
    if learners < 2:
        return 0
    steps = sum(steps_by_learner.values())
    return round(2 * (learners - 1) / learners * params * FLOAT32_BYTES * steps)
