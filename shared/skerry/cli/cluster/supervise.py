"""Keep a set of processes running: restart what crashes, respect what is final, stop in order.

Every process gets its own session, so that Ctrl-C in a terminal reaches this one only, and is
bound to this one's life by ``skerry.cli.cluster.child``, so that none survives even its SIGKILL.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING

from skerry.cli.cluster import child
from skerry.cli.cluster.place import log_file
from skerry.cli.cluster.tail import last_sentence, size_of
from skerry.errors import ConfigError, SkerryError, Superseded

if TYPE_CHECKING:
    from asyncio import Task
    from asyncio.subprocess import Process
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

FINAL_CODES = frozenset({ConfigError.exit_code, Superseded.exit_code})
"""Exit codes that a restart would not change: a wrong setting, a newer process of that name."""


class ServiceError(SkerryError):
    """A service that the others need ended for good; ``name`` says which."""

    def __init__(self, message: str, *, name: str, exit_code: int) -> None:
        super().__init__(message)
        self.name = name
        self.exit_code = exit_code


@dataclass(frozen=True, slots=True)
class Command:
    """One process to keep running; ``essential``: the others make no sense without it."""

    name: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    essential: bool = True


@dataclass(frozen=True, slots=True)
class Backoff:
    """Seconds until a restart: doubled for each crash in a row, forgotten after a healthy while."""

    first_s: float = 1.0
    most_s: float = 15.0
    healthy_s: float = 20.0
    attempts: int = 6

    def delay_s(self, crashes: int) -> float:
        return min(self.most_s, self.first_s * 2.0 ** (crashes - 1))


class Change(StrEnum):
    """What happened to a process."""

    STARTED = "started"
    CRASHED = "crashed"
    FINISHED = "finished"
    REFUSED = "refused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Event:
    """A change of one process; ``delay_s`` until its restart, ``sentence`` from its log."""

    name: str
    change: Change
    pid: int
    code: int = 0
    delay_s: float = 0.0
    sentence: str = ""


@dataclass(slots=True)
class _Slot:
    command: Command
    process: Process | None = None
    crashes: int = 0
    delay_once_s: float | None = None


@dataclass(slots=True)
class Supervisor:
    """Runs commands until all have finished; ``stages`` is also the order in which they stop."""

    stages: Sequence[Sequence[Command]]
    on_event: Callable[[Event], None]
    backoff: Backoff = Backoff()
    grace_s: float = 12.0
    _slots: dict[str, _Slot] = field(default_factory=dict[str, _Slot], init=False)
    _stop_asked: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _forced: asyncio.Event = field(default_factory=asyncio.Event, init=False)

    async def run(self) -> None:
        """Keep everything running until all have exited with 0 or a stop was asked for.

        Stops what is left in every case. Raises ServiceError when an essential process ends for
        good: a refused setting, or too many crashes in a row.
        """
        self._slots = {c.name: _Slot(c) for stage in self.stages for c in stage}
        keepers = [
            asyncio.create_task(self._keep(slot), name=name) for name, slot in self._slots.items()
        ]
        stop = asyncio.create_task(self._stop_wanted(), name="stop")
        try:
            await self._until_over(keepers, stop)
        finally:
            stop.cancel()
            await self._stop(keepers)

    def ask_stop(self) -> None:
        """Stop everything in order; asking twice changes nothing."""
        self._stop_asked.set()

    def force(self) -> None:
        """Stop everything at once: kill what is left."""
        self._stop_asked.set()
        self._forced.set()
        for slot in self._slots.values():
            _signal(slot.process, signal.SIGKILL)

    def kill(self, name: str, *, back_after_s: float) -> int:
        """SIGKILL one process and return its pid; it is started again after ``back_after_s``."""
        slot = self._slots[name]
        if slot.process is None:
            msg = f"{name} is not running."
            raise ProcessLookupError(msg)
        slot.delay_once_s = back_after_s
        _signal(slot.process, signal.SIGKILL)
        return slot.process.pid

    def pids(self) -> dict[str, int]:
        """Return the pid of every process that runs now."""
        return {n: s.process.pid for n, s in self._slots.items() if s.process is not None}

    async def _stop_wanted(self) -> None:
        await self._stop_asked.wait()

    async def _force_wanted(self) -> None:
        await self._forced.wait()

    async def _until_over(self, keepers: list[Task[None]], stop: Task[None]) -> None:
        pending = {*keepers, stop}
        while pending - {stop} and stop in pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for future in done:
                future.result()

    async def _keep(self, slot: _Slot) -> None:
        while not self._stop_asked.is_set():
            began, offset = time.monotonic(), size_of(slot.command.log)
            slot.process = process = await _spawn(slot.command)
            self.on_event(Event(slot.command.name, Change.STARTED, process.pid))
            if self._stop_asked.is_set():  # began too late to be stopped with its stage
                _signal(process, signal.SIGKILL)
            code = await process.wait()
            slot.process = None
            if time.monotonic() - began > self.backoff.healthy_s:
                slot.crashes = 0
            sentence = "" if code == 0 else last_sentence(slot.command.log, offset)
            if not self._again(slot, process.pid, code, sentence):
                return
            await self._pause(slot, process.pid, code, sentence)

    def _again(self, slot: _Slot, pid: int, code: int, sentence: str) -> bool:
        """Say whether a process that exited is started again; ServiceError if it had to live."""
        name = slot.command.name
        stopping = self._stop_asked.is_set()
        if stopping or code == 0:
            change = Change.FINISHED if code == 0 and not stopping else Change.STOPPED
            self.on_event(Event(name, change, pid, code, sentence=sentence))
            return False
        slot.crashes += 1
        hopeless = slot.crashes >= self.backoff.attempts and slot.delay_once_s is None
        if code not in FINAL_CODES and not hopeless:
            return True
        if slot.command.essential and code != Superseded.exit_code:
            why = sentence or f"It exited with {code}."
            msg = f"{name} cannot run: {why} (its log: {slot.command.log})"
            raise ServiceError(msg, name=name, exit_code=code if code > 0 else 1)
        self.on_event(Event(name, Change.REFUSED, pid, code, sentence=sentence))
        return False

    async def _pause(self, slot: _Slot, pid: int, code: int, sentence: str) -> None:
        delay_s = slot.delay_once_s
        if delay_s is None:
            delay_s = self.backoff.delay_s(slot.crashes)
        else:
            slot.crashes = 0
        slot.delay_once_s = None
        name = slot.command.name
        self.on_event(Event(name, Change.CRASHED, pid, code, delay_s, sentence))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop_asked.wait(), delay_s)

    async def _stop(self, keepers: list[Task[None]]) -> None:
        self._stop_asked.set()
        for stage in self.stages:
            slots = [self._slots[command.name] for command in stage]
            await self._stop_stage([s.process for s in slots if s.process is not None])
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _stop_stage(self, processes: list[Process]) -> None:
        """SIGTERM, then SIGKILL to the whole session once the grace is over or was cut short."""
        if not processes:
            return
        for process in processes:
            _signal(process, signal.SIGTERM)
        exits = asyncio.create_task(_all_exited(processes), name="exits")
        forced = asyncio.create_task(self._force_wanted(), name="forced")
        await asyncio.wait(
            {exits, forced}, timeout=self.grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        forced.cancel()
        for process in processes:
            _signal(process, signal.SIGKILL)
        await exits


async def _all_exited(processes: list[Process]) -> None:
    for process in processes:
        await process.wait()


async def _spawn(command: Command) -> Process:
    launcher = (sys.executable, "-I", "-S", child.__file__, str(os.getpid()))
    with log_file(command.log) as log:
        return await asyncio.create_subprocess_exec(
            *launcher,
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env=dict(command.env),
            start_new_session=True,
        )


def _signal(process: Process | None, number: signal.Signals) -> None:
    """Signal a process; SIGKILL goes to its whole session, which is ours alone."""
    if process is None or process.returncode is not None:
        return
    with contextlib.suppress(ProcessLookupError):
        if number is signal.SIGKILL:
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
