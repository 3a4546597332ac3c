"""What services hold against what is promised: ``python tests/bench/bench_memory.py``.

A learner: parameters, anchors, AdamW's two moments and two fragments in flight, each with what was
captured and what is on its way out or in. A syncer: three f32 per parameter of its shard, the
global fragments in bf16, and one contribution per learner of the fragment in hand. Both are real
processes on a real broker; the syncer's learners are learners with a model of 20 M parameters.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import Goal, parser, write

from skerry.algorithm.fragments import BLOCK, LeafSpec, Plan, plan
from skerry.algorithm.schemes import SCHEMES
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.log.streams import specs
from skerry.settings.models import OuterConfig, RunConfig, SyncConfig
from tests.support.builders import run_record
from tests.support.cluster import Cluster, until_commit
from tests.support.learners import FakeLearner
from tests.support.nats_server import NatsServer

WEIGHED = Path(__file__).parent / "weighed_service.py"
FRAGMENTS = 8
LEARNERS = 4
MIB = 1024**2
LEARNER = """
[model]
preset = "micro"
[data]
batch = 1
seq_len = 32
[train]
steps = 1000000
[sync]
learners = 1
fragments = 8
h_steps = 24
"""


@dataclass(frozen=True, slots=True)
class Weight:
    """Bytes held at most, with buffers on their way (peak), and promised.

    ``base`` is what never changes: a learner's parameters, anchors and moments, a syncer's masters
    and momentum; ``vectors`` says how many f32 vectors of the largest fragment lie above it.
    """

    service: str
    parameters: int
    held: int
    peak: int
    promised: int
    base: int
    fragment: int

    @property
    def vectors(self) -> float:
        return (self.held - self.base) / self.fragment


async def weigh_learner(folder: Path, server: NatsServer) -> Weight:
    """Let one learner train through a few rounds of every fragment."""
    config = folder / "run.toml"
    config.write_text(LEARNER)
    out = folder / "learner.json"
    async with (
        Cluster(server.url, "learner", folder, config, folder / "jax") as cluster,
        NatsBus(server.url, name="bench") as bus,
    ):
        await cluster.start("syncer", "s")
        where = (str(out), server.url, "learner", str(config))
        learner = await cluster.start_script("weighed", WEIGHED, "learner", *where)
        await until_commit(bus, "learner", lambda c: c.version == 5)
        record = await ledger.read_run(bus, "learner")
        learner.terminate()
        await learner.ended()
    cut = plan(record.leaves, record.fragments)
    fragment = largest(cut)
    samples: list[dict[str, int]] = json.loads(out.read_text())
    base = 16 * cut.parameters
    return Weight(
        service="learner",
        parameters=cut.parameters,
        held=max(s["device"] + s["host"] for s in samples),
        peak=max(s["device"] + s["host_peak"] for s in samples),
        promised=base + 2 * 2 * fragment,
        base=base,
        fragment=fragment,
    )


def largest(cut: Plan) -> int:
    return 4 * max(f.padded_size for f in cut.fragments)


async def weigh_syncer(folder: Path, server: NatsServer) -> Weight:
    """Let learners contribute to a few rounds of every fragment."""
    shapes = [LeafSpec("embed", (8000, 512), embedding=True)]
    cut = plan([*shapes, *(LeafSpec(f"w{i}", (1000, 1000)) for i in range(16))], FRAGMENTS)
    config = RunConfig(
        sync=SyncConfig(fragments=FRAGMENTS, h_steps=24, learners=LEARNERS, quorum=LEARNERS),
        outer=OuterConfig(preset="nesterov"),
    )
    out = folder / "syncer.json"
    async with NatsBus(server.url, name="bench") as bus:
        await bus.declare(specs("syncer"))
        await ledger.create_run(bus, run_record("syncer", cut, config.model_dump_json()))
        async with Cluster(server.url, "syncer", folder, folder, folder / "jax") as cluster:
            syncer = await cluster.start_script(
                "weighed", WEIGHED, "syncer", str(out), server.url, "syncer"
            )
            await contribute(bus, cut)
            syncer.terminate()
            await syncer.ended()
    samples: list[dict[str, int]] = json.loads(out.read_text())
    merges = [s for s in samples if s["version"] > 2]
    fragment = largest(cut)
    scheme = SCHEMES["int4"]
    contribution = fragment // 4 // BLOCK * (scheme.code_bytes + 2)
    return Weight(
        service="syncer",
        parameters=cut.parameters,
        held=max(s["held"] for s in merges),
        peak=max(s["peak"] for s in merges),
        promised=14 * cut.parameters + LEARNERS * contribution,
        base=10 * cut.parameters,
        fragment=fragment,
    )


async def contribute(bus: NatsBus, cut: Plan) -> None:
    """Have learners train until every fragment has been merged twice."""
    names = [f"p{i}" for i in range(LEARNERS)]
    first, *others = [
        FakeLearner(bus, "syncer", cut, name, scheme="int4", step_s=0.1) for name in names
    ]
    async with asyncio.timeout(150):
        tasks = [asyncio.create_task(first.train())]
        for fragment in cut.fragments:
            await until_commit(bus, "syncer", lambda c, f=fragment.index: c.fragment == f)
        tasks += [asyncio.create_task(fake_learner.train()) for fake_learner in others]
        await until_commit(bus, "syncer", lambda c: c.version == 4)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def measure() -> list[Weight]:
    """Weigh a learner, then a syncer."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        server = NatsServer(folder / "nats")
        server.start()
        try:
            return [await weigh_learner(folder, server), await weigh_syncer(folder, server)]
        finally:
            server.kill()


def show(weights: Sequence[Weight]) -> None:
    print("memory: MiB held at most, with buffers on their way (peak), and promised")
    for w in weights:
        word = "kept" if w.held <= w.promised else "broken"
        print(
            f"  {w.service:<8} {w.parameters / 1e6:5.1f} M parameters: held {w.held / MIB:7.1f},"
            f" peak {w.peak / MIB:7.1f}, promised {w.promised / MIB:7.1f}: {word}"
        )
        print(
            f"           {w.vectors:.1f} f32 vectors of a fragment ({w.fragment / MIB:.1f} MiB)"
            f" above the {w.base / MIB:.1f} MiB that never change"
        )


def main() -> None:
    chosen = parser("Memory of a learner and a syncer.").parse_args()
    weights = asyncio.run(measure())
    show(weights)
    goals = [
        Goal(
            f"memory of a {w.service}",
            round(w.promised / MIB, 1),
            w.held / MIB,
            "MiB",
            at_most=True,
        )
        for w in weights
    ]
    write("memory", [asdict(w) for w in weights], goals, chosen.json)


if __name__ == "__main__":
    main()
