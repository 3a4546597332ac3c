"""Keep a set of processes running: restart what crashes, respect what is final, stop in order.

Every process gets its own session, so that Ctrl-C in a terminal reaches only this one, and is
started by ``child.py``, so that it does not survive even a SIGKILL of this one.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import TYPE_CHECKING

from skerry.cli.cluster import child
from skerry.cli.cluster.folder import last_sentence, log_file, set_aside, size_of
from skerry.errors import ConfigError, SkerryError, Superseded
from skerry.status.format import printable
from skerry.tasks import TaskGroup, happens

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
    from pathlib import Path


LOGS_S = 30.0
"""Seconds between two looks at how long the logs are."""


class ServiceError(SkerryError):
    """A process that the others need ended for good; ``name`` says which."""

    def __init__(self, message: str, *, name: str, exit_code: int) -> None:
        super().__init__(message)
        self.name = name
        self.exit_code = exit_code


class NotRunning(SkerryError, ProcessLookupError):
    """A process that was to be signalled does not run."""


class Need(StrEnum):
    """When the end of a process ends the whole cluster.

    ``ALWAYS``: when it is refused, for a wrong setting, and when all of its kind crash too often.
    ``SETTINGS``: when it is refused; one that crashes is tried again for ever. ``NEVER``: its end
    never does.
    """

    ALWAYS = "always"
    SETTINGS = "settings"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Command:
    """One process to keep running.

    ``prepare`` is called before each start. The process works once ``ready`` returns, given its
    pid; ``unwell`` returns a sentence once it must be restarted although it runs. ``death_signal``
    is what the kernel sends it when this process dies.
    """

    name: str
    kind: str
    argv: tuple[str, ...]
    log: Path
    env: Mapping[str, str]
    need: Need = Need.ALWAYS
    prepare: Callable[[], None] | None = None
    ready: Callable[[int], Awaitable[None]] | None = None
    unwell: Callable[[], Awaitable[str]] | None = None
    death_signal: signal.Signals = signal.SIGKILL


@dataclass(frozen=True, slots=True)
class RestartPolicy:
    """How long to wait before a process that crashed is started again.

    The delay doubles with each crash in a row, up to ``most_s``; after ``healthy_s`` of work the
    count begins again. A process that has crashed ``attempts`` times in a row is tried every
    ``hopeless_s``. An exit code in ``final`` says that a restart would change nothing: a wrong
    setting, a newer process of that name.
    """

    first_s: float = 1.0
    most_s: float = 15.0
    healthy_s: float = 20.0
    attempts: float = 6
    hopeless_s: float = 300.0
    final: frozenset[int] = frozenset({ConfigError.exit_code, Superseded.exit_code})

    def delay_s(self, crashes: int) -> float:
        if crashes >= self.attempts:
            return self.hopeless_s
        return min(self.most_s, self.first_s * 2.0 ** min(crashes - 1, 30))


class Change(StrEnum):
    """What happened to a process."""

    STARTED = "started"
    CRASHED = "crashed"
    UNWELL = "unwell"
    FINISHED = "finished"
    REFUSED = "refused"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class ProcessEvent:
    """A change of one process; ``delay_s`` until its restart, ``sentence`` says why, if known.

    ``pid`` is 0 for one that could not be started.
    """

    name: str
    change: Change
    pid: int
    code: int = 0
    delay_s: float = 0.0
    sentence: str = ""

    @property
    def summary(self) -> str:
        """The sentence for a change that a person should know about, or an empty string."""
        sentence = printable(self.sentence)
        if self.change is Change.REFUSED and sentence:
            return f"{self.name} stopped for good: {sentence}"
        if self.change is Change.UNWELL:
            return f"{self.name} (pid {self.pid}) is started again: {sentence}"
        if self.change not in {Change.CRASHED, Change.REFUSED}:
            return ""
        why = f" ({sentence})" if sentence else ""
        if not self.pid:
            end = f"could not be started{why}"
        elif self.code < 0:
            end = f"(pid {self.pid}) was ended by signal {-self.code}"
        else:
            end = f"(pid {self.pid}) ended with {self.code}{why}"
        if self.change is Change.REFUSED:
            return f"{self.name} {end}; it is not started again."
        return f"{self.name} {end}; it starts again in {self.delay_s:.0f} s."


@dataclass(slots=True)
class _Slot:
    """A command's process, if it runs; ``worked`` is set once it has been ready.

    ``active`` is True from before its start to after its end, ``last_try`` where it was started
    after the run was over.
    """

    command: Command
    process: Process | None = None
    worked: asyncio.Event = field(default_factory=asyncio.Event)
    crashes: int = 0
    delay_once_s: float | None = None
    active: bool = False
    finished: bool = False
    last_try: bool = False


class Supervisor:
    """Runs commands until all have finished; ``stages`` is also the order in which they stop.

    The run is over once something has finished and nothing is active. Whatever waits for a restart
    then starts at once, except what was killed for a while. If it crashes after that, it is given
    up if nothing needs it, or if another of its kind has finished.
    """

    def __init__(
        self,
        stages: Sequence[Sequence[Command]],
        on_event: Callable[[ProcessEvent], None],
        policy: RestartPolicy | None = None,
        grace_s: float = 12.0,
    ) -> None:
        self._stages = [[_Slot(command) for command in stage] for stage in stages]
        self._slots = {slot.command.name: slot for stage in self._stages for slot in stage}
        self._on_event = on_event
        self._policy = policy or RestartPolicy()
        self._grace_s = grace_s
        self._stopping = asyncio.Event()
        self._woken = asyncio.Event()
        self._over = False
        self._forced = asyncio.Event()
        self._failure: Exception | None = None
        self._say: Callable[[str], None] = lambda _sentence: None

    async def run(self) -> None:
        """Keep everything running until all have exited with 0 or a stop was asked for.

        Raises ServiceError when a process that the cluster needs is refused or keeps crashing; the
        others are stopped first.
        """
        async with TaskGroup() as group:
            keepers = [group.create_task(self._keep(slot)) for slot in self._slots.values()]
            for keeper in keepers:
                keeper.add_done_callback(
                    lambda _: self.ask_stop() if all(one.done() for one in keepers) else None
                )
            try:
                while not await happens(self._stopping, LOGS_S):
                    for slot in self._slots.values():
                        await asyncio.to_thread(set_aside, slot.command.log)
            finally:  # whatever cancels this stops them in order, too
                self.ask_stop()
                for stage in self._stages:
                    await self._stop_stage(stage)
        if self._failure is not None:
            raise self._failure

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Keep everything running while the context lasts, which begins once all of it works."""
        run = asyncio.create_task(self.run(), name="supervisor")
        work = asyncio.gather(*(slot.worked.wait() for slot in self._slots.values()))
        try:
            await asyncio.wait((run, work), return_when=asyncio.FIRST_COMPLETED)
            if run.done():
                run.result()
            yield
        finally:
            self.ask_stop()
            work.cancel()
            await asyncio.gather(run, work, return_exceptions=True)

    def ask_stop(self, say: Callable[[str], None] | None = None) -> None:
        """Stop everything in order; asking twice changes nothing. ``say`` what is waited for."""
        self._say = say or self._say
        self._stop()

    def force(self) -> None:
        """Stop everything at once: kill what is left."""
        self._stop()
        self._forced.set()

    def kill(self, name: str, *, back_after_s: float) -> int:
        """SIGKILL one process and return its pid; it is started again after ``back_after_s``.

        Raises NotRunning if it does not run, KeyError for an unknown name.
        """
        pid = self.signal(name, signal.SIGKILL)
        self._slots[name].delay_once_s = back_after_s
        return pid

    def signal(self, name: str, number: signal.Signals) -> int:
        """Send a signal to one process and return its pid; raises as ``kill`` does."""
        process = self._slots[name].process
        if process is None:
            msg = f"{name} is not running."
            raise NotRunning(msg)
        send_signal(process, number)
        return process.pid

    def kinds(self) -> dict[str, str]:
        """Return the kind of every process, whether it runs or not."""
        return {name: slot.command.kind for name, slot in self._slots.items()}

    def pids(self) -> dict[str, int]:
        """Return the pid of every process that runs now."""
        return {n: s.process.pid for n, s in self._slots.items() if s.process is not None}

    async def _keep(self, slot: _Slot) -> None:
        """Run a command, and again after each end for as long as that makes sense."""
        while not self._stopping.is_set():
            began = time.monotonic()
            slot.active, slot.last_try = True, self._over
            try:
                end = await self._run_once(slot)
            except (OSError, SkerryError) as error:
                if not slot.worked.is_set():
                    self._fail(error)
                    return
                end = ProcessEvent(slot.command.name, Change.CRASHED, 0, 1, sentence=str(error))
            finally:
                slot.active = False
            if time.monotonic() - began > self._policy.healthy_s:
                slot.crashes = 0
            patient = slot.last_try or slot.delay_once_s is not None
            judged = self._judged(slot, end)
            if judged is not None:
                self._on_event(judged)
            if judged is None or judged.change not in {Change.CRASHED, Change.UNWELL}:
                return
            await happens(self._stopping if patient else self._woken, judged.delay_s)

    async def _run_once(self, slot: _Slot) -> ProcessEvent:
        """Run a process to its end; UNWELL if it was killed because it did not work any more."""
        command, offset = slot.command, size_of(slot.command.log)
        if command.prepare is not None:
            command.prepare()
        slot.process = process = await spawn(command)
        self._on_event(ProcessEvent(command.name, Change.STARTED, process.pid))
        if self._stopping.is_set():  # began too late to be stopped with its stage
            send_signal(process, signal.SIGKILL)
        exited = asyncio.create_task(process.wait(), name="exit")
        health = asyncio.create_task(_until_unwell(slot), name="health")
        try:
            await asyncio.wait((exited, health), return_when=asyncio.FIRST_COMPLETED)
            why = "" if exited.done() else health.result()
        finally:
            health.cancel()
            send_signal(process, signal.SIGKILL)
            await asyncio.gather(exited, health, return_exceptions=True)
            slot.process = None
        change = Change.UNWELL if why and slot.worked.is_set() else Change.CRASHED
        code = exited.result()
        sentence = why or (last_sentence(command.log, offset) if code else "")
        return ProcessEvent(command.name, change, process.pid, code, sentence=sentence)

    def _judged(self, slot: _Slot, end: ProcessEvent) -> ProcessEvent | None:
        """Return an end with what it means and when to start again; None if it fails everything."""
        stopped = self._stopping.is_set()
        slot.finished = end.code == 0 and not stopped
        if not stopped:
            self._wake_if_over()
        if stopped or end.code == 0:
            return replace(end, change=Change.STOPPED if stopped else Change.FINISHED)
        if slot.delay_once_s is not None:
            delay_s, slot.delay_once_s, slot.crashes = slot.delay_once_s, None, 0
            return replace(end, change=Change.CRASHED, delay_s=delay_s)
        if end.change is Change.UNWELL:
            return end
        slot.crashes += 1
        command, refused = slot.command, end.code in self._policy.final
        alike = [other for other in self._slots.values() if other.command.kind == command.kind]
        hopeless = command.need is Need.ALWAYS and all(
            other.crashes >= self._policy.attempts for other in alike
        )
        given_up = refused or hopeless or not slot.worked.is_set()
        if given_up and command.need is not Need.NEVER and end.code != Superseded.exit_code:
            why = end.sentence or f"It exited with {end.code}."
            msg = f"{command.name} cannot run: {why} (its log: {command.log})"
            self._fail(ServiceError(msg, name=command.name, exit_code=max(end.code, 1)))
            return None
        spare = command.need is Need.NEVER or any(other.finished for other in alike)
        if refused or (slot.last_try and spare):
            return replace(end, change=Change.REFUSED)
        hurries = self._over and not slot.last_try
        delay_s = 0.0 if hurries else self._policy.delay_s(slot.crashes)
        return replace(end, change=Change.CRASHED, delay_s=delay_s)

    def _fail(self, error: Exception) -> None:
        """Stop everything because of an error, which ``run`` then raises."""
        self._failure = self._failure or error
        self._stop()

    def _stop(self) -> None:
        self._stopping.set()
        self._woken.set()

    def _wake_if_over(self) -> None:
        """Wake what waits, once, when something has finished and nothing is active any more."""
        slots = self._slots.values()
        if not self._over and any(s.finished for s in slots) and not any(s.active for s in slots):
            self._over = True
            self._woken.set()
            self._woken.clear()

    async def _stop_stage(self, stage: Sequence[_Slot]) -> None:
        """SIGTERM, then SIGKILL to the whole session once the grace is over or was cut short."""
        running = [slot for slot in stage if slot.process is not None]
        processes = [slot.process for slot in running if slot.process is not None]
        if running:
            self._say(f"Waiting for {', '.join(slot.command.name for slot in running)}.")
        for process in processes:
            send_signal(process, signal.SIGTERM)
            send_signal(process, signal.SIGCONT)  # a paused one could not end
        exits = asyncio.gather(*(process.wait() for process in processes))
        forced = asyncio.ensure_future(self._forced.wait())
        await asyncio.wait(
            (exits, forced), timeout=self._grace_s, return_when=asyncio.FIRST_COMPLETED
        )
        forced.cancel()
        for process in processes:
            send_signal(process, signal.SIGKILL)
        await exits


