"""The messages between the processes of one learner, and their connections.

One line of JSON per message, over TCP, in order. Nothing here depends on JAX or torch.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any, TypeAlias

BEAT_S = 1.0
SILENCE_S = 15.0
"""A process that was silent for ``SILENCE_S`` is gone; each sends something every ``BEAT_S``."""
MOST_LINE = 16 << 20

Words: TypeAlias = list[Any]


class Deed(IntEnum):
    """What the first process does next, and the others with it."""

    HOLD = 0
    GENESIS = 1
    CAPTURE = 2
    RELEASE = 3
    ADOPT = 4
    RESET = 5
    DONE = 6
    FAIL = 7
    WARM = 8
    FEED = 9
    STEP = 10
    SAVE = 11
    RESTORE = 12
    READ = 13
    SEND = 14
    STOP = 15
    MEET = 16
    BEAT = 17
    END = 18
    KEEP = 19
    FOUND = 20
    READY = 21
    QUANTISE = 22
    FORGET = 23


def end_at_once(sentence: str) -> None:
    """End this process at once, because its other threads would wait for ever.

    An empty sentence says that nothing is wrong.
    """
    if sentence:
        print(f"error: {sentence}", file=sys.stderr, flush=True)
    os._exit(1 if sentence else 0)


class Peer:
    """Another process at the other end of a connection; ``heard`` is called in a thread."""

    def __init__(
        self,
        connection: socket.socket,
        name: str,
        heard: Callable[[Deed, Words], None],
        lost: Callable[[str], None],
    ) -> None:
        connection.settimeout(SILENCE_S)
        self._connection = connection
        self._name = name
        self._heard = heard
        self._lost = lost
        self._lock = threading.Lock()
        self._over = threading.Event()
        loops = self._listen, self._beat
        threads = [threading.Thread(target=loop, name="peer", daemon=True) for loop in loops]
        self._listener = threads[0]
        for thread in threads:
            thread.start()

    def say(self, deed: Deed, words: Sequence[Any] = ()) -> None:
        """Send a message; a failure is left to the listening thread."""
        with self._lock, suppress(OSError):
            self._connection.sendall(json.dumps([deed, *words]).encode() + b"\n")

    def close(self, deed: Deed = Deed.END) -> None:
        """Send ``deed`` as the last message; after END the other process counts no loss."""
        self._over.set()
        self.say(deed)
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def await_end(self, within_s: float) -> None:
        """Wait until the other process has closed its connection."""
        self._listener.join(within_s)

    def break_off(self) -> None:
        """Close without a message; the other process then counts this one as lost."""
        self._over.set()
        with suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def _listen(self) -> None:
        why = "it has gone"
        try:
            with self._connection, self._connection.makefile("rb") as lines:
                while line := lines.readline(MOST_LINE):
                    number, *words = json.loads(line)
                    deed = Deed(number)
                    if deed is Deed.END:
                        self._over.set()
                    if deed is not Deed.BEAT:
                        self._heard(deed, words)
        except TimeoutError:
            why = f"it has said nothing for {SILENCE_S:g} s"
        except (OSError, ValueError, TypeError, LookupError, RecursionError) as error:
            why = f"its connection failed ({error})"
        if not self._over.is_set():
            self._lost(
                f"Process {self._name} of this learner is lost ({why}): all of its processes end."
                " Start each again: the learner goes on from the log."
            )

    def _beat(self) -> None:
        while not self._over.wait(BEAT_S):
            self.say(Deed.BEAT)
