"""The files of infra/launch: each runs a learner that its task names, with options that exist."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner

from skerry.protocol.subjects import checked_token
from skerry.settings import loading
from skerry_learner.__main__ import app
from tests.support.processes import call

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "infra" / "launch"
STOPPED = 75
"""What a learner that is stopped before its run ends exits with: EX_TEMPFAIL, try again."""
SKY = "sky-managed-2026-11-27-10-00-00-000000_skerry-learner_7-0"
Launch = tuple[list[str], dict[str, str]]


def skypilot() -> tuple[str, dict[str, str]]:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    return task["run"], {**task["envs"], "SKYPILOT_TASK_ID": SKY}


def dstack() -> tuple[str, dict[str, str]]:
    task = yaml.safe_load((FOLDER / "learner.dstack.yml").read_text())
    script = "\n".join(c for c in task["commands"] if not c.startswith(("cd ", "pip ")))
    given = dict(line.split("=", 1) for line in task["env"])
    return script, {**given, "DSTACK_RUN_NAME": "spot-1"}


def slurm() -> tuple[str, dict[str, str]]:
    given = {"SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "3"}
    return (FOLDER / "learners.sbatch").read_text(), given


@pytest.mark.skipif(not shutil.which("git"), reason="needs git")
def test_of_all_keys_only_a_learners_leaves_with_the_checkout(tmp_path: Path) -> None:
    shutil.copy(ROOT / ".gitignore", tmp_path)
    assert call("git", "init", "-q", cwd=tmp_path).returncode == 0
    ours = ("keys/admin.nk", "keys/regions/eu/link.creds", "keys-30/signer.json")
    ignored = call("git", "check-ignore", *ours, "learner.nk", cwd=tmp_path)
    assert ignored.stdout.split() == [*ours]


@pytest.fixture
def launched(tmp_path: Path) -> Callable[..., Launch]:
    """Run a launcher's script with a stand-in for skerry; return its arguments and settings."""
    stand_in = tmp_path / "bin" / "skerry"
    stand_in.parent.mkdir()
    stand_in.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\nprintf "ENV\\n"\nenv | grep ^SKERRY_\n')
    (stand_in.parent / "srun").write_text('#!/bin/sh\nexec "$@"\n')
    for program in stand_in.parent.iterdir():
        program.chmod(0o755)

    def launch(made: tuple[str, dict[str, str]], **more: str) -> Launch:
        script, given = made
        env = {"PATH": f"{stand_in.parent}:{os.environ['PATH']}", "HOME": str(tmp_path), **given}
        done = call("bash", "-c", script, cwd=tmp_path, env={**env, **more})
        assert done.returncode == 0, done.stderr
        words, _, variables = done.stdout.partition("ENV\n")
        return words.splitlines(), dict(line.split("=", 1) for line in variables.splitlines())

    return launch


@pytest.mark.parametrize(
    ("made", "name"), [(skypilot, "sky-"), (dstack, "spot-1"), (slurm, "slurm-4711-3")]
)
def test_a_launcher_starts_a_learner_whose_name_outlasts_it(
    made: Callable[[], tuple[str, dict[str, str]]], name: str, launched: Callable[..., Launch]
) -> None:
    (command, *words), environ = launched(made())
    assert command == "learner"
    assert launched(made())[0] == [command, *words]
    given = words[words.index("--name") + 1]
    assert checked_token(given, "name").startswith(name)
    assert CliRunner().invoke(app, [*words, "--help"]).exit_code == 0
    assert environ.pop("SKERRY_RUN") == "main"
    sets = [words[place + 1] for place, word in enumerate(words) if word == "--set"]
    local = loading.load(None, sets, environ).local.learner
    assert (local.path.name, local.stopped_code) == ("learners", STOPPED)


def test_a_key_is_used_where_there_is_one(launched: Callable[..., Launch], tmp_path: Path) -> None:
    (tmp_path / "sky_workdir").mkdir()
    for folder in (tmp_path, tmp_path / "sky_workdir"):
        (folder / "learner.nk").touch()
    words, environ = launched(skypilot(), LEARNER="spot-2")
    assert environ["SKERRY_NATS__CREDENTIALS"] == str(tmp_path / "sky_workdir" / "learner.nk")
    assert "spot-2" in words
    assert launched(dstack())[1]["SKERRY_NATS__CREDENTIALS"] == str(tmp_path / "learner.nk")
    words, environ = launched(slurm(), LEARNERS="site", KEYS="keys")
    assert environ["SKERRY_NATS__CREDENTIALS"] == "keys/site-3.nk"
    assert "site-3" in words


def test_a_job_that_is_taken_away_is_started_again() -> None:
    task = yaml.safe_load((FOLDER / "skypilot.yaml").read_text())
    assert task["resources"]["job_recovery"]["recover_on_exit_codes"] == [STOPPED]
    task = yaml.safe_load((FOLDER / "learner.dstack.yml").read_text())
    assert {"interruption", "error"} <= set(task["retry"]["on_events"])
    assert "#SBATCH --requeue\n" in (FOLDER / "learners.sbatch").read_text()


@pytest.mark.parametrize(("code", "said"), [(STOPPED, "requeue 4714"), (0, ""), (2, "")])
def test_a_slurm_job_whose_time_is_up_is_queued_again(tmp_path: Path, code: int, said: str) -> None:
    script, given = slurm()
    for name, body in {"srun": f"exit {code}", "scontrol": 'echo "$@"'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "HOME": str(tmp_path)}
    done = call("bash", "-c", script, cwd=tmp_path, env=path | given | {"SLURM_JOB_ID": "4714"})
    assert (done.returncode, done.stdout.strip()) == (0 if said else code, said)
