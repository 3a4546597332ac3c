"""A learner that stops itself (SIGSTOP) just before its nth contribution: the real service."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from skerry.log.base import Expect, Receipt
from skerry.log.nats.bus import NatsBus
from skerry.service.entry import run_service
from skerry.service.reporting import configure
from skerry.settings import loading
from skerry_learner.service import learner

CONTRIBUTION = re.compile(r"\.contrib\.\d+\.")


class FreezingBus(NatsBus):
    """Stops the whole process before the nth publish of a contribution."""

    left = 0

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        self.left -= CONTRIBUTION.search(subject) is not None
        if self.left == 0:
            self.left = -1
            os.kill(os.getpid(), signal.SIGSTOP)
        return await super().publish(
            subject, payload, msg_id=msg_id, expect=expect, headers=headers
        )


def main() -> None:
    url, run, name, config, count = sys.argv[1:]
    configure("info", service="learner")
    bus = FreezingBus(url, name=name)
    bus.left = int(count)
    given = loading.load(Path(config))
    run_service(learner(bus, run, name, given.run, shutdown_s=5.0, started_s=time.monotonic()))


if __name__ == "__main__":
    main()
