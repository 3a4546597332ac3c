"""The wheel, built from this tree and tried away from it."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path

import pytest

from tests.support.processes import call

pytestmark = pytest.mark.drill

PACKAGES = {
    "skerry": "shared",
    "skerry_learner": "services/learner",
    "skerry_syncer": "services/syncer",
    "skerry_checkpointer": "services/checkpointer",
    "skerry_evaluator": "services/evaluator",
    "skerry_health_monitor": "services/health_monitor",
    "skerry_tools": "shared",
}
"""Import packages, and the folders of the checkout that they lie in."""


def output(*command: str, cwd: Path, env: dict[str, str]) -> str:
    done = call(*command, cwd=cwd, env=env)
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(
    root: Path, uv: str, plain_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("dist")
    output(uv, "build", "--wheel", "--out-dir", str(out), str(root), cwd=out, env=plain_environ)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(root: Path, uv: str, wheel: Path, plain_environ: dict[str, str]) -> Path:
    """A fresh environment with the wheel and the locked versions of what it needs."""
    venv = wheel.parent / "venv"
    pins = wheel.parent / "pins.txt"
    frozen = ["--frozen", "--no-dev", "--extra", "all", "--no-emit-project", "--no-hashes"]
    output(uv, "export", *frozen, "--quiet", "-o", str(pins), cwd=root, env=plain_environ)
    made = (uv, "venv", "--python", sys.executable, str(venv))
    output(*made, cwd=wheel.parent, env=plain_environ)
    into = ["--python", str(venv / "bin" / "python"), "--constraints", str(pins)]
    wanted = f"skerry[all] @ {wheel.as_uri()}"
    output(uv, "pip", "install", *into, wanted, cwd=wheel.parent, env=plain_environ)
    return venv / "bin"


def test_the_wheel_carries_every_file_of_every_package_and_nothing_but_metadata_beside_them(
    wheel: Path, root: Path
) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)
    sources = {
        path.relative_to(root / folder).as_posix()
        for package, folder in PACKAGES.items()
        for path in (root / folder / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources <= set(zipfile.ZipFile(wheel).namelist())


@pytest.mark.parametrize("command", [["skerry", "--help"], ["skerry", "doctor"]])
def test_the_installed_command_works_in_any_folder(
    installed: Path, command: list[str], plain_environ: dict[str, str], tmp_path: Path
) -> None:
    output(str(installed / command[0]), *command[1:], cwd=tmp_path, env=plain_environ)


@pytest.mark.parametrize(
    "package", [*(n for n in PACKAGES if PACKAGES[n] != "shared"), "skerry_tools.lab"]
)
def test_each_installed_program_explains_itself(
    installed: Path, package: str, plain_environ: dict[str, str], tmp_path: Path
) -> None:
    python = str(installed / "python")
    shown = output(python, "-m", package, "--help", cwd=tmp_path, env=plain_environ)
    wanted = ("--learners", "--seed") if package == "skerry_tools.lab" else ("--nats", "--run")
    assert all(option in shown for option in wanted)


def test_the_installed_package_is_not_the_checkout(
    installed: Path, root: Path, plain_environ: dict[str, str], tmp_path: Path
) -> None:
    ask = "import skerry; print(skerry.__file__)"
    path = output(str(installed / "python"), "-c", ask, cwd=tmp_path, env=plain_environ)
    assert not Path(path).is_relative_to(root)
