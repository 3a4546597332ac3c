"""A syncer that kills itself with SIGKILL at a chosen publish: the real service on the real bus."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Mapping

from skerry.log.base import Expect, Receipt
from skerry.log.nats.bus import NatsBus
from skerry.service.entry import run_service
from skerry_syncer.service import syncer


class CrashingBus(NatsBus):
    """Dies before or after the nth publish on a subject that matches."""

    pattern = ""
    left = 0
    when = "before"

    async def publish(
        self,
        subject: str,
        payload: bytes,
        *,
        msg_id: str | None = None,
        expect: Expect | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Receipt:
        hit = re.search(self.pattern, subject) is not None
        self.left -= hit
        if hit and self.left == 0 and self.when == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        receipt = await super().publish(
            subject, payload, msg_id=msg_id, expect=expect, headers=headers
        )
        if hit and self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return receipt


def main() -> None:
    url, run, pattern, count, when = sys.argv[1:]
    bus = CrashingBus(url, name="crashing")
    bus.pattern, bus.left, bus.when = pattern, int(count), when
    run_service(syncer(bus, run, "crashing", 5.0))


if __name__ == "__main__":
    main()
