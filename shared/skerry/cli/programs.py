"""The programs that ``skerry`` consists of beside its own commands: one table of all of them."""

from __future__ import annotations

import importlib.util
import os
import stat
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skerry import installing
from skerry.errors import ConfigError

CACHES = ("jax", "numba")
NUMERIC = ("jax", "optax", "numba")
TRAINING = (*NUMERIC, "safetensors")


@dataclass(frozen=True, slots=True)
class Program:
    """A Python module that runs as a process of its own; its extra has the same name.

    ``needs`` are the packages of that extra. ``compiles``: it keeps compiled code in a cache.
    ``commands`` are the ``skerry`` commands that it answers, each with its line of help; one that
    is not the program's own name is passed on as the first argument.
    """

    module: str
    needs: tuple[str, ...]
    commands: Mapping[str, str]
    compiles: bool = False


PROGRAMS: Mapping[str, Program] = {
    "learner": Program(
        "skerry_learner",
        TRAINING,
        {"learner": "Run one learner.", "create": "Create a run that learners then join."},
        compiles=True,
    ),
    "syncer": Program(
        "skerry_syncer", NUMERIC, {"syncer": "Run a syncer; more of them stand by."}, compiles=True
    ),
    "checkpointer": Program(
        "skerry_checkpointer",
        ("safetensors", "ml_dtypes"),
        {
            "checkpointer": "Run a checkpointer.",
            "checkpoints": "List, verify or restore checkpoints.",
            "hub": "Make a region's broker the hub of a run whose hub is gone.",
            "export": "Write a checkpoint as a folder that transformers loads.",
        },
    ),
    "evaluator": Program(
        "skerry_evaluator",
        TRAINING,
        {
            "evaluator": "Run an evaluator: held-out loss during a run.",
            "sample": "Generate text from a checkpoint, or talk with it.",
            "eval": "Measure a checkpoint on held-out text.",
        },
        compiles=True,
    ),
    "data": Program(
        "skerry.data",
        ("tokenizers",),
        {"data": "Train a tokenizer on text, or write its tokens for a run."},
    ),
    "health-monitor": Program(
        "skerry_health_monitor",
        ("prometheus_client", "starlette", "uvicorn"),
        {"health-monitor": "Run the health monitor: web page, metrics, alerts."},
    ),
    "tools": Program(
        "skerry_tools",
        (),
        {
            "plan": "Plan a run: does it fit, how long, at what cost.",
            "simulate": "Simulate a fleet's failures and the goodput that is left.",
            "ledger": "Verify a run's log.",
            "replay": "Rebuild parameters of any moment from the log; ask what if.",
            "fork": "Write a checkpoint of a past moment, or without a learner.",
            "rewind": "Write a checkpoint of a past moment, to go on from there.",
            "chaos": "Inject faults into a run, then heal and check it.",
        },
    ),
    "lab": Program(
        "skerry_tools.lab",
        TRAINING,
        {"lab": "Train a whole cluster in one process, on virtual time."},
        compiles=True,
    ),
}
SERVICES = ("learner", "syncer", "checkpointer", "evaluator", "health-monitor")
"""Programs of which a cluster consists."""
COMMANDS: Mapping[str, str] = {
    command: name for name, program in PROGRAMS.items() for command in program.commands
}
"""The program that answers each command that ``skerry`` passes on."""


def argv(name: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line that starts a program."""
    return (sys.executable, "-m", PROGRAMS[name].module, *arguments)


def argv_of(command: str, *arguments: str) -> tuple[str, ...]:
    """Return the command line of the program that answers a ``skerry`` command."""
    name = COMMANDS[command]
    return argv(name, *(() if command == name else (command,)), *arguments)


def require(name: str) -> None:
    """Raise ConfigError with the command to run when a program's packages are not installed."""
    program = PROGRAMS[name]
    missing = [n for n in (program.module, *program.needs) if not importlib.util.find_spec(n)]
    if missing:
        msg = (
            f"The {name} needs {', '.join(missing)}, which is not installed: "
            f"run `{installing.command(extra=name)}`."
        )
        raise ConfigError(msg, path=name)


def computing(cache: Path) -> dict[str, str]:
    """Return environment variables that make a process compute fast from the start.

    Huge pages make a CPU training step 1.3 times faster; the caches let a restarted process begin
    without compiling. They are made where they are missing.

    Raises ConfigError for a cache that another user may have written, since what it holds is
    executed, and OSError where none can be made.
    """
    cache = cache.absolute()
    kept = [cache / name for name in CACHES]
    for folder in kept:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for folder in filter(Path.exists, (*kept, cache, *cache.parents)):
        facts = folder.stat()
        shared = facts.st_mode & stat.S_IWOTH and not facts.st_mode & stat.S_ISVTX
        if shared or (folder in kept and facts.st_uid != os.geteuid()):
            msg = (
                f"{cache} holds compiled code, and other users may write in {folder}: start this "
                "command in a folder of your own."
            )
            raise ConfigError(msg, path="cache")
    return {
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
        "JAX_COMPILATION_CACHE_DIR": str(cache / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "NUMBA_CACHE_DIR": str(cache / "numba"),
    }
