"""How one incarnation of a learner settles in and leaves, in the network's thread."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from contextlib import suppress
from dataclasses import dataclass

import structlog

from skerry.client.inner import RestoredState
from skerry.client.island import Island
from skerry.client.joining import settle
from skerry.client.network import Network
from skerry.protocol.messages import LearnerPhase
from skerry.service.kernels import load_kernels
from skerry.tasks import TaskGroup

log = structlog.get_logger()


@dataclass(slots=True)
class Membership:
    """What a learner does in its run beside training; ``over`` once the run is finished."""

    network: Network
    island: Island
    over: bool = False

    async def settle(self, restored: Awaitable[RestoredState]) -> None:
        """Load what the first contribution needs, while the trainer compiles; never return.

        Also publish the record of how this incarnation goes on.
        """
        async with TaskGroup() as group:
            group.create_task(asyncio.to_thread(load_kernels))
            await settle(self.network.link.bus, self.island.place.member, await restored)
        await asyncio.Event().wait()

    async def finished(self) -> None:
        """Return once the run is finished and the log has this learner's last answers."""
        await self.network.finished()
        self.over = True
        await self.network.sender.answered()

    async def leave(self) -> None:
        """Send what was captured and say goodbye, after the trainer has stopped."""
        if not self.over:
            with suppress(RuntimeError):  # a program at its very end starts no work in threads
                await self.network.flush()
        self.island.enter(LearnerPhase.FINISHED if self.over else LearnerPhase.STOPPED)
        await self.network.pulse()
        log.info("stopped", phase=self.island.meter.phase.value, step=self.island.now.step)
