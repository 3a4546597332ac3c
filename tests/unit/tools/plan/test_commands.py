"""``skerry plan`` and ``skerry simulate`` from the outside."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skerry.algorithm.fragments import LeafSpec
from skerry.algorithm.fragments import plan as layout
from skerry_tools.__main__ import app
from skerry_tools.plan import measure, measured

LINK = ("--chips", "8", "--bandwidth", "3 Gbit/s", "--step-time", "2 s", "--step-tokens", "8192")
ONE_LINE = ("--params", "12B", "--regions", "4", *LINK)
SMALL = ("--set", "fleet.chips=150000", "--set", "simulation.days=0.5")


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, words)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.output


def plan(*words: str) -> tuple[int, str]:
    return run("plan", *words)


def simulate(*words: str) -> str:
    code, text = run("simulate", *words)
    assert code == 0, text
    return text


@pytest.mark.parametrize(
    ("words", "code", "first"),
    [
        (ONE_LINE, 0, "Feasible: 12.0 Gparam on 4 learners at 4 sites with H="),
        ((*ONE_LINE, "-H", "16", "-P", "16"), 4, "Not feasible: "),
        ((*ONE_LINE, "-K", "5"), 2, "error: sync.quorum is 5 but sync.learners is 4"),
        (("--params", "12B", "--bandwidth", "3 Gbit/s"), 2, "error: --bandwidth, --step-time and "),
        (("--params", "1B", "--regions", "1000000", *LINK), 2, "error: --regions is 1000000, but"),
        (("four-regions",), 0, "Feasible, extrapolated: "),
        (("nope",), 2, "error: nope is no scenario, neither shipped nor a file: there are four-r"),
        (("none.toml",), 2, "error: The config file none.toml cannot be read"),
    ],
)
def test_a_plan_answers_in_its_first_line_and_exit_code(
    words: tuple[str, ...], code: int, first: str
) -> None:
    found = plan(*words)
    assert found[0] == code
    assert found[1].startswith(first)


def test_set_wins_over_the_short_options() -> None:
    code, text = plan(*ONE_LINE, "--set", "plan.parameters=1B", "--json")
    assert code == 0
    assert json.loads(text)["figures"]["rounds"]["parameters"]["value"] == 1e9


def test_a_runs_own_config_is_enough_with_sites(tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        '[model]\npreset = "small"\n[sync]\nquorum = 1\n[sites.a]\nup = "1 Gbit/s"\n'
        'step_time = "1 s"\n[store]\npath = "x"\n'
    )
    code, text = plan(str(config), "--json")
    assert code == 0
    assert json.loads(text)["figures"]["rounds"]["parameters"]["value"] == 75713280


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (("plan", *ONE_LINE), {"jax", "optax", "numba", "numpy", "nats", "blosc2", "matplotlib"}),
        (("simulate", *SMALL), {"jax", "optax", "numba", "nats", "blosc2"}),
    ],
)
def test_nothing_heavy_is_imported(words: tuple[str, ...], heavy: set[str]) -> None:
    program = (
        "import sys; from skerry_tools.__main__ import app\n"
        f"try: app({list(words)!r})\n"
        "except SystemExit as end: assert not end.code\n"
        f"print(sorted({heavy!r} & sys.modules.keys()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_first_line_of_a_simulation_is_the_answer() -> None:
    first = simulate(*SMALL).splitlines()[0]
    assert first.startswith("150,000 chips as 8 decoupled learners, K = 1, 0.5 days: goodput 9")


def test_json_of_a_simulation_is_the_same_bytes_again_and_holds_no_nan() -> None:
    one, two = (simulate(*SMALL, "--json") for _ in range(2))
    assert one == two
    found = json.loads(one, parse_constant=pytest.fail)
    assert found["figures"]["result"]["goodput"]["unit"] == "share"
    assert set(found["figures"]["uptime"]) == {f"K = {k}" for k in range(1, 9)}
    assert found["status"]["failures.chip_mtbi"] == "published"


def test_a_blocking_run_waits() -> None:
    stops = ("sync.overlap_steps=0", "sync.quorum=8", "sync.fragments=1", "timing.spread=0.2")
    sets = [word for one in stops for word in ("--set", one)]
    assert "waiting for other learners" in simulate(*SMALL, *sets)


@pytest.mark.nats
def test_a_plan_that_measures_judges_by_what_this_machine_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measure, "PARAMETERS", 2**20)
    monkeypatch.setattr(measure, "LAYOUT", layout([LeafSpec("w", (2**20,))], 1))
    monkeypatch.setattr(measure, "PUBLISHED_BYTES", 8 * 1024**2)
    code, text = plan(*ONE_LINE, "--params", "1B", "--measure", "--json")
    assert code in {0, 4}
    found = json.loads(text)
    note = next(one for one in found["mind"] if one.startswith("measured on this machine"))
    assert re.search(r"encode int4 [\d.]+ [MG]B/s.*; publish [\d.]+ [MG]B/s$", note)
    assert found["figures"]["judged"]["broker"]["has"]["value"] != measured.BROKER_WRITE_B_S
    assert not any("hub.write is not given" in note for note in found["mind"])
