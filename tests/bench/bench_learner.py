"""What synchronising costs a learner's steps: ``python tests/bench/bench_learner.py``.

Two learners on one core take turns, each stopped (SIGSTOP) while the other has it: one in a real
run with broker and syncer on another core, one alone. The ratio of CPU time per step counts all
that a learner's process does, encoding, decoding and the network included, and is what a learner on
one core pays, whoever else uses the machine. The ratio of wall times says the same on a machine
that nobody shares.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Goal, parser, write

from skerry.log.nats.bus import NatsBus
from tests.support.cluster import Cluster, Service, until_commit
from tests.support.nats_server import NatsServer

TIMED = Path(__file__).parent / "timed_learner.py"
RUN = "bench"
GOAL = 1.03
CONFIG = """
[model]
preset = "{preset}"
[train]
steps = 1000000
[sync]
learners = 1
"""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one learner did while it had the core; seconds."""

    steps: int
    median_s: float
    cpu_s: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """Ratios of step times, with sync over without; boundaries of the learner with sync."""

    preset: str
    ratio_cpu: float
    ratio_wall: float
    cpu_ms_alone: float
    wall_ms_alone: float
    steps_timed: int
    boundary_p50_ms: float
    boundary_p99_ms: float
    boundary_max_ms: float
    longest_step_ms: float
    rounds: int


Window = tuple[float, float]
Times = Sequence[tuple[float, float, float]]


def within(times: Times, windows: Sequence[Window]) -> list[float]:
    """Return the durations that lie in one of the windows from beginning to end."""
    return [took for end, took, _ in times if any(a <= end - took and end <= b for a, b in windows)]


def turn(times: Times, window: Window) -> Turn:
    """Return what one learner did in a turn; CPU time goes from one step's end to another's."""
    durations = within(times, [window])
    used = [cpu for end, _, cpu in times if window[0] <= end <= window[1]]
    return Turn(
        len(durations), statistics.median(durations), (used[-1] - used[0]) / (len(used) - 1)
    )


async def until_training(service: Service) -> None:
    """Return once a learner says that it trains."""
    async with asyncio.timeout(600):
        while '"phase": "training"' not in service.said:
            if service.process.returncode is not None:
                raise RuntimeError(service.said[-2000:])
            await asyncio.sleep(0.1)


async def take_turns(
    learners: Sequence[Service], turns: int, seconds: float
) -> dict[int, list[Window]]:
    """Let the learners have the core one after the other; return when each had it."""
    windows: dict[int, list[Window]] = {i: [] for i in range(len(learners))}
    for _ in range(turns):
        for i, service in enumerate(learners):
            service.resume()
            await asyncio.sleep(0.5)  # pages and caches of the other are still there
            began = time.monotonic()
            await asyncio.sleep(seconds)
            windows[i].append((began, time.monotonic()))
            service.pause()
    return windows


async def measure(preset: str, turns: int, seconds: float) -> Verdict:
    """Run both learners and compare them."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})  # this process, the broker, the syncer
    os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = folder / "run.toml"
        config.write_text(CONFIG.format(preset=preset))
        server = NatsServer(folder / "nats")
        server.start()
        try:
            async with (
                Cluster(server.url, RUN, folder, config, folder / "jax") as cluster,
                NatsBus(server.url, name="bench") as bus,
            ):
                await cluster.start("syncer", "s")
                outs = [folder / "sync.json", folder / "alone.json"]
                common = [(str(out), str(cores[0]), str(config)) for out in outs]
                synced = await cluster.start_script(
                    "sync", TIMED, "sync", *common[0], server.url, RUN
                )
                await until_training(synced)
                await until_commit(bus, RUN, lambda c: c.version == 2)
                synced.pause()
                alone = await cluster.start_script("alone", TIMED, "alone", *common[1])
                await until_training(alone)
                alone.pause()
                windows = await take_turns([synced, alone], turns, seconds)
                for service in (synced, alone):
                    service.resume()
                    service.terminate()
                    await service.ended()
                rounds = synced_rounds(cluster)
            told = [json.loads(out.read_text()) for out in outs]
        finally:
            server.kill()
    return verdict(preset, told, windows, rounds)


def synced_rounds(cluster: Cluster) -> int:
    return cluster.services[0].said.count('"event": "round_committed"')


def verdict(
    preset: str, told: Sequence[dict[str, Any]], windows: dict[int, list[Window]], rounds: int
) -> Verdict:
    synced = [turn(told[0]["steps"], w) for w in windows[0]]
    alone = [turn(told[1]["steps"], w) for w in windows[1]]
    pairs = list(zip(synced, alone, strict=True))
    boundaries = sorted(within(told[0]["boundaries"], windows[0]))
    return Verdict(
        preset=preset,
        ratio_cpu=statistics.fmean(s.cpu_s for s in synced)
        / statistics.fmean(a.cpu_s for a in alone),
        ratio_wall=statistics.median(s.median_s / a.median_s for s, a in pairs),
        cpu_ms_alone=1e3 * statistics.fmean(a.cpu_s for a in alone),
        wall_ms_alone=1e3 * statistics.median(a.median_s for a in alone),
        steps_timed=sum(s.steps for s in synced),
        boundary_p50_ms=1e3 * statistics.median(boundaries),
        boundary_p99_ms=1e3 * boundaries[int(0.99 * len(boundaries))],
        boundary_max_ms=1e3 * boundaries[-1],
        longest_step_ms=1e3 * max(within(told[0]["steps"], windows[0])),
        rounds=rounds,
    )


def main() -> None:
    options = parser("A learner's step time with sync and without.")
    options.add_argument("--preset", default="nano", help="size of the model (default nano)")
    options.add_argument("--turns", type=int, default=6, help="turns of each learner (default 6)")
    options.add_argument("--seconds", type=float, default=4.0, help="length of a turn (default 4)")
    chosen = options.parse_args()
    found = asyncio.run(measure(chosen.preset, chosen.turns, chosen.seconds))
    print(
        f"learner: {found.preset}, {found.rounds} rounds; a step alone takes"
        f" {found.wall_ms_alone:.1f} ms, {found.cpu_ms_alone:.1f} ms of CPU"
    )
    print(f"  CPU time of a step with sync / without:  {found.ratio_cpu:.3f}")
    print(f"  wall time of a step with sync / without: {found.ratio_wall:.3f} (median)")
    print(
        f"  boundary: median {found.boundary_p50_ms:.2f} ms, p99 {found.boundary_p99_ms:.2f} ms,"
        f" longest {found.boundary_max_ms:.1f} ms of {found.steps_timed} steps;"
        f" longest step {found.longest_step_ms:.1f} ms"
    )
    goal = Goal("CPU of a step, with sync", GOAL, found.ratio_cpu, "of without", at_most=True)
    write("learner", [asdict(found)], [goal], chosen.json)


if __name__ == "__main__":
    main()
