"""``skerry plan --measure``: encode, decode, merge and publish as this machine does them."""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
import timeit
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK, LeafSpec, plan
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import make_outer, merge_and_apply
from skerry.cli.cluster.broker import LocalBroker, find_server
from skerry.cli.cluster.supervisor import Supervisor
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import specs
from skerry.protocol.chunks import PlaneAssembler, seal_chunk, unseal
from skerry.protocol.codec import pack
from skerry.protocol.subjects import Subjects
from skerry.settings.models import SyncConfig
from skerry_tools.plan.measured import DEFAULT, MERGE_CHECKED, NEAR, Speeds
from skerry_tools.plan.traffic import SyncLoad

PARAMETERS = 4 * 1024**2
ROUNDS = 5
PUBLISHED_BYTES = 128 * 1024**2
RUN = "measure"
LAYOUT = plan([LeafSpec("w", (PARAMETERS,))], 1)


def measure(sync: SyncConfig, learners: int) -> tuple[Speeds, float]:
    """Return what one core does with a run's schemes, and bytes a second that a broker stores.

    It merges as many contributions as there are learners, 8 at most. The broker is a server of our
    own below the folder for temporary files. Raises ConfigError where there is none.
    """
    up, down = sync.contribution_scheme, SyncLoad(sync, PARAMETERS).down_scheme
    x = np.random.default_rng(0).standard_normal(PARAMETERS, np.float32) * np.float32(1e-4)
    count = min(learners, MERGE_CHECKED[-1])
    sent = {scheme: _messages(scheme, x, sync.chunk_bytes) for scheme in {up, NEAR.get(down, down)}}
    encode = {s: _rate(partial(_messages, s, x, sync.chunk_bytes)) for s in sent}
    decode = {s: _rate(partial(_received, s, messages)) for s, messages in sent.items()}
    each = {up: 1 / _rate(_merging(up, x, count)) / count}
    found = replace(DEFAULT, encode=encode, decode=decode, merge_base=0.0, merge_each=each)
    return found, asyncio.run(_published(sync))


def _rate(work: Callable[[], object]) -> float:
    """Return f32 bytes a CPU second, the median of some rounds: others may use the cores too."""
    work()  # compiles
    spent_s = timeit.repeat(work, timer=time.process_time, repeat=ROUNDS, number=1)
    return 4 * PARAMETERS / statistics.median(spent_s)


def _messages(scheme: str, x: np.ndarray, chunk_bytes: int) -> list[bytes]:
    return [
        seal_chunk(c, run=RUN, plan=LAYOUT, fragment=0, version=1, sender="a", incarnation=1)
        for c in pack(scheme, cpu().quantise(scheme, x), chunk_bytes)
    ]


def _received(scheme: str, sent: list[bytes]) -> None:
    assembler = PlaneAssembler(scheme, PARAMETERS // BLOCK)
    for message in sent:
        assembler.add(*unseal(message, run=RUN, plan=LAYOUT))
    cpu().dequantise(scheme, assembler.planes)


def _merging(scheme: str, x: np.ndarray, count: int) -> Callable[[], object]:
    fragment, outer = LAYOUT.fragments[0], make_outer("direct", lr=None, momentum=None, h_steps=1)
    sent = [x * np.float32(1 + n / count) for n in range(count)]  # equal ones cost a digest more
    items = [
        OuterGradient(scheme, cpu().quantise(scheme, y), slice_norms(fragment, y)) for y in sent
    ]
    master, spare = np.ones_like(x), [np.ones_like(x), np.ones_like(x)]
    given = items, [1 / count] * count, "rda", fragment, (False,) * len(fragment.slices)
    return lambda: merge_and_apply(outer, master, outer.init(master), *given, spare)


async def _published(sync: SyncConfig) -> float:
    """Return bytes a second that a broker on this machine's disk takes, durably."""
    payload, shard = np.random.default_rng(1).bytes(sync.chunk_bytes), Subjects(RUN).shard(0)
    with tempfile.TemporaryDirectory(prefix="skerry-") as folder:
        broker = LocalBroker(Path(folder), find_server())
        async with Supervisor([[broker.command()]], lambda _event: None).running():
            options = NatsOptions(credentials=broker.credentials)
            async with NatsBus(broker.url, options=options) as bus:
                await bus.declare(specs(RUN, window_bytes=2 * PUBLISHED_BYTES))
                began, count = time.perf_counter(), max(1, PUBLISHED_BYTES // sync.chunk_bytes)
                subject = shard.contribution(0, "a")
                await asyncio.gather(
                    *(bus.publish(subject, payload, msg_id=f"{n}") for n in range(count))
                )
                return count * sync.chunk_bytes / (time.perf_counter() - began)
