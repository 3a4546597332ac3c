"""Around a program's ``main``: errors become one sentence and an exit code."""

from __future__ import annotations

import asyncio
import sys
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING

from skerry.errors import SkerryError, first_cause
from skerry.status.format import printable

if TYPE_CHECKING:
    from collections.abc import Coroutine, Generator
    from contextlib import AbstractContextManager


@contextmanager
def exit_on_error() -> Generator[None]:
    """Print a SkerryError as one sentence on stderr and exit with its code.

    Any other error is a defect and keeps its traceback. Log lines of a command that configures no
    log go to stderr: what it prints is on stdout.
    """
    import structlog

    if not structlog.is_configured():
        structlog.configure(logger_factory=lambda *_: structlog.PrintLogger(sys.stderr))
    try:
        yield
    except KeyboardInterrupt:
        sys.exit(130)
    except (SkerryError, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, SkerryError):
            raise
        print(f"error: {printable(str(cause))}", file=sys.stderr)
        sys.exit(cause.exit_code)


def run_service(
    main: Coroutine[object, object, None], around: AbstractContextManager[None] | None = None
) -> None:
    """Run ``main`` to its end, within ``around``, under ``exit_on_error``."""
    with exit_on_error():
        try:
            with around or nullcontext():
                asyncio.run(main)
        finally:
            main.close()  # where it never began
