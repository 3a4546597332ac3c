"""How the inner optimizer begins, and the thread that saves its state from time to time.

The trainer copies the state on its device at a step boundary and goes on; fetching, hashing and
writing happen here. The copy costs the state's own size (8 bytes a parameter for AdamW) until it
is written, and is given up tensor by tensor.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.errors import SkerryError
from skerry.models.base import path_name
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import InnerState
from skerry.settings.models import LearnerSettings
from skerry_learner.inner import file
from skerry_learner.inner.file import Origin, Saved, Shapes

log = structlog.get_logger()

FILE = "inner.state"
DRAFT = "inner-*.draft"


@dataclass(frozen=True, slots=True)
class RestoredState:
    """How the inner optimizer begins, and why; ``tensors`` by name if it begins warm.

    NEW: the learner's own warm-up is all it needs. WARM: as it was ``age_steps`` ago. COLD: its
    moments are gone, or begin in mid-schedule, as in a learner that joins later or in a restored
    run; so the learning rate rises again.
    """

    inner: InnerState
    reason: str
    age_steps: int = 0
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


def fresh(incarnation: int, step: int, reason: str) -> RestoredState:
    """Return how a learner without a saved state starts at ``step`` of the global clock."""
    first = incarnation <= 1 and not step
    return RestoredState(InnerState.NEW if first else InnerState.COLD, reason)


def aged(
    saved_step: int,
    tensors: Mapping[str, NDArray[Any]],
    *,
    incarnation: int,
    step: int,
    most_steps: int,
) -> RestoredState:
    """Return how a learner with a state that was saved at ``saved_step`` starts at ``step``."""
    age = max(0, step - saved_step)  # a learner may have been ahead of the newest commit
    if age > most_steps:
        return fresh(incarnation, step, f"it is {age} steps old, of {most_steps} allowed")
    return RestoredState(InnerState.WARM, "saved", age, tensors)


def shapes_of(moments: Any) -> Shapes:
    """Name every tensor of an optimizer's state (arrays or their shapes), in flattening order."""
    found = jax.tree_util.tree_flatten_with_path(moments)[0]
    return {path_name(path): (tuple(leaf.shape), str(leaf.dtype)) for path, leaf in found}


@dataclass(slots=True)
class _Job:
    """A state to be saved; its tensors go as they are written."""

    leaves: list[jax.Array | None]
    saved: Saved


@dataclass(slots=True)
class InnerStateSaver:
    """One learner's state on disk, below ``path/<run>/<name>``; at most one save in flight.

    ``template`` is the state's tree of shapes and dtypes; ``ended`` is called from the thread once
    it has ended. A save that fails is logged once and tried again when the next one is due.
    """

    local: LearnerSettings
    origin: Origin
    incarnation: int
    template: Any
    clock: Callable[[], float] = time.monotonic
    restored: Future[RestoredState] = field(default_factory=Future[RestoredState])
    _jobs: SimpleQueue[_Job | None] = field(init=False, default_factory=SimpleQueue[Any])
    _busy: bool = field(init=False, default=False)
    _copy: Callable[[Any], Any] | None = field(init=False, default=None)
    _due_s: float = field(init=False, default=0.0)
    _complained: str = field(init=False, default="")

    @property
    def path(self) -> Path:
        return self.local.path / self.origin.run / self.origin.learner / FILE

    def start(self, step: int, max_age_steps: int, ended: Callable[[], None]) -> None:
        """Begin to read what was saved, for a learner at ``step`` of the global clock."""
        self.restored.set_running_or_notify_cancel()  # no waiter can cancel it
        self._due_s = self.clock() + self.local.save_every_s
        run, arguments = copy_context().run, (self._live, step, max_age_steps, ended)
        threading.Thread(target=run, args=arguments, name="inner", daemon=True).start()

    def due(self) -> bool:
        """Return True if a save is due and can begin; never while one is in flight."""
        return self._copy is not None and not self._busy and self.clock() >= self._due_s

    def save(self, moments: Any, now: TrainingProgress) -> None:
        """Copy the state on its device and have it saved; nothing here waits."""
        if self._copy is not None:
            self._due_s = self.clock() + self.local.save_every_s
            self._post(self._copy(moments), now)

    def close(self, moments: Any = None, now: TrainingProgress | None = None) -> None:
        """Save a state that no longer changes, if there is one, and end the thread."""
        if now is not None:
            self._post(moments, now)
        self._jobs.put(None)

    def _post(self, moments: Any, now: TrainingProgress) -> None:
        self._busy = True
        saved = Saved(self.origin, self.incarnation, now.step, now.steps)
        self._jobs.put(_Job(list(jax.tree.leaves(moments)), saved))

    def _live(self, step: int, max_age_steps: int, ended: Callable[[], None]) -> None:
        try:
            self.restored.set_result(self._restore(step, max_age_steps))
            with suppress(OSError):  # what earlier incarnations were killed over
                for draft in self.path.parent.glob(DRAFT):
                    draft.unlink()
            copy = jax.jit(lambda moments: jax.tree.map(jnp.copy, moments))
            self._copy = copy.lower(self.template).compile()
            while (job := self._jobs.get()) is not None:
                self._save(job)
                self._busy = False
        finally:
            ended()

    def _restore(self, step: int, max_age_steps: int) -> RestoredState:
        start = self.incarnation, step
        try:
            saved, tensors = file.read(self.path, shapes_of(self.template))
        except FileNotFoundError:
            return fresh(*start, "nothing is saved on this machine")
        except (OSError, SkerryError) as error:
            log.warning("inner_state_unreadable", error=str(error))
            return fresh(*start, "what is saved cannot be read")
        if saved.origin != self.origin:
            return fresh(*start, "it belongs to another run or learner")
        return aged(
            saved.step,
            tensors,
            incarnation=self.incarnation,
            step=step,
            most_steps=max_age_steps,
        )

    def _save(self, job: _Job) -> None:
        """Write a state; log once why it cannot be written, until it can."""
        began_s, shapes = self.clock(), shapes_of(self.template)
        draft = DRAFT.replace("*", str(self.incarnation))

        def fetched() -> Iterator[NDArray[Any]]:
            for number, leaf in enumerate(job.leaves):
                job.leaves[number] = None  # each is given up on the device after it
                yield np.asarray(leaf)

        try:
            file.write(self.path, job.saved, shapes, fetched(), draft)
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
        took, size = round(self.clock() - began_s, 3), file.size_of(shapes)
        log.debug("inner_state_saved", step=job.saved.step, bytes=size, seconds=took)
