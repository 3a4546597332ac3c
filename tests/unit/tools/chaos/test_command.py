"""``skerry chaos``: what it refuses before anything is touched, and what it tells."""

from __future__ import annotations

import asyncio
import json
import math
import os
import re
import signal
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.cli.cluster.folder import RunFolder, RunInUse, RunningCluster
from skerry.errors import BrokerUnavailable, ConfigError, HistoryBroken, RunNotFound
from skerry.log import ledger
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.service.control import ControlError
from skerry.service.interrupts import Interrupted
from skerry.settings.loading import to_json
from skerry.settings.local import LocalSettings, StoreSettings
from skerry.settings.models import RunConfig
from skerry_tools.chaos import command as cli
from skerry_tools.chaos import healing, lease
from skerry_tools.chaos.checks import Check
from skerry_tools.chaos.command import ChaosOptions, make_plan, run_chaos
from skerry_tools.chaos.drill import DrillResult, FaultDrill
from skerry_tools.chaos.engine import Firing
from skerry_tools.chaos.local import LocalRun
from skerry_tools.chaos.meter import GoodputMeter
from skerry_tools.chaos.plan import FaultPlan
from skerry_tools.chaos.remote import RemoteRun
from tests.support.builders import run_record

NOBODY = "Nobody answers."
FIRING = Firing(0, "pause", "syncer", 1.0, 1.0, 3.0, 0, fired=True, proof="it is stopped")


def test_a_folder_without_a_cluster_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunNotFound, match=r"No cluster of run 'x' runs in .*chaos\.allow=true"):
        run_chaos(ChaosOptions(run="x"))


def test_healing_needs_no_broker_so_one_that_is_named_for_other_commands_does_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKERRY_NATS__URL", "nats://elsewhere:4222")
    with pytest.raises(RunNotFound, match="No cluster of run 'x' runs in"):
        run_chaos(ChaosOptions(run="x", heal=True))
    with pytest.raises(ConfigError, match="nothing to heal over a broker's address"):
        run_chaos(ChaosOptions(run="x", heal=True, nats="nats://elsewhere:4222"))


@pytest.mark.parametrize(
    ("wanted", "words"),
    [
        (ChaosOptions(kinds=("kil",)), "no fault 'kil': use any of kill, pause"),
        (ChaosOptions(kinds=("partition",)), "A partition cannot be done here: the services reach"),
        (ChaosOptions(targets=("learner-9",)), "no 'learner-9' in this cluster"),
        (ChaosOptions(seed=1, kinds=("kill",), duration_s=0.001), "no fault at all"),
        (ChaosOptions(duration_s=math.inf), "duration_s is inf"),
        (ChaosOptions(plan=Path("nowhere.json")), "cannot be read"),
    ],
)
def test_what_cannot_be_done_is_refused(ground: LocalRun, wanted: ChaosOptions, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        make_plan(wanted, ground)


@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0, 1e300])
@pytest.mark.parametrize("name", ["quiet_s", "goodput"])
def test_a_number_that_means_nothing_is_refused_before_anything_is_looked_for(
    name: str, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    def looked(_run: object) -> None:
        pytest.fail("a cluster was looked for")

    monkeypatch.setattr(cli, "_cluster", looked)
    with pytest.raises(ConfigError, match=re.escape(f"{name} is {value}:")):
        run_chaos(replace(ChaosOptions(), **{name: value}))


def test_a_plan_file_with_an_unknown_target_is_refused(ground: LocalRun, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    path.write_text('{"format": 1, "faults": [{"at_s": 1, "kind": "kill", "target": "master"}]}')
    with pytest.raises(ConfigError, match="There is no 'master' for the kill"):
        make_plan(ChaosOptions(plan=path), ground)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (None, HistoryBroken),
        (asyncio.CancelledError(), KeyboardInterrupt),
        (BrokerUnavailable("Nobody answers."), BrokerUnavailable),
    ],
)
def test_the_verdict_is_printed_however_the_drill_ended(
    ground: LocalRun,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: BaseException | None,
    raised: type[BaseException],
) -> None:
    bad = Check("bad", ok=False, detail="why")
    result = DrillResult("r", 1, (FIRING,), (bad,), GoodputMeter().result(), commits=3, planned=2)

    async def ends(_drill: FaultDrill) -> DrillResult:
        if error is not None:
            raise error
        return result

    async def drill(options: ChaosOptions, *_: object) -> DrillResult:
        return await cli._drill(options, ground, FaultPlan(1, ()), StoreSettings(), ())

    monkeypatch.setattr(FaultDrill, "run", ends)
    monkeypatch.setattr(FaultDrill, "result", lambda _: result)
    monkeypatch.setattr(cli, "_cluster", lambda _run: None)
    monkeypatch.setattr(cli, "_chaos", drill)
    with pytest.raises(raised):
        run_chaos(ChaosOptions(as_json=True))
    told = json.loads(capsys.readouterr().out)
    assert (told["ok"], told["fired"], told["planned"]) == (False, 1, 2)
    assert told["faults"][0]["proof"] == FIRING.proof


