"""Files at the root that no other test would miss: Makefile, CI entry, lock, pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

TARGETS = ("help", "setup", "demo", "test", "lint", "format", "proto", "bench", "secrets", "clean")
SERVICES = ("learner", "syncer", "checkpointer", "health_monitor")

# Assembled, so that this file does not find itself.
MACHINE_PATHS = re.compile("|".join(f"/{name}/" for name in ("work", "farm", "root")))


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_its_targets(root: Path, target: str) -> None:
    done = subprocess.run(
        ["make", "--dry-run", target], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("target", TARGETS)
def test_make_help_names_its_targets(root: Path, target: str) -> None:
    told = subprocess.run(["make", "help"], cwd=root, capture_output=True, text=True, check=True)
    assert f"make {target} " in told.stdout


def test_the_ci_entry_runs_make_test(root: Path) -> None:
    entry = root / ".ci" / "run"
    assert os.access(entry, os.X_OK)
    assert "\nmake test" in entry.read_text()
    subprocess.run(["bash", "-n", str(entry)], check=True)


def test_the_lock_matches_the_project(root: Path, uv: str, plain_environ: dict[str, str]) -> None:
    done = subprocess.run(
        [uv, "lock", "--check"],
        cwd=root,
        env=plain_environ,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_service_has_an_extra_that_all_contains(root: Path) -> None:
    extras = tomllib.loads((root / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    names = {name.replace("_", "-") for name in SERVICES}
    assert names <= set(extras)
    assert names <= set(re.findall(r"[a-z-]+", extras["all"][0]))


def test_images_and_makefile_pin_the_same_uv(root: Path) -> None:
    pinned = re.search(r"^UV_VERSION := (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    for service in SERVICES:
        recipe = (root / "services" / service / "Dockerfile").read_text()
        assert f"uv=={pinned[1]}\n" in recipe


def test_no_path_of_the_machine_it_was_written_on(root: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=root, capture_output=True, text=True, check=False
    )
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = (name for name in listed.stdout.split("\0") if name and (root / name).is_file())
    found = [
        name for name in texts if MACHINE_PATHS.search((root / name).read_text(errors="replace"))
    ]
    assert found == []
