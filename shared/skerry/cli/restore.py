"""``skerry checkpoints restore`` without a broker's address: into the log in this folder."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.cli.cluster.services import argv
from skerry.cli.status import log_of
from skerry.settings import loading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.settings.models import Settings


def restore_here(rest: Sequence[str]) -> int | None:
    """Restore into a run's log in this folder, behind a broker of our own; None if it has none.

    ``rest`` are the words after ``restore``. Returns the exit code of the checkpointer's command,
    which refuses a log that somebody still works on.
    """
    words = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    words.add_argument("--nats")
    words.add_argument("--run", default=loading.control_variable("SKERRY_RUN") or "main")
    words.add_argument("--config", type=Path)
    words.add_argument("--set", action="append", default=[])
    try:
        asked, _ = words.parse_known_args(rest)
    except argparse.ArgumentError:
        return None  # the command itself says what is wrong
    if asked.nats:
        return None
    given = loading.load(asked.config, asked.set)
    if "url" in given.local.nats.model_fields_set:
        return None
    return asyncio.run(_restored(given, asked.run, rest))


async def _restored(given: Settings, run: str, rest: Sequence[str]) -> int | None:
    async with log_of(given, run, named=False) as log:
        if log.nats.url == given.local.nats.url:
            return None
        command = argv("checkpointer", "checkpoints", "restore", *rest, "--nats", log.nats.url)
        process = await asyncio.create_subprocess_exec(*command)
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()
