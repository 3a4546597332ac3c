"""The inner optimizer's state on disk: saved from time to time, read at a start.

The training loop copies a portion of the state on its devices at a step boundary and goes on; a
thread fetches, hashes and writes it, and then wants the next one. So a save never costs more than
one of ``PORTIONS`` of the state; tensors of different portions are a few steps apart. The file is a
header of JSON, the tensors, and a checksum over both. Without JAX or torch: ``jax_inner`` and
``torch_inner`` know their states.
"""

from __future__ import annotations

import json
import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import suppress
from contextvars import copy_context
from dataclasses import asdict, dataclass, field
from math import prod
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeAlias

import numpy as np
import structlog
import xxhash
from numpy.typing import NDArray

from skerry.client.inner import RestoredState, aged, fresh
from skerry.errors import CheckpointCorrupt, SkerryError
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import RunRecord
from skerry.settings.models import LearnerSettings
from skerry.store.base import fsync_folder

log = structlog.get_logger()

FILE = "inner.state"
DRAFT = "inner-*.draft"
Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Every tensor by name: its shape and its numpy dtype."""

LENGTH = struct.Struct("<Q")
CHECKSUM_BYTES = 8
"""Of the xxh3-64 over all that comes before it."""
MOST_METADATA = 65_536
MOST_HEADER = 64 * 1024**2
PIECE = 4 * 1024**2
PORTIONS, LEAST_PORTION = 16, 8 * 1024**2
"""Parts that a state is copied in, and the bytes below which it is not worth while to cut it."""
RESTORE_S = 60.0
"""A disk that gives nothing for so long has nothing saved."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Whose state it is: it is good for this learner of this run and for nothing else."""

    run: str
    created_ns: int
    plan_digest: int
    config_digest: int
    learner: str


def origin_of(record: RunRecord, name: str) -> Origin:
    """Return whose inner state this learner may go on with."""
    config = xxhash.xxh3_64_intdigest(record.config_json.encode())
    return Origin(record.run, record.created_ns, record.plan_digest, config, name)


@dataclass(frozen=True, slots=True)
class Saved:
    """What a file says of itself: ``step`` on the global clock, ``steps`` of that incarnation."""

    origin: Origin
    incarnation: int
    step: int
    steps: int


Arrays: TypeAlias = Mapping[str, Any]
"""Arrays of a state by name, or some of them."""
Copying: TypeAlias = Callable[[Arrays], Arrays]
"""Copies arrays on their devices, without waiting, and hands the copies over."""


@dataclass(frozen=True, slots=True)
class StateKind:
    """What a saver has to know of a training loop's optimizer state.

    ``named`` names its arrays, ``described`` has their shapes and dtypes as numpy spells these.
    ``copying`` makes what copies some, in the saver's thread; ``handed`` hands them over as they
    are, each with ``__array__``. A file must have the tensors of ``shapes``, where that is known
    before, and ``fits``.
    """

    named: Callable[[Any], Arrays]
    described: Callable[[Arrays], Shapes]
    copying: Callable[[], Copying]
    handed: Copying
    shapes: Shapes | None = None
    fits: Callable[[Shapes], bool] = lambda _: True


def shapes_in(arrays: Mapping[str, Any]) -> Shapes:
    """Return the shapes of a state's arrays."""
    return {name: (tuple(array.shape), str(array.dtype)) for name, array in arrays.items()}


def portions_of(shapes: Shapes) -> list[tuple[str, ...]]:
    """Cut a state into portions of neighbouring tensors, by name; none is empty."""
    sizes = {name: size_of({name: about}) for name, about in shapes.items()}
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
    """A save that will not be whole."""


@dataclass(slots=True)
class _Job:
    """A state to be saved, ``parts`` of it as they come; None: no more of them.

    ``left`` are the portions still to come. ``hungry``: the thread has nothing to do; ``over``: it
    has ended.
    """

    shapes: Shapes
    saved: Saved
    left: list[tuple[str, ...]]
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
            self.hungry = True


