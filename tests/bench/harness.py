"""What the benches share: timing beside a memcpy, tables, goals, and JSON.

The machine may be shared, so figures in GB/s say little and ratios much: every round runs each case
once, the memcpy first, and what is reported is the median over rounds of a case's speed and of its
ratio to that round's memcpy. Time is the CPU time of the process, all its threads together, which
is what the work costs a core of its own: a clock on the wall would also count what other processes
do on that core. Nothing timed this way waits for anything. A claim about one core is measured with
the process kept on one by ``one_core``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

MEMCPY = "memcpy"
JSON_ENV = "BENCH_JSON"
"""Where ``python -m tests.bench`` wants the figures of the bench that it starts."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to time; ``size_bytes`` is the f32 it takes in or gives out, ``goal`` a ratio."""

    name: str
    run: Callable[[], object]
    size_bytes: int
    goal: float | None = None
    goal_gb_s: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Medians of one case, or a ``note`` in place of them."""

    name: str
    gb_s: float
    ratio: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Goal:
    """A figure that has a goal: at least that much, or at most if ``at_most``."""

    name: str
    goal: float
    measured: float
    unit: str
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.measured <= self.goal if self.at_most else self.measured >= self.goal


def one_core() -> None:
    """Keep this process, and the threads it starts later, on one of the cores it may use."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def memcpy(size_bytes: int) -> Case:
    """Copy f32 between two vectors whose pages are already mapped: the ceiling."""
    source = np.ones(size_bytes // 4, np.float32)
    target = np.zeros_like(source)
    return Case(MEMCPY, lambda: np.copyto(target, source), size_bytes)


def compare(cases: Sequence[Case], rounds: int) -> list[Result]:
    """Time every case once per round, after one round to warm up; the first is the memcpy."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            start = time.process_time()
            case.run()
            if number:
                times[case.name].append(time.process_time() - start)
    results: list[Result] = []
    for case in cases:
        speeds = [case.size_bytes / spent / 1e9 for spent in times[case.name]]
        ceiling = [cases[0].size_bytes / spent / 1e9 for spent in times[cases[0].name]]
        ratio = statistics.median(s / c for s, c in zip(speeds, ceiling, strict=True))
        results.append(Result(case.name, statistics.median(speeds), ratio))
    return results


def goals(bench: str, cases: Sequence[Case], results: Sequence[Result]) -> list[Goal]:
    """Return the goals that cases have, each with what was measured."""
    measured = {result.name: result for result in results}
    found: list[Goal] = []
    for case in cases:
        name = f"{bench}: {case.name}"
        if case.goal is not None:
            found.append(Goal(name, case.goal, measured[case.name].ratio, "of memcpy"))
        if case.goal_gb_s is not None:
            found.append(Goal(name, case.goal_gb_s, measured[case.name].gb_s, "GB/s"))
    return found


def parser(description: str) -> argparse.ArgumentParser:
    """Return a parser with the option that every bench has, ``--json FILE``."""
    made = argparse.ArgumentParser(description=description.split("\n", 1)[0])
    wanted = os.environ.get(JSON_ENV)
    said = "also write all figures here"
    made.add_argument("--json", type=Path, metavar="FILE", default=wanted, help=said)
    return made


def options(description: str) -> argparse.Namespace:
    """Parse ``--json``, ``--mib`` and ``--rounds``."""
    made = parser(description)
    made.add_argument("--mib", type=int, default=64, help="MiB of f32 per case (default 64)")
    made.add_argument("--rounds", type=int, default=9, help="rounds to take medians of")
    return made.parse_args()


def report(
    bench: str, title: str, results: Sequence[Result], reached: Sequence[Goal], path: Path | None
) -> None:
    """Print a table of results, and write it and the goals as JSON if there is a ``path``."""
    print(f"{bench}: {title}\n  {'f32, one core':<40} {'GB/s':>8} {'memcpy':>7}")
    for result in results:
        if result.note:
            print(f"  {result.name:<40} {result.note}")
        else:
            print(f"  {result.name:<40} {result.gb_s:>8.2f} {result.ratio:>7.2f}")
    write(bench, [asdict(result) for result in results], reached, path)


def write(bench: str, rows: Sequence[object], reached: Sequence[Goal], path: Path | None) -> None:
    """Write the rows and goals of a bench as JSON, if there is a ``path``."""
    if path is not None:
        found = {"bench": bench, "results": rows, "goals": [asdict(goal) for goal in reached]}
        path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def summary(found: Sequence[Goal]) -> str:
    """Return a table of goals: what was to be reached, what was measured, and their ratio."""
    lines = [f"  {'':<40} {'goal':>9} {'measured':>9} {'ratio':>6}"]
    for goal in found:
        sign = "<=" if goal.at_most else ">="
        lines.append(
            f"  {goal.name:<40} {sign + f' {goal.goal:g}':>9} {goal.measured:>9.2f} "
            f"{goal.measured / goal.goal:>6.2f}  {'reached' if goal.reached else 'MISSED'}"
            f" ({goal.unit})"
        )
    return "\n".join(lines)
