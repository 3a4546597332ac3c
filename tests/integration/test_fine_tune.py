"""docs/how-to/fine-tune.md as a reader runs it: from a folder of weights to another one."""

from __future__ import annotations

import importlib.util
import json
import re
import shlex
from functools import reduce
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from skerry.data.documents import Article
from skerry.data.prepare import prepare
from skerry.data.tokenizer import Words, train_tokenizer
from skerry.models import hf
from skerry.models.adapters import ADAPTER
from skerry.settings.local import StoreSettings
from skerry.store import checkpoint
from skerry.store.finding import locate
from tests.support.hf_folder import random_folder
from tests.support.processes import skerry

pytestmark = [pytest.mark.nats, pytest.mark.drill, pytest.mark.timeout(900)]

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "fine-tune.md"
CHECKPOINTS = ".skerry/checkpoints/main"
NOTES = "".join(
    f"Note {n}: once it rained for {n * n % 97} days, then the sun came out.\n" for n in range(2500)
)
SHORT = {
    "vocab = 4096": "vocab = 300\nd_model = 32\nheads = 4\nkv_heads = 2\nd_ff = 48",
    "layers = 12": "layers = 2",
    "seq_len = 256": "seq_len = 32",
    "seq_len = 128": "seq_len = 32",
    "steps = 1000": "steps = 40\nlr = 2e-2",
    "steps = 200": "steps = 40",
    "lr = 1e-4": "lr = 2e-2",
    "learners = 2": "learners = 2\nquorum = 2",
}
"""What makes the page's runs short; one learner may be through before the other begins, and is
waited for, because what each learns by itself in all of so short a run adds up to too much."""
ELSEWHERE = ("skerry learner", "--tasks")
"""Lines for several machines, and for a package that is not installed here."""


def run(cwd: Path, *arguments: str) -> str:
    done = skerry(cwd, *arguments)
    assert done.returncode == 0, done.stderr + done.stdout
    return done.stdout


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with a model and its tokenizer, some text, and the page's settings, made short."""
    notes, model = tmp_path / "notes", random_folder(tmp_path / "models" / "mine")
    notes.mkdir()
    for n, start in enumerate(range(0, len(NOTES), 5000)):
        (notes / f"{n}.txt").write_text(NOTES[start : start + 5000])
    words = train_tokenizer([NOTES], 260, tmp_path / "scratch")
    for file in words.folder.iterdir():
        file.rename(model / file.name)
    (model / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    for name, settings in re.findall(r"```toml\n# (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL):
        short = reduce(lambda text, pair: text.replace(*pair), SHORT.items(), settings)
        (tmp_path / name).write_text(short)
    return tmp_path


def test_every_command_of_the_page_works(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SKERRY_HEALTH__PORT", "0")
    blocks = re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)
    said: dict[str, str] = {}
    for line in "".join(blocks).splitlines():
        if not any(part in line for part in ELSEWHERE):
            short = line.replace("~/notes", str(site / "notes")).replace("4096", "300")
            said[line] = run(site, *shlex.split(short, comments=True)[1:])
    (scores,) = (json.loads(text) for line, text in said.items() if "--json" in line)
    fresh = np.log(260)
    assert scores["loss"] < fresh - 0.5
    sampled = [text for line, text in said.items() if "--prompt" in line]
    assert all(text.startswith("Once") for text in sampled)
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("torch")
    model = transformers.AutoModelForCausalLM.from_pretrained(site / "out" / "mine")
    tokenizer = transformers.AutoTokenizer.from_pretrained(site / "out" / "mine")
    ids = tokenizer(NOTES[:200], return_tensors="pt")["input_ids"]
    assert model(ids, labels=ids).loss.item() < fresh - 0.5


def test_a_run_that_has_not_learnt_yet_holds_the_folders_weights(site: Path) -> None:
    lines = [Article(line) for line in NOTES.splitlines(keepends=True)]
    prepare(lines, Words.of(site / "models" / "mine"), site / "shards-mine")
    nothing = ("--set", "train.steps=2", "--set", "train.lr=1e-12", "--set", "health.port=0")
    run(site, "up", "finetune.toml", "--from-hf", "models/mine", *nothing)
    run(site, "export", CHECKPOINTS, "--out", "out")
    arch = hf.read_config(site / "out")
    before, after = (hf.read_tensors(site / f, arch) for f in ("models/mine", "out"))
    rtol = 2.0**-8  # rounding to bf16
    for name in before:
        held, wanted = np.asarray(after[name]), np.asarray(before[name])
        atol = rtol * np.abs(wanted).max() / 14  # half a step of a delta in int4
        np.testing.assert_allclose(held, wanted, rtol=rtol, atol=atol, err_msg=name)


def test_two_learners_train_adapters_that_peft_loads(site: Path) -> None:
    base, adapted = site / "models" / "mine", site / "adapters"
    lines = [Article(line) for line in NOTES.splitlines(keepends=True)]
    prepare(lines, Words.of(base), site / "shards-mine")
    lora = "model.lora_rank=4", 'model.lora_targets=["q_proj","v_proj","o_proj"]', "health.port=0"
    sets = [part for one in lora for part in ("--set", one)]
    run(site, "up", "finetune.toml", "--from-hf", "models/mine", *sets)
    named = "--set", "model.path=models/mine"
    run(site, "export", CHECKPOINTS, "--to", "peft", "--out", "adapters", "--tokenizer", str(base))
    run(site, "export", CHECKPOINTS, "--to", "hf", "--out", "out", *named)
    saved, trained = checkpoint.params(*locate(str(site / CHECKPOINTS), StoreSettings()))
    assert all(ADAPTER.fullmatch(name) for name in trained)
    assert len(saved.learners) == 2
    found = load_file(adapted / "adapter_model.safetensors")
    assert all(np.any(leaf) for leaf in found.values())
    transformers, torch = map(pytest.importorskip, ("transformers", "torch"))
    ids = torch.arange(1, 40)[None]
    whole = transformers.AutoModelForCausalLM.from_pretrained(site / "out")
    if importlib.util.find_spec("peft") is not None:
        peft = pytest.importorskip("peft")
        plain = transformers.AutoModelForCausalLM.from_pretrained(base)
        beside = peft.PeftModel.from_pretrained(plain, adapted)
        np.testing.assert_allclose(
            whole(ids).logits.detach(), beside(ids).logits.detach(), rtol=1e-3, atol=1e-4
        )
    arch = hf.read_config(base)
    before, after = (hf.read_tensors(folder, arch) for folder in (base, site / "out"))
    for name in before:
        key = f"base_model.model.{name.removesuffix('.weight')}"
        down, up = found.get(f"{key}.lora_A.weight"), found.get(f"{key}.lora_B.weight")
        learnt = 0.0 if down is None or up is None else 2.0 * up @ down
        wanted = np.asarray(before[name]) + learnt
        np.testing.assert_allclose(np.asarray(after[name]), wanted, rtol=1e-5, atol=1e-6)


def test_a_folder_that_is_no_model_starts_nothing(site: Path) -> None:
    done = skerry(site, "up", "finetune.toml", "--from-hf", "notes")
    assert done.returncode != 0
    assert "config.json" in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not (site / ".skerry" / "main").exists()
