"""What watching costs: ``python tests/bench/bench_monitor.py``.

A health monitor as a process, on a real broker, with 200 learners that pulse once a second and 50
rounds a second, one page open and a scrape every ten seconds. Time is the CPU time of the monitor's
process over the time on the wall, so that what else runs on the machine does not count.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import time
from asyncio.subprocess import DEVNULL, PIPE
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import httpx
from harness import Goal, parser, write

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.protocol.messages import Commit, Pulse
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.tasks import TaskGroup
from tests.support.builders import commit, consumed, progress, pulse, round_, run_record
from tests.support.nats_server import NatsServer

LEARNERS = 200
ROUNDS_PER_S = 50
FRAGMENTS = 50
SCRAPE_S = 10.0
WARM_S = 5.0
GOAL = 0.25
NAMES = tuple(f"learner-{number}" for number in range(LEARNERS))
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Load:
    """Cores that the monitor kept busy, with so many contributions in each round."""

    contributions: int
    cores: float
    pages: int
    pulses_per_s: float
    rounds_per_s: float
    pushed_bytes_per_s: float
    scrape_ms: float
    resident_bytes: int


@dataclass(slots=True)
class Sent:
    """What was published and what came back so far."""

    pulses: int = 0
    rounds: int = 0
    pushed_bytes: int = 0
    scrape_s: float = 0.0


def beat(run: str, name: str, second: float) -> Pulse:
    step = int(second * 10)
    return pulse(
        name,
        step,
        run=run,
        sent_ns=time.time_ns(),
        tokens=step * 1024,
        cursor=step * 8,
        loss=2.5,
        busy_s=0.9 * second,
        alive_s=second,
        bytes_up=step * 1000,
        bytes_down=step * 3000,
        contributions=step // 24,
        versions=(1 + step // 24,) * FRAGMENTS,
        compile_s=5.0,
        f32_bytes_up=step * 9000,
        f32_bytes_down=step * 9000,
    )


def closed(run: str, digest: int, fragment: int, version: int, merged: int) -> Commit:
    now_ns, step = time.time_ns(), version * 24
    first = (fragment + version) * merged
    who = [NAMES[(first + number) % LEARNERS] for number in range(merged)]
    of = {"base_version": version - 1, "steps": 24, "tokens": 24_576, "cursor_from": step}
    arrived = {"cursor_to": step + 24, "arrived_ns": now_ns - 10**8}
    return commit(
        version,
        fragment,
        run=run,
        plan_digest=digest,
        step=step,
        opened_ns=now_ns - 10**9,
        closed_ns=now_ns,
        consumed=tuple(consumed(name, version, **of, **arrived) for name in who),
        contrib_floor=version,
        progress=tuple(progress(name, version, tokens=step * 1024, cursor=step) for name in NAMES),
        trace_id=f"{fragment:016x}{version:016x}",
    )


async def keep_pulsing(bus: Bus, run: str, sent: Sent) -> None:
    """Have every learner pulse once a second, evenly spread."""
    began, subjects = time.monotonic(), Subjects(run)
    while True:
        for number, name in enumerate(NAMES):
            second = sent.pulses // LEARNERS + number / LEARNERS
            await asyncio.sleep(max(0.0, began + second - time.monotonic()))
            await bus.publish(subjects.pulse(name), encode(beat(run, name, second + 10)))
            sent.pulses += 1


async def keep_committing(bus: Bus, run: str, digest: int, merged: int, sent: Sent) -> None:
    """Open a round and commit the one before, so many times a second."""
    began, subjects = time.monotonic(), Subjects(run)
    while True:
        fragment, version = sent.rounds % FRAGMENTS, 2 + sent.rounds // FRAGMENTS
        await asyncio.sleep(max(0.0, began + sent.rounds / ROUNDS_PER_S - time.monotonic()))
        told = closed(run, digest, fragment, version, merged)
        clock = {"due_step": version * 24, "opened_ns": told.closed_ns}
        opened = round_(version + 1, fragment, run=run, plan_digest=digest, **clock)
        await bus.publish(subjects.round(fragment), encode(opened))
        await bus.publish(subjects.commit(fragment), encode(told))
        sent.rounds += 1


async def keep_watching(url: str, sent: Sent) -> None:
    """Read what the page is pushed, as a browser does."""
    async with (
        httpx.AsyncClient(base_url=url, timeout=None) as client,  # noqa: S113 - it has no end
        client.stream("GET", "/api/stream") as events,
    ):
        async for data in events.aiter_raw():
            sent.pushed_bytes += len(data)


async def keep_scraping(url: str, sent: Sent) -> None:
    async with httpx.AsyncClient(base_url=url, timeout=60.0) as client:
        while True:
            began = time.monotonic()
            await client.get("/metrics")
            sent.scrape_s = time.monotonic() - began
            await asyncio.sleep(SCRAPE_S)


def cpu_s(pid: int) -> float:
    """Return the CPU seconds of a process so far, all its threads together."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def resident_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@asynccontextmanager
