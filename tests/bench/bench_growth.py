"""What 100,000 small commits leave on disk, and how soon everything starts on it again.

``python tests/bench/bench_growth.py`` writes them through the syncer's own writer to a real
server, watches the store meanwhile, ends the server with SIGKILL, and starts it and each service
once more, one after the other. STATE keeps two versions of every fragment, and the server gives
room back a 4 MiB block at a time: what is said of it holds for a state well above that.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import urlopen

from commits import Scale, begin, write
from harness import Goal, parser
from harness import write as write_figures

from skerry.algorithm.fragments import Plan
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.place import take_place
from skerry.log.state import read_manifests, read_part
from skerry.protocol.parts import KEYFRAME
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from tests.support.cluster import Cluster, Service
from tests.support.nats_server import NatsServer

RUN = "growth"
SAMPLES = 20
WINDOW = 32
STATE_GOAL = 3.0
LEDGER_GOAL = 1024
RESTART_GOAL_S = 15.0
COMMAND_GOAL_S = 60.0
COMMAND = "skerry"
PATIENCE_S = 300.0
PAGE_BYTES = 4096
LOOK_S = 0.05


class Sample(NamedTuple):
    """The store after so many commits; bytes on disk, and the server's resident memory."""

    commits: int
    state: int
    ledger: int
    memory: int


@dataclass(frozen=True, slots=True)
class Growth:
    """The log afterwards; ``live`` is one version of every fragment, in bytes on the log."""

    commits: int
    seconds: float
    live: int
    state_most: int
    ledger: int
    memory: int


@dataclass(frozen=True, slots=True)
class Restart:
    """Seconds from starting a process until it does its work, or why that was not measured."""

    what: str
    seconds: float
    note: str = ""


def on_disk(folder: Path) -> int:
    """Return the bytes that a folder takes; files may come and go meanwhile."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_blocks * 512
    return total


def resident(pid: int | None) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE_BYTES


def sample(server: NatsServer, commits: int) -> Sample:
    """Look at the store as it is now."""
    (streams,) = server.store.rglob("streams")
    names = Subjects(RUN)
    kept = names.shard(0).stream("STATE"), names.stream("LEDGER")
    state, ledger = (on_disk(streams / name) for name in kept)
    return Sample(commits, state, ledger, resident(server.pid))


async def live_bytes(bus: NatsBus, cut: Plan) -> int:
    """Return what one version of every fragment takes: its chunks and its manifest."""
    manifests = (await read_manifests(bus, RUN, cut)).values()
    chunks = sum(ref.size for m in manifests for part in m.parts for ref in part.chunks)
    return chunks + sum(len(encode(manifest)) for manifest in manifests)


async def grow(server: NatsServer, scale: Scale) -> tuple[Growth, list[Sample]]:
    """Write the commits, and look at the store now and then."""
    samples: list[Sample] = []
    every = max(1, scale.commits // SAMPLES)

    def look(done: int) -> None:
        if done % every == 0:
            samples.append(sample(server, done))
            print(f"  {done:>7} commits: {line(samples[-1])}", flush=True)

    async with NatsBus(server.url, options=NatsOptions(publish_window=WINDOW)) as bus:
        _, writer = await begin(bus, RUN, scale)
        seconds = await write(writer, scale, done=look)
        live = await live_bytes(bus, scale.cut)
    settled = samples[len(samples) // 4 :]  # the ratio means nothing before all are written twice
    last = samples[-1]
    most = max(taken.state for taken in settled)
    return Growth(last.commits, seconds, live, most, last.ledger, last.memory), samples


def line(taken: Sample) -> str:
    return (
        f"STATE {taken.state / 1e6:6.1f} MB, LEDGER {taken.ledger / 1e6:6.1f} MB"
        f" ({taken.ledger / taken.commits:.0f} B each), server {taken.memory / 1e6:.0f} MB"
    )


async def timed(what: str, ready: Callable[[], Awaitable[str]]) -> Restart:
    """Time something until it is ready; ``ready`` returns why it could not be, or nothing."""
    began = time.monotonic()
    async with asyncio.timeout(PATIENCE_S):
        note = await ready()
    restart = Restart(what, time.monotonic() - began, note)
    print(f"  {what:<24} {restart.seconds:6.2f} s {note}", flush=True)
    return restart


async def said(service: Service, event: str) -> dict[str, Any]:
    """Wait for a line of a service's log."""
    while True:
        for line in service.said.splitlines():
            with suppress(ValueError):
                told: dict[str, Any] = json.loads(line)
                if told.get("event") == event:
                    return told
        if service.process.returncode is not None:
            msg = f"The service ended without {event}: {service.said[-500:]}"
            raise RuntimeError(msg)
        await asyncio.sleep(LOOK_S)


async def ask(port: int, holds: Callable[[Any], bool]) -> None:
    """Ask the monitor until its answer holds."""

    def answer() -> Any:
        with suppress(OSError), urlopen(f"http://127.0.0.1:{port}/api/run", timeout=60) as reply:
            return json.loads(reply.read())
        return None

    while True:
        told = await asyncio.to_thread(answer)
        if told is not None and holds(told["run"]):
            return
        await asyncio.sleep(LOOK_S)


