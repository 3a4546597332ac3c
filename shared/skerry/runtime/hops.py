"""Telling of the broker's part in traced messages, beside whatever else a service does."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from skerry.bus.hops import QUEUE, hop
from skerry.bus.nats_bus import NatsBus
from skerry.telemetry import tracer
from skerry.wire.subjects import Subjects

if TYPE_CHECKING:
    from skerry.bus.base import Bus


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
