"""What durable acknowledgements cost: JetStream's default sync against ``sync_interval: always``.

One server and three that replicate, each with either setting, all in this run and on this disk:
publishes of 1 KiB and of 512 KiB with one and with six in flight, and whole commits of a fragment
(chunks, manifest, ledger). Figures are medians over rounds in which the settings take turns; what
lasts is the ratio of always to the default. A disk that lies about fsync makes always look free.
"""

from __future__ import annotations

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from harness import parser, write

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.streams import specs
from skerry.protocol.messages import Manifest
from skerry.protocol.subjects import Subjects
from tests.support.builders import commit
from tests.support.learners import walk
from tests.support.nats_cluster import NatsCluster
from tests.support.nats_server import NatsServer

SIZES = {"1 KiB": 1024, "512 KiB": 524_288}
WINDOW_BYTES = 64 * 1024**2
SYNCS = {"default": "2m", "always": "always"}
PLAN = plan([LeafSpec("w", (1024, 1024))], 1)
"""One fragment of 1 Mi parameters: about 13 MB of chunks a commit."""


@contextmanager
def server(folder: Path, replicas: int, sync: str) -> Generator[str]:
    """Start one server or three; yields their addresses."""
    if replicas > 1:
        with NatsCluster(folder, size=replicas, sync=sync) as cluster:
            asyncio.run(cluster.ready())
            yield cluster.url
        return
    alone = NatsServer(folder, settings=f'jetstream {{ sync_interval: "{sync}" }}')
    alone.start()
    try:
        yield alone.url
    finally:
        alone.kill()


async def declared(bus: NatsBus, replicas: int) -> Subjects:
    names = Subjects(f"b{time.time_ns()}")
    wanted = specs(names.run, replicas=replicas, window_bytes=WINDOW_BYTES)
    await bus.declare(wanted)
    for spec in wanted:  # a stream that was just made has its first election behind it
        await bus.publish(spec.subjects[0].replace("*", "0").replace(">", "0"), b"", msg_id="first")
    return names


async def publishes(size: int, window: int, count: int, bus: NatsBus, replicas: int) -> float:
    """Return the milliseconds that one publish takes with ``window`` of them in flight."""
    names, payload, numbers = await declared(bus, replicas), bytes(size), iter(range(count))

    async def worker() -> None:
        for i in numbers:
            await bus.publish(names.shard(0).contribution(0, "a"), payload, msg_id=f"{i}")

    start = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(window)))
    return 1e3 * (time.perf_counter() - start) / count


async def commits(count: int, bus: NatsBus, replicas: int) -> float:
    """Return the milliseconds that a whole commit of one fragment takes."""
    names = await declared(bus, replicas)
    writer = await StateWriter.acquire(bus, names.run, PLAN, holder="bench", now_ns=1)
    vector, held, spent = walk(PLAN.fragments[0], "bench"), None, list[float]()
    parts = [NewPart.of("keyframe", "bf16", vector)]
    parts += [NewPart.of(name, "f32", vector) for name in ("master", "outer.momentum")]
    for version in range(1, count + 2):
        start = time.perf_counter()
        held = await writer.commit(
            commit(version, run=names.run, plan_digest=PLAN.digest), parts, held
        )
        spent.append(time.perf_counter() - start)
    assert isinstance(held, Manifest)
    return 1e3 * statistics.median(spent[1:])


Measure = Callable[[NatsBus, int], Awaitable[float]]


def cases(count: int) -> dict[str, Measure]:
    """Return what is measured, by name; small publishes are eight times as many."""
    found: dict[str, Measure] = {}
    for name, size in SIZES.items():
        for window in (1, 6):
            many = count if size > 4096 else 8 * count
            found[f"publish {name}, {window} in flight"] = partial(publishes, size, window, many)
    found["commit of 1 Mi parameters"] = partial(commits, 3)
    return found


async def once(url: str, replicas: int, measure: Measure) -> float:
    async with NatsBus(url, options=NatsOptions(patience_s=60.0)) as bus:
        return await measure(bus, replicas)


def bench(rounds: int, count: int) -> list[dict[str, Any]]:
    """Measure every case on every broker in turn; returns a row per case and number of replicas."""
    rows: list[dict[str, Any]] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for replicas in (1, 3):
            urls = {
                sync: stack.enter_context(server(folder / f"{sync}{replicas}", replicas, value))
                for sync, value in SYNCS.items()
            }
            for name, measure in cases(count).items():
                taken: dict[str, list[float]] = {sync: [] for sync in SYNCS}
                for number in range(rounds + 1):
                    for sync in SYNCS if number % 2 else reversed(SYNCS):
                        spent = asyncio.run(once(urls[sync], replicas, measure))
                        if number:
                            taken[sync].append(spent)
                ms = {sync: statistics.median(found) for sync, found in taken.items()}
                rows.append({"case": name, "replicas": replicas, **ms})
    return [row | {"ratio": row["always"] / row["default"]} for row in rows]


def table(rows: list[dict[str, Any]]) -> str:
    lines = [f"durability: milliseconds each\n  {'':<38} {'default':>8} {'always':>8} {'ratio':>6}"]
    for row in rows:
        name = f"R{row['replicas']} {row['case']}"
        lines.append(
            f"  {name:<38} {row['default']:>8.2f} {row['always']:>8.2f} {row['ratio']:>6.1f}"
        )
    return "\n".join(lines)


def main() -> int:
    made = parser(__doc__ or "")
    made.add_argument("--rounds", type=int, default=5)
    made.add_argument("--count", type=int, default=48, help="publishes of 512 KiB per round")
    wanted = made.parse_args()
    rows = bench(wanted.rounds, wanted.count)
    print(table(rows))
    write("durability", rows, [], wanted.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