async def command(*words: str) -> str:
    """Run a command to its end; returns why it failed, if it did."""
    process = await asyncio.create_subprocess_exec(
        *(str(Path(sys.executable).parent / "skerry"), *words),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    _, error = await process.communicate()
    if not process.returncode:
        return ""
    words_of_it = error.decode().strip().splitlines()[-1:] or [f"exit {process.returncode}"]
    return f"failed: {words_of_it[0][:200]}"


async def restarts(server: NatsServer, folder: Path, scale: Scale) -> list[Restart]:
    """End the server at once, then start it and every service on what it holds."""
    server.kill9()
    run = ("--nats", server.url, "--run", RUN)

    async def broker() -> str:
        server.start(PATIENCE_S)
        async with NatsBus(server.url) as bus:
            await bus.streams()
        return ""

    found = [await timed("broker, after kill -9", broker)]
    rounds = scale.commits - scale.fragments
    versions = [-(-(scale.commits - f) // scale.fragments) for f in range(scale.fragments)]
    config = folder / "run.toml"
    config.touch()
    async with Cluster(server.url, RUN, folder, config, folder / "jax") as cluster:

        async def syncer() -> str:
            await said(await cluster.start("syncer", "s"), "shard_loaded")
            return ""

        async def checkpointer() -> str:
            await said(await cluster.start("checkpointer", "c"), "checkpoint_written")
            return ""

        port = 0

        async def monitor() -> str:
            nonlocal port
            service = await cluster.start("health-monitor", "h", "--set", "health.port=0")
            port = int((await said(service, "health_listening"))["port"])
            await ask(port, lambda told: told["versions"] == versions)
            return ""

        async def counts() -> str:
            await ask(port, lambda told: told["rounds"] == rounds)
            return "after that"

        async def learner() -> str:
            async with NatsBus(server.url) as bus:
                newcomer, *_ = await take_place(
                    bus, RUN, scale.cut, "newcomer", host="here", now_ns=time.time_ns()
                )
                manifests = await read_manifests(bus, RUN, scale.cut)
                for manifest in manifests.values():
                    await read_part(bus, RUN, scale.cut, manifest, KEYFRAME)
            return "" if newcomer.step else "without a step to go on from"

        found.append(await timed("syncer, serves", syncer))
        found.append(await timed("learner, place and state", learner))
        found.append(await timed("checkpointer, has written", checkpointer))
        found.append(await timed("monitor, versions", monitor))
        found.append(await timed("monitor, every count", counts))
    found.append(await timed("skerry status", lambda: command("status", *run, "--json")))
    found.append(await timed("skerry ledger verify", lambda: command("ledger", "verify", *run)))
    return found


async def measure(scale: Scale, folder: Path) -> tuple[Growth, list[Sample], list[Restart]]:
    server = NatsServer(folder / "nats")
    server.start()
    try:
        growth, samples = await grow(server, scale)
        return growth, samples, await restarts(server, folder, scale)
    finally:
        server.kill()


def goals_of(growth: Growth, found: list[Restart]) -> list[Goal]:
    """Return what was to be reached: commands are slower than services, they read all history."""
    ratio, each = growth.state_most / growth.live, growth.ledger / growth.commits
    services = max(r.seconds for r in found if not r.what.startswith(COMMAND))
    commands = max(r.seconds for r in found if r.what.startswith(COMMAND))
    return [
        Goal("STATE on disk", STATE_GOAL, ratio, "of the live state", at_most=True),
        Goal("LEDGER per commit", LEDGER_GOAL, each, "bytes on disk", at_most=True),
        Goal("slowest service to serve again", RESTART_GOAL_S, services, "s", at_most=True),
        Goal("slowest command on that log", COMMAND_GOAL_S, commands, "s", at_most=True),
    ]


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--commits", type=int, default=100_000)
    made.add_argument("--fragments", type=int, default=128)
    made.add_argument("--blocks", type=int, default=64, help="of 256 parameters, per fragment")
    made.add_argument("--learners", type=int, default=8)
    chosen = made.parse_args()
    scale = Scale(chosen.commits, chosen.fragments, chosen.blocks, chosen.learners)
    print(
        f"growth: {scale.fragments} fragments of {scale.blocks} blocks, {scale.learners} learners"
    )
    with tempfile.TemporaryDirectory() as name:
        growth, samples, found = asyncio.run(measure(scale, Path(name)))
    goals = goals_of(growth, found)
    state, ledger, *_ = goals
    print(
        f"  {growth.commits} commits in {growth.seconds:.0f} s: a state of"
        f" {growth.live / 1e6:.1f} MB takes {state.measured:.2f} times as much at most,"
        f" a commit {ledger.measured:.0f} B of the ledger"
    )
    rows = [asdict(growth), *(s._asdict() for s in samples), *(asdict(r) for r in found)]
    write_figures("growth", rows, goals, chosen.json)


if __name__ == "__main__":
    main()
