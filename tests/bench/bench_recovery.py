"""How soon a killed learner contributes again: ``python tests/bench/bench_recovery.py``.

Kills one of two learners with SIGKILL, starts it again with the same command, and reads from the
ledger when the first contribution of the new incarnation was merged. Compiling (which the learner
itself times, with the compilation cache that a restarted one finds) is told apart.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from contextlib import aclosing
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from harness import Goal, parser, write

from skerry.log import ledger
from skerry.log.base import Bus
from skerry.log.nats.bus import NatsBus
from tests.support.cluster import Cluster, Service
from tests.support.nats_server import NatsServer

RUN = "bench"
GOAL_S = 10.0
CONFIG = """
[model]
preset = "nano"
[train]
steps = 1000000
[sync]
learners = 2
"""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds from the start of the process to its first merged contribution.

    ``joined_s`` to the ledger's word that it is a member: interpreter, imports, model and data.
    ``cpu_s`` is what the process used in all: on a shared machine the rest is waiting for a core.
    """

    total_s: float
    compile_s: float
    joined_s: float
    cpu_s: float

    @property
    def without_compile_s(self) -> float:
        return self.total_s - self.compile_s


async def merged_at_s(bus: Bus, incarnation: int) -> float:
    """Return when a round first merged this incarnation of ``a``, by the syncer's clock."""
    commits = ledger.follow_commits(bus, RUN)
    async with asyncio.timeout(120), aclosing(commits):
        async for _, commit in commits:
            if commit.version > 1 and any(
                c.learner == "a" and c.incarnation >= incarnation for c in commit.consumed
            ):
                return commit.closed_ns / 1e9
    msg = "the log ended"
    raise RuntimeError(msg)


def told(service: Service, event: str) -> dict[str, Any]:
    """Return the learner's own log line about an event."""
    lines: list[dict[str, Any]] = [
        json.loads(line) for line in service.said.splitlines() if line.startswith("{")
    ]
    return next(line for line in lines if line["event"] == event)


def cpu_s(service: Service) -> float:
    """Return the CPU seconds that a process has used, by all its threads."""
    stat = Path(f"/proc/{service.process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


async def recovery(bus: Bus, cluster: Cluster, incarnation: int) -> tuple[Service, Recovery]:
    """Start ``a`` again and time its return."""
    began_s = time.time()
    service = await cluster.start("learner", "a")
    merged_s = await merged_at_s(bus, incarnation)
    used_s = cpu_s(service)
    joined = datetime.fromisoformat(told(service, "joined")["timestamp"]).timestamp()
    compile_s = float(told(service, "compiled")["seconds"])
    return service, Recovery(merged_s - began_s, compile_s, joined - began_s, used_s)


async def measure(times: int) -> list[Recovery]:
    """Kill the learner that often and time each return."""
    found: list[Recovery] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "run.toml"
        config.write_text(CONFIG)
        server = NatsServer(folder / "nats")
        server.start()
        try:
            async with (
                Cluster(server.url, RUN, folder, config, folder / "jax") as cluster,
                NatsBus(server.url, name="bench") as bus,
            ):
                await cluster.start("syncer", "s")
                await cluster.start("learner", "b")
                victim = await cluster.start("learner", "a")
                for incarnation in range(1, times + 1):
                    await merged_at_s(bus, incarnation)
                    victim.kill9()
                    await victim.ended()
                    victim, back = await recovery(bus, cluster, incarnation + 1)
                    found.append(back)
        finally:
            server.kill()
    return found


def main() -> None:
    options = parser("How soon a killed learner contributes again.")
    options.add_argument("--times", type=int, default=2, help="kills (default 2)")
    chosen = options.parse_args()
    found = asyncio.run(measure(chosen.times))
    middle = statistics.median(r.without_compile_s for r in found)
    print("recovery: seconds from a killed learner's new process to its first merged contribution")
    for r in found:
        print(
            f"  {r.total_s:6.2f} in all: joined after {r.joined_s:5.2f}, {r.compile_s:5.2f} to"
            f" compile, {r.cpu_s:5.2f} of CPU"
        )
    goal = Goal("back from kill -9, compiling left out", GOAL_S, middle, "s", at_most=True)
    write("recovery", [asdict(r) for r in found], [goal], chosen.json)
    print(f"  {middle:6.2f} without compiling (median)")


if __name__ == "__main__":
    main()
