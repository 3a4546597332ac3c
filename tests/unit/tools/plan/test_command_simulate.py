"""``skerry simulate``: the answer first, JSON, a report in files, and no JAX."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from skerry_tools.chaos.plan import load
from skerry_tools.plan.command_simulate import Asked, run_simulate

SMALL = ("fleet.chips=150000", "simulation.days=0.5", "sweep.failures=200", "simulation.rounds=40")


def asked(**more: object) -> Asked:
    return Asked(**{"scenario": None, "sets": SMALL, **more})  # type: ignore[arg-type]


def test_the_first_line_is_the_answer(capsys: pytest.CaptureFixture[str]) -> None:
    run_simulate(asked())
    first = capsys.readouterr().out.splitlines()[0]
    assert first.startswith("150,000 chips as 8 decoupled learners, K = 1, 0.5 days: goodput 9")
    assert "%" in first


def test_json_is_the_same_bytes_again_and_holds_no_nan(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[str] = []
    for _ in range(2):
        run_simulate(asked(as_json=True, table=True))
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    read = json.loads(told[0], parse_constant=pytest.fail)
    assert read["figures"]["result"]["goodput"]["unit"] == "share"
    assert set(read["figures"]["uptime"]) == {f"K = {k}" for k in range(1, 9)}
    assert read["status"]["failures.chip_mtbi"] == "published"
    assert read["error_points"] > 0


def test_a_report_is_the_same_bytes_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = tmp_path / "one", tmp_path / "two"
    for folder in folders:
        run_simulate(asked(report=folder))
    names = {path.name for path in folders[0].iterdir()}
    assert {
        "report.html",
        "goodput-by-chips.svg",
        "uptime.svg",
        "learners.svg",
        "tornado.svg",
    } < names
    assert {"goodput-by-chips.csv", "uptime.csv", "tornado.csv", "result.csv", "status.csv"} < names
    for name in names:
        assert (folders[0] / name).read_bytes() == (folders[1] / name).read_bytes()
    assert "nan" not in (folders[0] / "report.html").read_text("utf-8").lower()


def test_the_simulated_failures_are_a_plan_that_chaos_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "faults.json"
    whole = ("fleet.chips=8", "fleet.slice_chips=1", "fleet.elastic=false", "simulation.days=0.01")
    run_simulate(asked(sets=(*whole, "failures.chip_mtbi=500 s"), save_faults=path))
    assert load(path).faults
    run_simulate(asked(sets=(*whole, "failures.chip_mtbi=1e11"), faults=path))
    assert "outages" in capsys.readouterr().out


def test_a_blocking_run_waits(capsys: pytest.CaptureFixture[str]) -> None:
    stops = ("sync.overlap_steps=0", "sync.quorum=8", "sync.fragments=1", "timing.spread=0.2")
    run_simulate(asked(sets=(*stops, *SMALL)))
    assert "waiting for other learners" in capsys.readouterr().out


def test_the_shipped_scenarios_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    run_simulate(Asked("list"))
    assert {line.split(":")[0] for line in capsys.readouterr().out.splitlines()} == {
        "four-regions",
        "goodput-table",
        "llama-3",
    }


def test_it_needs_no_jax() -> None:
    code = (
        "import sys\nfrom skerry_tools.plan.command_simulate import Asked, run_simulate\n"
        f"run_simulate(Asked(None, {SMALL!r}, table=True))\n"
        "assert not {'jax', 'optax', 'numba', 'nats', 'blosc2'} & set(sys.modules), sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
