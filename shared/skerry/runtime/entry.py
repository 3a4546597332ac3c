"""What surrounds a service's ``main``: errors become one sentence and an exit code."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine

from skerry.errors import SkerryError


def first_cause(error: BaseException) -> BaseException:
    """Return the error to tell about: inside a group, a SkerryError before anything else."""
    while isinstance(error, BaseExceptionGroup):
        ours = [e for e in error.exceptions if isinstance(first_cause(e), SkerryError)]
        error = (ours or list(error.exceptions))[0]
    return error


def run_service(main: Coroutine[object, object, None]) -> None:
    """Run ``main`` to its end; a SkerryError is one sentence on stderr and a non-zero exit.

    Anything else is a defect and keeps its traceback.
    """
    try:
        asyncio.run(main)
    except KeyboardInterrupt:
        sys.exit(130)
    except (SkerryError, BaseExceptionGroup) as error:
        cause = first_cause(error)
        if not isinstance(cause, SkerryError):
            raise
        print(f"error: {cause}", file=sys.stderr)
        sys.exit(cause.exit_code)
