"""How soon a stand-by goes on where the active syncer stopped: ``python bench_takeover.py``.

Two syncers serve a run of learners at the default lease. The active one gets SIGKILL, and what is
timed is how long it takes until the log holds a commit of the other one; then the same with
SIGSTOP, after which the one that wakes up late must step down and stand by. Before it goes on, the
stand-by reads the state of its shard: ``--parameters`` says how much that is.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path

from harness import Goal, parser, write

from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.protocol.messages import Commit, SyncerPulse
from skerry.settings.models import RunConfig, SyncConfig
from tests.support.builders import run_record
from tests.support.cluster import Cluster, Service
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer

RUN = "takeover"
NAMES = ("syncer-0", "syncer-1")
GOAL_S = 3.0
PATIENCE_S = 120.0
CONFIG = RunConfig(sync=SyncConfig(fragments=4, h_steps=8))
STEP_S = 0.05
ROUNDS = 8
"""Rounds in between, so that a run is in full swing before the next signal."""


@dataclass(frozen=True, slots=True)
class Takeover:
    """Seconds from the signal to the stand-by's first commit, and those between two rounds."""

    signal: str
    seconds: float
    round_s: float


def plan_of(parameters: int) -> Plan:
    """Return a model of about so many parameters in four fragments."""
    rows = max(200, parameters // 256 - 300)
    return plan([LeafSpec("embed", (300, 256), embedding=True), LeafSpec("w", (rows, 256))], 4)


@asynccontextmanager
async def training(bus: Bus, cut: Plan) -> AsyncGenerator[None]:
    """Two learners that step and answer for as long as the block lasts."""
    learners = [
        FakeLearner(bus, RUN, cut, name, scheme="int4", step_s=STEP_S) for name in ("a", "b")
    ]
    tasks = [asyncio.create_task(fake_learner.train()) for fake_learner in learners]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Watch:
    """What the log says, as it comes: commits with the time of their arrival, and who stands."""

    def __init__(self, bus: Bus) -> None:
        self._bus = bus
        self._news = asyncio.Condition()
        self.commits: list[tuple[float, Commit]] = []
        self.standing: dict[str, str] = {}

    async def ledger(self) -> None:
        commits = ledger.follow_commits(self._bus, RUN)
        async with aclosing(commits):
            async for _, commit in commits:
                async with self._news:
                    self.commits.append((time.monotonic(), commit))
                    self._news.notify_all()

    async def pulses(self) -> None:
        pulses = run_records.follow(self._bus, RUN, SyncerPulse)
        async with aclosing(pulses):
            async for pulse in pulses:
                async with self._news:
                    self.standing[pulse.syncer] = pulse.instance
                    self._news.notify_all()

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until something holds, looking whenever there are news."""
        async with asyncio.timeout(PATIENCE_S), self._news:
            await self._news.wait_for(holds)

    async def rounds(self, count: int) -> None:
        """Wait for that many more commits."""
        wanted = len(self.commits) + count
        await self.until(lambda: len(self.commits) >= wanted)

    def round_s(self, count: int) -> float:
        """Return the median time between the newest commits."""
        times = [at for at, _ in self.commits[-count:]]
        return statistics.median(b - a for a, b in pairwise(times))


@dataclass(slots=True)
class Bench:
    """The run, both syncers, and the watch on their log."""

    cluster: Cluster
    watch: Watch
    syncers: dict[str, Service]

    async def start(self, name: str) -> None:
        """Start a syncer and wait until it stands by, which its pulse says."""
        before = self.watch.standing.get(name)
        self.syncers[name] = await self.cluster.start("syncer", name)
        await self.watch.until(lambda: self.watch.standing.get(name) not in {None, before})

    async def one(self, how: str) -> Takeover:
        """Kill or freeze whoever is active; afterwards both are there again."""
        await self.watch.rounds(ROUNDS)
        round_s = self.watch.round_s(ROUNDS)
        active = self.watch.commits[-1][1].syncer
        stopped = self.syncers[active]
        began, seen = time.monotonic(), len(self.watch.commits)
        stopped.kill9() if how == "SIGKILL" else stopped.pause()

        def other() -> list[float]:
            return [at for at, c in self.watch.commits[seen:] if c.syncer != active]

        await self.watch.until(lambda: bool(other()))
        took_s = other()[0] - began
        if how == "SIGKILL":
            await stopped.ended()
            await self.start(active)
        else:
            stopped.resume()
            await self._stands_by(active, stopped)
        return Takeover(how, took_s, round_s)

    async def _stands_by(self, name: str, service: Service) -> None:
        """Wait until a syncer that woke up late has said that it steps down."""
        async with asyncio.timeout(PATIENCE_S):
            while "stepped_down" not in service.said:
                await self.watch.rounds(1)
        if service.process.returncode is not None:
            msg = f"{name} ended instead of standing by: {service.said[-500:]}"
            raise RuntimeError(msg)


async def measure(times: int, cut: Plan) -> list[Takeover]:
    """Kill the active syncer that often, then freeze it as often."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "run.toml"
        config.touch()
        server = NatsServer(folder / "nats")
        server.start()
        try:
            async with (
                NatsBus(server.url, name="bench") as bus,
                Cluster(server.url, RUN, folder, config, folder / "jax") as cluster,
            ):
                await bus.declare(specs(RUN))
                await ledger.create_run(bus, run_record(RUN, cut, CONFIG.model_dump_json()))
                watch = Watch(bus)
                following = [asyncio.create_task(t) for t in (watch.ledger(), watch.pulses())]
                bench = Bench(cluster, watch, {})
                try:
                    async with training(bus, cut):
                        for syncer in NAMES:
                            await bench.start(syncer)
                        return [
                            await bench.one(how)
                            for how in ("SIGKILL", "SIGSTOP")
                            for _ in range(times)
                        ]
                finally:
                    for task in following:
                        task.cancel()
        finally:
            server.kill()


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--times", type=int, default=5, help="of each kind (default 5)")
    made.add_argument("--parameters", type=int, default=128_000, help="(default 128000)")
    chosen = made.parse_args()
    cut = plan_of(chosen.parameters)
    found = asyncio.run(measure(chosen.times, cut))
    lease_s = CONFIG.sync.lease_s
    print(
        f"takeover: seconds from the signal to the stand-by's first commit, lease {lease_s:g} s,"
        f" {cut.parameters:,} parameters"
    )
    for t in found:
        print(f"  {t.signal}  {t.seconds:6.2f}   ({t.round_s:.2f} between rounds before)")
    middle = {
        how: statistics.median(t.seconds for t in found if t.signal == how)
        for how in ("SIGKILL", "SIGSTOP")
    }
    goals = [
        Goal("take-over after kill -9", GOAL_S, middle["SIGKILL"], "s", at_most=True),
        Goal("take-over from a hung one", lease_s + GOAL_S, middle["SIGSTOP"], "s", at_most=True),
    ]
    write("takeover", [asdict(t) for t in found], goals, chosen.json)
    for goal in goals:
        print(f"  {goal.name}: {goal.measured:.2f} s (median), goal {goal.goal:g}")


if __name__ == "__main__":
    main()
