"""A learner or a syncer that writes down what its arrays weigh: the real service.

``weighed_service.py learner|syncer OUT URL RUN [CONFIG]`` serves until SIGTERM, then writes its
samples. What is counted: live JAX arrays, and what Python and numpy have allocated since kernels
were loaded and compiled (tracemalloc sees numpy's buffers), payloads on their way included.
"""

from __future__ import annotations

import json
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from skerry.log.nats.bus import NatsBus
from skerry.service.entry import run_service
from skerry.service.reporting import configure
from skerry.settings import loading

Samples = list[dict[str, int]]


def weigh_learner(samples: Samples) -> None:
    """Sample around every step boundary, when captures and adoptions happen.

    An anchor that is the very memory of the vector it was adopted from is counted once. Sampling
    begins when every fragment was adopted twice: the first vectors may be older than the tracing.
    """
    import jax

    from skerry.client.island import Island
    from skerry.client.jax_fragments import JaxFragments
    from skerry_learner.trainer.trainer import Trainer

    boundary, warm, adopt = Island.boundary, Trainer.warm, JaxFragments.adopt
    shared: dict[int, int] = {}
    first: set[int] = set()

    def live() -> int:
        return sum(array.nbytes for array in jax.live_arrays())

    def weighed_adopt(self: JaxFragments, fragment: int, vector: NDArray[np.float32]) -> None:
        adopt(self, fragment, vector)
        if fragment not in first:
            first.add(fragment)
            return
        parts = self.anchor(fragment).parts
        same = any(np.may_share_memory(np.asarray(part), vector) for part in parts)
        shared[fragment] = vector.nbytes if same else 0

    def weighed_boundary(self: Island) -> Iterator[float]:
        yield from boundary(self)
        host, peak = (size - sum(shared.values()) for size in tracemalloc.get_traced_memory())
        tracemalloc.reset_peak()
        if len(shared) == len(self.session.versions):
            samples.append({"device": live(), "host": host, "host_peak": peak})

    def weighed_warm(
        self: Trainer, tick: Callable[[], None], batch: Mapping[str, Any] | None = None
    ) -> None:
        warm(self, tick, batch)
        tracemalloc.start()

    JaxFragments.adopt = weighed_adopt  # type: ignore[method-assign] # weighed in its place
    Island.boundary = weighed_boundary  # type: ignore[method-assign] # weighed in its place
    Trainer.warm = weighed_warm  # type: ignore[method-assign] # weighed in its place


def weigh_syncer(samples: Samples) -> None:
    """Sample when a merge is done and its result about to be written: when most is held."""
    from skerry_syncer import service
    from skerry_syncer.committer import Committer

    load_kernels, write = service.load_kernels, Committer._write

    def weighed_load() -> None:
        load_kernels()
        tracemalloc.start()

    async def weighed_write(
        self: Committer, batch: Any, state: Any, weighed: Sequence[Any], *rest: Any
    ) -> Any:
        held = tracemalloc.get_traced_memory()[0]
        found = await write(self, batch, state, weighed, *rest)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        samples.append({"held": held, "peak": peak, "version": found.commit.version})
        return found

    service.load_kernels = weighed_load
    Committer._write = weighed_write  # type: ignore[method-assign] # weighed in its place


def main() -> None:
    kind, out, url, run, *config = sys.argv[1:]
    configure("info", service=kind)
    samples: Samples = []
    bus = NatsBus(url, name="weighed")
    try:
        if kind == "learner":
            weigh_learner(samples)
            from skerry_learner.service import learner

            given = loading.load(Path(config[0])).run
            began_s = time.monotonic()
            run_service(learner(bus, run, "weighed", given, shutdown_s=5.0, started_s=began_s))
        else:
            weigh_syncer(samples)
            from skerry_syncer.service import syncer

            run_service(syncer(bus, run, "weighed", 5.0))
    finally:
        Path(out).write_text(json.dumps(samples))


if __name__ == "__main__":
    main()
