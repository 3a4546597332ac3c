"""What ``skerry.join`` costs a JAX loop of one's own: ``python tests/bench/bench_join.py``.

As ``bench_learner.py``: the loop with ``island.step`` and the same loop without take turns in one
process, on one core; broker and syncer have another.
"""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path

from bench_learner import Sizes, measure
from harness import Goal, parser, write

RATIO, BLOCKED = 0.97, 0.01


def run(bench: str, script: str) -> None:
    """Measure a script of ``turns.py``, print what was found, and write it."""
    options = parser("A joined loop's tokens/s, and the time that its thread is held up.")
    for name, value in asdict(Sizes()).items():
        options.add_argument(f"--{name.replace('_', '-')}", type=type(value), default=value)
    chosen = options.parse_args()
    sizes = Sizes(**{name: getattr(chosen, name) for name in asdict(Sizes())})
    found = asyncio.run(measure(sizes, script=Path(__file__).parent / script))
    print(
        f"{bench}: {sizes.preset}, {sizes.turns} turns of {sizes.steps}, {found.rounds} rounds. A"
        f" step alone takes {found.plain_wall_ms:.1f} ms, {found.plain_cpu_ms:.1f} ms of CPU"
    )
    print(f"  tokens/s with island.step / without, by CPU time:  {found.speed_cpu:.3f}")
    print(f"  tokens/s with island.step / without, by wall time: {found.speed_wall:.3f} (median)")
    print(
        f"  the loop's thread is in island.step {found.blocked:.2%} of the time: median"
        f" {found.boundary_p50_ms:.2f} ms, p99 {found.boundary_p99_ms:.2f} ms;"
        f" {found.boundary_cpu:.2%} by its own CPU time"
    )
    goals = [
        Goal("tokens/s with island.step", RATIO, found.speed_cpu, "of without"),
        Goal("time in island.step", BLOCKED, found.blocked, "of all", at_most=True),
    ]
    write(bench, [asdict(found)], goals, chosen.json)


if __name__ == "__main__":
    run("join", "joined_loop.py")
