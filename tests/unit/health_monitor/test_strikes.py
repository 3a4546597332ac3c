"""What strikes do to a process, and that each of them ends."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncGenerator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skerry.cli.cluster.processes import Processes, read
from skerry.errors import ConfigError
from skerry.log.memory import MemoryBroker
from skerry.service.control import CONTROL, PROXY, ControlError, listening
from skerry_health_monitor.web.strikes import Strikes
from skerry_tools.chaos.ground import NotFired
from skerry_tools.chaos.local import LocalGround

DEADLINE_S = 20.0
LONG_S = 300.0


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A run's folder with one learner, which sleeps, and a syncer of that name."""
    process = subprocess.Popen(["sleep", "600"])
    table = Processes(tmp_path / "processes.json")
    with table.kept():
        table.started("learner-1", "learner", process.pid)
        table.started("syncer", "syncer", os.getpid())
        yield tmp_path
    process.kill()
    process.wait()


@asynccontextmanager
async def at_work(folder: Path) -> AsyncGenerator[Strikes]:
    strikes = Strikes(LocalGround("run", folder, MemoryBroker().connect()))
    running = asyncio.create_task(strikes.run())
    try:
        yield strikes
    finally:
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)


async def until_paused(folder: Path, *, paused: bool) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while read(folder)["learner-1"].paused is not paused:  # noqa: ASYNC110 - the kernel's turn
            await asyncio.sleep(0)


async def until_let_go(strikes: Strikes) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while strikes._held:  # noqa: ASYNC110 - its task ends next
            await asyncio.sleep(0)


async def test_a_pause_ends_by_itself(folder: Path) -> None:
    async with at_work(folder) as strikes:
        assert "over in 0.2 s" in await strikes.strike("learner-1", "pause", 0.2)
        await until_paused(folder, paused=True)
        await until_paused(folder, paused=False)


async def test_a_pause_ends_with_the_monitor(folder: Path) -> None:
    async with at_work(folder) as strikes:
        await strikes.strike("learner-1", "pause", LONG_S)
        await until_paused(folder, paused=True)
        await asyncio.sleep(0)
    await until_paused(folder, paused=False)


async def test_healing_ends_what_an_earlier_monitor_began(folder: Path) -> None:
    async with at_work(folder) as strikes:
        await strikes.strike("learner-1", "pause", LONG_S)
        await until_paused(folder, paused=True)
        other = Strikes(strikes.ground)
        await other.strike("learner-1", "heal", 1)
        await until_paused(folder, paused=False)


async def test_the_same_twice_is_refused(folder: Path) -> None:
    async with at_work(folder) as strikes:
        await strikes.strike("learner-1", "pause", LONG_S)
        with pytest.raises(NotFired):
            await strikes.strike("learner-1", "pause", LONG_S)


async def test_the_same_at_once_is_done_once_and_ends(folder: Path) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"pid": 1}

    async with listening(folder / CONTROL, answer), at_work(folder) as strikes:
        first, second = await asyncio.gather(
            *(strikes.strike("learner-1", "kill", 0.01) for _ in range(2)), return_exceptions=True
        )
        assert "has begun" in str(first)
        assert isinstance(second, NotFired)
        await until_let_go(strikes)
        await strikes.strike("learner-1", "kill", 0.01)
    assert len(asked) == 2


async def test_what_did_not_begin_can_be_tried_again(folder: Path) -> None:
    async with at_work(folder) as strikes:
        for _ in range(2):
            with pytest.raises(ControlError):
                await strikes.strike("learner-1", "kill", 1)


async def test_who_was_healed_can_be_struck_again(folder: Path) -> None:
    async with at_work(folder) as strikes:
        await strikes.strike("learner-1", "pause", LONG_S)
        await until_paused(folder, paused=True)
        await strikes.strike("learner-1", "heal", 1)
        await until_paused(folder, paused=False)
        await until_let_go(strikes)
        await strikes.strike("learner-1", "pause", LONG_S)
        await until_paused(folder, paused=True)


@pytest.mark.parametrize("name", ["syncer", "learner-9", "broker"])
async def test_nobody_but_learners_is_struck(folder: Path, name: str) -> None:
    async with at_work(folder) as strikes:
        with pytest.raises(ConfigError, match="no learner process"):
            await strikes.strike(name, "kill", 1)


async def test_a_kill_is_asked_of_who_keeps_the_cluster_and_cut_ways_are_mended(
    folder: Path,
) -> None:
    asked: list[dict[str, Any]] = []

    async def answer(request: dict[str, Any]) -> dict[str, Any]:
        asked.append(request)
        return {"pid": 1, "routes": {"learner-1": {}}}

    async with (
        listening(folder / CONTROL, answer),
        listening(folder / PROXY, answer),
        at_work(folder) as strikes,
    ):
        await strikes.strike("learner-1", "kill", 2.5)
        await strikes.strike("learner-1", "heal", 1)
    assert asked[0] == {"op": "kill", "name": "learner-1", "back_after_s": 2.5}
    assert asked[-1] == {"op": "set", "route": "learner-1"}
