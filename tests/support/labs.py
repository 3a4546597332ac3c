"""What the log of a lab run holds."""

from __future__ import annotations

import asyncio
from typing import TypeVar

from skerry.log import run_records
from skerry.protocol import messages
from skerry_tools.lab.lab import RUN, Lab

T = TypeVar("T", bound=messages.Record)


def records(lab: Lab, kind: type[T]) -> list[T]:
    """Return all records of a kind that a run has left, oldest first."""
    return asyncio.run(run_records.read_all(lab.connect(), RUN, kind))
