"""Turns of a loop that has joined a run and of the same loop without, in one process.

``SCRIPT OUT CORE CONFIG URL RUN TURNS STEPS`` writes what each turn took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.settings import loading
from skerry.settings.models import RunConfig

Step = Callable[[], Any]
"""Takes a step, and returns its loss, which may still be computed."""


@dataclass(frozen=True, slots=True)
class Asked:
    """What the bench asks for; the process is on its core."""

    out: Path
    config: RunConfig
    url: str
    run: str
    turns: int
    steps: int

    @classmethod
    def of_command_line(cls) -> Asked:
        out, core, path, url, run, turns, steps = sys.argv[1:]
        if core != "-":
            os.sched_setaffinity(0, {int(core)})
        return cls(Path(out), loading.load(Path(path)).run, url, run, int(turns), int(steps))

    def take_turns(self, ours: Step, boundary: Callable[[Any], None], plain: Step) -> None:
        """Time both loops, and what ``boundary`` takes of the first one's thread."""
        boundaries: list[tuple[float, float]] = []

        def timed(loss: Any) -> None:
            began_s, began_cpu_s = time.monotonic(), time.thread_time()
            boundary(loss)
            boundaries.append((time.monotonic() - began_s, time.thread_time() - began_cpu_s))

        _turn(ours, timed, 8)
        _turn(plain, lambda _: None, 2)
        boundaries.clear()
        found: dict[str, list[Any]] = {"ours": [], "plain": []}
        for _ in range(self.turns):
            found["ours"].append(_turn(ours, timed, self.steps))
            found["plain"].append(_turn(plain, lambda _: None, self.steps))
        walls, cpus = zip(*boundaries, strict=True)
        told = found | {"boundaries": walls, "boundary_cpu_s": sum(cpus)}
        self.out.write_text(json.dumps(told))


def _turn(step: Step, after: Callable[[Any], None], count: int) -> dict[str, float]:
    """Take steps; the loss of the step before is read, as a loop that prints it does."""
    before, began_s, began_cpu_s = 0.0, time.monotonic(), time.process_time()
    for _ in range(count):
        loss = step()
        after(loss)
        float(before)
        before = loss
    took = time.monotonic() - began_s, time.process_time() - began_cpu_s
    return {"wall_s": took[0], "cpu_s": took[1], "steps": count}
