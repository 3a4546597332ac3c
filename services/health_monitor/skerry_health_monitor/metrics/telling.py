"""What the health monitor knows in numbers, and the loops that pass it on."""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from skerry.log.base import Room, Storage
from skerry.status.alerts import StreamStore
from skerry.telemetry.points import flat
from skerry_health_monitor.metrics.broker import Brokers
from skerry_health_monitor.metrics.figures import figures
from skerry_health_monitor.metrics.sinks import Row

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Sequence

    from skerry.telemetry.points import Figure
    from skerry_health_monitor.metrics.figures import Known
    from skerry_health_monitor.metrics.sinks import Outlet

POLL_S = 5.0
CLOSE_S = 2.0
"""A sink that hangs delays the monitor's end by this much at most."""


class Telling:
    """Turns what the monitor knows into figures whenever somebody asks.

    ``known`` returns the newest of it, None before there is a run.
    """

    def __init__(
        self,
        known: Callable[[], Known | None],
        broker_urls: Sequence[str] = (),
        clock_s: Callable[[], float] = time.time,
    ) -> None:
        self._known = known
        self._brokers = Brokers(broker_urls)
        self._clock_s = clock_s

    def figures(self) -> list[Figure]:
        """Return every metric as of now."""
        return figures(self._known(), self._brokers.servers(), self._clock_s())

    def stores(self) -> list[StreamStore]:
        """Return how full each broker's stores are, of those that have answered."""
        return [
            StreamStore(Room(storage, held, most), server.name)
            for server in self._brokers.servers()
            for storage, held, most in (
                (Storage.FILE, server.held_file_bytes, server.most_file_bytes),
                (Storage.MEMORY, server.held_memory_bytes, server.most_memory_bytes),
            )
            if server.up
        ]

    async def lost(self, names: Collection[str]) -> dict[str, float]:
        """Return how many seconds ago each of these clients lost its connection to the brokers."""
        return await self._brokers.lost(names)

    async def poll(self) -> None:
        """Keep the figures of the brokers new, for ever."""
        while True:
            await self._brokers.poll()
            await asyncio.sleep(POLL_S)

    async def write(self, outlets: Sequence[Outlet], every_s: float) -> None:
        """Give every outlet a row now and then, for ever; one more at the end, then close them.

        A run that is finished has a last row, and none after it.
        """
        over = False
        try:
            while True:
                await asyncio.sleep(every_s)
                known = self._known()
                if known is not None and not over:
                    over = known.model.view.finished
                    self._offer(outlets, known)
        finally:
            known = self._known()
            if known is not None and not over:
                self._offer(outlets, known)
            closing = [asyncio.to_thread(outlet.close, CLOSE_S) for outlet in outlets]
            await asyncio.gather(*closing)

    def _offer(self, outlets: Sequence[Outlet], known: Known) -> None:
        row = Row(self._clock_s(), known.model.view.step, flat(self.figures()))
        for outlet in outlets:
            outlet.offer(row)
