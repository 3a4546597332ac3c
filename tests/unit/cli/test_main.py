"""The command line: what it imports, what it passes on, how it fails."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from importlib.metadata import metadata, version
from pathlib import Path
from types import ModuleType
from typing import get_args, get_type_hints

import pytest
from typer.testing import CliRunner

from skerry.cli import main
from skerry.cli.main import app
from skerry.cli.programs import COMMANDS as PASSED_ON
from skerry.cli.programs import PROGRAMS, require
from skerry.errors import ConfigError
from skerry.service.entry import exit_on_error
from skerry.service.examples import EXAMPLES
from skerry_checkpointer import __main__ as checkpointer
from skerry_evaluator import __main__ as evaluator
from skerry_tools import __main__ as tools
from tests.support.processes import call, skerry

COMMANDS = ["demo", "init", "up", *PASSED_ON, "status", "top", "quarantine", "doctor", "config"]
HEAVY = ("jax", "numpy", "blosc2", "nats", "numba", "optax", "google.protobuf", "structlog")
SCREEN_LINES = 26


def imported_by(*args: str) -> set[str]:
    """Return the modules that are loaded when the command line has been answered."""
    code = (
        "import sys, skerry.cli.main as m\n"
        f"sys.argv[1:] = {list(args)!r}\n"
        "try: m.main()\n"
        "except SystemExit: pass\n"
        "print(*sys.modules, sep='\\n', file=sys.stderr)"
    )
    return set(call(sys.executable, "-c", code).stderr.split())


@pytest.mark.parametrize("args", [("--help",), ("up", "--help"), ("--version",)])
def test_help_imports_nothing_heavy(args: tuple[str, ...]) -> None:
    assert imported_by(*args).isdisjoint(HEAVY)


def test_help_names_every_command_and_the_version_is_that_of_the_distribution() -> None:
    shown = CliRunner().invoke(app, ["--help"]).output
    assert all(command in shown for command in COMMANDS)
    assert CliRunner().invoke(app, ["--version"]).output == f"skerry {version('skerry')}\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_each_command_says_what_a_person_typed_and_fits_a_screen(
    tmp_path: Path, command: str
) -> None:
    done = skerry(tmp_path, command, "--help")
    assert done.returncode == 0
    assert done.stdout.startswith(f"Usage: skerry {command} ")
    assert "<bool>" not in done.stdout
    assert done.stdout.endswith(f"\n\n  Example: {EXAMPLES[command]}\n")
    assert len(done.stdout.splitlines()) <= SCREEN_LINES


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (["syncer", "--help"], ["skerry_syncer", "--help"]),
        (["health-monitor", "--run", "x"], ["skerry_health_monitor", "--run", "x"]),
        (["eval", "c", "--json"], ["skerry_evaluator", "eval", "c", "--json"]),
        (["evaluator", "--run", "x"], ["skerry_evaluator", "--run", "x"]),
        (["sample", "--help"], ["skerry_evaluator", "sample", "--help"]),
        (["checkpoints"], ["skerry_checkpointer", "checkpoints", "list"]),
        (["checkpoints", "verify", "c"], ["skerry_checkpointer", "checkpoints", "verify", "c"]),
        (["checkpoints", "--help"], ["skerry_checkpointer", "checkpoints", "--help"]),
    ],
)
def test_commands_of_other_programs_are_passed_on_whole(
    given: list[str], expected: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    became: list[list[str]] = []

    def execv(path: str, command: tuple[str, ...]) -> None:
        assert path == sys.executable
        became.append(list(command))
        raise SystemExit(0)

    monkeypatch.setattr("os.execv", execv)
    monkeypatch.setattr(main, "require", lambda _program: None)
    monkeypatch.setattr(sys, "argv", ["skerry", *given])
    with pytest.raises(SystemExit):
        main.main()
    assert became == [[sys.executable, "-m", *expected]]


def test_a_service_without_its_packages_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    with pytest.raises(ConfigError, match=r"install -e '/.*\[syncer\]'`"):
        require("syncer")


@pytest.fixture
def environ(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """The environment that a program would be started with; in a folder of its own."""
    seen = {name: value for name, value in os.environ.items() if not name.endswith("CACHE_DIR")}
    monkeypatch.setattr(os, "environ", seen)
    monkeypatch.setattr(os, "execv", lambda *_: None)
    monkeypatch.chdir(tmp_path)
    return seen


def test_a_learner_started_by_itself_keeps_what_it_compiles(
    environ: dict[str, str], tmp_path: Path
) -> None:
    main.pass_on("learner", ["--run", "r"])
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / ".skerry/cache/jax")
    assert (tmp_path / ".skerry/cache/numba").is_dir()


@pytest.mark.parametrize("given", [["--help"], ["--run", "r", "-h"]])
def test_a_question_for_help_leaves_nothing_in_the_folder(
    environ: dict[str, str], tmp_path: Path, given: list[str]
) -> None:
    main.pass_on("learner", given)
    assert "JAX_COMPILATION_CACHE_DIR" not in environ
    assert not list(tmp_path.iterdir())


def test_a_learner_starts_where_nothing_can_be_kept(
    environ: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / ".skerry").write_text("in the way")
    main.pass_on("learner", ["--run", "r"])
    assert "NUMBA_CACHE_DIR" not in environ


@pytest.mark.parametrize("folder", [".", ".skerry", ".skerry/cache/jax"])
def test_compiled_code_that_others_may_have_written_is_refused(tmp_path: Path, folder: str) -> None:
    (tmp_path / ".skerry/cache/jax").mkdir(parents=True)
    (tmp_path / folder).chmod(0o777)
    done = skerry(tmp_path, "learner", "--run", "x")
    assert done.returncode == 2
    assert f"other users may write in {(tmp_path / folder)}" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize("given", ["--nats", "--set"])
def test_a_password_on_the_command_line_is_refused_and_not_repeated(
    tmp_path: Path, given: str
) -> None:
    url = "nats://me:secret@127.0.0.1:1"
    for command in ("up", "status", "syncer"):
        done = skerry(tmp_path, command, given, url if given == "--nats" else f"nats.url={url}")
        assert (done.returncode, "secret" in done.stderr) == (2, False), command
        assert "which every user of this machine can list" in done.stderr
        is_up = command == "up" and given == "--nats"  # which starts a broker without it
        assert ("or set SKERRY_NATS__URL" in done.stderr) != is_up, command


def test_each_program_has_an_extra_with_what_it_needs() -> None:
    extras = set(metadata("skerry").get_all("Provides-Extra", []))
    assert {name for name, program in PROGRAMS.items() if program.needs} <= extras


def test_a_defect_is_one_sentence_and_its_traceback_comes_with_debug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defect = ValueError("no\nsuch")
    with pytest.raises(SystemExit, match="1"), exit_on_error():
        raise defect
    assert capsys.readouterr().err.startswith("error: ValueError: no. This is a defect")
    monkeypatch.setenv("SKERRY_DEBUG", "1")
    with pytest.raises(ValueError, match="such"), exit_on_error():
        raise defect


@pytest.mark.parametrize(
    "line",
    [*("config show", "keys init --run main", "--help", "--version", "doctor", "doctor --json")],
)
def test_a_reader_that_has_read_enough_ends_a_command_without_a_word(
    tmp_path: Path, line: str
) -> None:
    """Some print more than a buffer holds, some less; by rich, by typer, or by themselves."""
    reader, writer = os.pipe()
    os.close(reader)  # as head does after its lines
    command = [sys.executable, "-m", "skerry.cli.main", *line.split()]
    done = subprocess.run(command, cwd=tmp_path, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("line", ["status", "quarantine a", "ledger verify", "replay"])
def test_a_run_that_the_environment_names_is_the_one_that_is_meant(
    tmp_path: Path, line: str
) -> None:
    command = (sys.executable, "-m", "skerry.cli", *line.split())
    done = call(*command, cwd=tmp_path, env=os.environ | {"SKERRY_RUN": "other"})
    assert "There is no run 'other'" in done.stderr


INTERRUPTED = """
import os, signal, sys
class Interrupting:
    def find_spec(self, name, path=None, target=None):
        if name == MODULE:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
