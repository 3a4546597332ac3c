"""What synchronising costs a learner's steps: ``python tests/bench/bench_learner.py``.

One process takes turns: our whole learner in a real run, with broker and syncer on another core,
and a plain hand-written JAX loop of the same model (plain_loop.py). CPU time counts all that the
learner's process does, encoding, decoding and the network included, and is what a learner on one
core pays, whoever else uses the machine. Wall time says the same on a machine that nobody shares.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from harness import Goal, parser, write

from tests.support.cluster import Cluster
from tests.support.nats_server import NatsServer

TIMED = Path(__file__).parent / "timed_learner.py"
RUN = "bench"
GOAL = 0.97
LIMIT_S = 1800
CONFIG = """
[model]
preset = "{preset}"
[data]
batch = {batch}
seq_len = {seq_len}
[train]
steps = 1000000
[sync]
learners = 1
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is trained, and how long."""

    preset: str = "nano"
    batch: int = 8
    seq_len: int = 128
    turns: int = 6
    steps: int = 96


@dataclass(frozen=True, slots=True)
class Verdict:
    """Speed of our loop with sync in units of the plain loop's; boundaries of the learner.

    ``speed_cpu_off`` is that of its steps without boundaries (None: not measured).
    ``blocked`` is their share of its time, ``boundary_cpu`` of its CPU time (0: not measured).
    """

    sizes: Sizes
    speed_cpu: float
    speed_cpu_off: float | None
    speed_wall: float
    plain_cpu_ms: float
    plain_wall_ms: float
    blocked: float
    boundary_cpu: float
    boundary_p50_ms: float
    boundary_p99_ms: float
    boundary_max_ms: float
    rounds: int


async def measure(sizes: Sizes, *, pinned: bool = True, script: Path = TIMED) -> Verdict:
    """Run ``script``, ours and a plain loop in turns; ``pinned``: on one core of a CPU."""
    core = "-"
    if pinned:
        cores = sorted(os.sched_getaffinity(0))
        os.sched_setaffinity(0, {cores[-1]})  # this process, the broker, the syncer
        os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"
        core = str(cores[0])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config, out = folder / "run.toml", folder / "turns.json"
        config.write_text(CONFIG.format(**asdict(sizes)))
        server = NatsServer(folder / "nats")
        server.start()
        try:
            async with Cluster(server.url, RUN, folder, config, folder / "jax") as cluster:
                await cluster.start("syncer", "s")
                counts = str(sizes.turns), str(sizes.steps)
                learner = await cluster.start_script(
                    "timed", script, str(out), core, str(config), server.url, RUN, *counts
                )
                async with asyncio.timeout(LIMIT_S):
                    await learner.process.wait()
                if not out.exists():
                    raise RuntimeError(learner.said[-2000:])
                rounds = cluster.services[0].said.count('"event": "round_committed"')
        finally:
            server.kill()
        return verdict(sizes, json.loads(out.read_text()), rounds)


def verdict(sizes: Sizes, told: dict[str, Any], rounds: int) -> Verdict:
    ours, plain = told["ours"], told["plain"]
    boundaries = sorted(told["boundaries"])

    def total(turns: list[dict[str, float]], key: str) -> float:
        return sum(turn[key] for turn in turns)

    pairs = [p["wall_s"] / o["wall_s"] for o, p in zip(ours, plain, strict=True)]
    return Verdict(
        sizes=sizes,
        speed_cpu=total(plain, "cpu_s") / total(ours, "cpu_s"),
        speed_cpu_off=total(plain, "cpu_s") / total(told["off"], "cpu_s")
        if "off" in told
        else None,
        speed_wall=statistics.median(pairs),
        plain_cpu_ms=1e3 * total(plain, "cpu_s") / total(plain, "steps"),
        plain_wall_ms=1e3 * statistics.median(p["wall_s"] / p["steps"] for p in plain),
        blocked=sum(boundaries) / total(ours, "wall_s"),
        boundary_cpu=told.get("boundary_cpu_s", 0.0) / total(ours, "cpu_s"),
        boundary_p50_ms=1e3 * statistics.median(boundaries),
        boundary_p99_ms=1e3 * boundaries[int(0.99 * len(boundaries))],
        boundary_max_ms=1e3 * boundaries[-1],
        rounds=rounds,
    )


def main() -> None:
    options = parser("Our training loop with sync against a plain one of the same model.")
    for name, value in asdict(Sizes()).items():
        options.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    chosen = options.parse_args()
    sizes = Sizes(**{name: getattr(chosen, name) for name in asdict(Sizes())})
    found = asyncio.run(measure(sizes))
    print(
        f"learner: {sizes.preset}, {sizes.turns} turns of {sizes.steps}, {found.rounds} rounds."
        f" A plain step takes {found.plain_wall_ms:.1f} ms, {found.plain_cpu_ms:.1f} ms of CPU"
    )
    print(f"  speed of ours with sync / plain, by CPU time:  {found.speed_cpu:.3f}")
    if found.speed_cpu_off is not None:
        print(f"  speed of ours with sync off / plain, by CPU time: {found.speed_cpu_off:.3f}")
    print(f"  speed of ours with sync / plain, by wall time: {found.speed_wall:.3f} (median)")
    print(
        f"  boundary: median {found.boundary_p50_ms:.2f} ms, p99 {found.boundary_p99_ms:.2f} ms,"
        f" longest {found.boundary_max_ms:.1f} ms"
    )
    goal = Goal("our loop with sync, by CPU time", GOAL, found.speed_cpu, "of a plain loop")
    write("learner", [asdict(found)], [goal], chosen.json)


if __name__ == "__main__":
    main()
