"""Typical mistakes: each is one sentence with the fix, at once, before anything is created.

They go the way of a person's command line, in this process. A mistake that would get through is
noticed because it becomes a program, reaches for a broker, or leaves something in the folder.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from skerry.cli import local_log, main, ready
from skerry.cli.cluster import devices
from skerry.cli.programs import COMMANDS, PROGRAMS
from skerry.data.__main__ import app as data
from skerry.service.entry import answer
from skerry_checkpointer.__main__ import app as checkpointer
from skerry_evaluator.__main__ import app as evaluator
from skerry_health_monitor.__main__ import app as health_monitor
from skerry_learner.__main__ import app as learner
from skerry_syncer.__main__ import app as syncer
from skerry_tools.__main__ import app as tools
from skerry_tools.lab.__main__ import app as lab

APPS = {
    "learner": learner,
    "syncer": syncer,
    "checkpointer": checkpointer,
    "evaluator": evaluator,
    "health-monitor": health_monitor,
    "tools": tools,
    "data": data,
    "lab": lab,
}
NOWHERE = "--nats nats://127.0.0.1:1 --set nats.connect_timeout_s=0.05"

MISTAKES = [
    # A setting.
    ("eval . --set eval.batches=4", "eval.batches would change nothing here"),
    ("eval . --set data.field=body", "leave it out"),
    ("eval . --tasks piqa --json", "leave --text, --batches and --json out"),
    ("sample . --set model.preset=tiny", "the checkpoint brings its own"),
    ("up --set sync.h_step=3", "did you mean sync.h_steps?"),
    ("up --set learners=3", "did you mean sync.learners?"),
    ("up --set sync=3", "give it as [sync]"),
    ("up --set sync.learners", "write it as --set table.key=value"),
    ("up --set sync.learners=two", "must be a whole number"),
    ("up --set sync.learners=0", "must be at least 1"),
    ("up --set train.lr=-1", "must be more than 0"),
    ("up --set train.lr=nan", "must be a finite number"),
    ("up --set eval.ema=1.5", "must be less than 1"),
    ("up --set train.clip=true", "must be a number"),
    ("up --set mode=dilocco", "must be one of"),
    ("up --set model.preset=medium", "must be one of"),
    ("up --set mode=diloco --set sync.fragments=4", "leave it out or set sync.fragments=1"),
    ("up --set sync.quorum=5", "set sync.quorum to at most 2"),
    ("up --set sync.overlap_steps=24", "below h_steps, or h_steps to at least 25"),
    ("up --set sync.shards=99", "at most 8, or sync.fragments to at least 99"),
    ("up --set data.batch=8 --set train.accumulate=3", "choose a divisor"),
    ("up --set model.heads=3 --set model.d_model=64", "heads must divide d_model"),
    ("up --set sync.contribution_scheme=int3", "must be one of"),
    ("up --set outer.preset=direct --set outer.momentum=0.9", "remove it or set outer.preset"),
    ("up --set model.factory=my_model", "must be module:function"),
    ("up --set train.inner=lion", "adamw, muon, gradient, or module:function"),
    ("up --set train.schedule=linear", "must be one of"),
    ("up --set log_level=verbose", "must be one of"),
    ("up --set train.steps=1e6", "must be a whole number"),
    ("up --set learner.mesh=rows=2", "such as data=2,fsdp=4"),
    ("up --set sync.merge=my_rules:median", "nor installed"),
    ("typo up", "did you mean sync.h_steps?"),
    # A config file.
    ("up nowhere.toml", "No such file"),
    ("up broken.toml", "is not valid TOML"),
    ("up bytes.toml", "is not UTF-8 text"),
    ("up typo.toml", "did you mean model.preset?"),
    ("up books", "Is a directory"),
    ("config show nowhere.toml", "No such file"),
    ("up --config broken.toml", "is not valid TOML"),
    ("lab nowhere.toml", "No such file"),
    ("plan --params -5B", "plan.parameters (from the command line)"),
    ("plan --params 12X", 'such as 12e9 or "12B"'),
    ("plan --bandwidth 3", "about --regions"),
    ("simulate nowhere", "neither shipped nor a file"),
    # A command line.
    ("upp", "Did you mean 'up'?"),
    ("up --learner 2", "--learners"),
    ("sample", "Missing argument 'CHECKPOINT'"),
    ("export books", "Missing option '--out'"),
    ("keys add site --role leaner", "is not one of 'learner'"),
    # Text.
    ("up --set data.source=text", "name the files or folders"),
    ('up --set data.paths=["books"]', 'set data.source to "text"'),
    ('up --set data.source=text --set data.paths=["nowhere"]', "correct data.paths"),
    ('up --set data.source=text --set data.paths=["odd"]', "names no file that ends in"),
    ('up --set data.source=text --set data.paths=["short.txt"]', "lower data.seq_len"),
    ('up --set data.source=tokens --set data.paths=["words.npy"]', "set model.vocab to"),
    ('up --set data.source=prepared --set data.paths=["books"]', "data prepare"),
    ("up --set data.tokenizer_folder=x", 'set data.source to "text"'),
    (
        'up --set data.source=text --set data.paths=["books","odd"] --set data.weights=[1]',
        "give each a weight",
    ),
    ("data prepare books --tokenizer nowhere --out corpus", "name the folder that has one"),
    ("data inspect books", "`skerry data prepare`"),
    ("data train-tokenizer empty --vocab 300 --out words", "names no file that ends in"),
    ("init nowhere", "name a file or folder"),
    ("init empty", "name a file or folder with the text"),
    ("init hollow.txt", "holds no text"),
    ("init --out typo.toml", "add --force"),
    # A model.
    ("up --set model.path=nowhere", "config.json"),
    ("up --from-hf meta-llama/Llama-3.2-1B", "`hf download` fetches one"),
    ("up --set model.config={}", "this decoder knows"),
    # The machine.
    ("up --set metrics.wandb=islands", "install"),
    ("up --set metrics.tensorboard=board", "install"),
    ("gpu up", "unset JAX_PLATFORMS"),
    ("gpu learner", "unset JAX_PLATFORMS"),
    ("gpuu up", "did you mean gpu?"),
    ("server up", "unset it and `"),
    # A broker.
    (f"status {NOWHERE}", "No NATS server answered"),
    (f"learner {NOWHERE}", "No NATS server answered"),
    (f"syncer {NOWHERE}", "No NATS server answered"),
    ("learner --nats tls://broker:4222 --set nats.ca_file=nowhere.pem", "files in PEM"),
    ("keys rotate site-a", "`skerry keys init`"),
    ("keys init --shards 99999", "less than or equal to 1024"),
    ("region init eu --hub tls://hub:7422 --learner eu-0", "`skerry keys init`"),
    ("status --nats http://broker:4222", "must look like nats://host:4222"),
    ("status --nats nats://broker:99999", "must look like nats://host:4222"),
    ("status --nats nats://[::1", "must look like nats://host:4222"),
    ("learner --nats nats://me:secret@broker", "password_file or nats.credentials"),
    ("learner --set nats.credentials=nowhere.nk", "No such file"),
    ("syncer --set nats.user=me --set nats.password_file=nowhere", "name a file that you may read"),
    # A name, a checkpoint, an address.
    ("learner --run my.run", "use 1 to 64 letters"),
    ("learner --name a/b", "use 1 to 64 letters"),
    ("up --from nowhere", "`skerry checkpoints list`"),
    ("checkpoints verify nowhere", "`skerry checkpoints list`"),
    ("export nowhere --out model", "`skerry checkpoints list`"),
    ("sample nowhere", "`skerry checkpoints list`"),
    ("checkpointer --set store.url=gs://bucket", "s3://bucket/prefix"),
    ("health-monitor --set health.host=203.0.113.7", "an address of this machine"),
    ("status", "name a broker with --nats"),
    ("chaos --once kill learner-1", "No cluster runs in"),
    ("plan nowhere.toml", "nowhere.toml"),
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A person's folder, with what some of the mistakes name."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    # Else the logs of tests that follow would go where this one's went.
    monkeypatch.setattr("skerry.service.reporting.configure", lambda *_, **__: None)
    monkeypatch.setattr("structlog.configure", lambda **_: None)
    for name in ("books", "odd", "empty"):
        (tmp_path / name).mkdir()
    (tmp_path / "books" / "one.txt").write_text("word " * 9000)
    (tmp_path / "odd" / "one.html").write_text("word " * 9000)
    (tmp_path / "short.txt").write_text("word")
    (tmp_path / "hollow.txt").write_text("")
    (tmp_path / "broken.toml").write_text("[sync")
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "typo.toml").write_text('[model]\npreest = "nano"\n')
    np.save(tmp_path / "words.npy", np.full(9000, 700, np.uint16))
    return tmp_path


def said(line: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Return the exit code of a command line and what it says on stderr."""
    words = line.split()
    program = COMMANDS.get(words[0])
    if program is not None and PROGRAMS[program].compiles and "JAX_PLATFORMS" in os.environ:
        with pytest.raises(SystemExit) as ended:  # before the program is started
            main.pass_on(words[0], words[1:])
        return int(str(ended.value)), capfd.readouterr().err
    app = main.app if program is None else APPS[program]
    done = CliRunner().invoke(app, words[1:] if program == words[0] else words)
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.stderr + capfd.readouterr().err


