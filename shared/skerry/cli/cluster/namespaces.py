"""A network namespace for each service, so that a partition is packets lost on their way.

The proxy is a poor network: it acknowledges every byte of a service that it cuts off. Here a
service's only cable drops what either end is given: TCP sends it again, later and later, and both
ends have to find out for themselves. Needs root on Linux, iproute2 and util-linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.cli.cluster.folder import writing
from skerry.errors import ConfigError, SkerryError

if TYPE_CHECKING:
    from collections.abc import Generator, Iterable

    from skerry.cli.cluster.folder import RunFolder
    from skerry.cli.cluster.team import Team
    from skerry.settings.models import LocalSettings

WIRES = "wires.json"
"""In the run's folder, while a cluster has namespaces: the cable of every service."""
NET = IPv4Network("10.213.0.0/16")
PAIR_BITS = 30
"""Prefix of the net between a service and this machine: two addresses."""
BLOCK = 256
"""Addresses; clusters on one machine begin at different multiples of it."""
FAR_END = "eth0"
SPACES = Path("/run/netns")
TOOLS = {"ip": "iproute2", "tc": "iproute2", "nsenter": "util-linux"}
NEEDED = 1 << 12 | 1 << 21
"""CAP_NET_ADMIN and CAP_SYS_ADMIN."""
PATIENCE_S = 15.0
LOSS = "blackhole"
"""The kernel's queue that takes every packet and sends none."""
OUTSIDE = "health-monitor"
"""Its page is for this machine's browsers."""


@dataclass(frozen=True, slots=True)
class Wire:
    """A service's cable: ``device`` with ``outer`` is this machine's end, ``inner`` the other's."""

    space: str
    device: str
    outer: str
    inner: str

    @property
    def entering(self) -> tuple[str, ...]:
        """The words before a command that run it in the namespace."""
        return ("nsenter", f"--net={SPACES / self.space}", "--")

    @property
    def ends(self) -> tuple[tuple[tuple[str, ...], str], ...]:
        """How ``tc`` is called where each end is, and the end's device there."""
        shown = ("tc", "-j", "-s")
        return ((shown, self.device), ((*shown, "-n", self.space), FAR_END))


def unable() -> str:
    """Return why namespaces cannot be made here, or an empty string."""
    if os.geteuid() or _capabilities() & NEEDED != NEEDED:
        return "only root, with CAP_NET_ADMIN and CAP_SYS_ADMIN, may make network namespaces"
    missing = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    return f"it needs {' and '.join(sorted(missing))}, not installed here" if missing else ""