if PROGRAM in sys.orig_argv:
    sys.meta_path.insert(0, Interrupting())
"""


@pytest.mark.parametrize(
    ("line", "program", "module"),
    [
        ("ledger verify", "skerry.cli", "typer"),
        ("ledger verify", "skerry_tools", "typer"),
        ("sample run", "skerry_evaluator", "jax"),
        ("eval run", "skerry_evaluator", "jax"),
        ("learner --nats nats://127.0.0.1:1", "skerry_learner", "jax"),
        ("create run --nats nats://127.0.0.1:1", "skerry_learner", "jax"),
        ("lab --set train.steps=1", "skerry_tools.lab", "jax"),
        ("up", "skerry.cli", "numpy"),
    ],
)
@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word(
    tmp_path: Path, line: str, program: str, module: str
) -> None:
    """In what jax imports an exception may become another one, or end the process badly."""
    code = INTERRUPTED.replace("PROGRAM", repr(program)).replace("MODULE", repr(module))
    (tmp_path / "sitecustomize.py").write_text(code)
    command = (sys.executable, "-m", "skerry.cli", *line.split())
    done = call(*command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(tmp_path)})
    assert (done.returncode, done.stderr) == (-signal.SIGINT, "")


@pytest.mark.parametrize("module", [main, tools, checkpointer, evaluator])
def test_address_of_a_checkpoint_is_taken_as_it_is_typed(module: ModuleType) -> None:
    """A path would lose one of the slashes of ``s3://``."""
    groups = [group.typer_instance for group in module.app.registered_groups]
    commands = [c.callback for each in (module.app, *groups) for c in each.registered_commands]
    hints = [h for c in commands for h in get_type_hints(c, include_extras=True).values()]
    named = [
        h
        for h in hints
        for given in get_args(h)[1:]
        if getattr(given, "metavar", "") == "CHECKPOINT"
    ]
    assert named
    assert not [hint for hint in named if "Path" in str(hint.__origin__)]
