"""A learner that takes turns with a plain loop, in its own process: the real service otherwise.

``timed_learner.py OUT CORE CONFIG URL RUN TURNS STEPS`` joins a run and goes on until all have had
their turns. With sync off it takes its steps without their boundaries. In a plain turn the
learner's thread trains the plain loop's copy of the model, while the network goes on beside it.
CORE pins the process; "-" leaves it on all.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax
from plain_loop import PlainLoop

from skerry.client.island import Island
from skerry.data.stream import Stream
from skerry.log.nats.bus import NatsBus
from skerry.service.entry import run_service
from skerry.service.reporting import configure, telemetry
from skerry.settings import loading
from skerry_learner import service
from skerry_learner.training import TrainingLoop

SETTLE = 5
"""Steps at the beginning of a turn that are not timed: caches still hold the other loop's."""
BATCHES = 16


@dataclass(frozen=True, slots=True)
class Turn:
    """What one loop did in its turn; seconds, and CPU seconds of the whole process."""

    steps: int
    wall_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Clock:
    """When a turn's timed part began."""

    wall_s: float
    cpu_s: float

    @classmethod
    def start(cls) -> Clock:
        return cls(time.perf_counter(), time.process_time())

    def stop(self, steps: int) -> Turn:
        return Turn(steps, time.perf_counter() - self.wall_s, time.process_time() - self.cpu_s)


class Alternation:
    """Gives a learner its batches in turns, and takes the plain loop's between them."""

    def __init__(self, turns: int, steps: int) -> None:
        self._turns, self._steps = turns, steps
        self.ours: list[Turn] = []
        self.off: list[Turn] = []
        self.plain: list[Turn] = []
        self.boundaries: list[float] = []

    def batches(self, given: Iterator[Any], loop: TrainingLoop, plain: PlainLoop) -> Iterator[Any]:
        """Yield batches; the consumer asks for the next one once its step is over."""
        for _ in range(self._turns):
            for _ in range(SETTLE):
                yield next(given)
            jax.block_until_ready(loop.trainer.state.params)
            clock = Clock.start()
            for _ in range(self._steps):
                yield next(given)
            jax.block_until_ready(loop.trainer.state.params)
            self.ours.append(clock.stop(self._steps))
            self.off.append(self._off_turn(given, loop))
            self.plain.append(self._plain_turn(plain, loop.tick))
        os.kill(os.getpid(), signal.SIGTERM)
        while True:
            yield next(given)

    def _off_turn(self, given: Iterator[Any], loop: TrainingLoop) -> Turn:
        """Take the learner's steps on its batches without its boundaries: sync is off."""
        clock, before = Clock.start(), None
        for number in range(SETTLE + self._steps):
            if number == SETTLE:
                jax.block_until_ready(loop.trainer.state.params)
                clock = Clock.start()
            batch, _, _ = next(given)
            after = loop.trainer.step(batch, loop.progress())
            if before is not None:
                float(before.loss)
            before = after
            loop.tick()
        jax.block_until_ready(loop.trainer.state.params)
        return clock.stop(self._steps)

    def _plain_turn(self, plain: PlainLoop, tick: Callable[[], None]) -> Turn:
        for _ in range(SETTLE):
            plain.step()
        plain.wait()
        clock = Clock.start()
        for _ in range(self._steps):
            plain.step()
            tick()  # the learner goes on to say that it is alive, twice a second
        plain.wait()
        return clock.stop(self._steps)


def install(alternation: Alternation) -> None:
    """Have the learner of this process fed by the alternation, and its boundaries timed."""
    feed, boundary = service._Service._feed, Island.boundary

    @contextmanager
    def fed(self: service._Service, cursor: int) -> Generator[Iterator[Any]]:
        work = self._work
        stream = Stream(work.corpus, 0)
        size = work.config.data.batch
        rows = [stream.read(size * i, size)["tokens"] for i in range(BATCHES)]
        plain = PlainLoop(work.model, work.config.train, rows)
        with feed(self, cursor) as batches:
            yield alternation.batches(batches, self._training, plain)

    def timed(self: Island) -> Iterator[float]:
        began = time.perf_counter()
        yield from boundary(self)
        alternation.boundaries.append(time.perf_counter() - began)

    service._Service._feed = fed  # type: ignore[method-assign,assignment] # as a Feed
    Island.boundary = timed  # type: ignore[method-assign] # what it measures


def main() -> None:
    out, core, path, url, run, turns, steps = sys.argv[1:]
    if core != "-":
        os.sched_setaffinity(0, {int(core)})
    configure("info", service="learner")
    given = loading.load(Path(path))
    alternation = Alternation(int(turns), int(steps))
    install(alternation)
    bus = NatsBus(url, name="timed")
    try:
        run_service(
            service.learner(
                bus, run, "timed", given.run, shutdown_s=5.0, started_s=time.monotonic()
            ),
            telemetry(given.local, "learner", run, "timed"),
        )
    finally:
        found = {
            "ours": [asdict(turn) for turn in alternation.ours],
            "off": [asdict(turn) for turn in alternation.off],
            "plain": [asdict(turn) for turn in alternation.plain],
            "boundaries": alternation.boundaries,
        }
        Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
