"""A learner that writes down how long each of its steps took: the real service otherwise.

``watched_learner.py OUT CORE CONFIG URL RUN`` serves a run until SIGTERM.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from skerry.client.meter import Meter
from skerry.log.nats.bus import NatsBus
from skerry.service.entry import run_service
from skerry.service.reporting import configure, telemetry
from skerry.settings import loading
from skerry_learner.service import learner

Times = list[tuple[float, float, float]]
"""When it ended (monotonic: all processes of a machine share it), seconds it took, CPU seconds
that this process had used by then, all its threads together."""


def record() -> Times:
    """Have every step of this process noted."""
    steps: Times = []
    stepped = Meter.stepped

    def noting(self: Meter, whole_s: float) -> None:
        steps.append((time.monotonic(), whole_s, time.process_time()))
        stepped(self, whole_s)

    Meter.stepped = noting  # type: ignore[method-assign] # what it measures
    return steps


def main() -> None:
    out, core, path, url, run = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    configure("info", service="learner")
    given = loading.load(Path(path))
    steps = record()
    bus = NatsBus(url, name="timed")
    try:
        run_service(
            learner(bus, run, "timed", given.run, shutdown_s=5.0, started_s=time.monotonic()),
            telemetry(given.local, "learner", run, "timed"),
        )
    finally:
        Path(out).write_text(json.dumps({"steps": steps}))


if __name__ == "__main__":
    main()
