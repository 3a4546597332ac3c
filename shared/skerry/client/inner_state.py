"""The inner optimizer's state on disk: saved from time to time, read at a start.

The training loop copies a portion of the state on its devices at a step boundary and goes on; a
thread fetches, hashes and writes it, and then wants the next one. So a save never takes more device
memory than one of ``PORTIONS`` of the state; tensors of different portions are a few steps apart.
Each process of a learner saves its own part, at the boundaries that the first one names. Nothing
here depends on JAX or torch, whose states ``jax_inner`` and ``torch_inner`` know.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.client.inner import Found, Point
from skerry.client.inner_file import Origin, Saved, Shapes, read_file, size_of, write_file
from skerry.client.peer import Deed, Words
from skerry.client.processes import FollowingProcess, LeadProcess
from skerry.errors import SkerryError
from skerry.protocol.learner import TrainingProgress
from skerry.settings.local import LearnerSettings

log = structlog.get_logger()

PORTIONS, LEAST_PORTION = 16, 8 * 1024**2
"""Portions of a large state, and the bytes that one may have even in a small state."""
RESTORE_S = 60.0
"""Seconds after which a disk that has not answered counts as one without a save."""

Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of a state by name, or some of them."""
Copying: TypeAlias = Callable[[Arrays], Arrays]
"""Copies arrays on their devices, without waiting, and hands the copies over."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """How to save a training loop's optimizer state.

    ``named`` names its arrays; ``described`` returns the shapes, and dtypes as numpy spells them,
    of this process's part. ``copying`` is called in the saver's thread and returns the function
    that copies that part; ``handed`` returns it uncopied, each tensor with ``__array__``. A saved
    file must have the tensors of ``shapes``, if they are known before, and pass ``fits``.
    """

    named: Callable[[Any], Arrays]
    described: Callable[[Arrays], Shapes]
    copying: Callable[[], Copying]
    handed: Copying
    shapes: Shapes | None = None
    fits: Callable[[Shapes], bool] = lambda _: True


def shapes_in(arrays: Mapping[str, Any]) -> Shapes:
    return {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}


def portions_of(arrays: Arrays) -> list[tuple[str, ...]]:
    """Cut a state into portions of neighbouring tensors, by name; none is empty.

    They are the same in each process that holds a part of the tensors.
    """
    sizes = {name: prod(a.shape) * int(a.dtype.itemsize) for name, a in arrays.items()}
    most, held = max(LEAST_PORTION, sum(sizes.values()) // PORTIONS), 0
    found: list[list[str]] = []
    for name, size in sizes.items():
        if not found or (held and held + size > most):
            found.append([])
            held = 0
        found[-1].append(name)
        held += size
    return [tuple(names) for names in found]


class _AbandonedError(Exception):
    """Raised in a save that is given up before it is whole."""


@dataclass(slots=True)
class _Job:
    """A state to be saved; ``parts`` arrive one by one, None after the last.

    ``left`` are the portions still to come. ``hungry``: the thread has nothing to do; ``over``: it
    has ended. ``ready`` is called when either becomes true.
    """

    shapes: Shapes
    saved: Saved
    left: list[tuple[str, ...]]
    ready: Callable[[], None]
    parts: SimpleQueue[list[Any] | None] = field(default_factory=SimpleQueue[Any])
    hungry: bool = False
    over: bool = False

    def give(self, arrays: Arrays) -> None:
        self.hungry = False
        self.parts.put(list(arrays.values()))

    def fetched(self) -> Iterator[NDArray[Any]]:
        """Yield every tensor on the host; each is given up on its devices after it."""
        count = len(self.shapes)
        while count:
            part = self.parts.get()
            if part is None:
                raise _AbandonedError
            count -= len(part)
            while part:
                yield np.asarray(part.pop(0))
            if count:
                self.hungry = True
                self.ready()


@dataclass(slots=True)
class InnerStateSaver:
    """One learner's state on disk, below ``path/<run>/<name>``; at most one save in flight.

    ``process`` is this process's connection if the learner has several: the first decides when
    all save.
    A save that fails is logged once and tried again when the next one is due.
    """

    local: LearnerSettings
    origin: Origin
    incarnation: int
    kind: StateKind
    clock: Callable[[], float] = time.monotonic
    process: LeadProcess | FollowingProcess | None = None
    found: Future[Found] = field(default_factory=Future[Found])
    _jobs: SimpleQueue[_Job | None] = field(init=False, default_factory=SimpleQueue[Any])
    _copy: Copying | None = field(init=False, default=None)
    _job: _Job | None = field(init=False, default=None)
    _due_s: float = field(init=False, default=0.0)
    _complained: str = field(init=False, default="")

    @property
    def path(self) -> Path:
        """The newest save."""
        folder = self.local.path / self.origin.run / self.origin.learner
        return folder / f"{self.origin.stem}.state"

    @property
    def before(self) -> Path | None:
        """The save before the newest, for when not all processes have written the newest one."""
        return self.path.with_suffix(".before") if self.origin.processes > 1 else None

    def start(self, ended: Callable[[], None] = lambda: None) -> None:
        """Begin to read the saved state; ``ended`` is called from the thread at its end."""
        self.found.set_running_or_notify_cancel()  # no waiter can cancel it
        self._due_s = self.clock() + self.local.save_every_s
        run = copy_context().run
        threading.Thread(target=run, args=(self._live, ended), name="inner", daemon=True).start()

    def due(self) -> bool:
        """Return True if a save is due and can begin, or wants more of the state."""
        job = self._job
        if job is not None and not job.over:
            wanted = job.hungry
        else:
            wanted = self._copy is not None and self.clock() >= self._due_s
        return wanted and (not isinstance(self.process, LeadProcess) or self.process.all_ready())

    def save(self, state: Any, now: TrainingProgress) -> None:
        """Copy the next portion of a state and have it saved; nothing here waits."""
        begins = self._job is None or self._job.over
        if isinstance(self.process, LeadProcess):
            self.process.order_save(begins, now.step, now.steps)
        self.take(state, now, begins=begins)

    def take(self, state: Any, now: TrainingProgress, *, begins: bool) -> None:
        """Copy the first portion of a state, or the next one, by the first process's order."""
        if self._copy is None:
            return
        job, arrays = self._job, self.kind.named(state)
        if begins:
            self._abandon()
            self._due_s = self.clock() + self.local.save_every_s
            job = self._job = self._post(arrays, now)
        elif job is None or job.over:  # it could not be written
            self._tell_ready()
            return
        elif self.kind.described(arrays) != job.shapes:  # an optimizer that keeps more by now
            self._abandon()
            return
        if job.left:
            job.give(self._copy({name: arrays[name] for name in job.left.pop(0)}))

    def follow(self, deed: Deed, words: Words, state: Callable[[], Any]) -> Arrays:
        """Save as the first process says; return what it has had restored, or nothing."""
        *about, step, steps = words
        if deed is Deed.RESTORE:
            return self.found.result().saves[words[0], words[1]]
        now = TrainingProgress(step, steps, 0, 0)
        if deed is Deed.KEEP:
            self.close(state(), now)
        else:
            self.take(state(), now, begins=bool(about[0]))
        return {}

    def close(self, state: Any = None, now: TrainingProgress | None = None) -> None:
        """Save a state that no longer changes, if there is one, and end the thread."""
        self._abandon()
        if now is not None:
            if isinstance(self.process, LeadProcess):
                self.process.post(Deed.KEEP, now.step, now.steps)
            arrays = self.kind.named(state)
            self._post(arrays, now).give(self.kind.handed(arrays))
        self._jobs.put(None)

    def _abandon(self) -> None:
        if self._job is not None:
            self._job.parts.put(None)
            self._job = None

    def _post(self, arrays: Arrays, now: TrainingProgress) -> _Job:
        saved = Saved(self.origin, self.incarnation, now.step, now.steps)
        job = _Job(self.kind.described(arrays), saved, portions_of(arrays), self._tell_ready)
        self._jobs.put(job)
        return job

    def _tell_ready(self) -> None:
        if isinstance(self.process, FollowingProcess):
            self.process.tell(Deed.READY)

    def _live(self, ended: Callable[[], None]) -> None:
        try:
            found = self._find()
            if isinstance(self.process, FollowingProcess):
                self.process.tell(Deed.FOUND, *found.saves)
            elif self.process is not None:
                found = found.common(self.process.all_found(RESTORE_S))
            self.found.set_result(found)
            with suppress(OSError):  # drafts of incarnations that were killed
                for draft in self.path.parent.glob(f"{self.origin.stem}-*.draft"):
                    draft.unlink()
            self._copy = self.kind.copying()
            self._tell_ready()
            while (job := self._jobs.get()) is not None:
                self._save(job)
                job.over = True
                self._tell_ready()
        finally:
            ended()

    def _find(self) -> Found:
        """Return the saved states; log once for each that cannot be used."""
        saves, reason = dict[Point, Mapping[str, NDArray[Any]]](), ""
        for path in filter(None, (self.path, self.before)):
            try:
                saved, tensors = read_file(path, self.kind.shapes)
            except FileNotFoundError:
                reason = reason or "nothing is saved on this machine"
                continue
            except (OSError, SkerryError) as error:
                log.warning("inner_state_unreadable", error=str(error))
                reason = reason or "what is saved cannot be read"
                continue
            if saved.origin != self.origin:
                reason = reason or "it belongs to another run or learner"
            elif not self.kind.fits(shapes_in(tensors)):
                reason = reason or "it belongs to another optimizer"
            else:
                saves[saved.incarnation, saved.step] = tensors
        return Found(saves, reason)

    def _save(self, job: _Job) -> None:
        """Write a state; log a failure once, and again only after a success."""
        began_s, shapes = self.clock(), job.shapes
        draft = f"{self.origin.stem}-{self.incarnation}.draft"
        try:
            write_file(self.path, job.saved, shapes, job.fetched(), draft, self.before)
        except _AbandonedError:
            return
        except (OSError, RuntimeError) as error:
            if str(error) != self._complained:
                self._complained = str(error)
                log.warning(
                    "inner_state_unsaved",
                    error=f"{error}: training goes on; make room below learner.path or make it"
                    " writable, or the next start of this learner begins cold.",
                )
            return
        self._complained = ""
        took, size = round(self.clock() - began_s, 3), size_of(shapes)
        log.debug("inner_state_saved", step=job.saved.step, bytes=size, seconds=took)
