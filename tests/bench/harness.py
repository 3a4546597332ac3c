"""A bench of a few cases on one core, told as ratios to a memcpy timed in the same rounds.

The machine may be shared, so figures in GB/s say little and ratios much: every round runs each case
once, the memcpy first, and what is reported is the median over rounds of a case's speed and of its
ratio to that round's memcpy.
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
from importlib.util import find_spec

import numpy as np

MEMCPY = "memcpy"


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
    """Medians of one case; ``gb_s`` is 0 where a peer is not installed."""

    name: str
    gb_s: float
    ratio: float
    goal: float | None = None
    goal_gb_s: float | None = None
    note: str = ""


def one_core() -> None:
    """Keep this process on one of the cores that it may use."""
    if sys.platform == "linux":
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})


def memcpy(size_bytes: int) -> Case:
    """Copy f32 between two vectors whose pages are already mapped: the ceiling."""
    source = np.ones(size_bytes // 4, np.float32)
    target = np.zeros_like(source)
    return Case(MEMCPY, lambda: np.copyto(target, source), size_bytes)


def compare(cases: Sequence[Case], rounds: int) -> list[Result]:
    """Time every case once per round, after one round to warm up."""
    times: dict[str, list[float]] = {case.name: [] for case in cases}
    for number in range(rounds + 1):
        for case in cases:
            start = time.perf_counter()
            case.run()
            if number:
                times[case.name].append(time.perf_counter() - start)
    results: list[Result] = []
    for case in cases:
        speeds = [case.size_bytes / spent / 1e9 for spent in times[case.name]]
        ceiling = [cases[0].size_bytes / spent / 1e9 for spent in times[cases[0].name]]
        ratio = statistics.median(s / c for s, c in zip(speeds, ceiling, strict=True))
        found = Result(case.name, statistics.median(speeds), ratio, case.goal, case.goal_gb_s)
        results.append(found)
    return results


def missing(*modules: str) -> list[Result]:
    """Return a line for each peer that is not installed."""
    absent = [name for name in modules if find_spec(name) is None]
    return [Result(name, 0.0, 0.0, note="not installed") for name in absent]


def options(description: str) -> argparse.Namespace:
    """Parse ``--json``, ``--mib`` and ``--rounds``."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--mib", type=int, default=64, help="MiB of f32 per case (default 64)")
    parser.add_argument("--rounds", type=int, default=9, help="rounds to take medians of")
    return parser.parse_args()


def report(bench: str, results: Sequence[Result], *, as_json: bool) -> None:
    """Print a table, or the same as one JSON object."""
    if as_json:
        print(json.dumps({"bench": bench, "results": [asdict(result) for result in results]}))
        return
    print(f"{bench}: GB/s of f32 on one core, and the ratio to memcpy in the same rounds")
    for result in results:
        if result.note:
            print(f"  {result.name:<34} {result.note}")
            continue
        print(f"  {result.name:<34} {result.gb_s:7.2f} {result.ratio:6.2f}  {_verdict(result)}")


def _verdict(result: Result) -> str:
    goals: list[str] = []
    if result.goal is not None:
        goals.append(f"goal {result.goal} of memcpy: {_word(result.ratio >= result.goal)}")
    if result.goal_gb_s is not None:
        goals.append(f"goal {result.goal_gb_s} GB/s: {_word(result.gb_s >= result.goal_gb_s)}")
    return ", ".join(goals)


def _word(reached: bool) -> str:
    return "reached" if reached else "missed"
