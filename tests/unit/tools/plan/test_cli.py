"""``skerry plan`` from the outside."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skerry.errors import ConfigError
from skerry_tools.__main__ import app

ONE_LINE = ("--params", "12B", "--regions", "4", "--bandwidth", "3 Gbit/s", "--step-time", "2 s")


def plan(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *words])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def test_the_answer_to_twelve_billion_in_four_regions_is_one_line() -> None:
    code, told = plan(*ONE_LINE)
    assert code == 0
    assert told.startswith("Feasible: 12.0 Gparam on 4 learners at 4 sites with H=48 P=48 tau=2")


def test_a_plan_that_does_not_work_ends_with_its_own_exit_code() -> None:
    code, told = plan(*ONE_LINE, "-H", "16", "-P", "16")
    assert code == 4
    assert told.startswith("Not feasible: ")


def test_set_wins_over_the_short_options() -> None:
    code, told = plan(*ONE_LINE, "--set", "plan.parameters=1B", "--json")
    found = json.loads(told)
    assert code == 0
    assert found["settings"]["parameters"]["value"] == 1e9


def test_bad_input_is_one_sentence_and_exit_code_two() -> None:
    code, told = plan(*ONE_LINE, "-K", "5")
    assert code == 2
    assert told.startswith("error: sync.quorum is 5 but sync.learners is 4")


def test_a_site_described_and_not_counted_is_refused() -> None:
    code, told = plan("--params", "12B", "--bandwidth", "3 Gbit/s")
    assert code == 2
    assert "--bandwidth is about sites of --regions" in told


@pytest.mark.parametrize(
    ("name", "first"), [("four-regions", "Feasible: "), ("streaming-diloco", "75 of 75 ")]
)
def test_shipped_scenarios_rerun_from_one_command(name: str, first: str) -> None:
    code, told = plan("--scenario", name)
    assert code == 0
    assert told.startswith(first)


def test_scenarios_are_listed_and_an_unknown_one_is_refused() -> None:
    assert plan("--scenario", "list") == (0, "four-regions\nstreaming-diloco\n")
    assert "There is no scenario" in plan("--scenario", "nope")[1]


def test_a_file_and_a_scenario_at_once_are_refused(tmp_path: Path) -> None:
    code, told = plan(str(tmp_path / "run.toml"), "--scenario", "four-regions")
    assert code == 2
    assert "two questions" in told


def test_a_runs_own_config_is_enough_with_sites(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\npreset = "small"\n[sync]\nquorum = 1\n[sites.a]\nup = "1 Gbit/s"\n'
        'step_time = "1 s"\n[store]\npath = "x"\n'
    )
    code, told = plan(str(config), "--json")
    assert code == 0
    assert json.loads(told)["settings"]["parameters"]["value"] == 75713280


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys; from skerry_tools.__main__ import app\n"
        f"try: app(['plan', *{ONE_LINE!r}])\n"
        "except SystemExit as end: assert not end.code\n"
        "print(sorted({'jax', 'optax', 'numba', 'numpy', 'nats', 'blosc2'} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_a_report_is_written_where_it_is_asked_for(tmp_path: Path) -> None:
    assert plan(*ONE_LINE, "--report", str(tmp_path / "report"))[0] == 0
    assert (tmp_path / "report" / "report.html").exists()


def test_a_folder_that_cannot_be_written_is_one_sentence(tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    code, told = plan(*ONE_LINE, "--report", str(blocked))
    assert code == ConfigError.exit_code
    assert "cannot be written" in told
