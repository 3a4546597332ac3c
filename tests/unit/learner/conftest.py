"""Strict jax, where silent promotions are errors; and a run that compiles in a second or two."""

from tests.support.small_run import bus, config, strict_jax

__all__ = ["bus", "config", "strict_jax"]
