# pyright: basic
"""How fast a learner that comes back reads the global state: ``python bench_catchup.py``.

About 1 GB of state lies on a local server. It is read the way a learner reads it (manifests, then
every fragment, verified and decoded to f32), and bare: the same messages by nats-py, thrown away
as they come, in each way that NATS has. What is compared is the fastest bare way, in the same run,
the readings taking turns: on this machine, where bytes cost nothing but CPU, and, as root, from a
network namespace over a link of ``--gbit``. A learner that was cut off and comes back lets each
fragment replace the one that it had; "all kept" is the same reading by one that starts, and has no
memory yet that it could use again; "memory alone" is what that costs by itself. Then ten learners
at once, each a process of its own, while a syncer idles: what they cost it is read from its own
clock.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import nats
import numpy as np
from commits import Scale, begin, commit_of, noise
from harness import Goal, parser, write
from nats.aio.client import Client
from nats.js.api import AckPolicy, ConsumerConfig

from skerry.algorithm import backend
from skerry.algorithm.fragments import BLOCK, Plan
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.state import Meters, read_manifests, read_part
from skerry.log.state_writer import NewPart
from skerry.protocol.parts import KEYFRAME
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from tests.support.cluster import Cluster
from tests.support.nats_server import NatsServer

RUN = "catchup"
LEARNER = "learner"
LANES = 2
"""A learner's mailbox has room for so many fragments."""
FRAGMENTS = 24
SPACE, HERE, THERE = "skerry-catchup", "10.213.77.1", "10.213.77.2"
"""A network namespace, and the addresses of this machine and of the namespace."""
GOAL = 1.3
WINDOW = 8
PAGE_BYTES = 16 * 1024**2
MIB = 1024**2
JOINERS = 10
SETTLE_S = 3.0
"""After this long a syncer that has nothing to do is at rest."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to read the state: medians of seconds by the wall, of CPU here and in the broker."""

    name: str
    wall_s: float
    cpu_s: float
    broker_cpu_s: float


Read = Callable[[Client, list[int]], Awaitable[None]]


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, by all its threads."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK")


