"""``skerry up`` and ``skerry chaos`` as a user runs them, in a folder of a test's own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

from skerry.cli.cluster.processes import read
from tests.support.processes import SKERRY, skerry

START_S = 120.0


@contextlib.contextmanager
def cluster(
    folder: Path, run: str, config: Path, cache: Path, *arguments: str
) -> Generator[subprocess.Popen[bytes]]:
    """Run a cluster that allows faults for as long as the context lasts."""
    given = ("--run", run, "--set", "chaos.allow=true", "--set", "health.port=0", *arguments)
    log = (folder / "up.log").open("wb")
    with log:
        process = subprocess.Popen(
            [*SKERRY, "up", str(config), *given],
            cwd=folder,
            stdout=log,
            stderr=log,
            env=os.environ | {"JAX_COMPILATION_CACHE_DIR": str(cache)},
        )
    try:
        deadline = time.monotonic() + START_S
        while not (folder / ".skerry" / run / "control.sock").exists():
            assert process.poll() is None, (folder / "up.log").read_text()
            assert time.monotonic() < deadline, (folder / "up.log").read_text()
            time.sleep(0.05)  # another process's files send us no event
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def chaos(folder: Path, run: str, *arguments: str) -> tuple[dict[str, Any], str]:
    """Run ``skerry chaos`` to its verdict; return that and what else it said."""
    done = skerry(folder, "chaos", "--run", run, "--json", *arguments)
    assert done.returncode in {0, 5}, done.stderr
    return json.loads(done.stdout), done.stderr


def summary(told: dict[str, Any]) -> str:
    """Return the verdict without the story of each fault."""
    brief = {key: value for key, value in told.items() if key != "faults"}
    kinds: dict[str, list[int]] = {}
    for fault in told["faults"]:
        fired = kinds.setdefault(fault["kind"], [0, 0])
        fired[0] += fault["fired"]
        fired[1] += 1
    brief["fired_by_kind"] = {kind: f"{a} of {b}" for kind, (a, b) in sorted(kinds.items())}
    return json.dumps(brief, indent=1)


def pids(folder: Path, run: str) -> dict[str, int]:
    """Return the processes of the cluster by name."""
    return {name: entry.pid for name, entry in read(folder / ".skerry" / run).items()}
