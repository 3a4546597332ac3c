"""Ctrl-C while a command line imports: the process ends without a word, and without a traceback.

Nothing is imported here, so that it counts from the first moment on.
"""

from __future__ import annotations

import signal
from collections.abc import Generator
from contextlib import contextmanager

ONLY = {signal.SIGINT}


def end_at_once() -> None:
    """Have Ctrl-C end this process as the system does, also one that was ``held``."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ONLY)


def raise_again() -> None:
    """Have Ctrl-C raise KeyboardInterrupt: a command has begun that may have to clean up."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def held() -> Generator[None]:
    """Keep a Ctrl-C back, also from the program that this process becomes meanwhile."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ONLY)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, ONLY)
