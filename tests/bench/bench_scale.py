"""A run of many parameters through everything that can happen to it: ``bench_scale.py``.

Learners that send noise in the place of training and keep no parameters, each in a process of its
own; all else is real: broker, two syncers, checkpointer. Genesis, rounds, kill -9 of the syncer and
of a learner, a checkpoint, and its restore into a second run. ``--parameters`` says how large;
``--syncers 1`` has no stand-by, so that 1 B parameters fit 24 GiB: the next one starts anew.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Awaitable, Callable
from contextlib import aclosing, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from bench_exchange import plan_of
from harness import Goal, parser, write
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan
from skerry.log import ledger, run_records
from skerry.log.global_fragments import GlobalReader
from skerry.log.nats.bus import NatsBus
from skerry.log.state import read_manifests
from skerry.log.streams import specs
from skerry.protocol.messages import CheckpointRecord, Commit
from skerry.protocol.parts import DELTA, path, size_of
from skerry.settings.models import CheckpointConfig, OuterConfig, RunConfig, SyncConfig
from skerry.tasks import TaskGroup
from tests.support.builders import run_record
from tests.support.cluster import Cluster, Service
from tests.support.learners import FakeLearner, RandomWalk, walk
from tests.support.nats_server import NatsServer

RUN, AGAIN = "scale", "scale-again"
LEARNERS = ("a", "b")
CHUNK_BLOCKS = 4000
"""About 512 KiB of int4, the default chunk."""
VERSIONS = 3
PATIENCE_S = 1800.0
CHANGE = 0.01
"""Of what a round changes, in initial parameters."""


class Noise(RandomWalk):
    """What a learner without parameters sends: changes as large as those of training."""

    def capture(self, fragment: int) -> NDArray[np.float32]:
        """Return another random vector each time."""
        count = self.captures[fragment] = self.captures.get(fragment, 0) + 1
        vector = walk(self.plan.fragments[fragment], *self.key, count)
        vector *= np.float32(CHANGE)
        return vector

    def adopt(self, fragment: int, vector: NDArray[np.float32]) -> None:
        """Drop what has been read."""
        del vector
        self.versions[fragment] = self.versions.get(fragment, 0) + 1

    def reset(self) -> None:
        """There is nothing to fall back to."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What one thing took; bytes are those that were read or stored for it, where they matter."""

    name: str
    seconds: float
    bytes_each: float = 0.0


@dataclass(frozen=True, slots=True)
class Usage:
    """A process at the end: most resident bytes and CPU seconds, per parameter."""

    process: str
    peak_bytes: float
    cpu_s: float


def usage(name: str, pid: int, parameters: int) -> Usage:
    """Return what a process that still runs has used."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return Usage(name, peak / parameters, (int(user) + int(system)) / 100 / parameters)


@dataclass(slots=True)
class Bench:
    """A run's processes, and its commits as they come."""

    bus: NatsBus
    cut: Plan
    cluster: Cluster
    script: tuple[str, ...]
    commits: list[Commit]
    news: asyncio.Condition
    stages: list[Stage]

    async def watch(self) -> None:
        """Note every commit, for ever."""
        async with aclosing(ledger.follow_commits(self.bus, RUN)) as commits:
            async for _, commit in commits:
                async with self.news:
                    self.commits.append(commit)
                    self.news.notify_all()

    async def until(self, holds: Callable[[Commit], bool], count: int = 1) -> list[Commit]:
        """Wait for so many commits from now on that are wanted."""
        start = len(self.commits)

        def found() -> list[Commit]:
            return [commit for commit in self.commits[start:] if holds(commit)]

        async with asyncio.timeout(PATIENCE_S), self.news:
            await self.news.wait_for(lambda: len(found()) >= count)
        return found()

    async def timed(self, name: str, work: Awaitable[object], bytes_each: float = 0.0) -> None:
        """Wait for something, and note how long it took."""
        began_s = time.monotonic()
        await work
        self.stages.append(Stage(name, time.monotonic() - began_s, bytes_each))
        print(f"  {name:<44} {self.stages[-1].seconds:8.2f} s", flush=True)

    async def learner(self, name: str) -> Service:
        return await self.cluster.start_script(name, __file__, *self.script, "--learner", name)

    async def catch_up(self) -> None:
        """Read all global fragments as a learner does that was away, in this process."""
        began_s, read = time.monotonic(), 0
        for fragment in self.cut.fragments:
            reader = GlobalReader(self.bus, RUN, self.cut)  # which holds one fragment at a time
            found = await reader.latest(fragment.index)
            assert found is not None
            read += sum(map(size_of, path(found[0], None)))
        took_s = time.monotonic() - began_s
        self.stages.append(Stage("catch-up", took_s, read / self.cut.parameters))


async def train(chosen: Namespace) -> None:
    """Be one learner until killed."""
    cut = plan_of(int(chosen.parameters), chosen.fragments)
    async with NatsBus(chosen.nats, name=chosen.learner) as bus:
        await FakeLearner(
            *(bus, RUN, cut, chosen.learner),
            step_s=chosen.step_s,
            pulse_s=0.5,
            chunk_blocks=CHUNK_BLOCKS,
            walk=Noise,
        ).train()


