"""A store for a run's checkpoints, and one checkpoint in it."""

from __future__ import annotations

from tests.support.checkpoints import saved, store

__all__ = ["saved", "store"]