@dataclass(slots=True)
class InnerStateSaver:
    """One learner's state on disk, below ``path/<run>/<name>``; at most one save in flight.

    ``ended`` is called from the thread once it has ended. A save that fails is logged once and
    tried again when the next one is due.
    """

    local: LearnerSettings
    origin: Origin
    incarnation: int
    kind: StateKind
    clock: Callable[[], float] = time.monotonic
    restored: Future[RestoredState] = field(default_factory=Future[RestoredState])
    _jobs: SimpleQueue[_Job | None] = field(init=False, default_factory=SimpleQueue[Any])
    _busy: bool = field(init=False, default=False)
    _copy: Copying | None = field(init=False, default=None)
    _job: _Job | None = field(init=False, default=None)
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
        """Return True if a save is due and can begin, or wants more of the state."""
        if self._job is not None and not self._job.over:
            return self._job.hungry
        return self._copy is not None and not self._busy and self.clock() >= self._due_s

    def save(self, state: Any, now: TrainingProgress) -> None:
        """Copy the next portion of a state and have it saved; nothing here waits."""
        if self._copy is None:
            return
        job, arrays = self._job, self.kind.named(state)
        if job is None or job.over:
            self._due_s = self.clock() + self.local.save_every_s
            job = self._job = self._post(arrays, now)
        elif self.kind.described(arrays) != job.shapes:  # an optimizer that keeps more by now
            self._abandon()
            return
        if job.left:
            job.give(self._copy({name: arrays[name] for name in job.left.pop(0)}))
        if not job.left:
            self._job = None

    def close(self, state: Any = None, now: TrainingProgress | None = None) -> None:
        """Save a state that no longer changes, if there is one, and end the thread."""
        self._abandon()
        if now is not None:
            arrays = self.kind.named(state)
            self._post(arrays, now).give(self.kind.handed(arrays))
        self._jobs.put(None)

    def _abandon(self) -> None:
        if self._job is not None:
            self._job.parts.put(None)
            self._job = None

    def _post(self, arrays: Arrays, now: TrainingProgress) -> _Job:
        self._busy = True
        shapes = self.kind.described(arrays)
        saved = Saved(self.origin, self.incarnation, now.step, now.steps)
        job = _Job(shapes, saved, portions_of(shapes))
        self._jobs.put(job)
        return job

    def _live(self, step: int, max_age_steps: int, ended: Callable[[], None]) -> None:
        try:
            self.restored.set_result(self._restore(step, max_age_steps))
            with suppress(OSError):  # what earlier incarnations were killed over
                for draft in self.path.parent.glob(DRAFT):
                    draft.unlink()
            self._copy = self.kind.copying()
            while (job := self._jobs.get()) is not None:
                self._save(job)
                job.over, self._busy = True, False
        finally:
            ended()

    def _restore(self, step: int, max_age_steps: int) -> RestoredState:
        start = self.incarnation, step
        try:
            saved, tensors = read_file(self.path, self.kind.shapes)
        except FileNotFoundError:
            return fresh(*start, "nothing is saved on this machine")
        except (OSError, SkerryError) as error:
            log.warning("inner_state_unreadable", error=str(error))
            return fresh(*start, "what is saved cannot be read")
        if saved.origin != self.origin:
            return fresh(*start, "it belongs to another run or learner")
        if not self.kind.fits(shapes_in(tensors)):
            return fresh(*start, "it belongs to another optimizer")
        return aged(
            saved.step,
            tensors,
            incarnation=self.incarnation,
            step=step,
            most_steps=max_age_steps,
        )

    def _save(self, job: _Job) -> None:
        """Write a state; log once why it cannot be written, until it can."""
        began_s, shapes = self.clock(), job.shapes
        draft = DRAFT.replace("*", str(self.incarnation))
        try:
            write_file(self.path, job.saved, shapes, job.fetched(), draft)
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