async def live(bench: Bench, chosen: Namespace) -> list[Usage]:
    """Take the run through everything; return what its processes used."""
    cut, size = bench.cut, len(bench.cut.fragments)
    names = [f"syncer-{number}" for number in range(chosen.syncers)]
    syncers = {name: await bench.cluster.start("syncer", name) for name in names}
    learners = {name: await bench.learner(name) for name in LEARNERS}
    await bench.timed("genesis", bench.until(lambda c: c.version == 1, size))
    await bench.timed(
        f"{VERSIONS} rounds of each fragment",
        bench.until(lambda c: c.version > 1, VERSIONS * size),
    )
    last = bench.commits[-1]
    syncers[last.syncer].kill9()
    if chosen.syncers == 1:
        syncers[last.syncer] = await bench.cluster.start("syncer", last.syncer)
    await bench.timed(
        "take-over after kill -9, to the first commit",
        bench.until(lambda c: c.fence > last.fence),
    )
    if chosen.syncers > 1:
        syncers[last.syncer] = await bench.cluster.start("syncer", last.syncer)
    learners["b"].kill9()
    learners["b"] = await bench.learner("b")
    merged = bench.until(lambda c: any((i.learner, i.incarnation) == ("b", 2) for i in c.consumed))
    await bench.timed("learner after kill -9, to its first merge", merged)
    await bench.catch_up()
    checkpointer = await bench.cluster.start("checkpointer", "checkpointer")
    async with aclosing(run_records.follow(bench.bus, RUN, CheckpointRecord)) as records:
        await bench.timed("checkpoint", anext(records))
    saved = await ledger.last_checkpoint(bench.bus, RUN)
    assert saved is not None
    processes = {**syncers, **learners, "checkpointer": checkpointer}
    found = [usage(n, s.process.pid, cut.parameters) for n, s in processes.items()]
    for service in processes.values():
        service.kill9()
        await service.ended()
    folder = bench.cluster.folder
    again = Cluster(chosen.nats, AGAIN, folder, bench.cluster.config, folder / "jax")
    async with again:
        restoring = await again.restore(Path(saved.path))
        await bench.timed("restore", restoring.ended(PATIENCE_S))
        if restoring.process.returncode:
            raise RuntimeError(restoring.said)
    return found


async def measure(chosen: Namespace) -> tuple[list[Stage], list[Usage], dict[str, float]]:
    """Run it all against a broker of our own."""
    cut = plan_of(int(chosen.parameters), chosen.fragments)
    sync = SyncConfig(fragments=chosen.fragments, learners=len(LEARNERS), h_steps=chosen.h_steps)
    outer = OuterConfig(preset="nesterov" if chosen.momentum else "direct")
    config = RunConfig(sync=sync, outer=outer, checkpoint=CheckpointConfig(every_s=1.0))
    with tempfile.TemporaryDirectory(dir=chosen.folder) as name:
        folder = Path(name)
        (folder / "run.toml").touch()
        server = NatsServer(folder / "nats")
        server.start()
        try:
            chosen.nats = server.url
            script = tuple(
                f"--{key.replace('_', '-')}={getattr(chosen, key)}"
                for key in ("nats", "parameters", "fragments", "step_s", "h_steps")
            )
            async with (
                NatsBus(server.url, name="bench") as bus,
                Cluster(server.url, RUN, folder, folder / "run.toml", folder / "jax") as cluster,
                TaskGroup() as group,
            ):
                await bus.declare(specs(RUN, window_bytes=max(2**29, 12 * cut.parameters)))
                await bus.declare(specs(AGAIN, window_bytes=2**29))
                await ledger.create_run(bus, run_record(RUN, cut, config.model_dump_json()))
                bench = Bench(bus, cut, cluster, script, [], asyncio.Condition(), [])
                watching = group.create_task(bench.watch())
                used = await live(bench, chosen)
                manifests = (await read_manifests(bus, RUN, cut)).values()
                deltas = [p for m in manifests for p in m.parts if p.name == DELTA]
                blocks = sum(part.blocks for part in deltas)
                bits = {"down, bits a parameter": sum(map(size_of, deltas)) * 8 / (256 * blocks)}
                watching.cancel()
                return bench.stages, used, bits
        finally:
            server.kill()


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--parameters", type=float, default=1e7, help="(default 1e7)")
    made.add_argument("--fragments", type=int, default=8, help="(default 8)")
    made.add_argument("--syncers", type=int, default=2, help="(default 2)")
    made.add_argument("--momentum", action="store_true", help="with Nesterov momentum")
    made.add_argument("--h-steps", type=int, default=16, help="sync.h_steps (default 16)")
    made.add_argument("--step-s", type=float, default=0.05, help="of a step (default 0.05)")
    made.add_argument("--folder", type=Path, help="where broker and checkpoints lie")
    made.add_argument("--nats", default="", help="of a learner's process")
    made.add_argument("--learner", default="", help="be a learner of this name")
    chosen = made.parse_args()
    if chosen.learner:
        with suppress(KeyboardInterrupt):
            asyncio.run(train(chosen))
        return
    size = plan_of(int(chosen.parameters), chosen.fragments).parameters
    print(f"scale: {size:,} parameters, {len(LEARNERS)} learners, {chosen.fragments} fragments")
    stages, used, bits = asyncio.run(measure(chosen))
    for stage in stages:
        print(f"  {stage.name:<44} {stage.seconds:8.2f} s  {stage.bytes_each:6.2f} B/parameter")
    for one in used:
        print(f"  {one.process:<20} {one.peak_bytes:6.1f} B/parameter at most,", end="")
        print(f" {1e9 * one.cpu_s:7.1f} CPU s for 1 B parameters")
    for what, value in bits.items():
        print(f"  {what:<44} {value:8.2f}")
    took = {stage.name.partition(" ")[0]: stage.seconds for stage in stages}
    goals = [Goal("scale: take-over", 3.0, took["take-over"], "s", at_most=True)]
    rows = [*map(asdict, stages), *map(asdict, used), bits]
    write("scale", rows, goals, chosen.json)


if __name__ == "__main__":
    sys.exit(main())
