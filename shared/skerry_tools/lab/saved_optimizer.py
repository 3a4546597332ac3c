"""The optimizer state that outlives a kill: on disk for a real learner, in memory here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from skerry.models.base import path_name
from skerry.protocol.learner import TrainingProgress
from skerry_learner.inner.saver import RestoredState, aged, fresh


class SavedOptimizer:
    """One island's saved inner optimizer state, over all its incarnations."""

    def __init__(self, every_s: float, clock: Callable[[], float]) -> None:
        self._every_s = every_s
        self._clock = clock
        self._due_s = every_s
        self._saved: tuple[Any, int] | None = None

    def due(self) -> bool:
        """Return True if a save is due."""
        return self._clock() >= self._due_s

    def save(self, moments: Any, now: TrainingProgress) -> None:
        """Copy the state; the next save is due in a while."""
        self._due_s = self._clock() + self._every_s
        self._saved = jax.tree.map(jnp.copy, moments), now.step

    def restore(self, incarnation: int, step: int, max_age_steps: int) -> RestoredState:
        """Return how the next incarnation begins, at ``step`` of the global clock."""
        if self._saved is None:
            return fresh(incarnation, step, "nothing is saved")
        moments, saved = self._saved
        named = jax.tree_util.tree_flatten_with_path(moments)[0]
        tensors = {path_name(path): np.asarray(leaf) for path, leaf in named}
        return aged(saved, tensors, incarnation=incarnation, step=step, most_steps=max_age_steps)