def test_a_hangup_that_is_ignored_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """As ``nohup`` has it: a drill may be left to itself."""
    seen: list[object] = []

    async def drill(*_: object) -> None:
        seen.append(signal.getsignal(signal.SIGHUP))

    monkeypatch.setattr(cli, "_chaos", drill)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asyncio.run(cli._stoppable(ChaosOptions(), LocalSettings(), None))
    finally:
        signal.signal(signal.SIGHUP, before)
    assert seen == [signal.SIG_IGN]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_drill_that_a_signal_ends_says_which(
    monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    async def drill(*_: object) -> None:
        os.kill(os.getpid(), number)
        await asyncio.Event().wait()

    monkeypatch.setattr(cli, "_chaos", drill)
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # the terminal of these tests is not gone
    with pytest.raises(Interrupted) as ended:
        asyncio.run(cli._stoppable(ChaosOptions(), LocalSettings(), None))
    assert ended.value.exit_code == 128 + number


@pytest.mark.parametrize("wanted", [ChaosOptions(), ChaosOptions(heal=True)])
def test_beside_a_drill_nothing_is_struck_and_nothing_healed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wanted: ChaosOptions
) -> None:
    async def touched(_run: object) -> list[str]:
        pytest.fail("a cluster was touched that another drill has")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_cluster", lambda _run: RunningCluster("r", 1, "nats://x"))
    monkeypatch.setattr(cli, "undo_first", touched)
    monkeypatch.setattr(healing, "undo_first", touched)
    with RunFolder("r").drilled(), pytest.raises(RunInUse, match="drills 'r' already"):
        run_chaos(wanted)


async def test_a_learner_that_is_left_out_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bus = MemoryBroker().connect()
    config = RunConfig.model_validate({"chaos": {"allow": True}})
    await bus.declare(specs("r"))
    await ledger.create_run(bus, run_record("r", plan([LeafSpec("w", (4, 4))], 1), to_json(config)))

    @asynccontextmanager
    async def heard(*_: object) -> AsyncGenerator[RemoteRun]:
        far = RemoteRun("r", bus, config)
        far.present, far.unheard = {"a": "learner"}, ["b", "c"]
        yield far

    monkeypatch.setattr(cli, "bus_from", lambda *_: bus)
    monkeypatch.setattr(cli, "remote", heard)
    monkeypatch.setattr(lease, "RENEW_S", 0.01)
    monkeypatch.setattr(FaultDrill, "run", lambda _: asyncio.sleep(0))
    await cli._chaos(ChaosOptions(run="r", as_json=True), LocalSettings(), None)
    assert "Nothing is heard of b, c: struck and judged are the others" in capsys.readouterr().err


def test_a_dry_run_looks_beside_a_drill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def connected(*_: object) -> None:
        raise BrokerUnavailable(NOBODY)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(cli, "_cluster", lambda _run: RunningCluster("r", 1, "nats://x"))
    monkeypatch.setattr(cli, "bus_from", connected)
    with RunFolder("r").drilled(), pytest.raises(BrokerUnavailable):
        run_chaos(ChaosOptions(dry_run=True))


@pytest.mark.parametrize("cause", [FileNotFoundError(), ConnectionRefusedError()])
async def test_who_is_not_there_takes_no_orders(
    monkeypatch: pytest.MonkeyPatch, cause: OSError
) -> None:
    async def refused(*_: object) -> object:
        raise ControlError(NOBODY) from cause

    monkeypatch.setattr(healing, "ask", refused)
    assert await healing.undo_first("r") is None


async def test_who_is_only_too_slow_is_not_taken_for_a_cluster_without_faults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def late(*_: object) -> object:
        raise ControlError(NOBODY) from TimeoutError()

    monkeypatch.setattr(healing, "ask", late)
    with pytest.raises(ControlError):
        await healing.undo_first("r")
