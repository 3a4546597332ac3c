"""A network namespace for each service, so that a partition is packets lost on their way.

The proxy is a poor network: whom it cuts off still has every byte acknowledged. Here a service's
only cable drops what either end is given. TCP sends it again, later and later, nobody is told, and
both ends have to find out for themselves. Needs root on Linux, iproute2 and util-linux.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import os
import shutil
import sys
from dataclasses import asdict, dataclass
from ipaddress import IPv4Network, ip_address
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.errors import ConfigError, SkerryError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Iterable

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
LOSS = "blackhole"
"""The kernel's queue that takes every packet and sends none."""


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
    missing = {package for tool, package in TOOLS.items() if shutil.which(tool) is None}
    if missing:
        return f"it needs {' and '.join(sorted(missing))}, not installed here"
    return "only root may make network namespaces" if os.geteuid() else ""


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


@contextlib.asynccontextmanager
async def wired(folder: Path, names: Iterable[str]) -> AsyncGenerator[dict[str, Wire]]:
    """Give every name a namespace with a cable to this machine, while the context lasts.

    What an earlier cluster of this folder left behind is removed first. Raises ConfigError where
    this cannot be done, SkerryError with what the kernel said.
    """
    why = unable()
    if why:
        msg = f"chaos.netns cannot be had: {why}. Leave it out: partitions are then the proxy's."
        raise ConfigError(msg, path="chaos.netns")
    tag = _tag(folder)
    await _remove(tag)
    wires = lay(tag, names, await _addresses())
    path = folder / WIRES
    try:
        for wire in wires.values():
            await _make(wire)
        path.write_text(json.dumps({name: asdict(wire) for name, wire in wires.items()}) + "\n")
        yield wires
    finally:
        path.unlink(missing_ok=True)
        await asyncio.shield(_remove(tag))


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
        await mend(wire)
        raise


async def lost(wire: Wire) -> int:
    """Return how many packets the cut has lost so far; 0 without a cut."""
    return sum([await _dropped(tc, device) or 0 for tc, device in wire.ends])


async def mend(wire: Wire) -> None:
    """Let packets pass again; a cable that is whole, or gone, stays as it is."""
    for tc, device in wire.ends:
        if await _dropped(tc, device) is not None:
            await _run(*tc, "qdisc", "del", "dev", device, "root")


async def must_reach(wire: Wire, port: int) -> None:
    """Raise ConfigError if no connection comes through from the namespace to this machine."""
    probe = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 5)"
    python = (sys.executable, "-I", "-S", "-c", probe)
    try:
        await _run(*wire.entering, *python, wire.outer, str(port))
    except SkerryError as error:
        msg = (
            f"chaos.netns cannot be had: nothing comes from {wire.inner} to {wire.outer}. Let this "
            f"machine's firewall pass {NET}, or leave the setting out."
        )
        raise ConfigError(msg, path="chaos.netns") from error


async def _dropped(tc: tuple[str, ...], device: str) -> int | None:
    """Return the packets that an end of a cable has dropped; None if it is not cut."""
    try:
        rows = json.loads(await _run(*tc, "qdisc", "show", "dev", device) or "[]")
    except SkerryError:  # it is gone, with its namespace
        return None
    return next((int(row["drops"]) for row in rows if row.get("kind") == LOSS), None)


async def _make(wire: Wire) -> None:
    inside = ("ip", "-n", wire.space)
    for words in (
        ("ip", "netns", "add", wire.space),
        (
            "ip",
            "link",
            "add",
            wire.device,
            "type",
            "veth",
            "peer",
            "name",
            FAR_END,
            "netns",
            wire.space,
        ),
        ("ip", "address", "add", f"{wire.outer}/{PAIR_BITS}", "dev", wire.device),
        ("ip", "link", "set", wire.device, "up"),
        (*inside, "address", "add", f"{wire.inner}/{PAIR_BITS}", "dev", FAR_END),
        (*inside, "link", "set", "lo", "up"),
        (*inside, "link", "set", FAR_END, "up"),
    ):
        await _run(*words)


async def _remove(tag: str) -> None:
    """Remove every namespace of a folder, and its cable."""
    for space in _spaces(tag):
        with contextlib.suppress(SkerryError):
            await _run("ip", "link", "del", f"sk{tag}-{space.rpartition('-')[2]}")
        with contextlib.suppress(SkerryError):
            await _run("ip", "netns", "del", space)


def _spaces(tag: str) -> list[str]:
    return [path.name for path in SPACES.glob(f"skerry-{tag}-*")]


def _tag(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]


async def _addresses() -> list[str]:
    """Return the IPv4 addresses of this machine."""
    links = json.loads(await _run("ip", "-j", "-4", "address"))
    return [held["local"] for link in links for held in link.get("addr_info", ())]


async def _run(*words: str) -> str:
    """Run a program and return what it says; SkerryError with its last words if it fails."""
    process = await asyncio.create_subprocess_exec(
        *words,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    out, err = await process.communicate()
    if process.returncode:
        said = err.decode("utf-8", "replace").strip() or f"exit code {process.returncode}"
        msg = f"`{' '.join(words)}` failed: {said}"
        raise SkerryError(msg)
    return out.decode("utf-8", "replace")