@pytest.mark.parametrize(("line", "fix"), MISTAKES)
def test_a_mistake_is_one_sentence_with_the_fix_and_leaves_nothing(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    line: str,
    fix: str,
) -> None:
    where, _, rest = line.partition(" ")
    if where in {"gpu", "gpuu"}:
        line = rest
        monkeypatch.setenv("JAX_PLATFORMS", "cuda" if where == "gpu" else where)
        monkeypatch.setattr(devices, "find_spec", lambda _name: None)
    if where == "typo":
        line = rest
        monkeypatch.setenv("SKERRY_SYNC__H_STEP", "3")
    if where == "server":
        line = rest
        monkeypatch.setenv("SKERRY_NATS_SERVER", "/nowhere/nats-server")
    monkeypatch.setattr(ready, "_found", lambda _module: False)
    monkeypatch.setattr(local_log, "HERE_S", 0.05)
    for begun in ("skerry.cli.up.run_stoppable", "os.execv"):
        monkeypatch.setattr(begun, pytest.fail)
    before = {*folder.rglob("*")}
    code, text = said(line, capfd)
    assert code in {1, 2}, text
    (sentence,) = [one for one in text.splitlines() if one.lower().startswith("error: ")]
    assert fix in sentence
    assert "Traceback" not in text
    assert {*folder.rglob("*")} == before


def test_a_service_given_its_file_as_an_argument_says_how_it_takes_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["skerry-learner", "run.toml"])
    with pytest.raises(SystemExit, match="2"):
        answer(learner, "learner")
    said = "error: learner takes a file as an option: --config run.toml.\n"
    assert capsys.readouterr().err == said


def test_there_are_sixty_of_them() -> None:
    assert len({fix for _, fix in MISTAKES}) >= 60
