"""Benches run to their end, at their smallest: what docs/results quotes can be measured again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BENCHES = ROOT / "tests" / "bench"
SMALLEST = {
    "bus": "--total-mib 4 --rounds 1",
    "codec": "",
    "commit": "",
    "deltas": "--learners 2 --cases 1 --steps 60",
    "exchange": "--parameters 1e6 --fragments 2 --learners 2 --times 1",
    "growth": "--commits 200 --fragments 4 --blocks 2 --learners 2",
    "lab": "--learners 2 --batch 2 --turns 1 --seconds 0.2",
    "merge": "",
    "model": "--steps 2",
    "planning": "",
    "quantise": "",
    "takeover": "--times 1",
}
LONG = {
    *("catchup", "data", "durability", "hostile", "join", "learner", "memory", "mesh", "monitor"),
    *("page", "recovery", "regions", "restart", "scale", "telemetry", "torch", "wan"),
}
"""Those that take half a minute and more at their smallest."""


def test_each_bench_is_run_here_or_known_to_be_long() -> None:
    names = {path.stem.removeprefix("bench_") for path in BENCHES.glob("bench_*.py")}
    assert names == {*SMALLEST, *LONG, "gpu"}  # that one: test_gpu.py


@pytest.mark.drill
@pytest.mark.parametrize("name", SMALLEST)
def test_a_bench_runs_to_its_end(name: str, tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHES / f"bench_{name}.py"), *SMALLEST[name].split()]
    environ = os.environ | {"PYTHONPATH": str(ROOT), "BENCH_JSON": str(out)}
    done = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(out.read_text())["results"]
