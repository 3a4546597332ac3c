"""A user's own model, trained, evaluated and sampled from with nothing but the command line."""

from __future__ import annotations

import json
import math
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.nats

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "own-model.md"


def run(*args: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "skerry.cli.main", *args]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd)


def skerry(*args: str, cwd: Path) -> str:
    done = run(*args, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.drill
def test_a_model_of_ones_own_is_trained_evaluated_and_sampled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = PAGE.read_text()
    (model, rules), (config,) = (
        re.findall(rf"```{kind}\n(.*?)```", text, re.DOTALL) for kind in ("python", "toml")
    )
    (tmp_path / "bigram.py").write_text(model)
    (tmp_path / "rules.py").write_text(rules)
    up, judge, sample, again, ruled = (
        shlex.split(line)[1:]
        for line in re.findall(r"^skerry .*(?=\n)", text.replace("\\\n", ""), re.MULTILINE)
    )
    monkeypatch.setenv("SKERRY_HEALTH__PORT", "0")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "sums.txt").write_text(" ".join(f"{n} and {n + 1};" for n in range(4000)))
    (tmp_path / "own.toml").write_text(config)
    assert "Run own is finished" in skerry(*up, cwd=tmp_path)
    told = json.loads(skerry("status", "--json", cwd=tmp_path))["run"]
    assert (told["run"], told["finished"]) == ("own", True), "read from the log that lies here"
    shown = skerry("status", cwd=tmp_path)
    assert re.search(r"own\s+finished", shown)
    assert "gone" not in shown
    for command in (judge[:2], again[:-2]):
        refused = run(*command, cwd=tmp_path)
        assert refused.returncode == 2
        assert "does not allow code from 'bigram'" in refused.stderr.splitlines()[-1]
    assert json.loads(skerry(*judge, "--json", cwd=tmp_path))["loss"] < math.log(256) / 2
    assert " and " in skerry(*sample, cwd=tmp_path)
    assert "Run again is finished" in skerry(*again, cwd=tmp_path)
    assert "Run rules is finished" in skerry(*ruled, cwd=tmp_path)
