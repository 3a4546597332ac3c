"""``skerry checkpoints restore`` without a broker's address: into the log in this folder."""

from __future__ import annotations

import argparse
import asyncio
import os
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.cli.programs import argv_of
from skerry.cli.status import log_of
from skerry.settings import loading

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.settings.models import NatsSettings, Settings


def restore_here(rest: Sequence[str]) -> int | None:
    """Restore into a run's log in this folder, served by a broker of our own; None without one.

    ``rest`` are the words after ``restore``. Returns the exit code of the checkpointer's command,
    which refuses a log that is being worked on.
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
        command = argv_of("checkpoints", "restore", *rest)
        process = await asyncio.create_subprocess_exec(
            *command, env=os.environ | _environment(log.nats)
        )
        try:
            return await process.wait()
        finally:
            if process.returncode is None:
                process.terminate()
                await process.wait()


def _environment(nats: NatsSettings) -> dict[str, str]:
    """Return the variables by which a command reaches this broker; others can read its argv."""
    given = {
        "URL": nats.url,
        "USER": nats.user,
        "PASSWORD_FILE": nats.password_file or "",
        "CREDENTIALS": nats.credentials or "",
    }
    return {f"SKERRY_NATS__{name}": str(value) for name, value in given.items()}
