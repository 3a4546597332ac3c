"""Commands to a cluster that runs: faults that end by themselves, and impossible orders."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from skerry.cli.cluster.faults import FaultControl
from skerry.cli.cluster.proxy import Proxy
from skerry.errors import ConfigError, SkerryError
from skerry.service.control import ControlError
from tests.support.builders import until
from tests.support.processes import Watched, command

LONG_S = 300.0


class Target:
    """A learner and a syncer that do nothing, the proxy before them, and what was said."""

    def __init__(self, watched: Watched, proxy: Proxy | None) -> None:
        self.said: list[str] = []
        self.watched = watched
        self.proxy = proxy
        self.control = FaultControl(watched.supervisor, proxy=proxy, say=self.said.append)

    @property
    def paused(self) -> bool:
        pid = self.watched.supervisor.pids().get("learner-1")
        return pid is not None and psutil.Process(pid).status() == psutil.STATUS_STOPPED

    @property
    def cut(self) -> bool:
        assert self.proxy is not None
        return self.proxy.show()["learner-1"]["cut"] == "blackhole"

    async def fault(self, fault: str, duration_s: float = LONG_S) -> str:
        order = {"op": "fault", "name": "learner-1", "fault": fault, "duration_s": duration_s}
        return str((await self.control.answer(order))["said"])

    async def heal(self) -> None:
        await self.control.answer({"op": "heal", "name": "learner-1"})


@asynccontextmanager
async def target(folder: Path, *, proxied: bool = True) -> AsyncGenerator[Target]:
    watched, proxy = Watched(), Proxy(1)
    learner = command(folder, "learner-1", kind="learner")
    async with (
        proxy.serving(["learner-1"]),
        watched.running([learner, command(folder, "syncer")]),
    ):
        yield Target(watched, proxy if proxied else None)


async def test_a_pause_ends_by_itself(tmp_path: Path) -> None:
    async with target(tmp_path) as held:
        said = await held.fault("pause", 0.2)
        assert said == "A pause of learner-1 has begun and ends after 0.2 s."
        assert held.said == ["Asked for on the page: a pause of learner-1 for 0.2 s."]
        await until(lambda: held.paused)
        await until(lambda: not held.paused)


async def test_a_partition_ends_by_itself_and_can_begin_again(tmp_path: Path) -> None:
    async with target(tmp_path) as held:
        for _ in range(2):
            await held.fault("partition", 0.05)
            assert held.cut
            await until(lambda: not held.cut and not held.control._active)


async def test_a_killed_learner_is_back_after_its_time(tmp_path: Path) -> None:
    async with target(tmp_path) as held:
        first = held.watched.supervisor.pids()["learner-1"]
        await held.fault("kill", 0.1)
        await until(lambda: held.watched.supervisor.pids().get("learner-1", first) != first)
        assert held.watched.events[2].delay_s == 0.1


async def test_healing_ends_everything_at_once_and_its_own_end_undoes_no_later_fault(
    tmp_path: Path,
) -> None:
    async with target(tmp_path) as held:
        await held.fault("pause")
        await held.fault("partition", 0.2)
        await until(lambda: held.paused)
        await held.heal()
        await until(lambda: not held.paused)
        assert not held.cut
        await held.fault("partition")
        await asyncio.sleep(0.3)  # the first one would have ended by now
        assert held.cut


async def test_the_same_fault_at_once_begins_once(tmp_path: Path) -> None:
    async with target(tmp_path) as held:
        first, second = await asyncio.gather(
            held.fault("pause"), held.fault("pause"), return_exceptions=True
        )
        assert "has begun" in str(first)
        assert isinstance(second, ControlError)
        assert "A pause of learner-1 is under way" in str(second)


async def test_a_fault_that_did_not_begin_can_be_tried_again(tmp_path: Path) -> None:
    async with target(tmp_path, proxied=False) as held:
        for _ in range(2):
            with pytest.raises(ControlError, match="without a proxy"):
                await held.fault("partition")
        await held.heal()


async def test_showing_what_runs_touches_nothing(tmp_path: Path) -> None:
    async with target(tmp_path) as held:
        shown = await held.control.answer({"op": "show"})
        assert set(shown["pids"]) == {"learner-1", "syncer"}
        assert shown["routes"]["learner-1"]["cut"] == "none"
        await held.control.answer({"op": "set", "route": "learner-1", "cut": "reset"})
        assert await held.control.answer({"op": "open"}) == {"opened": ["learner-1"]}
        assert await held.control.answer({"op": "open"}) == {"opened": []}


@pytest.mark.parametrize(
    ("order", "error", "words"),
    [
        ({"op": "dance"}, ConfigError, "no order 'dance'"),
        ({"op": "kill", "name": "x"}, ConfigError, "no process 'x'"),
        ({"op": "kill", "name": "broker"}, ControlError, "not started by this cluster"),
        ({"op": "kill", "name": "syncer", "back_after_s": math.inf}, ConfigError, "above 0"),
        ({"op": "heal", "name": "syncer"}, ConfigError, "no learner 'syncer'"),
        ({"op": "fault", "name": "syncer", "fault": "kill"}, ConfigError, "no learner 'syncer'"),
        ({"op": "fault", "name": "learner-1", "fault": "kick"}, ConfigError, "no fault 'kick'"),
        *(
            ({"op": "fault", "name": "learner-1", "fault": "kill", **time}, ConfigError, "above 0")
            for time in ({}, {"duration_s": 0}, {"duration_s": 301}, {"duration_s": float("nan")})
        ),
    ],
)
async def test_an_order_that_cannot_be_carried_out_says_why(
    tmp_path: Path, order: dict[str, Any], error: type[SkerryError], words: str
) -> None:
    async with target(tmp_path) as held:
        with pytest.raises(error, match=words):
            await held.control.answer(order)
        assert held.watched.changes("learner-1") == ["started"]
