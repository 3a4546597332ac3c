"""Runs that an audit is made of: the real syncer, fake learners, and a log that has ended."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from typing import TYPE_CHECKING

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log import ledger
from skerry.log.streams import specs
from skerry.service.kernels import load_kernels
from skerry.settings.models import DataConfig, LogConfig, OuterConfig, RunConfig, SyncConfig
from skerry_syncer.service import stand_by
from tests.support.builders import background, run_record
from tests.support.learners import TOKENS, FakeLearner

if TYPE_CHECKING:
    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit

PLAN = plan([LeafSpec("embed", (30, 64), embedding=True), LeafSpec("w", (20, 64))], 2)
WINDOW_BYTES = 16 * 1024**2
CONFIG = RunConfig(
    data=DataConfig(seq_len=TOKENS, batch=1),  # what a fake learner's step stands for
    sync=SyncConfig(fragments=2, h_steps=8, merge="rda", chunk_bytes=4096, quorum=2),
    outer=OuterConfig(preset="nesterov"),
    log=LogConfig(window_bytes=WINDOW_BYTES),
)
WHOLE = CONFIG.model_copy(update={"sync": CONFIG.sync.model_copy(update={"snapshot_every": 1})})
"""Each version stores a snapshot."""


async def until_version(bus: Bus, run: str, version: int) -> list[tuple[int, Commit]]:
    """Return the run's commits by ledger sequence once every fragment has reached a version."""
    found: list[tuple[int, Commit]] = []
    newest: dict[int, int] = {}
    commits = ledger.follow_commits(bus, run)
    async with asyncio.timeout(180), aclosing(commits):
        async for sequence, commit in commits:
            found.append((sequence, commit))
            newest[commit.fragment] = commit.version
            if len(newest) == len(PLAN.fragments) and min(newest.values()) >= version:
                break
    return found


async def create(bus: Bus, run: str, config: RunConfig = CONFIG) -> None:
    """Create a run in a log."""
    await asyncio.to_thread(load_kernels)
    await bus.declare(specs(run, window_bytes=WINDOW_BYTES))
    await ledger.create_run(bus, run_record(run, PLAN, config.model_dump_json()))


async def train(bus: Bus, run: str, versions: int, syncers: int = 1) -> list[tuple[int, Commit]]:
    """Have two fake learners train a run up to a version of each fragment; return its commits.

    One syncer after the other leads them, each for an equal share of the versions.
    """
    found: list[tuple[int, Commit]] = []
    learners = [
        FakeLearner(bus, run, PLAN, name, step_s=0.005, scheme="int4").train() for name in "ab"
    ]
    async with background(*learners):
        for number in range(1, syncers + 1):
            async with background(stand_by(bus, run, "s")):
                found = await until_version(bus, run, versions * number // syncers)
    return found
