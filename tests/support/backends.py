"""Backends of traces and metrics that others wrote, started where they are on PATH."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import pytest

DEADLINE_S = 300.0


def binary(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"no {name} on PATH")
    return found


@asynccontextmanager
async def serving(
    *command: str, url: str, folder: Path, env: Mapping[str, str] | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    """Run a backend until the block ends; yield a client of it once it answers."""
    with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
        started = await asyncio.create_subprocess_exec(
            *command, stdout=log, stderr=log, cwd=folder, env=env
        )
    try:
        async with httpx.AsyncClient(base_url=url, timeout=30.0) as client:
            async with asyncio.timeout(DEADLINE_S):
                while True:
                    with suppress(httpx.TransportError):
                        await client.get("/")
                        break
                    assert started.returncode is None, log.name
                    await asyncio.sleep(0.2)  # it sends no event when it is ready
            yield client
    finally:
        with suppress(ProcessLookupError):
            started.terminate()
        await started.wait()