def lay(tag: str, names: Iterable[str], taken: Iterable[str]) -> dict[str, Wire]:
    """Return a cable for every name, in addresses that no block of ``taken`` is in.

    ConfigError if the net is full.
    """
    named = list(names)
    size = 2 ** (NET.max_prefixlen - PAIR_BITS)
    blocks = -(-len(named) * size // BLOCK)
    count = NET.num_addresses // BLOCK
    base = int(NET.network_address)
    used = {(int(ip_address(text)) - base) // BLOCK for text in taken if ip_address(text) in NET}
    begins = int(tag, 16) % count
    free = (
        first
        for first in ((begins + n) % count for n in range(count))
        if first + blocks <= count and not used & {*range(first, first + blocks)}
    )
    first = next(free, None)
    if first is None:
        msg = f"{NET} has no room for {len(named)} services: end another cluster with chaos.netns."
        raise ConfigError(msg, path="chaos.netns")
    at = base + first * BLOCK
    return {
        name: Wire(
            f"skerry-{tag}-{n}",
            f"sk{tag}-{n}",
            str(ip_address(at + n * size + 1)),
            str(ip_address(at + n * size + 2)),
        )
        for n, name in enumerate(named)
    }


@contextlib.contextmanager
def namespaces(folder: RunFolder, team: Team, local: LocalSettings) -> Generator[dict[str, Wire]]:
    """Yield the cable of every service that has a namespace: all but the monitor, or none.

    ConfigError where that is impossible.
    """
    if not team.netns:
        sweep(folder.path)
        yield {}
        return
    refuse_elsewhere(local)
    named = [name for name, service in team.kinds().items() if service != OUTSIDE]
    with contextlib.ExitStack() as stack:
        with writing(folder.path):
            wires = stack.enter_context(wired(folder.path, named))
        yield wires


def refuse_elsewhere(local: LocalSettings) -> None:
    """Raise ConfigError for an address beside the broker's: a namespace has no way to it."""
    named = {
        "store.url": local.store.url,
        "telemetry.endpoint": local.telemetry.traces_url or local.telemetry.metrics_url,
    }
    for setting, url in named.items():
        if url:
            msg = (
                f"{setting} is {url}: services in namespaces of their own reach nothing but their "
                "broker. Leave it out, or create a run without chaos.netns."
            )
            raise ConfigError(msg, path=setting)


@contextlib.contextmanager
def wired(folder: Path, names: Iterable[str]) -> Generator[dict[str, Wire]]:
    """Give every name a namespace with a cable to this machine while the context lasts.

    What an earlier cluster of this folder left is removed first. Raises ConfigError where this is
    impossible, SkerryError with what the kernel said. It blocks for a tenth of a second, so that
    no cancellation leaves half of it.
    """
    why = unable()
    if why:
        msg = f"chaos.netns is impossible: {why}. Create a run without it: the proxy partitions it."
        raise ConfigError(msg, path="chaos.netns")
    sweep(folder)
    wires = lay(_tag(folder), names, _addresses())
    try:
        for wire in wires.values():
            _make(wire)
        rows = {name: asdict(wire) for name, wire in wires.items()}
        (folder / WIRES).write_text(json.dumps(rows) + "\n", encoding="utf-8")
        yield wires
    finally:
        sweep(folder)


def sweep(folder: Path) -> None:
    """Remove every namespace and cable of a folder, also those that a killed cluster left."""
    (folder / WIRES).unlink(missing_ok=True)
    tag = _tag(folder)
    for space in [path.name for path in SPACES.glob(f"skerry-{tag}-*")]:
        with contextlib.suppress(SkerryError):
            _call("ip", "link", "del", f"sk{tag}-{space.rpartition('-')[2]}")
        with contextlib.suppress(SkerryError):
            _call("ip", "netns", "del", space)


def read(folder: Path) -> dict[str, Wire]:
    """Return the cables of the cluster that runs in this folder; none where it has none."""
    try:
        rows = json.loads((folder / WIRES).read_text("utf-8"))
        return {name: Wire(**row) for name, row in rows.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


async def cut(wire: Wire) -> None:
    """Lose every packet, both ways, from now on."""
    try:
        for tc, device in wire.ends:
            await _run(*tc, "qdisc", "replace", "dev", device, "root", LOSS)
    except SkerryError:
        await reconnect(wire)
        raise


async def lost(wire: Wire) -> int:
    """Return how many packets the cut has lost so far; 0 without a cut."""
    return sum([await _dropped(tc, device) or 0 for tc, device in wire.ends])


async def reconnect(wire: Wire) -> bool:
    """Let packets pass again; returns True if the cable was cut. A cable that is gone stays so.

    Raises SkerryError for an end that stays cut.
    """
    was_cut = False
    for tc, device in wire.ends:
        if await _dropped(tc, device) is None:
            continue
        was_cut = True
        try:
            await _run(*tc, "qdisc", "del", "dev", device, "root")
        except SkerryError:  # another command may have done it meanwhile
            if await _dropped(tc, device) is not None:
                raise
    return was_cut


async def must_reach(wire: Wire, port: int) -> None:
    """Raise ConfigError if no connection comes through from the namespace to this machine."""
    probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    python = (sys.executable, "-I", "-S", "-c", probe)
    try:
        await _run(*wire.entering, *python, wire.outer, str(port))
    except SkerryError as error:
        last = str(error).splitlines()[-1]
        msg = (
            f"chaos.netns is impossible: nothing comes from {wire.inner} to {wire.outer} ({last}). "
            f"Let this machine's firewall pass {NET}, or create a run without it."
        )
        raise ConfigError(msg, path="chaos.netns") from error


async def _dropped(tc: tuple[str, ...], device: str) -> int | None:
    """Return the packets that an end of a cable has dropped; None if it is not cut."""
    try:
        rows = json.loads(await _run(*tc, "qdisc", "show", "dev", device) or "[]")
    except SkerryError:  # it is gone, with its namespace
        return None
    return next((int(row["drops"]) for row in rows if row.get("kind") == LOSS), None)


def _make(wire: Wire) -> None:
    inside = ("ip", "-n", wire.space)
    peer = ("peer", "name", FAR_END, "netns", wire.space)
    for words in (
        ("ip", "netns", "add", wire.space),
        ("ip", "link", "add", wire.device, "type", "veth", *peer),
        ("ip", "address", "add", f"{wire.outer}/{PAIR_BITS}", "dev", wire.device),
        ("ip", "link", "set", wire.device, "up"),
        (*inside, "address", "add", f"{wire.inner}/{PAIR_BITS}", "dev", FAR_END),
        (*inside, "link", "set", "lo", "up"),
        (*inside, "link", "set", FAR_END, "up"),
    ):
        _call(*words)


def _tag(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]


def _addresses() -> list[str]:
    """Return the IPv4 addresses of this machine."""
    links = json.loads(_call("ip", "-j", "-4", "address"))
    return [held["local"] for link in links for held in link.get("addr_info", ())]


def _capabilities() -> int:
    """Return what this process may do, as the kernel's bits."""
    try:
        lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)


async def _run(*words: str) -> str:
    return await asyncio.to_thread(_call, *words)


def _call(*words: str) -> str:
    """Run a program and return its output; SkerryError with its last words if it fails."""
    try:
        done = subprocess.run(
            words,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=PATIENCE_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"`{' '.join(words)}` did not run: {error}"
        raise SkerryError(msg) from error
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
        msg = f"`{' '.join(words)}` failed: {why}"
        raise SkerryError(msg)
    return done.stdout.decode("utf-8", "replace")
