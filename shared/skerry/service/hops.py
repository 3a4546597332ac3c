"""Telling of the broker's part in traced messages, beside whatever else a service does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from skerry.log.hops import QUEUE, hop
from skerry.log.nats.bus import NatsBus
from skerry.protocol.subjects import Subjects
from skerry.telemetry import tracer

if TYPE_CHECKING:
    from skerry.log.base import Bus


async def tell_hops(bus: Bus, run: str) -> None:
    """Turn what servers say of this run's traced messages into spans, for ever."""
    if isinstance(bus, NatsBus):
        reports = bus.listen(Subjects(run).hops(), QUEUE)
        async with aclosing(reports):
            async for report in reports:
                found = hop(report)
                if found is not None:
                    tracer.tell(found)
    await asyncio.Event().wait()
