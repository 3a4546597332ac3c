"""How JAX compiles in tests and the processes that they start: quickly, and each program once."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from collections.abc import Generator
from contextlib import contextmanager

FOLDER = "JAX_COMPILATION_CACHE_DIR"


def compile_quickly() -> None:
    """Have every process of this run leave out optimisations and share what it compiles.

    JAX reads the environment when it is imported. Compiling is most of what tests of small models
    cost, and without optimisations it takes half.
    """
    if FOLDER not in os.environ:
        os.environ[FOLDER] = tempfile.mkdtemp(prefix="skerry-tests-jax-")
        atexit.register(shutil.rmtree, os.environ[FOLDER], ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")


@contextmanager
def optimised() -> Generator[None]:
    """Compile as a user's process does, for tests of bits that fused arithmetic could change."""
    import jax

    before = jax.config.values["jax_disable_most_optimizations"]
    jax.clear_caches()
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)
    jax.clear_caches()
