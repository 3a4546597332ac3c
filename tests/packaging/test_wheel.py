"""The wheel, built from this tree and tried away from it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

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


def call(command: list[str], *, cwd: Path, env: dict[str, str]) -> str:
    done = subprocess.run(
        command, cwd=cwd, env=env, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(
    root: Path, uv: str, plain_environ: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    out = tmp_path_factory.mktemp("dist")
    call([uv, "build", "--wheel", "--out-dir", str(out), str(root)], cwd=out, env=plain_environ)
    (built,) = out.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(root: Path, uv: str, wheel: Path, plain_environ: dict[str, str]) -> Path:
    """A fresh environment with the wheel and the locked versions of what it needs."""
    venv = wheel.parent / "venv"
    pins = wheel.parent / "pins.txt"
    frozen = ["--frozen", "--no-dev", "--extra", "all", "--no-emit-project", "--no-hashes"]
    call([uv, "export", *frozen, "--quiet", "-o", str(pins)], cwd=root, env=plain_environ)
    call([uv, "venv", "--python", sys.executable, str(venv)], cwd=wheel.parent, env=plain_environ)
    into = ["--python", str(venv / "bin" / "python"), "--constraints", str(pins)]
    call(
        [uv, "pip", "install", *into, f"skerry[all] @ {wheel.as_uri()}"],
        cwd=wheel.parent,
        env=plain_environ,
    )
    return venv / "bin"


def test_the_wheel_carries_every_package_with_its_type_marker(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    assert {f"{package}/py.typed" for package in PACKAGES} <= names


def test_the_wheel_carries_nothing_but_packages_and_metadata(wheel: Path) -> None:
    tops = {name.split("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {top for top in tops if not top.endswith(".dist-info")} == set(PACKAGES)


def test_the_wheel_carries_every_file_of_every_package(wheel: Path, root: Path) -> None:
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
    call([str(installed / command[0]), *command[1:]], cwd=tmp_path, env=plain_environ)


@pytest.mark.parametrize(
    "package", [*(n for n in PACKAGES if PACKAGES[n] != "shared"), "skerry_tools.lab"]
)
def test_each_installed_program_explains_itself(
    installed: Path, package: str, plain_environ: dict[str, str], tmp_path: Path
) -> None:
    python = str(installed / "python")
    told = call([python, "-m", package, "--help"], cwd=tmp_path, env=plain_environ)
    wanted = ("--learners", "--seed") if package == "skerry_tools.lab" else ("--nats", "--run")
    assert all(option in told for option in wanted)


def test_the_installed_package_is_not_the_checkout(
    installed: Path, root: Path, plain_environ: dict[str, str], tmp_path: Path
) -> None:
    told = "import skerry; print(skerry.__file__)"
    path = call([str(installed / "python"), "-c", told], cwd=tmp_path, env=plain_environ)
    assert not Path(path).is_relative_to(root)
