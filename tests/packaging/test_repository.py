"""Files at the root that no other test would miss: Makefile, CI entry, lock, pins."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.support.processes import call

TARGETS = (
    *("help", "setup", "demo", "check", "test", "drill", "lint"),
    *("format", "proto", "bench", "docs", "release", "secrets", "clean"),
)
SERVICES = ("learner", "syncer", "checkpointer", "health_monitor")
GOOD = "..\n\x1b[32m==== 40 passed, 2 skipped, 9 deselected in 61.50s (0:01:01) ====\x1b[0m\n"
BAD = "= short test summary info =\n= 1 failed, 7 passed, 1 error in 3.25s =\nmake: Error 1\n"

# Assembled, so that this file does not find itself.
MACHINE_PATHS = re.compile("|".join(f"/{name}/" for name in ("work", "farm", "root")))


def test_make_knows_its_targets_and_helps_with_them(root: Path) -> None:
    helped = call("make", "help", cwd=root)
    for target in TARGETS:
        assert call("make", "--dry-run", target, cwd=root).returncode == 0, target
        assert f"make {target} " in helped.stdout


def test_the_ci_entry_runs_lint_book_tests_and_drills(root: Path) -> None:
    entry = root / ".ci" / "run"
    assert os.access(entry, os.X_OK)
    said = entry.read_text()
    assert re.findall(r"^stage make (\w+)$", said, re.MULTILINE) == [
        *("torch", "lint", "docs", "test", "drill")
    ]
    subprocess.run(["bash", "-n", str(entry)], check=True)


@pytest.mark.parametrize(
    ("stages", "line", "code"),
    [
        ([("checked\n", 0), (GOOD, 0)], "40 passed, 2 skipped in 61.50s", 0),
        ([(GOOD, 0), (GOOD, 0)], "80 passed, 4 skipped in 123.00s", 0),
        ([(GOOD, 0), (BAD, 2)], "47 passed, 1 failed, 1 errors, 2 skipped in 64.75s", 1),
        ([("style\n", 2), (GOOD, 0)], "40 passed, 1 failed, 2 skipped in 61.50s", 1),
        ([(GOOD, 2), (GOOD, 0)], "80 passed, 1 failed, 4 skipped in 123.00s", 1),
        ([], "0 passed, 1 failed in 0.00s", 1),
    ],
)
def test_ci_sums_up_its_stages_in_the_form_of_pytest(
    root: Path, tmp_path: Path, stages: list[tuple[str, int]], line: str, code: int
) -> None:
    for number, (said, status) in enumerate(stages):
        (tmp_path / f"{number}.log").write_text(said)
        (tmp_path / f"{number}.status").write_text(f"{status}\n")
    done = call(sys.executable, root / ".ci" / "total.py", tmp_path)
    assert (done.stdout.strip(), done.returncode) == (line, code)


def test_what_a_contributor_touched_names_its_tests(tmp_path: Path, root: Path) -> None:
    """Committed on a branch, changed and new; tests that start processes are left out."""
    if shutil.which("git") is None:
        pytest.skip("no git")
    for folder in ("tests/unit/syncer", "tests/unit/tools/lab", "tests/unit/log", "tests/fault"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "tests/unit/test_tasks.py").touch()
    git = ("git", "-c", "user.name=x", "-c", "user.email=x@y.z")

    def commit(*paths: str) -> None:
        write(*paths)
        subprocess.run([*git, "add", "."], cwd=tmp_path, check=True)
        subprocess.run([*git, "commit", "-qm", "work"], cwd=tmp_path, check=True)

    def write(*paths: str) -> None:
        for path in paths:
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text("x")

    subprocess.run([*git, "init", "-qb", "main"], cwd=tmp_path, check=True)
    commit("shared/skerry/log/base.py", "infra/a.yml")
    subprocess.run([*git, "checkout", "-qb", "mine"], cwd=tmp_path, check=True)
    commit("services/syncer/skerry_syncer/work.py")
    write("shared/skerry_tools/lab/clock.py", "shared/skerry/tasks.py")
    write("tests/unit/syncer/test_work.py", "tests/fault/test_a.py", "infra/a.yml")
    done = call(sys.executable, root / ".ci" / "touched.py", cwd=tmp_path)
    assert done.stdout.split() == [
        "tests/unit/syncer",
        "tests/unit/test_tasks.py",
        "tests/unit/tools/lab",
    ]


def test_the_lock_matches_the_project(root: Path, uv: str, plain_environ: dict[str, str]) -> None:
    done = call(uv, "lock", "--check", cwd=root, env=plain_environ)
    assert done.returncode == 0, done.stderr


def test_every_service_has_an_extra_that_all_contains(root: Path) -> None:
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    names = {name.replace("_", "-") for name in SERVICES}
    assert names <= set(extras)
    assert names <= set(re.findall(r"[a-z-]+", extras["all"][0]))


def test_every_image_of_ours_has_the_projects_version(root: Path) -> None:
    version = tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"]
    files = [root / "docker-compose.yml", *root.glob("infra/**/*.y*ml"), *root.glob("docs/**/*.md")]
    texts = [path.read_text() for path in files]
    found = [tag for text in texts for tag in re.findall(r"skerry/[a-z-]+:([\w.]+)", text)]
    wheels = [tag for text in texts for tag in re.findall(r"skerry-([\d.]+)-py3", text)]
    assert len(found) >= 14
    assert {*found, *wheels} == {version}
    assert f"## {version} (" in (root / "CHANGELOG.md").read_text()


def test_images_and_makefile_pin_the_same_uv(root: Path) -> None:
    pinned = re.search(r"^UV_VERSION := (\S+)$", (root / "Makefile").read_text(), re.MULTILINE)
    assert pinned is not None
    for service in SERVICES:
        recipe = (root / "services" / service / "Dockerfile").read_text()
        assert f"uv=={pinned[1]}\n" in recipe


def test_no_path_of_the_machine_it_was_written_on(root: Path) -> None:
    if shutil.which("git") is None:
        pytest.skip("no git")
    listed = call("git", "ls-files", "-z", cwd=root)
    if listed.returncode != 0:
        pytest.skip("not a git checkout")
    texts = (name for name in listed.stdout.split("\0") if name and (root / name).is_file())
    found = [
        name for name in texts if MACHINE_PATHS.search((root / name).read_text(errors="replace"))
    ]
    assert found == []
