"""Where rows of metrics go: a file, always, and experiment trackers where they are asked for.

A sink that fails says so once and is tried again: nothing that watches a run may end with a full
disk or a tracker that is away.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import math
import os
import queue
import shutil
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple

import structlog

from skerry import installing

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from skerry.settings.local import MetricsSettings

log = structlog.get_logger()

MOST_WAITING = 16
CLOSE_S = 2.0
"""A sink that hangs delays the monitor's end by this much at most."""


@dataclass(frozen=True, slots=True)
class Row:
    """Numbers by name at one moment: seconds since the epoch, and the global clock's step.

    None follows the ``last`` one, that of a run which is finished, until another run of that name
    begins.
    """

    at_s: float
    step: int
    values: Mapping[str, float]
    last: bool = False


class Sink(NamedTuple):
    """Takes rows, one after the other, until it is closed; may wait, and may raise anything."""

    write: Callable[[Row], object]
    close: Callable[[], object]


class Journal:
    """JSON lines in a file of at most ``most_bytes``; older ones beside it, ``keep`` of them.

    Those are packed, to about a tenth, as ``<name>.1.gz`` and so on. Nothing is held open: a file
    that is moved away is replaced by a new one.
    """

    def __init__(self, path: Path, run: str, *, most_bytes: int, keep: int) -> None:
        self.path = path
        self._run = run
        self._most_bytes = most_bytes
        self._keep = keep

    def write(self, row: Row) -> None:
        finite = {name: value for name, value in row.values.items() if math.isfinite(value)}
        line = {"time_s": round(row.at_s, 3), "run": self._run, "step": row.step, **finite}
        data = (json.dumps(line, separators=(",", ":")) + "\n").encode()
        self.path.parent.mkdir(parents=True, exist_ok=True)
        held = self.path.stat().st_size if self.path.exists() else 0
        if held and held + len(data) > self._most_bytes:
            self._rotate()
            held = 0
        try:
            with self.path.open("ab") as file:
                file.write(data)
        except OSError:  # half a line would spoil the next one, too
            with suppress(OSError):
                os.truncate(self.path, held)
            raise

    def _rotate(self) -> None:
        """Set the file aside, packed, and those before it one number on; the last is replaced.

        If it cannot be packed, as on a full disk, nothing moves.
        """
        if self._keep:
            draft = self.path.with_name(f"{self.path.name}.draft")
            with self.path.open("rb") as whole, gzip.open(draft, "wb", compresslevel=6) as packed:
                shutil.copyfileobj(whole, packed)
            for number in range(self._keep, 1, -1):
                if (newer := self._aside(number - 1)).exists():
                    newer.replace(self._aside(number))
            draft.replace(self._aside(1))
        self.path.unlink()

    def _aside(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}.gz")


def tensorboard(writer: Any) -> Sink:
    """Return scalars in a folder that TensorBoard reads, by step of the global clock."""

    def write(row: Row) -> None:
        for name, value in row.values.items():
            writer.add_scalar(tag(name), value, row.step, walltime=row.at_s)
        writer.flush()

    return Sink(write, writer.close)


def weights_and_biases(begun: Any) -> Sink:
    """Return a run of the same name in a project of Weights & Biases."""

    def write(row: Row) -> None:
        begun.log({tag(name): value for name, value in row.values.items()}, step=row.step)

    return Sink(write, begun.finish)


class Outlet:
    """A sink in a thread of its own, opened at its first row: it may be slow, fail, or hang.

    Rows are lost while MOST_WAITING others wait for it.
    """

    def __init__(self, name: str, opening: Callable[[], Sink]) -> None:
        self.name = name
        self._opening = opening
        self._sink: Sink | None = None
        self._failing = False
        self._rows: queue.Queue[Row | None] = queue.Queue(MOST_WAITING)
        self._thread = threading.Thread(target=self._run, name=f"metrics {name}", daemon=True)

    def offer(self, row: Row) -> None:
        """Have a row written soon; never waits."""
        if self._thread.ident is None:
            self._thread.start()
        try:
            self._rows.put_nowait(row)
        except queue.Full:
            self._say("it takes rows more slowly than they come")

    def close(self, wait_s: float) -> None:
        """Write what waits and close the sink, but give up on it after ``wait_s`` seconds."""
        if self._thread.ident is None:
            return
        with suppress(queue.Full):
            self._rows.put(None, timeout=wait_s)
        self._thread.join(wait_s)

    def _run(self) -> None:
        while (row := self._rows.get()) is not None:
            try:
                if self._sink is None:
                    self._sink = self._opening()
                self._sink.write(row)
            except Exception as error:  # noqa: BLE001  a tracker may raise whatever it likes
                self._say(str(error))
            else:
                self._failing = False
        try:
            if self._sink is not None:
                self._sink.close()
        except Exception as error:  # noqa: BLE001  idem
            self._say(str(error))

    def _say(self, why: str) -> None:
        if not self._failing:
            log.warning("metrics_not_written", to=self.name, error=why)
        self._failing = True


def tag(name: str) -> str:
    """Return a flat name as trackers group it: ``loss{learner=a}`` is ``loss/a``."""
    base, _, rest = name.partition("{")
    labels, _, part = rest.rpartition("}")
    values = [pair.partition("=")[2] for pair in labels.split(",") if pair]
    return "/".join([base + part, *values])


async def write_rows(
    to: Sequence[Outlet], current: Callable[[], Row | None], every_s: float
) -> None:
    """Give every outlet a row now and then, for ever; one more at the end, then close them.

    ``current`` returns None as long as there is nothing to write.
    """
    row: Row | None = None

    def offer() -> None:
        nonlocal row
        was_last, row = row is not None and row.last, current()
        if row is not None and not (was_last and row.last):
            for outlet in to:
                outlet.offer(row)

    try:
        while True:
            await asyncio.sleep(every_s)
            offer()
    finally:
        offer()
        await asyncio.gather(*(asyncio.to_thread(outlet.close, CLOSE_S) for outlet in to))


def outlets(settings: MetricsSettings, path: Path, run: str) -> list[Outlet]:
    """Return the file at ``path``, and every tracker that the settings ask for.

    A tracker whose package is not installed is left out, with a line that says how to get it.
    """
    journal = Journal(path, run, most_bytes=settings.file_bytes, keep=settings.keep_files)
    found = [Outlet(str(path), lambda: Sink(journal.write, lambda: None))]
    if settings.tensorboard is not None:
        folder = str(settings.tensorboard / run)

        def board() -> Sink:
            module = _installed("tensorboardX", "tensorboard", "metrics.tensorboard")
            return tensorboard(module.SummaryWriter(folder))

        found.append(Outlet("tensorboard", board))
    if settings.wandb:
        named = {"project": settings.wandb, "name": run, "id": run, "resume": "allow"}

        def tracked() -> Sink:
            return weights_and_biases(_installed("wandb", "wandb", "metrics.wandb").init(**named))

        found.append(Outlet("wandb", tracked))
    return found


def _installed(module: str, extra: str, setting: str) -> Any:
    try:
        return import_module(module)
    except ImportError as error:
        raise installing.missing(setting, module, extra) from error
