"""A syncer or a learner that signals itself at a chosen publish: the real service on the real bus.

Arguments: broker, run, name, kind, config or "-", signal, pattern of a subject, which publish on
one that matches, and whether before or after it.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

from skerry.log.base import Receipt
from skerry.log.nats.bus import NatsBus
from skerry.service.entry import run_service
from skerry.service.reporting import configure
from skerry.settings import loading


class FailingBus(NatsBus):
    """Signals its process before or after the nth publish on a subject that matches."""

    signal = signal.SIGKILL
    pattern = ""
    left = 0
    when = "before"

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Receipt:
        matches = re.search(self.pattern, subject) is not None
        self.left -= matches
        hit = matches and self.left == 0
        if hit and self.when == "before":
            os.kill(os.getpid(), self.signal)
        receipt = await super().publish(subject, payload, **options)
        if hit and self.when == "after":
            os.kill(os.getpid(), self.signal)
        return receipt


def main() -> None:
    url, run, name, kind, config, number, pattern, count, when = sys.argv[1:]
    configure("info", service=kind)
    bus = FailingBus(url, name=name)
    bus.signal, bus.pattern = signal.Signals[number], pattern
    bus.left, bus.when = int(count), when
    if kind == "syncer":
        from skerry_syncer.service import syncer

        run_service(syncer(bus, run, name, 5.0))
    else:
        from skerry_learner.service import learner

        given = loading.load(Path(config))
        run_service(learner(bus, run, name, given.run, shutdown_s=5.0, started_s=time.monotonic()))


if __name__ == "__main__":
    main()
