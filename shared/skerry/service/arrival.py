"""Wait for a run that is not created yet."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog

from skerry.log import ledger
from skerry.log.recovery import find_run

if TYPE_CHECKING:
    from skerry.log.base import Bus
    from skerry.protocol.messages import RunRecord

log = structlog.get_logger()


async def arrive(bus: Bus, run: str) -> RunRecord:
    """Return the run's record, waiting until a learner has created it or a checkpoint restored it.

    Raises StateLost where the record is gone while the log still holds state of the run: it would
    never come.
    """
    record = await find_run(bus, run, waits=True)
    if record is not None:
        return record
    log.info("waits_for_run", run=run, hint="its first learner creates it; is the run id right?")
    return await ledger.wait_run(bus, run)
