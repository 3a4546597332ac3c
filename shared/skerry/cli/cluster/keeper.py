"""Keep our own broker at work: start it again when it ends, and when its disk was full.

A stream that could not write once stays without an answer until its server starts again, also after
there is room (measured, nats-server 2.15); what it says of it in its log is how we know.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.cli.cluster.processes import BROKER
from skerry.cli.cluster.tail import size_of
from skerry.errors import BrokerUnavailable

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from skerry.cli.cluster.broker import LocalBroker
    from skerry.cli.cluster.processes import Processes

COMPLAINTS = (b"failed to store a msg", b"will be DISABLED")
"""What nats-server writes in its log when it could not write a stream, or has given up on all."""
LOOK_S = 0.5
AGAIN_S = 1.0
ROOM_BYTES = 1024**2


@dataclass(slots=True)
class Keeper:
    """Keeps one broker running while ``run`` does; ``say`` hears what a person should know."""

    ours: LocalBroker
    table: Processes
    say: Callable[[str], None]
    _away_s: float = 0.0
    _pid: int = field(default=0, init=False)
    _offset: int = field(default=0, init=False)

    def start(self) -> None:
        """Start the broker; BrokerUnavailable when it does not come up.

        It blocks, and has to run in the main thread: the kernel ends the server together with the
        thread that started it.
        """
        self.ours.start()
        self._offset = size_of(self.ours.log)
        self._pid = self.ours.pid or 0
        self.table.started(BROKER, BROKER, self._pid)

    def kill(self, *, back_after_s: float) -> int:
        """SIGKILL the broker and return its pid; it is started again after ``back_after_s``."""
        pid = self.ours.pid
        if pid is None:
            msg = "The broker is not running."
            raise ProcessLookupError(msg)
        self._away_s = back_after_s
        self.ours.kill()
        return pid

    async def run(self) -> None:
        """Start the broker again whenever it ends or cannot write; everybody heals by itself."""
        while hasattr(os, "pidfd_open"):
            pid = self._pid
            ended = asyncio.create_task(_exited(pid), name="broker-exit")
            stuck = asyncio.create_task(self._stuck(), name="broker-log")
            try:
                await asyncio.wait({ended, stuck}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (ended, stuck):
                    task.cancel()
                await asyncio.gather(ended, stuck, return_exceptions=True)
            if self.ours.pid is not None:
                self.say("The broker could not write; there is room again: it is started again.")
                self.ours.kill()
            self.table.ended(BROKER, pid)
            away_s, self._away_s = self._away_s, 0.0
            await asyncio.sleep(away_s)
            await self._start_until_up()

    async def _start_until_up(self) -> None:
        while True:
            try:
                self.start()
            except OSError as error:  # BrokerUnavailable is one, a full disk another
                why = str(error) if isinstance(error, BrokerUnavailable) else f"{error}."
                self.say(f"{why} It is tried again.")
                await asyncio.sleep(AGAIN_S)
            else:
                return

    async def _stuck(self) -> None:
        """Return once the server has complained that it could not write, and there is room."""
        while not complained(self.ours.log, self._offset):  # noqa: ASYNC110 - files send no event
            await asyncio.sleep(LOOK_S)
        while not await asyncio.to_thread(has_room, self.ours.folder):  # noqa: ASYNC110 - idem
            await asyncio.sleep(LOOK_S)


def complained(log: Path, offset: int) -> bool:
    """Say whether a server's log, from ``offset`` on, says that it could not write."""
    with contextlib.suppress(OSError), log.open("rb") as file:
        file.seek(offset)
        said = file.read()
        return any(words in said for words in COMPLAINTS)
    return False


def has_room(folder: Path) -> bool:
    """Say whether a mebibyte can be written here."""
    probe = folder / "room.probe"
    try:
        with probe.open("wb") as file:
            file.write(bytes(ROOM_BYTES))
            file.flush()
            os.fsync(file.fileno())
    except OSError:
        return False
    finally:
        with contextlib.suppress(OSError):
            probe.unlink(missing_ok=True)
    return True


async def _exited(pid: int) -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    with contextlib.suppress(ProcessLookupError):
        handle = os.pidfd_open(pid)
        loop.add_reader(handle, ended.set)
        try:
            await ended.wait()
        finally:
            loop.remove_reader(handle)
            os.close(handle)
