"""A drill through two regions with keys: brokers, links and a cache are lost, and no promise is."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from skerry.cli.cluster.folder import RunFolder
from skerry.log import ledger, run_records
from skerry.protocol.messages import Pulse, RunState
from skerry_tools.chaos import plan as plans
from skerry_tools.chaos.plan import Fault, FaultPlan, Kind
from tests.support.cluster import until_pulse
from tests.support.local_cluster import chaos, summary
from tests.support.processes import skerry
from tests.support.several_regions import Regions, several_regions

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.drill, pytest.mark.timeout(1200)]

HOMES = {"learner-1": "eu", "learner-2": "eu", "learner-3": "us", "learner-4": "us"}
RUN = "apart"
LASTS_S = 120.0
SOAK = Path(__file__).parents[2] / "infra" / "chaos" / "soak.toml"
SEED, SOAK_S = 20261128, 420
TARGETS = "learner,syncer,checkpointer,region,broker"
FAULTS = (
    Fault(0.0, Kind.KILL, "eu", 1.0),  # the region's broker
    Fault(4.0, Kind.PARTITION, "us", 8.0),  # its link to the hub
    Fault(10.0, Kind.PARTITION, "eu", 8.0),
    Fault(20.0, Kind.BROKER_KILL, "broker", 1.0),
    Fault(26.0, Kind.KILL, "us", 1.0),  # which loses its disk, and so its cache
    Fault(30.0, Kind.SLOW, "eu", 3.0, 0.1),
)


@pytest.fixture
def given(tmp_path: Path, tiny_config: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The config of a run that ends by time, in the folder where commands look for it."""
    monkeypatch.chdir(tmp_path)
    text = tiny_config.read_text()
    tiny_config.write_text(text.replace("[train]", f"[train]\nduration_s = {LASTS_S}"))
    return tiny_config


async def test_a_run_in_two_regions_outlives_the_loss_of_brokers_links_and_a_cache(
    tmp_path: Path, given: Path
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(plans.dumps(FaultPlan(5, FAULTS, heal_s=300.0)))
    async with several_regions(RunFolder(RUN), given, HOMES, days=7) as regions:

        async def script() -> None:
            regions.losing.add("us")
            told, said = await asyncio.to_thread(
                chaos, tmp_path, RUN, "--plan", str(plan), "--quiet-s", "2"
            )
            story = f"{json.dumps(told, indent=1)}\n{said}"
            assert all(fault["fired"] for fault in told["faults"]), story
            assert all(check["ok"] for check in told["checks"]), story
            assert not regions.losing, story
            await regions.make_cache("us")
            await until_cached(regions, "learner-3")

        await regions.train(script())
        assert regions.unasked == []
        async with regions.admin() as admin:
            assert (await ledger.read_run(admin, RUN)).state is RunState.FINISHED
        audit = f"nats.credentials={regions.keyring.seed('audit').absolute()}"
        where = ("--run", RUN, "--nats", regions.hub.url, "--set", audit)
        verified = skerry(tmp_path, "ledger", "verify", *where)
        assert verified.returncode == 0, verified.stdout + verified.stderr


async def until_cached(regions: Regions, learner: str) -> None:
    """Return once a learner has read from its region's cache from now on."""
    async with regions.admin() as admin:
        before = {
            pulse.learner: pulse.cached_bytes
            for pulse in await run_records.newest_each(admin, RUN, Pulse)
        }
        await until_pulse(
            admin, RUN, lambda p: p.learner == learner and p.cached_bytes > before[learner]
        )


@pytest.mark.soak
async def test_seven_minutes_of_faults_in_two_regions_break_no_promise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run by hand with ``-s -m soak``; docs/results/soak.md has what came of it."""
    monkeypatch.chdir(tmp_path)
    drawn = ("--seed", str(SEED), "--every-s", "5", "--duration-s", str(SOAK_S))
    async with several_regions(RunFolder(RUN), SOAK, HOMES, days=7) as regions:

        async def script() -> None:
            told, said = await asyncio.to_thread(chaos, tmp_path, RUN, *drawn, "--targets", TARGETS)
            print(summary(told), *regions.unasked, sep="\n")
            assert all(check["ok"] for check in told["checks"]), said[-20_000:]
            assert told["fired"] > 0.5 * len(told["faults"]), said[-20_000:]
            regions.stop.on_signal()

        await regions.train(script())