def scale_of(size: int) -> Scale:
    """Return a run whose parameters take ``size`` bytes as bf16."""
    return Scale(FRAGMENTS, FRAGMENTS, max(1, size // 2 // BLOCK // FRAGMENTS))


async def seed(url: str, size: int) -> tuple[int, int]:
    """Write the state; returns bytes and messages on the log.

    A learner reads the parameters alone, so that the masters are one block each.
    """
    scale = scale_of(size)
    async with NatsBus(url) as bus:
        _, writer = await begin(bus, RUN, scale)
        vector = noise(scale.blocks * BLOCK, 0)
        for fragment in writer.plan.fragments:
            draft = commit_of(writer.plan, RUN, scale, fragment.index, fragment.index)
            master = NewPart.of("master", "f32", np.zeros(BLOCK, np.float32))
            await writer.commit(draft, [NewPart.of(KEYFRAME, "bf16", vector), master], None)
        manifests = await read_manifests(bus, RUN, writer.plan)
    parts = [part for manifest in manifests.values() for part in manifest.parts]
    refs = [ref for part in parts if part.name == KEYFRAME for ref in part.chunks]
    return sum(ref.size for ref in refs), len(refs)


async def as_a_learner(url: str, cut: Plan, *, keep: bool = False) -> int:
    """Read every fragment as a learner's network loop does; returns the bytes that came."""
    total, kept = 0, list[Any]()

    def count(size: int) -> None:
        nonlocal total
        total += size

    async with NatsBus(url) as bus, TaskGroup() as group:
        manifests = iter((await read_manifests(bus, RUN, cut)).values())

        async def lane() -> None:
            for manifest in manifests:
                vector = await read_part(bus, RUN, cut, manifest, KEYFRAME, meters=Meters(count))
                kept.extend([vector] if keep else [])
                del vector

        for _ in range(LANES):
            group.create_task(lane())
    return total


async def direct_gets(client: Client, sequences: list[int]) -> None:
    """Read messages one request each, WINDOW of them in flight."""
    subject = f"$JS.API.DIRECT.GET.{Subjects(RUN).shard(0).stream('STATE')}"
    rest = iter(sequences)

    async def worker() -> None:
        for sequence in rest:
            await client.request(subject, json.dumps({"seq": sequence}).encode(), timeout=30)

    await asyncio.gather(*(worker() for _ in range(WINDOW)))


async def batch_gets(client: Client, sequences: list[int]) -> None:
    """Read messages a page of PAGE_BYTES per request."""
    subject, inbox = (
        f"$JS.API.DIRECT.GET.{Subjects(RUN).shard(0).stream('STATE')}",
        client.new_inbox(),
    )
    arrived: asyncio.Queue[Any] = asyncio.Queue()
    await client.subscribe(inbox, cb=arrived.put, pending_msgs_limit=0, pending_bytes_limit=0)
    at = sequences[0]
    while at <= sequences[-1]:
        body = {"seq": at, "batch": 1000, "max_bytes": PAGE_BYTES}
        await client.publish(subject, json.dumps(body).encode(), inbox)
        while (msg := await arrived.get()).data:
            at = int(msg.headers["Nats-Sequence"]) + 1


async def pulls(client: Client, sequences: list[int]) -> None:
    """Read messages through a pull consumer, as nats-py's documentation does."""
    seen, shard = 0, Subjects(RUN).shard(0)
    pattern = next(pattern for pattern in shard.shared() if f".{KEYFRAME}." in pattern)
    config = ConsumerConfig(ack_policy=AckPolicy.NONE)
    reader = await client.jetstream().pull_subscribe(
        pattern, stream=shard.stream("STATE"), config=config
    )
    while seen < len(sequences):
        seen += len(await reader.fetch(16, timeout=30))
    await reader.unsubscribe()


BARE = {"direct get": direct_gets, "batch get": batch_gets, "pull": pulls}


async def bare(url: str, read: Read, cut: Plan) -> None:
    """Connect, find the sequences, and read them all."""
    async with NatsBus(url) as bus:
        manifests = (await read_manifests(bus, RUN, cut)).values()
    parts = [p for m in manifests for p in m.parts if p.name == KEYFRAME]
    client = await nats.connect(url)
    await read(client, sorted(ref.sequence for part in parts for ref in part.chunks))
    await client.close()


async def compare(url: str, broker: int, cut: Plan, rounds: int) -> list[Reading]:
    """Let all ways take turns; the first round only warms up. ``broker`` is its process id."""

    def way(read: Read) -> Callable[[], Awaitable[object]]:
        return lambda: bare(url, read, cut)

    ways: dict[str, Callable[[], Awaitable[object]]] = {
        LEARNER: lambda: as_a_learner(url, cut),
        **{name: way(read) for name, read in BARE.items()},
    }
    return await taking_turns(ways, broker, rounds)


async def taking_turns(
    ways: dict[str, Callable[[], Awaitable[object]]], broker: int, rounds: int
) -> list[Reading]:
    times: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(rounds + 1):
        for name, read in ways.items():
            began = (time.perf_counter(), time.process_time(), cpu_s(broker))
            await read()
            ended = (time.perf_counter(), time.process_time(), cpu_s(broker))
            if number:
                wall, mine, its = (b - a for a, b in zip(began, ended, strict=True))
                times[name].append((wall, mine, its))
    return [
        Reading(name, *(statistics.median(column) for column in zip(*taken, strict=True)))
        for name, taken in times.items()
    ]


async def from_nothing(url: str, broker: int, cut: Plan, rounds: int) -> list[Reading]:
    """Read and keep everything, and touch as much memory without reading anything."""

    async def touch() -> None:
        held = [np.empty(f.padded_size, np.float32) for f in cut.fragments]
        for vector in held:
            vector.fill(0.0)

    ways: dict[str, Callable[[], Awaitable[object]]] = {
        "all kept": lambda: as_a_learner(url, cut, keep=True),
        "memory alone": touch,
    }
    return await taking_turns(ways, broker, rounds)


@contextlib.contextmanager
def cable(gbit: float) -> Generator[None]:
    """Keep a namespace with a cable to this machine that carries ``gbit`` Gbit/s."""
    for text in (
        f"ip netns add {SPACE}",
        f"ip link add {SPACE} type veth peer name eth0 netns {SPACE}",
        f"ip address add {HERE}/30 dev {SPACE}",
        f"ip link set {SPACE} up",
        f"ip -n {SPACE} address add {THERE}/30 dev eth0",
        f"ip -n {SPACE} link set lo up",
        f"ip -n {SPACE} link set eth0 up",
        f"tc qdisc add dev {SPACE} root tbf rate {gbit}gbit burst 1mb latency 50ms",
    ):
        subprocess.run(text.split(), check=True)
    try:
        yield
    finally:
        subprocess.run(["ip", "link", "del", SPACE], check=False)
        subprocess.run(["ip", "netns", "del", SPACE], check=False)


def over_a_link(gbit: float, size: int, rounds: int, folder: Path) -> list[Reading]:
    """Compare as over a network: readers in a namespace, whose cable carries ``gbit`` Gbit/s down.

    Nothing for 0 Gbit/s, and where namespaces cannot be made.
    """
    if not gbit:
        return []
    if os.geteuid() or shutil.which("tc") is None:
        print(f"catchup: no link of {gbit:g} Gbit/s: it needs root and iproute2\n")
        return []
    with cable(gbit):
        server = NatsServer(folder / "far", host=HERE)
        server.start()
        try:
            asyncio.run(seed(server.url, size))
            told = subprocess.run(
                (
                    *("ip", "netns", "exec", SPACE, sys.executable, __file__, "--read", server.url),
                    *("--broker", str(server.pid), "--mib", str(size // MIB)),
                    *("--rounds", str(rounds)),
                ),
                check=True,
                stdout=subprocess.PIPE,
            )
        finally:
            server.kill()
    return [Reading(**row) for row in json.loads(told.stdout)]


@dataclass(frozen=True, slots=True)
class Crowd:
    """Ten learners at once: seconds until the last was done, and the syncer's CPU meanwhile.

    ``idle_cpu_s`` is what the syncer used in as long a time before, with nobody there.
    """

    learners: int
    wall_s: float
    syncer_cpu_s: float
    idle_cpu_s: float


async def crowd(server: NatsServer, folder: Path, size: int) -> Crowd:
    """Let ten learners catch up at once beside an idle syncer."""
    config = folder / "run.toml"
    config.touch()
    async with Cluster(server.url, RUN, folder, config, folder / "jax") as cluster:
        syncer = await cluster.start("syncer", "idle")
        async with asyncio.timeout(120):
            while "shard_loaded" not in syncer.said:  # noqa: ASYNC110 - a file sends no event
                await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)
        pid = syncer.process.pid
        before, began = cpu_s(pid), time.monotonic()
        joiners = [
            await asyncio.create_subprocess_exec(
                *(sys.executable, __file__, "--join", server.url, "--mib", str(size // MIB)),
                stdout=subprocess.DEVNULL,
            )
            for _ in range(JOINERS)
        ]
        codes = [await joiner.wait() for joiner in joiners]
        if any(codes):
            msg = f"A joiner failed: {codes}"
            raise RuntimeError(msg)
        took_s, used_s = time.monotonic() - began, cpu_s(pid) - before
        before = cpu_s(pid)
        await asyncio.sleep(took_s)
        return Crowd(JOINERS, took_s, used_s, cpu_s(pid) - before)


async def join(url: str, size: int) -> None:
    """Read the state once, as one of ten."""
    async with NatsBus(url) as bus:
        record = await ledger.read_run(bus, RUN)
    cut = scale_of(size).cut
    if record.plan_digest != cut.digest:
        msg = "The state was written with another size."
        raise RuntimeError(msg)
    await as_a_learner(url, cut)


async def measure(size: int, rounds: int, folder: Path) -> tuple[list[Reading], Crowd, int]:
    """Write the state once, read it in every way, then by a crowd."""
    server = NatsServer(folder / "nats")
    server.start()
    try:
        backend.cpu()
        stored, _ = await seed(server.url, size)
        cut, broker = scale_of(size).cut, server.pid or 0
        found = await compare(server.url, broker, cut, rounds)
        found += await from_nothing(server.url, broker, cut, rounds)
        return found, await crowd(server, folder, size), stored
    finally:
        server.kill()


def table(title: str, readings: list[Reading], stored: int) -> None:
    """Print what was read in which way."""
    print(f"  {title:<12} {'wall s':>7} {'MB/s':>6} {'CPU s':>6} {'broker':>6}")
    for r in readings:
        columns = f"{r.wall_s:>7.2f} {stored / 1e6 / r.wall_s:>6.0f} {r.cpu_s:>6.2f}"
        print(f"  {r.name:<12} {columns} {r.broker_cpu_s:>6.2f}")


def goal(name: str, readings: list[Reading]) -> Goal:
    """Return what the learner is measured by: the fastest bare way."""
    wall_s = {reading.name: reading.wall_s for reading in readings}
    ratio = wall_s[LEARNER] / min(wall_s[way] for way in BARE)
    return Goal(name, GOAL, ratio, "of the fastest bare read", at_most=True)


def main() -> None:
    made = parser("How fast a learner that comes back reads the global state.")
    made.add_argument("--mib", type=int, default=1024, help="MiB of bf16 (default 1024)")
    made.add_argument("--rounds", type=int, default=3, help="readings to take medians of")
    made.add_argument("--gbit", type=float, default=1.0, help="of a link, as root; 0: none")
    made.add_argument("--join", metavar="URL", help="read once and end: one of the ten")
    made.add_argument("--read", metavar="URL", help="compare readings, print JSON and end")
    made.add_argument("--broker", metavar="PID", type=int, help="with --read: its process")
    chosen = made.parse_args()
    size = chosen.mib * MIB
    if chosen.join:
        asyncio.run(join(chosen.join, size))
        return
    if chosen.read:
        cut = scale_of(size).cut
        read = asyncio.run(compare(chosen.read, chosen.broker, cut, chosen.rounds))
        print(json.dumps([asdict(r) for r in read]))
        return
    with tempfile.TemporaryDirectory() as name:
        readings, many, stored = asyncio.run(measure(size, chosen.rounds, Path(name)))
    with tempfile.TemporaryDirectory() as name:
        far = over_a_link(chosen.gbit, size, chosen.rounds, Path(name))
    print(f"catchup: {stored / 1e9:.2f} GB stored, {size / 1e9:.2f} GB as bf16\n")
    table("", readings, stored)
    if far:
        table(f"{chosen.gbit:g} Gbit/s", far, stored)
    print(
        f"  {many.learners} at once: {many.wall_s:.1f} s; the syncer used {many.syncer_cpu_s:.2f} s"
        f" of CPU meanwhile, {many.idle_cpu_s:.2f} s in as long a time alone"
    )
    extra = max(0.0, many.syncer_cpu_s - many.idle_cpu_s)
    goals = [
        goal("catch-up", readings),
        *([goal(f"catch-up over {chosen.gbit:g} Gbit/s", far)] if far else []),
        Goal("syncer's CPU for ten joiners", 0.1, extra, "s more than idle", at_most=True),
    ]
    over = [{**asdict(r), "gbit": chosen.gbit} for r in far]
    rows = [*(asdict(r) for r in readings), *over, asdict(many)]
    write("catchup", rows, goals, chosen.json)


if __name__ == "__main__":
    main()
