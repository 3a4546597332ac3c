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
"""In the run folder, while a cluster has namespaces: the cable of every service."""
NET = IPv4Network("10.213.0.0/16")
BLOCK = 256
"""Addresses; clusters on one machine begin at different multiples of it."""
PAIR = 4
"""Addresses of the net (/30) between a service and this machine."""
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
    collector = local.telemetry.traces_url or local.telemetry.metrics_url
    for setting, url in {"store.url": local.store.url, "telemetry.endpoint": collector}.items():
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
    if why := unable():
        why += ". Create a run without it: the proxy partitions it."
        raise _impossible(why)
    sweep(folder)
    links = json.loads(_call("ip", "-j", "-4", "address"))
    wires = lay(_tag(folder), names, [at["local"] for one in links for at in one["addr_info"]])
    try:
        for wire in wires.values():
            _make(wire)
        rows = {name: asdict(wire) for name, wire in wires.items()}
        (folder / WIRES).write_text(json.dumps(rows) + "\n", encoding="utf-8")
        yield wires
    finally:
        sweep(folder)


def lay(tag: str, names: Iterable[str], taken: Iterable[str]) -> dict[str, Wire]:
    """Return a cable for every name, in addresses that no block of ``taken`` is in.

    ConfigError if the net is full.
    """
    named, count, base = list(names), NET.num_addresses // BLOCK, int(NET.network_address)
    blocks = -(-len(named) * PAIR // BLOCK)
    used = {(int(ip_address(text)) - base) // BLOCK for text in taken if ip_address(text) in NET}
    for n in range(count):
        first = (int(tag, 16) + n) % count
        if first + blocks <= count and not used & {*range(first, first + blocks)}:
            break
    else:
        msg = f"{NET} has no room for {len(named)} services: end another cluster with chaos.netns."
        raise ConfigError(msg, path="chaos.netns")
    nets = (NET[first * BLOCK + n * PAIR] for n in range(len(named)))
    return {
        name: Wire(f"skerry-{tag}-{n}", f"sk{tag}-{n}", str(net + 1), str(net + 2))
        for n, (name, net) in enumerate(zip(named, nets, strict=True))
    }


def sweep(folder: Path) -> None:
    """Remove every namespace and cable of a folder, also those that a killed cluster left."""
    (folder / WIRES).unlink(missing_ok=True)
    tag = _tag(folder)
    for space in [path.name for path in SPACES.glob(f"skerry-{tag}-*")]:
        device = f"sk{tag}-{space.rpartition('-')[2]}"
        for words in (("link", "del", device), ("netns", "del", space)):
            with contextlib.suppress(SkerryError):
                _call("ip", *words)


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
        why = (
            f"nothing comes from {wire.inner} to {wire.outer} ({last}). Let this machine's "
            f"firewall pass {NET}, or create a run without it."
        )
        raise _impossible(why) from error


async def _dropped(tc: tuple[str, ...], device: str) -> int | None:
    """Return the packets that an end of a cable has dropped; None if it is not cut."""
    try:
        rows = json.loads(await _run(*tc, "qdisc", "show", "dev", device) or "[]")
    except SkerryError:  # it is gone, with its namespace
        return None
    return next((int(row["drops"]) for row in rows if row.get("kind") == LOSS), None)


def _make(wire: Wire) -> None:
    for text in (
        f"netns add {wire.space}",
        f"link add {wire.device} type veth peer name {FAR_END} netns {wire.space}",
        f"address add {wire.outer}/30 dev {wire.device}",
        f"link set {wire.device} up",
        f"-n {wire.space} address add {wire.inner}/30 dev {FAR_END}",
        f"-n {wire.space} link set lo up",
        f"-n {wire.space} link set {FAR_END} up",
    ):
        _call("ip", *text.split())


def _tag(folder: Path) -> str:
    return hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:6]


def _impossible(why: str) -> ConfigError:
    return ConfigError(f"chaos.netns is impossible: {why}", path="chaos.netns")


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
            words, stdin=subprocess.DEVNULL, capture_output=True, timeout=PATIENCE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        msg = f"`{' '.join(words)}` did not run: {error}"
        raise SkerryError(msg) from error
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip() or f"exit code {done.returncode}"
        msg = f"`{' '.join(words)}` failed: {why}"
        raise SkerryError(msg)
    return done.stdout.decode("utf-8", "replace")
