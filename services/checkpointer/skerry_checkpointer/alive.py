"""Who works on a run right now: nobody may restore under its feet."""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from typing import TYPE_CHECKING

from skerry.algorithm.liveness import Activity
from skerry.errors import WireError
from skerry.log.base import Deliver
from skerry.log.presence import last_pulses
from skerry.protocol.messages import LearnerPhase, Pulse
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects

if TYPE_CHECKING:
    from skerry.log.base import Bus, Record
    from skerry.settings.models import RunConfig

LONGEST_S = 60.0
"""Nobody listens longer than this, however slow a learner's steps are."""


async def living(bus: Bus, run: str, config: RunConfig) -> list[str]:
    """Return who says that it is alive while we listen, by kind and name; no clock is compared.

    Listens even where nobody has said a word yet: a broker that has just restarted has forgotten
    its pulses, and a run that lives says them again. It listens for a syncer's lease, and long
    enough for each learner's next step boundary.
    """
    subjects = Subjects(run)
    patterns = (subjects.pulses(), subjects.syncers())
    steps = [
        pulse.step_time_s
        for pulse in (await last_pulses(bus, run)).values()
        if pulse.phase.activity in {Activity.TRAINING, Activity.WAITING}
    ]
    window_s = max(config.sync.lease_s, 3 * config.liveness.pulse_s, 2 * max(steps, default=0.0))
    found: set[str] = set()
    records = bus.follow(patterns, deliver=Deliver.NEW)
    with suppress(TimeoutError):
        async with asyncio.timeout(min(window_s, LONGEST_S)), aclosing(records):
            async for record in records:
                if _works(record, run):
                    found.add(" ".join(record.subject.split(".")[-2:]).replace("pulse", "learner"))
    return sorted(found)


def _works(record: Record, run: str) -> bool:
    """Tell a sign of life from a learner's farewell."""
    if ".pulse." not in record.subject:
        return True
    try:
        return decode(Pulse, record.payload, run=run).phase is not LearnerPhase.STOPPED
    except WireError:
        return True