async def spawn(command: Command, *, stdout: int | None = None) -> Process:
    """Start a command, bound to the life of this process; ConfigError if its log cannot be made.

    ``stdout`` is where its output goes instead of its log.
    """
    with log_file(command.log) as log:
        return await asyncio.create_subprocess_exec(
            *launcher(command.death_signal),
            *command.argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log if stdout is None else stdout,
            stderr=log,
            env=dict(command.env),
            start_new_session=True,
        )


def launcher(death_signal: signal.Signals = signal.SIGKILL) -> tuple[str, ...]:
    """Return the words before a command line that bind its process to the life of this one."""
    return (sys.executable, "-I", "-S", child.__file__, str(os.getpid()), str(int(death_signal)))


async def _until_unwell(slot: _Slot) -> str:
    """Return, once it is so, why a running process must be restarted; else wait for ever."""
    command = slot.command
    if command.ready is not None and slot.process is not None:
        try:
            await command.ready(slot.process.pid)
        except SkerryError as error:
            return str(error)
    slot.worked.set()
    if command.unwell is not None:
        return await command.unwell()
    await asyncio.Event().wait()
    return ""


def send_signal(process: Process, number: signal.Signals) -> None:
    """Signal a process that may have ended; SIGKILL goes to its whole session.

    ``Process.send_signal`` would reap a process that has just ended, and asyncio would then not
    know its exit code.
    """
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):
            (os.killpg if number is signal.SIGKILL else os.kill)(process.pid, number)
