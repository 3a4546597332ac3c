"""``skerry quarantine``: stop merging what a learner sends, or merge it again."""

from __future__ import annotations

import asyncio
import socket
import time

from skerry.cli.local_log import RunChoice
from skerry.errors import ConfigError
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.protocol.messages import Quarantine, QuarantineReason


def run_quarantine(learner: str, choice: RunChoice, *, release: bool) -> None:
    """Write the record that the syncers of a run obey, and say so.

    Raises ConfigError for a name that no learner of the run has.
    """

    async def write() -> str:
        async with choice.reached(choice.load(), "quarantine") as (bus, name):
            await decide(bus, name, learner, release=release)
            return name

    name = asyncio.run(write())
    what = f"what {learner} sends" if release else f"nothing of {learner}"
    print(f"Run {name}: from its next round on {what} is merged.")


async def decide(bus: Bus, run: str, learner: str, *, release: bool) -> None:
    """Record a quarantine, or a release; ConfigError if there is no such learner."""
    await ledger.read_run(bus, run)
    known = await ledger.members(bus, run)
    if learner not in known:
        few = ", ".join(sorted(known)[:8]) or "none yet"
        msg = f"Run {run!r} has no learner {learner!r}: there are {few}."
        raise ConfigError(msg, path="learner")
    decided = run, learner, QuarantineReason.BY_HAND, socket.gethostname(), time.time_ns()
    await run_records.publish(bus, Quarantine(*decided, released=release))
