"""A store for a run's checkpoints, and one checkpoint in it."""

from tests.support.checkpoints import saved, store

__all__ = ["saved", "store"]
