"""A user's own model, trained, evaluated and sampled from with nothing but the command line."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nats

CONFIG = """
[model]
factory = "bigram:build"
options = { width = 32 }
[data]
source = "text"
paths = ["text"]
seq_len = 32
batch = 4
[train]
steps = 150
lr = 0.01
[sync]
learners = 1
fragments = 2
[health]
port = 0
"""


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skerry.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def skerry(*args: str, cwd: Path) -> str:
    done = run(*args, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.drill
def test_a_model_of_ones_own_is_trained_evaluated_and_sampled(tmp_path: Path) -> None:
    shutil.copy(Path(__file__).with_name("bigram.py"), tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "sums.txt").write_text(" ".join(f"{n} and {n + 1};" for n in range(4000)))
    (tmp_path / "run.toml").write_text(CONFIG)
    assert "Run own is finished" in skerry("up", "run.toml", "--run", "own", cwd=tmp_path)
    told = json.loads(skerry("status", "--json", cwd=tmp_path))["run"]
    assert (told["run"], told["finished"]) == ("own", True), "read from the log that lies here"
    shown = skerry("status", cwd=tmp_path)
    assert re.search(r"own\s+finished", shown)
    assert "gone" not in shown
    checkpoints = ".skerry/checkpoints/own"
    further = ("up", "--run", "again", "--from", checkpoints, "--set", "train.steps=300")
    for command in (("eval", checkpoints), further):
        refused = run(*command, cwd=tmp_path)
        assert refused.returncode == 2
        assert "does not allow code from 'bigram'" in refused.stderr.splitlines()[-1]
    allowed = ("--set", "allow_code=bigram")
    data = ("--set", "allow_data=text")
    judged = json.loads(skerry("eval", checkpoints, "--json", *allowed, *data, cwd=tmp_path))
    assert judged["loss"] < math.log(256) / 2
    given = ("--prompt", "7 a", "--temperature", "0", *allowed)
    sampled = skerry("sample", checkpoints, *given, cwd=tmp_path)
    assert " and " in sampled
