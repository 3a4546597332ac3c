"""Whether every process that was there before the faults runs again, hears its broker, and stays.

What a process makes of what it hears is not looked at here: ``convergence`` reads that from the log
where it can be seen.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry_tools.chaos.convergence import Check

if TYPE_CHECKING:
    from collections.abc import Collection

    from skerry_tools.chaos.ground import Ground

LOOK_S = 0.1


@dataclass(slots=True)
class Survivors:
    """The processes by ``names``; ``note`` is called once everything has been healed."""

    ground: Ground
    names: Collection[str]
    _heard: dict[str, int] = field(default_factory=dict[str, int], init=False)
    _starts: dict[str, str] = field(default_factory=dict[str, str], init=False)

    async def note(self) -> None:
        """Remember how much every process has heard from its broker by now."""
        self._heard = await self._down_bytes()

    async def checks(self, deadline_s: float) -> list[Check]:
        """Wait until every process runs and has heard something since; one check for each."""
        await self.ground.settle()
        until = asyncio.get_running_loop().time() + deadline_s
        while True:
            told = await self._look()
            if all(check.ok for check in told) or asyncio.get_running_loop().time() > until:
                break
            await asyncio.sleep(LOOK_S)
        entries = self.ground.entries()
        self._starts = {name: entries[name].which for name in self.names if name in entries}
        return told

    async def stayed(self) -> str:
        """Return who has ended since ``checks``, as words; empty for nobody."""
        await self.ground.settle()
        now = {name: entry for name, entry in self.ground.entries().items() if entry.alive}
        gone = sorted(
            n for n, which in self._starts.items() if n not in now or now[n].which != which
        )
        return ", ".join(gone)

    async def _look(self) -> list[Check]:
        heard = await self._down_bytes()
        return [self._one(name, heard) for name in sorted(self.names)]

    def _one(self, name: str, heard: dict[str, int]) -> Check:
        title, entry = f"{name} runs", self.ground.entries().get(name)
        if entry is None or not entry.alive:
            return Check(title, ok=False, detail="it does not")
        if entry.paused:
            return Check(title, ok=False, detail=f"{entry.which} is stopped")
        if name not in heard:
            return Check(title, ok=True, detail=entry.which)
        more = heard[name] - self._heard.get(name, 0)
        detail = f"{entry.which}, {more} bytes from the broker since healing"
        return Check(title, more > 0, detail)

    async def _down_bytes(self) -> dict[str, int]:
        routes = await self.ground.routes()
        return {name: int(route["bytes_down"]) for name, route in routes.items()}
