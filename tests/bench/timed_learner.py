"""A learner that writes down how long each step and each step boundary took: the real code.

``timed_learner.py sync OUT CORE CONFIG URL RUN`` serves a run; ``alone`` takes the same steps with
the same model, data and pulses, but no log and so no rounds. Both go on until SIGTERM.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import structlog

from skerry.client.island import Island
from skerry.client.joining import LearnerPlace
from skerry.client.mailbox import Mailbox
from skerry.client.meter import Meter
from skerry.client.session import Session
from skerry.client.telemetry import LearnerIdentity, LearnerTelemetry
from skerry.data.stream import Prefetch, Stream
from skerry.log.nats.bus import NatsBus
from skerry.protocol.learner import LearnerPolicy, TrainingProgress
from skerry.service.entry import run_service
from skerry.service.reporting import configure, telemetry
from skerry.settings import loading
from skerry.settings.models import RunConfig
from skerry_learner.service import learner
from skerry_learner.trainer.trainer import Trainer
from skerry_learner.training import TrainingLoop
from skerry_learner.work import prepare
from tests.support.builders import member

Times = list[tuple[float, float, float]]
"""When it ended (monotonic: all processes of a machine share it), seconds it took, CPU seconds
that this process had used by then, all its threads together."""


def record() -> tuple[Times, Times]:
    """Have every step and every boundary of this process noted."""
    steps: Times = []
    boundaries: Times = []
    stepped, boundary = Meter.stepped, Island.boundary

    def noting_stepped(self: Meter, whole_s: float) -> None:
        steps.append((time.monotonic(), whole_s, time.process_time()))
        stepped(self, whole_s)

    def noting_boundary(self: Island) -> Iterator[float]:
        began = time.monotonic()
        yield from boundary(self)
        now = time.monotonic()
        boundaries.append((now, now - began, time.process_time()))

    Meter.stepped = noting_stepped  # type: ignore[method-assign]
    Island.boundary = noting_boundary  # type: ignore[method-assign]
    return steps, boundaries


def alone(config: RunConfig) -> None:
    """Train without a log until SIGTERM."""
    work = prepare(config)
    trainer = Trainer(work.model, config, work.plan)
    start = TrainingProgress(0, 0, 0, 0)
    mailbox = Mailbox(LearnerPolicy.of(config.sync).room, lambda: None)
    signal.signal(signal.SIGTERM, lambda *_: mailbox.stop())
    me = LearnerIdentity("none", "alone", 1)
    session = Session(LearnerTelemetry(me), work.plan, config.sync, trainer, mailbox, start=start)
    vocab, batch = getattr(work.model, "vocab", None), config.data.batch
    feed = partial(Prefetch, Stream(work.corpus, 0), batch=batch, vocab=vocab)
    place = LearnerPlace(me, member("alone"), start, ())
    loop = TrainingLoop(place, config, session, Meter(time.monotonic()), trainer=trainer, feed=feed)
    trainer.warm(lambda: None)
    structlog.get_logger().info("phase", phase="training")
    for _ in loop._train():
        pass  # no mode of the benchmark blocks


def main() -> None:
    mode, out, core, path, *place = sys.argv[1:]
    os.sched_setaffinity(0, {int(core)})
    configure("info", service="learner")
    given = loading.load(Path(path))
    config = given.run
    steps, boundaries = record()
    try:
        if mode == "alone":
            alone(config)
        else:
            url, run = place
            bus = NatsBus(url, name="timed")
            run_service(
                learner(bus, run, "timed", config, shutdown_s=5.0, started_s=time.monotonic()),
                telemetry(given.local, "learner", run, "timed"),
            )
    finally:
        Path(out).write_text(json.dumps({"steps": steps, "boundaries": boundaries}))


if __name__ == "__main__":
    main()