async def monitor(nats: NatsServer, run: str, folder: Path) -> AsyncGenerator[tuple[int, str]]:
    """Run a monitor; yields its pid and its address."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "skerry_health_monitor", "--nats", nats.url, "--run", run),
        *("--set", "health.port=0", "--set", f'telemetry.jsonl="{folder / run}.jsonl"'),
        stdout=DEVNULL,
        stderr=PIPE,
    )
    assert process.stderr is not None
    try:
        while (told := json.loads(await process.stderr.readline()))["event"] != "health_listening":
            pass
        draining = asyncio.ensure_future(process.stderr.read())
        yield process.pid, f"http://127.0.0.1:{told['port']}"
        process.terminate()
        await asyncio.wait({draining})
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def measure(
    nats: NatsServer, folder: Path, merged: int, seconds: float, *, pages: int
) -> Load:
    """Load a monitor for that long, and say what it cost."""
    run, sent = f"load-{merged}-{pages}", Sent()
    cut = plan(tuple(LeafSpec(f"w{number}", (64, 64)) for number in range(FRAGMENTS)), FRAGMENTS)
    config = RunConfig.model_validate(
        {"sync": {"fragments": FRAGMENTS, "learners": LEARNERS}, "liveness": {"pulse_s": 1.0}}
    )
    async with NatsBus(nats.url, name="bench") as bus:
        await bus.declare(specs(run, window_bytes=2**20))
        await ledger.create_run(bus, run_record(run, cut, config.model_dump_json()))
        for fragment in range(FRAGMENTS):
            genesis = closed(run, cut.digest, fragment, 1, 0)
            await bus.publish(Subjects(run).commit(fragment), encode(genesis))
        async with monitor(nats, run, folder) as (pid, url), TaskGroup() as group:
            tasks = [
                group.create_task(keep_pulsing(bus, run, sent)),
                group.create_task(keep_committing(bus, run, cut.digest, merged, sent)),
                group.create_task(keep_scraping(url, sent)),
                *(group.create_task(keep_watching(url, sent)) for _ in range(pages)),
            ]
            await asyncio.sleep(WARM_S)
            before, began, spent_s = replace(sent), time.monotonic(), cpu_s(pid)
            await asyncio.sleep(seconds)
            took_s, spent_s = time.monotonic() - began, cpu_s(pid) - spent_s
            held = resident_bytes(pid)
            for task in tasks:
                task.cancel()
    return Load(
        contributions=merged,
        cores=spent_s / took_s,
        pages=pages,
        pulses_per_s=(sent.pulses - before.pulses) / took_s,
        rounds_per_s=(sent.rounds - before.rounds) / took_s,
        pushed_bytes_per_s=(sent.pushed_bytes - before.pushed_bytes) / took_s,
        scrape_ms=sent.scrape_s * 1e3,
        resident_bytes=held,
    )


async def main_async(seconds: float, path: Path | None) -> None:
    loads: list[Load] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        nats = NatsServer(folder / "broker")
        nats.start()
        try:
            for merged, pages in ((8, 0), (8, 1), (LEARNERS, 1)):
                loads.append(await measure(nats, folder, merged, seconds, pages=pages))
        finally:
            nats.stop()
    print(f"monitor: {LEARNERS} learners, {ROUNDS_PER_S} rounds a second, {seconds:g} s each")
    print("  merged  pages  pulses/s  rounds/s  cores   pushed kB/s  scrape ms  resident MiB")
    for load in loads:
        print(
            f"  {load.contributions:>6} {load.pages:>6} {load.pulses_per_s:>9.0f}"
            f" {load.rounds_per_s:>9.1f} {load.cores:>6.3f} {load.pushed_bytes_per_s / 1e3:>12.1f}"
            f" {load.scrape_ms:>10.0f} {load.resident_bytes / 2**20:>13.0f}"
        )
    reached = [
        Goal(
            f"monitor: {load.contributions} merged a round, {load.pages} pages",
            GOAL,
            load.cores,
            "cores",
            at_most=True,
        )
        for load in loads
        if load.contributions < LEARNERS
    ]
    write("monitor", [asdict(load) for load in loads], reached, path)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--seconds", type=float, default=30.0, help="seconds per case (default 30)")
    given = made.parse_args()
    asyncio.run(main_async(given.seconds, given.json))


if __name__ == "__main__":
    main()