def size_of(shapes: Shapes) -> int:
    """Return the bytes of all tensors together."""
    return sum(prod(shape) * np.dtype(dtype).itemsize for shape, dtype in shapes.values())


def write_file(
    path: Path, saved: Saved, shapes: Shapes, tensors: Iterable[NDArray[Any]], draft: str
) -> None:
    """Write a file whole or not at all: ``draft`` beside it first, then renamed over it.

    ``tensors`` come one by one, in the order of ``shapes``, so that memory stays flat. Raises
    OSError, and leaves what was there before.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.parent / draft
    text = json.dumps(asdict(saved) | {"tensors": _listed(shapes)}).encode()
    header = LENGTH.pack(len(text)) + text
    hasher = xxhash.xxh3_64(header)
    try:
        with beside.open("wb") as handle:
            handle.write(header)
            for tensor in tensors:
                data = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data
                for at in range(0, len(data), PIECE):  # hashing and writing share the cache
                    hasher.update(data[at : at + PIECE])
                    handle.write(data[at : at + PIECE])
            handle.write(hasher.digest())
            handle.flush()
            os.fsync(handle.fileno())
        beside.replace(path)
    except BaseException:
        with suppress(OSError):
            beside.unlink()
        raise
    fsync_folder(path.parent)


def read_file(path: Path, shapes: Shapes | None) -> tuple[Saved, dict[str, NDArray[Any]]]:
    """Return what an undamaged file holds: exactly the tensors of ``shapes``, or (None) any.

    Tensors are views of the file, so that what is put on a device is read when it is put there.
    Sizes are checked before anything is mapped, the checksum before anything is parsed. Raises
    CheckpointCorrupt for what does not hold, OSError for a file that cannot be read.
    """
    with path.open("rb") as handle:
        size = os.fstat(handle.fileno()).st_size
        prefix = handle.read(LENGTH.size)
        (length,) = LENGTH.unpack(prefix.ljust(LENGTH.size, b"\xff"))
        bound, inside = MOST_HEADER, size - LENGTH.size - length - CHECKSUM_BYTES
        expected = max(0, inside)
        if shapes is not None:
            bound, expected = len(json.dumps(_listed(shapes))) + MOST_METADATA, size_of(shapes)
        if length > bound or inside != expected:
            raise _damaged(path, f"{size} bytes are not those of this model's inner state")
        text = handle.read(length)
        hasher = xxhash.xxh3_64(prefix + text)
        for at in range(0, expected, PIECE):
            hasher.update(handle.read(min(PIECE, expected - at)))
        checksum, start = handle.read(), LENGTH.size + length
        data = np.memmap(handle, np.uint8, "r", start, (expected,)) if expected else b""
    if checksum != hasher.digest():
        raise _damaged(path, "its checksum does not match")
    try:
        entries: dict[str, Any] = json.loads(text)
        listed, origin = entries.pop("tensors"), Origin(**entries.pop("origin"))
        saved = Saved(origin, **entries)
        found = {name: (tuple(shape), dtype) for name, shape, dtype in listed}
        if shapes is None and size_of(found) == expected:
            shapes = found
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(path, "its header makes no sense") from error
    if shapes is None or listed != _listed(shapes):
        raise _damaged(path, "its tensors are not those of this model")
    tensors: dict[str, NDArray[Any]] = {}
    offset = 0
    for name, (shape, dtype) in shapes.items():
        tensors[name] = np.frombuffer(data, dtype, prod(shape), offset).reshape(shape)
        offset += tensors[name].nbytes
    return saved, tensors


def _listed(shapes: Shapes) -> list[list[Any]]:
    return [[name, list(shape), dtype] for name, (shape, dtype) in shapes.items()]


def _damaged(path: Path, why: str) -> CheckpointCorrupt:
    msg = (
        f"The inner optimizer state in {path} cannot be used ({why}): the learner starts with a"
        " fresh one, and its next save replaces the file."
    )
    return CheckpointCorrupt(msg, path=str(path))
