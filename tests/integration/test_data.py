"""docs/how-to/data.md as a reader runs it: from text to a tokenizer, shards and a run."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from tests.support.processes import skerry

ALLOWED = ("--set", "allow_code=my_data", "--set", "allow_data=tokenizer")
SHORT = ("--set", "health.port=0", "--set", "data.batch=2", "--set", "sync.learners=1")
PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "data.md"


@pytest.mark.nats
@pytest.mark.drill
@pytest.mark.timeout(900)
def test_text_becomes_a_tokenizer_a_corpus_and_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "books").mkdir()
    for n in range(200):
        text = "".join(f"Chapter {n}, line {k}: {n * k} whales, {k**3} waves.\n" for k in range(60))
        (tmp_path / "books" / f"{n}.txt").write_text(text)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "a.jsonl").write_text(json.dumps({"text": "one line of a log " * 20}))
    for name, text in re.findall(
        r"```(?:toml|python)\n# (\S+)\n(.*?)```", PAGE.read_text(), re.DOTALL
    ):
        short = text.replace("steps = 200", "steps = 12").replace("~/", f"{tmp_path}/")
        (tmp_path / name).write_text(short)
    first = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)[0]
    said = []
    for line in first.splitlines():
        words = shlex.split(line.replace("~/", f"{tmp_path}/"), comments=True)
        more = SHORT if words[1] == "up" else ()
        done = skerry(tmp_path, *words[1:], *more)
        assert done.returncode == 0, done.stderr + done.stdout
        said.append(done.stdout)
    assert "201 documents" in said[1]
    assert "as they were prepared" in said[2]
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    for line in ("text.toml --run text", "dataset.toml --run rows --allow-code my_data"):
        done = skerry(tmp_path, "up", *line.split(), *SHORT)
        assert done.returncode == 0, done.stderr + done.stdout
        assert line.partition(" --run")[0] in PAGE.read_text()
    done = skerry(tmp_path, "eval", ".skerry/checkpoints/rows", "--json", *ALLOWED)
    assert 0 < json.loads(done.stdout)["bits_per_byte"] < 8, done.stderr
    done = skerry(tmp_path, "sample", ".skerry/checkpoints/prepared", "--prompt", "Chapter 1")
    assert done.stdout.startswith("Chapter 1"), done.stderr
