"""A drill comes to a verdict, whatever becomes of healing, of judging or of itself."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.cli.cluster.processes import TABLE, ProcessTable
from skerry.errors import BrokerUnavailable, StateLost
from skerry.log import ledger, run_records
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.service.control import CONTROL, listening
from skerry_tools.chaos import drill as drills
from skerry_tools.chaos import healing
from skerry_tools.chaos.checks import LivenessCheck
from skerry_tools.chaos.drill import DrillResult, FaultDrill, kinds_check
from skerry_tools.chaos.drilled import DrilledRun
from skerry_tools.chaos.engine import Firing
from skerry_tools.chaos.local import LocalRun
from skerry_tools.chaos.meter import GoodputMeter
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind
from tests.support.builders import run_record, until

RUN = "r"
PLAN = plan([LeafSpec("w", (4, 4))], 1)
PAUSE = Fault(0.0, Kind.PAUSE, "syncer")
IDLE = ("-I", "-S", "-c", "import signal; signal.pause()")


@dataclass(slots=True)
class DrillSite:
    """A log, and one idle process that is called a syncer; a kill leaves it dead."""

    ground: LocalRun
    table: ProcessTable
    process: asyncio.subprocess.Process

    async def obey(self, order: dict[str, Any]) -> dict[str, Any]:
        if order["op"] == "open":
            return {"opened": []}
        self.process.kill()
        await self.process.wait()
        self.table.ended(order["name"], self.process.pid)
        return {"pid": self.process.pid}

    def drill(self, *faults: Fault) -> FaultDrill:
        async def whole(_path: str) -> str:
            return ""

        return FaultDrill(
            self.ground,
            FaultPlan(1, faults, heal_s=0.2),
            quiet_s=0.05,
            least=0.0,
            damage=whole,
            say=lambda _text: None,
        )


@asynccontextmanager
async def site(folder: Path) -> AsyncGenerator[DrillSite]:
    bus: MemoryBus = MemoryBroker().connect()
    await bus.declare(specs(RUN))
    await ledger.create_run(bus, run_record(RUN, PLAN, "{}"))
    process = await asyncio.create_subprocess_exec(sys.executable, *IDLE)
    held = DrillSite(LocalRun(RUN, folder, bus), ProcessTable(folder / TABLE), process)
    with held.table.kept():
        held.table.started("syncer", "syncer", process.pid)
        async with listening(folder / CONTROL, held.obey):
            try:
                yield held
            finally:
                with contextlib.suppress(ProcessLookupError):
                    process.kill()
                await process.wait()


def checks(result: DrillResult) -> dict[str, bool]:
    return {check.name: check.ok for check in result.checks}


def detail(result: DrillResult, name: str) -> str:
    return next(check.detail for check in result.checks if check.name == name)


async def test_a_drill_tells_every_check(tmp_path: Path) -> None:
    async with site(tmp_path) as held:
        result = await held.drill(PAUSE).run()
    assert checks(result) == {
        "everything is healed": True,
        "every kind of fault fired": True,
        "syncer answers": False,
        "a syncer that runs commits": False,
        "syncer runs": True,
        "no process ended meanwhile": True,
        "nothing acknowledged was lost": False,
        "the ledger verifies": True,
        "the window replays": False,
        "goodput": True,
    }
    assert detail(result, "every kind of fault fired") == "1 of 1 (pause 1/1)"
    assert "had committed nothing" in detail(result, "the window replays")
    assert ([firing.fired for firing in result.history], result.planned) == ([True], 1)


async def test_a_process_that_stays_dead_fails_a_check_and_the_log_is_verified_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(healing, "BACK_S", 0.1)
    monkeypatch.setattr(drills, "HEARD_S", 0.1)
    async with site(tmp_path) as held:
        result = await held.drill(Fault(0.0, Kind.KILL, "syncer")).run()
    told = checks(result)
    assert not told["everything is healed"]
    assert "syncer did not come back" in detail(result, "everything is healed")
    assert not told["syncer runs"]
    assert told["the ledger verifies"]
    assert [firing.fired for firing in result.history] == [True]
    assert not result.ok


@pytest.mark.parametrize(
    "error", [StateLost("Version 3 is gone."), BrokerUnavailable("Nobody answers."), OSError(5)]
)
async def test_a_log_that_cannot_be_verified_fails_that_check_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    async def broken(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(drills, "verify", broken)
    async with site(tmp_path) as held:
        result = await held.drill(PAUSE).run()
    assert not checks(result)["the ledger verifies"]
    assert str(error) in detail(result, "the ledger verifies")
    assert "had committed nothing" in detail(result, "the window replays")
    assert checks(result)["goodput"]


async def test_an_error_while_faults_run_is_a_failed_check_behind_which_all_is_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_action(*_: object) -> None:
        msg = "no such action"
        raise KeyError(msg)

    monkeypatch.setattr(LocalRun, "inject", no_action)
    async with site(tmp_path) as held:
        result = await held.drill(PAUSE).run()
    told = checks(result)
    assert not told["the plan ran"]
    assert not told["every kind of fault fired"]
    assert told["everything is healed"]
    assert told["the ledger verifies"]


async def test_what_cannot_be_watched_is_a_failed_check_and_the_drill_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def deaf(*_: object) -> AsyncGenerator[None]:
        yield
        msg = "Nobody answers."
        raise BrokerUnavailable(msg)

    monkeypatch.setattr(run_records, "follow", deaf)
    monkeypatch.setattr(GoodputMeter, "observe", lambda *_: None)
    async with site(tmp_path) as held:
        result = await held.drill(PAUSE).run()
    assert detail(result, "pulses could be watched") == "Nobody answers."
    assert checks(result)["the ledger verifies"]


async def test_an_interrupted_drill_heals_and_still_tells_its_history(tmp_path: Path) -> None:
    async with site(tmp_path) as held:
        drill = held.drill(replace(PAUSE, duration_s=3600.0), Fault(7200.0, Kind.PAUSE, "syncer"))
        task = asyncio.create_task(drill.run())
        async with asyncio.timeout(30):
            await until(lambda: held.ground.entries()["syncer"].paused)
            await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not held.ground.entries()["syncer"].paused
        result = drill.result()
    assert checks(result) == {"everything is healed": True, "the drill ran to its end": False}
    assert detail(result, "the drill ran to its end") == "no: while faults ran"
    assert [(firing.kind, firing.fired) for firing in result.history] == [("pause", True)]
    assert result.planned == 2
    assert json.loads(json.dumps(result.to_json()))["ok"] is False


async def test_a_second_interruption_finds_the_first_one_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    healing_begins, goes_on, heal = asyncio.Event(), asyncio.Event(), drills.heal

    async def slow(ground: DrilledRun, names: set[str]) -> None:
        healing_begins.set()
        await goes_on.wait()
        await heal(ground, names)

    monkeypatch.setattr(drills, "heal", slow)
    async with site(tmp_path) as held:
        os.kill(held.process.pid, signal.SIGSTOP)
        drill = held.drill(replace(PAUSE, at_s=3600.0))
        task = asyncio.create_task(drill.run())
        await asyncio.sleep(0.2)
        task.cancel()
        await healing_begins.wait()
        task.cancel()  # its lease is lost, too
        await asyncio.sleep(0.05)
        goes_on.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not held.ground.entries()["syncer"].paused
    assert checks(drill.result()) == {
        "everything is healed": True,
        "the drill ran to its end": False,
    }


async def test_a_drill_heals_also_where_nobody_listens_any_more(tmp_path: Path) -> None:
    def gone(_text: str) -> None:
        raise BrokenPipeError

    async with site(tmp_path) as held:
        drill = held.drill(PAUSE)
        drill.say = gone
        os.kill(held.process.pid, signal.SIGSTOP)
        with pytest.raises(BaseExceptionGroup):
            await drill.run()
        assert not held.ground.entries()["syncer"].paused


FIRING = Firing(0, "pause", "syncer", 0.0, 0.0, 1.0, 0, fired=True, proof="it is stopped")


@pytest.mark.parametrize(
    ("history", "ok", "words"),
    [
        ([("pause", True, True), ("kill", True, True)], True, "3 of 3 (kill 1/1, pause 2/2)"),
        ([("pause", True, True), ("pause", False, True), ("kill", True, True)], True, "2 of 3"),
        ([("pause", True, True), ("kill", False, True)], False, "there was a target: kill"),
        ([("pause", True, True), ("kill", False, False)], True, "a target that was up: kill"),
        ([("pause", True, True)], False, "there was a target: kill"),
        ([("pause", False, False), ("kill", False, False)], False, "0 of 3"),
    ],
)
def test_every_kind_that_had_a_target_has_to_fire(
    history: list[tuple[str, bool, bool]], ok: bool, words: str
) -> None:
    firings = [replace(FIRING, kind=kind, fired=fired, up=up) for kind, fired, up in history]
    if words.startswith("3"):
        firings.append(FIRING)
    found = kinds_check(FaultPlan(1, (PAUSE, PAUSE, Fault(0.0, Kind.KILL, "syncer"))), firings)
    assert found.ok is ok
    assert words in found.detail


async def test_a_process_that_hears_nothing_or_ends_is_named(tmp_path: Path) -> None:
    counted = {"syncer": {"bytes_down": 5}}

    async def show(_order: dict[str, Any]) -> dict[str, Any]:
        return {"routes": counted}

    async with site(tmp_path) as held, listening(tmp_path / CONTROL, show):
        liveness = LivenessCheck(replace(held.ground, proxied=True), {"syncer"})
        await liveness.note()
        (deaf,) = await liveness.checks(0.1)
        assert (deaf.ok, deaf.name) == (False, "syncer runs")
        counted["syncer"]["bytes_down"] = 9
        (hears,) = await liveness.checks(10.0)
        assert hears.ok
        assert "4 bytes from the broker" in hears.detail
        assert await liveness.ended() == []
        await held.obey({"op": "kill", "name": "syncer"})
        assert await liveness.ended() == ["syncer"]
