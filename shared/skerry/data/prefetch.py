"""Batches read ahead by a thread, and put on the device before the trainer asks for them."""

from __future__ import annotations

import queue
import threading
from typing import NamedTuple, Self

import jax

from skerry.data.corpus import Batch
from skerry.data.stream import Stream
from skerry.errors import CorpusError, SkerryError

DEPTH = 4
PATIENCE_S = 0.2


class Prefetched(NamedTuple):
    """``tokens`` int32 [batch, seq_len + 1] on the device; ``cursor`` once they are consumed."""

    tokens: jax.Array
    cursor: int


class Prefetch:
    """An endless iterator over a stream; a context manager that owns its thread.

    An error in the thread (a missing shard, a token out of range) is raised by the next ``next``.
    Every batch is a new array, because ``device_put`` may alias it.
    """

    def __init__(self, stream: Stream, cursor: int, *, batch: int, vocab: int | None) -> None:
        self._stream = stream
        self._cursor = cursor
        self._batch = batch
        self._vocab = vocab
        self._ready: queue.Queue[Prefetched | Exception] = queue.Queue(DEPTH)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="prefetch", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Prefetched:
        item = self._ready.get()
        if isinstance(item, Exception):
            raise item
        return item

    def _fill(self) -> None:
        try:
            while not self._stop.is_set():
                rows = self._stream.read(self._cursor, self._batch)
                check_tokens(rows, self._vocab)
                self._cursor += self._batch
                self._offer(Prefetched(jax.device_put(rows), self._cursor))
        except SkerryError as error:
            self._offer(error)
        except (OSError, ValueError) as error:
            failure = CorpusError(f"The corpus can no longer be read ({error}): restore its files.")
            failure.__cause__ = error
            self._offer(failure)
        except Exception as error:  # noqa: BLE001  a device out of memory: raised where it is read
            self._offer(error)

    def _offer(self, item: Prefetched | Exception) -> None:
        while not self._stop.is_set():
            try:
                return self._ready.put(item, timeout=PATIENCE_S)
            except queue.Full:
                continue
        return None


def check_tokens(rows: Batch, vocab: int | None) -> None:
    """Raise CorpusError for a token beyond the model's vocabulary; None: any is allowed."""
    if vocab is not None and int(rows.max()) >= vocab:
        msg = (
            f"The corpus holds token {int(rows.max())} but model.vocab is {vocab}:"
            " raise model.vocab."
        )
        raise CorpusError(msg, path="model.vocab")
