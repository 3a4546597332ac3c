# pyright: basic
"""Our bus against bare nats-py with the same messages, in the same run: ``python bench_bus.py``.

Both sides publish the same bytes, ids of the same length included, with the same window into a
stream of the same settings on one local server (file storage) and read them back; bare nats-py the
way its own documentation does: awaited ``js.publish`` and ``pull_subscribe(...).fetch``. The rounds
alternate, and the ratio is that of the medians, because the machine is shared.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import nats
from harness import Goal, parser, write
from nats.js.api import AckPolicy, ConsumerConfig

from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import specs
from skerry.protocol.subjects import Subjects
from tests.support.nats_server import NatsServer

WINDOW = 6
SECRET = 24
"""Characters that our bus adds to an id."""
WINDOW_BYTES = 1024**3
FETCH_BYTES = 8 * 1024**2
MIB = 1024**2
GOAL = 0.85


async def windowed(publish: Callable[[int], Awaitable[object]], count: int) -> None:
    """Call ``publish`` for 0..count-1 with WINDOW calls in flight."""
    numbers = iter(range(count))

    async def worker() -> None:
        for i in numbers:
            await publish(i)

    await asyncio.gather(*(worker() for _ in range(WINDOW)))


async def bare(url: str, names: Subjects, payload: bytes, count: int) -> tuple[float, float]:
    """Publish and consume with nats-py alone; returns seconds for each."""
    client = await nats.connect(url)
    js, size, subject = client.jetstream(), len(payload), names.shard(0).contribution(0, "a")
    start = time.perf_counter()
    await windowed(lambda i: js.publish(subject, payload, headers=named(f"{i}")), count)
    published = time.perf_counter() - start
    stream = names.shard(0).stream("CONTRIB")
    config = ConsumerConfig(ack_policy=AckPolicy.NONE)
    reader = await js.pull_subscribe(subject, stream=stream, config=config)
    start, seen = time.perf_counter(), 0
    while seen < count:
        seen += len(await reader.fetch(max(1, FETCH_BYTES // size), timeout=5))
    consumed = time.perf_counter() - start
    await client.close()
    return published, consumed


def named(msg_id: str) -> dict[str, str]:
    """Return the header of an id that is as long as those of our bus."""
    return {"Nats-Msg-Id": f"{msg_id}.{'0' * SECRET}"}


async def ours(url: str, names: Subjects, payload: bytes, count: int) -> tuple[float, float]:
    """Publish and consume through NatsBus; returns seconds for each."""
    async with NatsBus(url, options=NatsOptions(publish_window=WINDOW)) as bus:
        subject = names.shard(0).contribution(0, "a")
        start = time.perf_counter()
        await windowed(lambda i: bus.publish(subject, payload, msg_id=f"{i}"), count)
        published = time.perf_counter() - start
        records, seen = bus.follow(subject), 0
        start = time.perf_counter()
        async for _ in records:
            seen += 1
            if seen == count:
                break
        consumed = time.perf_counter() - start
        await records.aclose()
    return published, consumed


async def one(server: NatsServer, side: str, payload: bytes, count: int) -> tuple[float, float]:
    """Run one side on a stream of its own, which is deleted afterwards."""
    names = Subjects(f"b{time.time_ns()}")
    wanted = [s for s in specs(names.run, window_bytes=WINDOW_BYTES) if s.max_bytes > 0]
    async with NatsBus(server.url) as bus:
        await bus.declare(wanted)
    run = ours if side == "ours" else bare
    try:
        return await run(server.url, names, payload, count)
    finally:
        client = await nats.connect(server.url)
        await client.jetstream().delete_stream(names.shard(0).stream("CONTRIB"))
        await client.close()


async def compare(server: NatsServer, size: int, total: int, rounds: int) -> dict[str, Any]:
    """Alternate both sides; returns MiB/s of the median rounds and their ratios."""
    count, payload = max(32, total // size), os.urandom(size)
    times: dict[str, list[tuple[float, float]]] = {"bare": [], "ours": []}
    for i in range(rounds + 1):
        for side in ("bare", "ours") if i % 2 else ("ours", "bare"):
            seconds = await one(server, side, payload, count)
            if i:
                times[side].append(seconds)
    row: dict[str, Any] = {"bytes": size, "messages": count}
    for at, what in enumerate(("publish", "consume")):
        speed = {s: count * size / MIB / statistics.median(t[at] for t in times[s]) for s in times}
        row |= {f"{what}_{side}_mib_s": round(speed[side]) for side in speed}
        row[f"{what}_ratio"] = round(speed["ours"] / speed["bare"], 2)
    return row


async def bench(sizes: list[int], total: int, rounds: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        server = NatsServer(Path(folder))
        server.start()
        try:
            return [await compare(server, size, total, rounds) for size in sizes]
        finally:
            server.kill()


def table(rows: list[dict[str, Any]]) -> str:
    """Lay the rows out, a line for each size and direction."""
    lines = [f"bus: MiB/s of file storage\n  {'':<28} {'bare':>6} {'ours':>6} {'ratio':>6}"]
    for row in rows:
        for what in ("publish", "consume"):
            name = f"{what} {row['messages']} x {row['bytes'] // 1024} KiB"
            bare, ours = (row[f"{what}_{side}_mib_s"] for side in ("bare", "ours"))
            lines.append(f"  {name:<28} {bare:>6} {ours:>6} {row[f'{what}_ratio']:>6.2f}")
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--sizes", type=int, nargs="+", default=[524_288, 65_536])
    made.add_argument("--total-mib", type=int, default=128)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--least", type=float, default=0.0, help="fail below this ratio")
    wanted = made.parse_args()
    rows = asyncio.run(bench(wanted.sizes, wanted.total_mib * MIB, wanted.rounds))
    print(table(rows))
    goals = [
        Goal(f"bus: {what} {row['bytes'] // 1024} KiB", GOAL, row[f"{what}_ratio"], "of nats-py")
        for row in rows
        for what in ("publish", "consume")
    ]
    write("bus", rows, goals, wanted.json)
    return 0 if min(goal.measured for goal in goals) >= wanted.least else 1


if __name__ == "__main__":
    sys.exit(main())
