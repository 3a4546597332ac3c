"""One drill of a run at a time, from whichever machine: a lease in the log, by compare-and-set.

No clocks of two machines are compared: a drill that finds a holder listens for its next word.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace

from skerry.errors import BusError, ConfigError, Conflict
from skerry.log.base import Bus, Expect, Record, Storage
from skerry.log.run_records import readable
from skerry.log.streams import specs
from skerry.protocol.messages import Drill
from skerry.protocol.records import encode
from skerry.protocol.subjects import drill_of
from skerry_tools.chaos.drilled import beside

RENEW_S = 2.0
AGAIN_S = 0.2
"""How soon what the broker did not take is said again: a drill may have killed its own broker."""
LEASE_S = 10.0
"""A drill that says nothing for so long has died, and the next one need not wait for it."""


@contextlib.asynccontextmanager
async def leased(bus: Bus, run: str, holder: str, replicas: int = 1) -> AsyncGenerator[None]:
    """Be the only drill of a run while the context lasts; ``holder`` is how others name us.

    The run's stream in memory is made where no service has done so yet, with so many ``replicas``.
    Raises ConfigError while another one is at work. The same ends the context, in a group, where
    another one took this one for dead since it had hung, or its broker had forgotten it.
    """
    await bus.declare([s for s in specs(run, replicas=replicas) if s.storage is Storage.MEMORY])
    lease = _Lease(bus, Drill(run, holder, began_ns=time.time_ns(), sent_ns=0), drill_of(run))
    over = await lease.free()
    try:
        await lease.say(over)
    except Conflict as error:
        held = lease.read(await bus.last(lease.subject))
        if held is None or not lease.is_mine(held):
            raise lease.refusal(held) from error
    try:
        async with beside(lease.renew()):
            yield
    finally:
        with contextlib.suppress(BusError):  # the next one begins at once, if that can be said
            newest = await bus.last(lease.subject)
            held = lease.read(newest)
            if newest is not None and held is not None and lease.is_mine(held):
                lease.mine = replace(lease.mine, holder="")
                await lease.say(newest.sequence)


@dataclass(slots=True)
class _Lease:
    bus: Bus
    mine: Drill
    subject: str

    async def free(self) -> int:
        """Return the sequence of a lease that no drill holds, 0 for none; ConfigError if one does.

        Where there is none a broker may have forgotten it: its holder has time to say it again.
        """
        newest = await self.bus.last(self.subject)
        if newest is not None and not self._holder(newest):
            return newest.sequence
        over, silent_s = (0, 2 * RENEW_S) if newest is None else (newest.sequence, LEASE_S)
        coming = self.bus.follow(self.subject, after=over)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(silent_s), contextlib.aclosing(coming):
                async for record in coming:
                    if self._holder(record):
                        raise self.refusal(self.read(record))
                    return record.sequence
        return over

    async def renew(self) -> None:
        """Renew the lease again and again; ConfigError once it is another one's."""
        pause_s = RENEW_S
        while True:
            await asyncio.sleep(pause_s)
            pause_s = AGAIN_S
            with contextlib.suppress(BusError):
                newest = await self.bus.last(self.subject)
                held = self.read(newest)
                if held is not None and not self.is_mine(held):
                    raise self.refusal(held)  # also where that one has given it back by now
                await self.say(newest.sequence if newest is not None else 0)
                pause_s = RENEW_S

    async def say(self, over: int) -> None:
        """Write the lease over the record at a sequence; Conflict where that is not the newest."""
        now_ns = time.time_ns()
        msg_id = f"drill/{self.mine.began_ns}/{now_ns}"
        payload, expect = encode(replace(self.mine, sent_ns=now_ns)), Expect(self.subject, over)
        await self.bus.publish(self.subject, payload, msg_id=msg_id, expect=expect)

    def read(self, record: Record | None) -> Drill | None:
        """Return what a record says; None where there is none, or one that cannot be read."""
        return None if record is None else readable(Drill, record, self.mine.run)

    def _holder(self, record: Record) -> str:
        held = self.read(record)
        return held.holder if held is not None else ""

    def is_mine(self, held: Drill) -> bool:
        """Return True if a lease is this drill's."""
        return (held.holder, held.began_ns) == (self.mine.holder, self.mine.began_ns)

    def refusal(self, held: Drill | None) -> ConfigError:
        """Return why this drill cannot be judged beside the one that holds or held the lease."""
        if held is not None and not held.holder:
            msg = (
                f"Another drill was at work on run {self.mine.run!r} meanwhile, and neither of two"
                " can be judged: give this command again."
            )
            return ConfigError(msg, path="run")
        other = "Another drill" if held is None else f"A drill of {held.holder}"
        msg = (
            f"{other} is at work on run {self.mine.run!r}, and neither of two could be judged: wait"
            " for its verdict, or end it."
        )
        return ConfigError(msg, path="run")
