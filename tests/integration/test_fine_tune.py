"""docs/how-to/fine-tune.md as a reader runs it: from a folder of weights to another one."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest

from skerry.models import hf
from tests.support.hf_folder import random_folder
from tests.support.processes import skerry

pytestmark = [pytest.mark.nats, pytest.mark.drill]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fine-tune.md"
CHECKPOINTS = ".skerry/checkpoints/main"
QUICK = ("--set", "health.port=0", "--set", "train.lr=2e-2")


def run(cwd: Path, *arguments: str) -> str:
    done = skerry(cwd, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a model, some text, and the page's settings, made short."""
    random_folder(tmp_path / "models" / "mine")
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "one.txt").write_text("the quick brown fox jumps over the lazy dog.\n" * 2000)
    (settings,) = re.findall(r"```toml\n(.*?)```", PAGE.read_text(), re.DOTALL)
    settings = settings.replace("~/notes", str(notes)).replace("steps = 200", "steps = 40")
    (tmp_path / "finetune.toml").write_text(settings.replace("seq_len = 128", "seq_len = 32"))
    return tmp_path


def test_weights_are_trained_judged_exported_and_loaded(site: Path) -> None:
    run(site, "up", "finetune.toml", "--from-hf", "models/mine", *QUICK)
    scores = json.loads(run(site, "eval", CHECKPOINTS, "--json", "--batches", "2"))
    fresh = np.log(260)
    assert scores["loss"] < fresh - 0.5
    other = json.loads(run(site, "eval", CHECKPOINTS, "--text", "notes", "--json"))
    assert other["perplexity"] > 1
    assert run(site, "sample", CHECKPOINTS, "--prompt", "the ", "--tokens", "5").startswith("the ")

    said = run(site, "export", CHECKPOINTS, "--to", "hf", "--out", "out/mine")
    assert "out/mine" in said
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(site / "out" / "mine")
    text = torch.tensor([list(b"the quick brown fox jumps over the lazy dog.\n")])
    assert model(text, labels=text).loss.item() < fresh - 0.5


def test_a_run_that_has_not_learnt_yet_holds_the_folders_weights(site: Path) -> None:
    nothing = ("--set", "train.steps=2", "--set", "train.lr=1e-12", "--set", "health.port=0")
    run(site, "up", "finetune.toml", "--from-hf", "models/mine", *nothing)
    run(site, "export", CHECKPOINTS, "--out", "out")
    arch = hf.read_config(site / "out")
    before, after = (hf.read_tensors(site / f, arch) for f in ("models/mine", "out"))
    for name in before:
        assert np.asarray(after[name]) == pytest.approx(np.asarray(before[name]), abs=1e-6), name


def test_a_folder_that_is_no_model_starts_nothing(site: Path) -> None:
    done = skerry(site, "up", "finetune.toml", "--from-hf", "notes")
    assert done.returncode != 0
    assert "config.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (site / ".skerry" / "main").exists()
