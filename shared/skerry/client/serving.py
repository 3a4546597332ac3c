"""The network's side of a learner in a user's training loop: a thread beside that loop."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable
from concurrent.futures import Future
from functools import partial

import structlog

from skerry.client.inner import RestoredState
from skerry.client.island import Island
from skerry.client.loop_thread import LoopThread
from skerry.client.membership import Membership
from skerry.client.network import Network
from skerry.errors import BrokerUnavailable, SkerryError, first_cause
from skerry.log import ledger
from skerry.protocol.messages import LearnerPhase
from skerry.service.shell import outlast, run_loops

log = structlog.get_logger()

LOOK_PAUSE_S = 0.05


class Serving:
    """Serves the log in a thread for as long as a loop trains; ``shutdown_s`` bounds its goodbye.

    Set ``restored`` once it is known how the optimizer begins.
    """

    def __init__(
        self, thread: LoopThread, network: Network, island: Island, shutdown_s: float
    ) -> None:
        self.restored = Future[RestoredState]()
        self.restored.set_running_or_notify_cancel()  # the network's end cannot cancel it
        self._thread = thread
        self._member = Membership(network, island)
        self._shutdown_s = shutdown_s
        self._stop, self._still = asyncio.Event(), asyncio.Event()
        self._served: Future[None] = thread.begin(self._serve())

    def wait(self, pauses: Iterable[float]) -> None:
        """Wait at each pause until the network has news; raise what ``check`` raises."""
        for pause in pauses:
            self.check()
            self._member.network.link.mailbox.wait(pause)
        self.check()

    def check(self) -> None:
        """Raise the error that ended the network's thread, if it has ended."""
        if self._served.done() and (error := self._served.exception()) is not None:
            cause = first_cause(error)
            raise cause if isinstance(cause, SkerryError) else error

    def end(self, error: BaseException | None) -> None:
        """Say goodbye after the loop has ended; log its failure if an ``error`` ended the loop."""
        for event in (self._still, self._stop):
            self._thread.call(event.set)
        try:
            self._served.result()
        except BaseException as late:
            cause = first_cause(late)
            if error is None and isinstance(cause, SkerryError):
                raise cause from None
            if error is None:
                raise
            if cause is not error:
                log.warning("goodbye_unsent", error=str(cause))

    async def _serve(self) -> None:
        """Serve until the run or this learner is over, and leave once its loop has ended."""
        network = self._member.network
        loops = {
            "network": network.run,
            "finished": self._finished,
            "prepare": lambda: self._member.settle(asyncio.wrap_future(self.restored)),
        }
        try:
            await run_loops(loops, self._stop)
            network.link.mailbox.stop()
            await self._still.wait()
            async with asyncio.timeout(self._shutdown_s):
                await self._member.leave()
        except TimeoutError as error:
            msg = (
                f"No broker took this learner's goodbye for {self._shutdown_s:g} s: its last steps"
                " are in no global state. Start it again once one answers."
            )
            raise BrokerUnavailable(msg) from error
        finally:
            network.link.mailbox.stop()

    async def _finished(self) -> None:
        """Return once the run is finished and its last state is adopted.

        A loop that stands still adopts it when it goes on. Once the loop has come to its end, the
        last state is waited for as long as a goodbye.
        """
        link, island = self._member.network.link, self._member.island
        await self._member.finished()
        read = partial(ledger.last_commits, link.bus, link.run)
        commits, ends_s = await outlast(read, event="last_state_unread"), math.inf
        while any(island.session.versions[f] < commit.version for f, commit in commits.items()):
            if island.meter.phase is LearnerPhase.FINISHED:
                ends_s = min(ends_s, time.monotonic() + self._shutdown_s)
            if time.monotonic() >= ends_s:
                hint = "this loop holds an earlier one: take the run's last state from a checkpoint"
                log.warning("last_state_missed", seconds=self._shutdown_s, hint=hint)
                return
            await asyncio.sleep(LOOK_PAUSE_S)  # another thread adopts
