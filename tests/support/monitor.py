"""A health monitor as a process: its exit, its log lines, what it answers."""

from __future__ import annotations

import asyncio
import json
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from tempfile import TemporaryDirectory
from typing import Any

import httpx

DEADLINE_S = 60.0


@dataclass
class Running:
    """A monitor process."""

    process: asyncio.subprocess.Process
    url: str = ""

    async def line(self, event: str, **fields: object) -> dict[str, Any]:
        """Wait for a log line with this event and these fields."""
        assert self.process.stderr is not None
        async with asyncio.timeout(DEADLINE_S):
            while data := await self.process.stderr.readline():
                line: dict[str, Any] = json.loads(data)
                if line["event"] == event and fields.items() <= line.items():
                    return line
        msg = f"the monitor ended without {event} {fields}"
        raise AssertionError(msg)

    async def until(self, path: str, holds: Callable[[Any], Any]) -> Any:
        """Ask until the answer holds, as JSON or else as text."""
        async with asyncio.timeout(DEADLINE_S), httpx.AsyncClient(base_url=self.url) as client:
            while True:
                answer = await client.get(path)
                is_json = answer.headers["content-type"] == "application/json"
                found = answer.json() if is_json else answer.text
                if answer.status_code == 200 and holds(found):
                    return found
                await asyncio.sleep(0)


@asynccontextmanager
async def monitor(
    url: str, run: str, *sets: str, options: tuple[str, ...] = ()
) -> AsyncGenerator[Running]:
    """Watch a run of the broker at ``url`` until the block ends."""
    words = [word for text in ("health.port=0", *sets) for word in ("--set", text)]
    with TemporaryDirectory() as folder:  # it writes metrics below its working folder
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "skerry_health_monitor", "--nats", url, "--run", run),
            *(*words, *options),
            stderr=PIPE,
            cwd=folder,
        )
        running = Running(process)
        try:
            listening = await running.line("health_listening")
            running.url = f"http://127.0.0.1:{listening['port']}"
            yield running
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.communicate()
