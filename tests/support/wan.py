"""Regions on one machine: network namespaces, and a router that carries packets between them.

For machines without ``tc netem``: the only way out of a region is a TUN device, and the router, a
thread of this process, gives each packet the rate of its region's link in that direction, the delay
of the pair, a bounded queue and loss. TCP runs from end to end, so that windows, congestion control
and loss behave as they do on a real link. Needs root, iproute2 and /dev/net/tun.
"""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import os
import random
import select
import struct
import subprocess
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

TUNSETIFF, IFF_TUN, IFF_NO_PI, CLONE_NEWNET = 0x400454CA, 1, 0x1000, 0x40000000
DEVICE = "wan0"
NET = b"\x0a\x4d\x00"  # 10.77.0
SPACES = Path("/run/netns")
POLL_S = 0.05
TURN = 64
"""Packets that are read from one region before the next one's."""
PACKET = 65_536
LONGEST_HEADER = 20


def missing() -> str:
    """Return what this machine lacks for regions; empty if nothing."""
    if os.geteuid() != 0:
        return "root"
    return "" if Path("/dev/net/tun").exists() else "/dev/net/tun"


@dataclass(frozen=True, slots=True)
class Link:
    """What each region's link carries: ``mbit`` per second in each direction, 0: any number.

    ``rtt_s`` is the time of a round trip between any two regions without load, ``queue_s`` how much
    a full queue delays, ``loss`` the share of packets that are lost.
    """

    mbit: float = 0.0
    rtt_s: float = 0.0
    queue_s: float = 0.5
    loss: float = 0.0

    @property
    def bytes_s(self) -> float:
        return self.mbit * 1e6 / 8


@dataclass(slots=True)
class Region:
    """One namespace; ``up`` and ``down`` are the bytes that its link has carried."""

    name: str
    space: str
    address: str
    device: int = -1
    up: int = 0
    down: int = 0
    cut: bool = False
    up_free_s: float = field(default=0.0, repr=False)
    down_free_s: float = field(default=0.0, repr=False)

    def inside(self, command: Sequence[str]) -> list[str]:
        """Return a command that runs another one in this region."""
        return ["ip", "netns", "exec", self.space, *command]


class Regions:
    """Namespaces with links between them, for as long as a ``with`` block lasts.

    ``dropped`` are the packets that found a full queue.
    """

    def __init__(self, names: Sequence[str], link: Link) -> None:
        tag = f"wan-{os.getpid()}"
        self.link = link
        self.all = [
            Region(name, f"{tag}-{name}", f"10.77.0.{number}")
            for number, name in enumerate(names, 1)
        ]
        self.dropped = 0
        self._stop = threading.Event()
        self._router = threading.Thread(target=self._route, name="router", daemon=True)
        self._heap: list[tuple[float, int, bool, Region, bytes]] = []
        self._count = 0

    def __enter__(self) -> Self:
        try:
            for region in self.all:
                _lay(region)
        except BaseException:
            self._sweep()
            raise
        self._router.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stop.set()
        self._router.join()
        self._sweep()

    def __getitem__(self, name: str) -> Region:
        return next(region for region in self.all if region.name == name)

    def _sweep(self) -> None:
        for region in self.all:
            if region.device >= 0:
                os.close(region.device)
            if (SPACES / region.space).exists():
                subprocess.run(["ip", "netns", "del", region.space], check=True)

    def _route(self) -> None:
        """Carry packets until the block ends."""
        poll, by_device = select.poll(), {region.device: region for region in self.all}
        for device in by_device:
            poll.register(device, select.POLLIN)
        while not self._stop.is_set():
            now_s = time.monotonic()
            while self._heap and self._heap[0][0] <= now_s:
                _, _, serialised, region, packet = heapq.heappop(self._heap)
                self._arrive(region, packet, now_s, serialised=serialised)
            wait_s = self._heap[0][0] - now_s if self._heap else POLL_S
            for device, _ in poll.poll(1e3 * min(max(wait_s, 0.0), POLL_S)):
                self._read(by_device[device])

    def _read(self, sender: Region) -> None:
        """Take what waits in one region, at most ``TURN`` packets, onto its uplink."""
        for _ in range(TURN):
            try:
                packet = os.read(sender.device, PACKET)
            except BlockingIOError:
                return
            receiver = self._receiver(packet)
            if receiver is None or sender.cut or receiver.cut:
                continue
            if self.link.loss and random.random() < self.link.loss:
                continue
            at_s = self._queued(len(packet), sender.up_free_s)
            if at_s is None:
                continue
            sender.up_free_s = at_s
            sender.up += len(packet)
            self._later(at_s + self.link.rtt_s / 2, receiver, packet, serialised=False)

    def _receiver(self, packet: bytes) -> Region | None:
        """Return the region that an IPv4 packet is for; None for any other packet."""
        if len(packet) < LONGEST_HEADER or packet[0] >> 4 != 4 or packet[16:19] != NET:
            return None
        number = packet[19]
        return self.all[number - 1] if 1 <= number <= len(self.all) else None

    def _arrive(self, region: Region, packet: bytes, now_s: float, *, serialised: bool) -> None:
        """Take a packet onto its receiver's downlink, or out of it once that has carried it."""
        if not serialised:
            at_s = self._queued(len(packet), region.down_free_s)
            if at_s is not None:
                region.down_free_s = at_s
                self._later(at_s, region, packet, serialised=True)
            return
        region.down += len(packet)
        try:
            os.write(region.device, packet)
        except OSError:
            self.dropped += 1

    def _queued(self, size: int, free_s: float) -> float | None:
        """Return when a link that is ``free_s`` has carried a packet; None if its queue is full."""
        now_s = time.monotonic()
        begin_s = max(now_s, free_s)
        if begin_s - now_s > self.link.queue_s:
            self.dropped += 1
            return None
        return begin_s + (size / self.link.bytes_s if self.link.mbit else 0.0)

    def _later(self, at_s: float, region: Region, packet: bytes, *, serialised: bool) -> None:
        self._count += 1  # packets of one moment stay in order
        heapq.heappush(self._heap, (at_s, self._count, serialised, region, packet))


def _lay(region: Region) -> None:
    """Make a region's namespace and its device, which this process holds the other end of."""
    libc = ctypes.CDLL(None, use_errno=True)
    subprocess.run(["ip", "netns", "add", region.space], check=True)
    home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(SPACES / region.space, os.O_RDONLY)
    try:
        if libc.setns(there, CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
        region.device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        asked = struct.pack("16sH14x", DEVICE.encode(), IFF_TUN | IFF_NO_PI)
        fcntl.ioctl(region.device, TUNSETIFF, asked)
    finally:
        libc.setns(home, CLONE_NEWNET)
        os.close(there)
        os.close(home)
    for words in (
        ("link", "set", "lo", "up"),
        ("addr", "add", f"{region.address}/24", "dev", DEVICE),
        ("link", "set", DEVICE, "mtu", "1500", "txqueuelen", "1000", "up"),
    ):
        subprocess.run(["ip", "-n", region.space, *words], check=True)
