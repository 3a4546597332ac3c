"""Ctrl-C while a command is being imported: the process ends silently, without a traceback.

This module imports nothing heavy, so that it takes effect as early as possible.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

INTERRUPT = {signal.SIGINT}


class Interrupted(KeyboardInterrupt):
    """A signal asked this process to stop, and everything has been stopped."""

    def __init__(self, number: int = signal.SIGINT) -> None:
        super().__init__(number)
        self.exit_code = 128 + number


def end_at_once() -> None:
    """Have Ctrl-C end this process as the system does, even a Ctrl-C that was ``held``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)


def raise_again() -> None:
    """Have Ctrl-C raise KeyboardInterrupt: a command has begun that may have to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def held() -> Generator[None]:
    """Hold a Ctrl-C back, even from the program that this process becomes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, INTERRUPT)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, INTERRUPT)
