"""``skerry plan --measure``: encode, decode, merge and publish as this machine does them."""

from __future__ import annotations

import asyncio
import tempfile
import time
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
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.log.streams import specs
from skerry.protocol.chunks import PlaneAssembler, seal, unseal
from skerry.protocol.codec import pack
from skerry.protocol.messages import ChunkHeader
from skerry.protocol.subjects import Subjects
from skerry.settings.loading import control_variable
from skerry.settings.models import SyncConfig
from skerry_tools.plan.measured import COUNTS, DEFAULT, Speeds
from skerry_tools.plan.traffic import SyncLoad

PARAMETERS = 4 * 1024**2
ROUNDS = 5
PUBLISHED_BYTES = 128 * 1024**2
RUN = "measure"
LAYOUT = plan([LeafSpec("w", (PARAMETERS,))], 1)


def measure(sync: SyncConfig) -> tuple[Speeds, float]:
    """Return what one core does with a run's schemes, and bytes a second that a broker stores.

    Whole commits are taken to cost more or less by as much as their decode, merge and encode. The
    broker is a server of our own below the folder for temporary files. Raises ConfigError where
    there is none.
    """
    up, down = sync.contribution_scheme, SyncLoad(sync, PARAMETERS).down_scheme
    x = np.random.default_rng(0).standard_normal(PARAMETERS, np.float32) * np.float32(1e-4)
    sent = {scheme: _messages(scheme, x, sync.chunk_bytes) for scheme in {up, down}}
    encode = {s: _rate(partial(_messages, s, x, sync.chunk_bytes)) for s in sent}
    decode = {s: _rate(partial(_received, s, messages)) for s, messages in sent.items()}
    few, many = (4 * PARAMETERS / _rate(_merging(up, x, count)) for count in COUNTS)
    each = max(0.0, many - few) / (COUNTS[1] - COUNTS[0]) / (4 * PARAMETERS)
    base = max(0.0, few / (4 * PARAMETERS) - COUNTS[0] * each)
    found = replace(DEFAULT, encode=encode, decode=decode, merge_base=base, merge_each={up: each})
    slower = found.work_s(up, down, 1.0, COUNTS[0]) / DEFAULT.work_s(up, down, 1.0, COUNTS[0])
    commits = tuple(seconds * slower for seconds in DEFAULT.commit_cpu_s)
    return replace(found, commit_cpu_s=commits, here=True), asyncio.run(_published(sync))


def _rate(work: Callable[[], object]) -> float:
    """Return f32 bytes a second, of the best of some rounds."""
    work()  # compiles
    best = float("inf")
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began)
    return 4 * PARAMETERS / best


def _messages(scheme: str, x: np.ndarray, chunk_bytes: int) -> list[bytes]:
    return [
        seal(
            ChunkHeader(
                *(RUN, LAYOUT.digest, 0, 1, "a", 1, c.index, c.count, scheme),
                *(c.first_block, c.blocks, c.raw_bytes),
            ),
            c.packed,
        )
        for c in pack(scheme, cpu().quantise(scheme, x), chunk_bytes)
    ]


def _received(scheme: str, sent: list[bytes]) -> None:
    assembler = PlaneAssembler(scheme, PARAMETERS // BLOCK)
    for message in sent:
        assembler.add(*unseal(message, run=RUN, plan=LAYOUT))
    cpu().dequantise(scheme, assembler.planes)


def _merging(scheme: str, x: np.ndarray, count: int) -> Callable[[], object]:
    fragment, outer = LAYOUT.fragments[0], make_outer("direct", lr=None, momentum=None, h_steps=1)
    one = OuterGradient(scheme, cpu().quantise(scheme, x), slice_norms(fragment, x))
    master, spare = np.ones_like(x), [np.ones_like(x), np.ones_like(x)]
    given = [one] * count, [1 / count] * count, "rda", fragment, (False,) * len(fragment.slices)
    return lambda: merge_and_apply(outer, master, outer.init(master), *given, spare)


async def _published(sync: SyncConfig) -> float:
    """Return bytes a second that a broker on this machine's disk takes, durably."""
    payload, names = np.random.default_rng(1).bytes(sync.chunk_bytes), Subjects(RUN)
    with tempfile.TemporaryDirectory(prefix="skerry-") as folder:
        broker = LocalBroker(Path(folder), find_server(control_variable("SKERRY_NATS_SERVER")))
        command = broker.command()
        assert command.prepare
        assert command.ready
        command.prepare()
        with command.log.open("wb") as log:
            server = await asyncio.create_subprocess_exec(*command.argv, stdout=log, stderr=log)
        try:
            await command.ready(server.pid)
            options = NatsOptions(credentials=broker.credentials)
            async with NatsBus(broker.url, options=options) as bus:
                await bus.declare(specs(RUN, window_bytes=2 * PUBLISHED_BYTES))
                began, count = time.perf_counter(), max(1, PUBLISHED_BYTES // sync.chunk_bytes)
                subject = names.shard(0).contribution(0, "a")
                await asyncio.gather(
                    *(bus.publish(subject, payload, msg_id=f"{n}") for n in range(count))
                )
                return count * sync.chunk_bytes / (time.perf_counter() - began)
        finally:
            server.terminate()
            await server.wait()
