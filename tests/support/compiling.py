"""How JAX and numba compile in tests and the processes that they start: quickly, and once."""

from __future__ import annotations

import os
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

KEPT = Path(__file__).parents[2] / ".pytest_cache" / "compiled"
"""Kept between runs, so that the drills find what the tests have compiled; `make clean` ends it."""


def compile_quickly() -> None:
    """Have every process leave out optimisations of JAX and share what it and numba compile.

    Both read the environment when they are imported. Compiling is most of what tests of small
    models cost, and without optimisations it takes half; numba's kernels take each process ten
    seconds that finds none.
    """
    for name, folder in {"JAX_COMPILATION_CACHE_DIR": "jax", "NUMBA_CACHE_DIR": "numba"}.items():
        if name not in os.environ:
            (KEPT / folder).mkdir(mode=0o700, parents=True, exist_ok=True)
            os.environ[name] = str(KEPT / folder)
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
