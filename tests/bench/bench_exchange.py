"""What one exchange of a whole model costs: ``python tests/bench/bench_exchange.py``.

M learners without a model send int4 noise for each fragment to a real broker, a syncer in a process
of its own merges and commits it, and each learner reads the new global fragment. All on this
machine, so the link is memory. ``--parameters`` and ``--learners`` say how much; encoding is done
once before, since it is a learner's own. Beside each figure stands what ``skerry plan --measure``
says of it, taken on the same machine afterwards; but no wall time: a plan has no learners and no
broker on the syncer's cores. ``--peers`` averages as many by torch's all-reduce and by hivemind.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncGenerator, Iterable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import NamedTuple

import numpy as np
import psutil
from allreduce import Averaging, averagings
from harness import Goal, parser, write
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import Fragment, LeafSpec, Plan, plan
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.planes import Planes
from skerry.log import contributions, fences, ledger, run_records, state
from skerry.log.global_fragments import GlobalReader
from skerry.log.nats.bus import NatsBus
from skerry.log.state import Meters
from skerry.log.streams import specs
from skerry.protocol.codec import pack
from skerry.protocol.messages import ContributionKind, Manifest, Round
from skerry.protocol.parts import size_of, window_bytes
from skerry.settings.models import LogConfig, OuterConfig, RunConfig, SyncConfig
from skerry_tools.plan.measure import measure as measured_here
from skerry_tools.plan.memory import syncer_bytes
from skerry_tools.plan.tables import HubTable, ScenarioTables, SiteTable
from skerry_tools.plan.traffic import Deployment, PlannedSite, SyncLoad
from tests.support.builders import background, header, run_record
from tests.support.cluster import Cluster
from tests.support.learners import ScriptedLearner
from tests.support.nats_server import NatsServer

RUN = "exchange"
ROWS = 4096
LEAF = 16 * 2**20
"""Parameters in a tensor."""
PATIENCE_S = 3600.0
UP = "up, bits a parameter and learner"
DOWN = "down, bits a parameter and learner"
STORED = "stored beside contributions, bytes a parameter"
WALL = "wall, s for 1 B parameters"
CPU = "CPU of the syncer, s for 1 B parameters"
RESIDENT = "resident in the syncer, bytes a parameter"
SIZE, STEP = 0.02, 1e-4
"""Of parameters, and of what a learner changes, as in training: standard deviations."""
GAP = 4
"""Steps between the rounds of two fragments."""


@dataclass(frozen=True, slots=True)
class Exchange:
    """One exchange of every fragment: seconds, CPU seconds by process, bytes."""

    wall_s: float
    syncer_cpu_s: float
    learners_cpu_s: float
    broker_cpu_s: float
    sent_bytes: int
    read_bytes: int
    stored_bytes: int


def plan_of(parameters: int, fragments: int) -> Plan:
    """Return a plan of about so many parameters."""
    tensors = max(fragments, round(parameters / LEAF))
    rows = max(1, parameters // tensors // ROWS)
    return plan([LeafSpec(f"w{i:03d}", (rows, ROWS)) for i in range(tensors)], fragments)


class Encoded(NamedTuple):
    """A vector ready to send, and the norms of its slices."""

    scheme: str
    planes: Planes
    norms: tuple[float, ...]


class Learner:
    """One that answers every round with almost the same noise, and reads every version.

    ``planes`` and ``norms`` are those of each fragment, encoded once.
    """

    def __init__(self, bus: NatsBus, cut: Plan, name: str, chunk_bytes: int) -> None:
        self.name = name
        self._cut = cut
        self._chunk_bytes = chunk_bytes
        self._reader = GlobalReader(bus, RUN, cut)
        self._sender = contributions.Sender(bus, RUN, cut)
        self._scripted = ScriptedLearner(bus, RUN, cut, name)
        self._rng = np.random.default_rng(sum(name.encode()))
        self._identities = count(1)
        self._encoded = {f.index: self._noise(f, STEP, "int4") for f in cut.fragments}

    def _noise(self, fragment: Fragment, scale: float, scheme: str) -> Encoded:
        vector = self._rng.standard_normal(fragment.padded_size, np.float32)
        vector *= np.float32(scale)
        planes = cpu().quantise(scheme, vector)
        norms = slice_norms(fragment, cpu().dequantise(scheme, planes, vector))
        return Encoded(scheme, planes, norms)

    async def pulse(self, step: int) -> None:
        await self._scripted.pulse(step)

    async def begin(self, fragment: Fragment) -> None:
        """Offer initial parameters."""
        kind = ContributionKind.GENESIS
        await self._send(kind, fragment.index, 1, self._noise(fragment, SIZE, "f32"))

    async def answer(self, opened: Round) -> int:
        """Send a contribution; returns its bytes.

        One code is another each time: a syncer refuses what it has merged before.
        """
        kind, index = ContributionKind.OUTER_GRADIENT, opened.fragment
        codes = self._encoded[index].planes.codes
        codes[opened.version % len(codes), 0] ^= 1
        return await self._send(kind, index, opened.version, self._encoded[index])

    async def _send(
        self, kind: ContributionKind, fragment: int, version: int, encoded: Encoded
    ) -> int:
        said = header(
            next(self._identities),
            self.name,
            kind=kind,
            fragment=fragment,
            base_version=version - 1,
            norms=() if kind is ContributionKind.GENESIS else encoded.norms,
        )
        chunks = pack(encoded.scheme, encoded.planes, self._chunk_bytes)
        return await self._sender.send(said, chunks)

    async def read(self, manifest: Manifest) -> int:
        """Read a version; returns its bytes."""
        sizes: list[int] = []
        await self._reader.read(manifest, Meters(sizes.append))
        return sum(sizes)


@dataclass(slots=True)
class Bench:
    """The learners, the log, and the processes of syncer, learners and broker."""

    bus: NatsBus
    cut: Plan
    learners: Sequence[Learner]
    processes: Sequence[psutil.Process]
    rounds: AsyncGenerator[Round]
    manifests: AsyncGenerator[Manifest]
    pulse_s: float
    step: int = 0
    versions: dict[int, int] = field(default_factory=dict[int, int])

    async def pulse(self) -> None:
        """Say where the learners are, for ever: one that is silent is not waited for."""
        while True:
            await self._pulse()
            await asyncio.sleep(self.pulse_s)

    async def _pulse(self) -> None:
        for learner in self.learners:
            await learner.pulse(self.step)

    async def _opened(self) -> Round:
        """Return the next round that no commit has closed; one may be opened again."""
        while True:
            opened = await anext(self.rounds)
            if opened.version > self.versions[opened.fragment]:
                return opened

    async def begin(self) -> None:
        """Have one learner offer the initial parameters, and all read them."""
        for fragment in self.cut.fragments:
            await self.learners[0].begin(fragment)
            await self._read(await anext(self.manifests))

    async def exchange(self) -> Exchange:
        """Exchange every fragment once, one after the other."""
        began_s, cpu_s = time.monotonic(), self._cpu_s()
        sent = read = stored = 0
        for _ in self.cut.fragments:
            self.step += GAP
            await self._pulse()
            opened = await self._opened()
            sent += sum(await asyncio.gather(*(one.answer(opened) for one in self.learners)))
            manifest = await anext(self.manifests)
            if manifest.commit.refused:
                msg = f"the syncer refused {manifest.commit.refused}"
                raise RuntimeError(msg)
            read += await self._read(manifest)
            version = manifest.commit.version
            stored += sum(size_of(p) for p in manifest.parts if p.version == version)
        took_s = time.monotonic() - began_s
        syncer_s, learners_s, broker_s = (self._cpu_s() - cpu_s).tolist()
        return Exchange(took_s, syncer_s, learners_s, broker_s, sent, read, stored)

    async def _read(self, manifest: Manifest) -> int:
        self.versions[manifest.commit.fragment] = manifest.commit.version
        return sum(await asyncio.gather(*(one.read(manifest) for one in self.learners)))

    def _cpu_s(self) -> NDArray[np.float64]:
        return np.array([sum(one.cpu_times()[:2]) for one in self.processes])


def config_of(cut: Plan, chosen: Namespace) -> RunConfig:
    """Return the settings of the run, with the window that one is founded with."""
    sync = SyncConfig(
        fragments=chosen.fragments,
        h_steps=GAP * chosen.fragments,
        learners=chosen.learners,
        quorum=chosen.learners,
        delta_scheme=chosen.deltas,
        round_timeout_s=PATIENCE_S,
    )
    about = sync.contribution_scheme, sync.snapshot_every
    window = window_bytes(cut.parameters, sync.learners, *about)
    return RunConfig(
        sync=sync,
        outer=OuterConfig(preset="nesterov" if chosen.momentum else "direct"),
        log=LogConfig(window_bytes=max(LogConfig().window_bytes, window)),
    )


def planned(
    cut: Plan, config: RunConfig, chosen: Namespace, empty_bytes: float
) -> dict[str, float]:
    """Return what ``skerry plan --measure`` says of these settings, by the name of its figure.

    ``empty_bytes`` is what a syncer's process holds before it has a model.
    """
    speeds, write = measured_here(config.sync, chosen.learners)
    load = SyncLoad(config.sync, cut.parameters, outer=config.outer)
    here = {"learners": chosen.learners, "up": "1 Tbit/s", "rtt": "1 ms"}
    # A step as long as a round: an exchange has one round after the other.
    site = PlannedSite("here", SiteTable.model_validate(here), 1.0, local=True)
    hub = HubTable().model_copy(update={"write": write})
    at = Deployment(load, {"here": site}, hub, ScenarioTables(), run=config, speeds=speeds)
    state = load.state_bytes(1 / load.keyframe_every, at.snapshots)
    return {
        UP: load.up_bits,
        DOWN: load.down_bits,
        STORED: state,
        CPU: 1e9 * at.hub_round.busy_cores * at.period_s / cut.parameters,
        RESIDENT: (syncer_bytes(at) + empty_bytes) / cut.parameters,
    }


async def measure(
    cut: Plan, config: RunConfig, chosen: Namespace
) -> tuple[list[Exchange], float, float]:
    """Return the exchanges that are asked for, and bytes that the syncer held first and last."""
    sync, learners = config.sync, chosen.learners
    async with AsyncExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        (folder / "run.toml").touch()
        server = NatsServer(folder / "nats")
        server.start()
        opened.callback(server.kill)
        buses = [
            await opened.enter_async_context(NatsBus(server.url, name=f"bench-{i}"))
            for i in range(learners + 1)
        ]
        bus = buses[0]
        await bus.declare(specs(RUN, window_bytes=config.log.window_bytes))
        await ledger.create_run(bus, run_record(RUN, cut, config.model_dump_json()))
        cluster = await opened.enter_async_context(
            Cluster(server.url, RUN, folder, folder / "run.toml", folder / "jax")
        )
        syncer = await cluster.start("syncer", "s")
        process = psutil.Process(syncer.process.pid)
        await anext(fences.follow_fence(bus, RUN, 0))  # by then it has loaded its kernels
        empty_bytes = process.memory_info().rss
        bench = Bench(
            bus,
            cut,
            [
                await asyncio.to_thread(Learner, own, cut, f"l{i}", sync.chunk_bytes)
                for i, own in enumerate(buses[1:])
            ],
            (process, psutil.Process(), psutil.Process(server.pid)),
            await opened.enter_async_context(
                aclosing(run_records.follow(bus, RUN, Round, cut.digest))
            ),
            await opened.enter_async_context(aclosing(state.follow_manifests(bus, RUN, cut))),
            config.liveness.pulse_s,
        )
        async with asyncio.timeout(PATIENCE_S), background(bench.pulse()):
            await bench.begin()
            await bench.exchange()  # which loads kernels, and touches memory for the first time
            found = [await bench.exchange() for _ in range(chosen.times)]
            return found, empty_bytes, process.memory_info().rss


def compare(ours: Averaging, peers: Iterable[Averaging]) -> None:
    """Print what the same average took us, and others."""
    print(f"  {'':<30} {'wall, s':>8} {'CPU, s':>8} {'moved, MB':>10} {'peak, MB':>9}")
    for one in (ours, *peers):
        sizes = f"{one.moved_bytes / 1e6:10.0f} {one.peak_bytes / 1e6:9.0f}"
        print(f"  {one.name:<30} {one.wall_s:8.2f} {one.cpu_s:8.2f} {sizes}", flush=True)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--parameters", type=float, default=16e6, help="(default 16e6)")
    made.add_argument("--fragments", type=int, default=8, help="(default 8)")
    made.add_argument("--learners", type=int, default=4, help="(default 4)")
    made.add_argument("--deltas", default="auto", help="sync.delta_scheme (default auto)")
    made.add_argument("--momentum", action="store_true", help="with Nesterov momentum")
    made.add_argument("--peers", action="store_true", help="torch and hivemind beside it")
    made.add_argument("--times", type=int, default=5, help="exchanges (default 5)")
    chosen = made.parse_args()
    cut = plan_of(int(chosen.parameters), chosen.fragments)
    config = config_of(cut, chosen)
    found, empty_bytes, resident = asyncio.run(measure(cut, config, chosen))
    size, learners = cut.parameters, chosen.learners
    middle = {
        name: statistics.median(getattr(one, name) for one in found) / size
        for name in asdict(found[0])
    }
    rows = {
        UP: 8 * middle["sent_bytes"] / learners,
        DOWN: 8 * middle["read_bytes"] / learners,
        STORED: statistics.mean(one.stored_bytes for one in found) / size,
        WALL: 1e9 * middle["wall_s"],
        CPU: 1e9 * middle["syncer_cpu_s"],
        RESIDENT: resident / size,
    }
    plans = planned(cut, config, chosen, empty_bytes)
    limits = {
        UP: 3.4,
        DOWN: 5.0,
        STORED: 1.0,
        WALL: 12.0,
        CPU: 6.0,
        RESIDENT: 10.5 if chosen.momentum else 6.5,
    }
    print(
        f"exchange: {size:,} parameters, {learners} learners, median of {len(found)}, load ", end=""
    )
    print(" ".join(f"{load:.1f}" for load in os.getloadavg()))
    print(f"  {'':<50} {'measured':>8} {'planned':>8} {'goal':>5}")
    for name, value in rows.items():
        says = f"{plans[name]:8.2f}" if name in plans else f"{'-':>8}"
        print(f"  {name:<50} {value:8.2f} {says} {limits[name]:5g}")
    print(f"  {empty_bytes / 2**20:.0f} MiB of the resident are a syncer without a model")
    if chosen.peers:
        ours = Averaging(
            "Skerry, all processes",
            size * middle["wall_s"],
            size * sum(middle[f"{who}_cpu_s"] for who in ("syncer", "learners", "broker")),
            size * (middle["sent_bytes"] + middle["read_bytes"]),
            resident,
        )
        compare(ours, averagings(size, learners, chosen.times))
    goals = [Goal(name, goal, rows[name], "", at_most=True) for name, goal in limits.items()]
    write("exchange", [rows, plans], goals, chosen.json)


if __name__ == "__main__":
    main()
