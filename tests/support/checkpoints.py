"""Runs with checkpoints: fixtures for a store, and processes that write to it."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from skerry.errors import BrokerUnavailable, BusError
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.log.memory import MemoryBroker
from skerry.log.state_writer import NewPart, StateWriter
from skerry.protocol.messages import Commit, Manifest
from skerry.protocol.records import encode, plan_of
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.store.base import Store
from skerry.store.checkpoint import fragments
from skerry.store.local import LocalStore
from skerry_checkpointer.service import Checkpointer
from tests.support.builders import syncer_pulse
from tests.support.log import newest_parts
from tests.support.scripted_run import ScriptedRun

DEADLINE_S = 90.0
QUICK = {"sync": {"lease_s": 0.2}, "liveness": {"pulse_s": 0.01}}
"""A restore listens for a lease whether the run is alive: here, not for long."""


async def begun(**config: object) -> ScriptedRun:
    """Begin a run in a memory log."""
    values = RunConfig.model_validate({**QUICK, **config})
    return await ScriptedRun.begin(MemoryBroker().connect(), config=values)


async def save(scripted: ScriptedRun, store: Store) -> str:
    """Write a checkpoint of a run and return its name."""
    written = await Checkpointer.of(scripted.bus, scripted.record, store).save()
    assert written is not None
    return written.name


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    """A local store for the checkpoints of one run."""
    return LocalStore(tmp_path / "checkpoints" / "run")


@pytest.fixture
async def saved(store: LocalStore) -> Path:
    """The folder of one checkpoint at step 7 with 70 tokens."""
    scripted = await begun()
    await scripted.commit_all(step=7, tokens=70)
    return store.root / await save(scripted, store)


async def assert_log_holds(bus: Bus, run: str, store: Store, name: str) -> None:
    """Assert that the newest state of a run is, vector by vector, a checkpoint's."""
    cut = plan_of(await ledger.read_run(bus, run))
    for kept, vectors in fragments(store, name):
        _, found = await newest_parts(bus, run, cut, kept.commit.fragment, [*vectors])
        for part, vector in vectors.items():
            np.testing.assert_array_equal(found[part], vector, strict=True)


def flip_bit(path: Path, position: int, bit: int = 0) -> Callable[[], object]:
    """Damage a file and return what puts it right again."""
    whole = path.read_bytes()
    damaged = bytearray(whole)
    damaged[position] ^= 1 << bit
    path.write_bytes(damaged)
    return lambda: path.write_bytes(whole)


@asynccontextmanager
async def pulsing(bus: Bus, run: str) -> AsyncGenerator[None]:
    """Let a syncer ``s`` of a run be alive for as long as the block lasts."""
    pulse = encode(syncer_pulse(run=run))

    async def beat() -> None:
        while True:
            with suppress(BusError):
                await bus.publish(Subjects(run).syncer("s"), pulse)
            await asyncio.sleep(0.01)

    beating = asyncio.create_task(beat())
    try:
        yield
    finally:
        beating.cancel()
        await asyncio.wait([beating])


def dying_at_the_second(
    written: list[Manifest] | None = None,
) -> Callable[..., Awaitable[Manifest]]:
    """Return a ``StateWriter.commit`` that loses the broker at fragment 1."""
    whole = StateWriter.commit

    async def commit(
        self: StateWriter, commit: Commit, parts: list[NewPart], held: Manifest | None
    ) -> Manifest:
        if commit.fragment == 1:
            msg = "The broker went away."
            raise BrokerUnavailable(msg)
        manifest = await whole(self, commit, parts, held)
        if written is not None:
            written.append(manifest)
        return manifest

    return commit


@asynccontextmanager
async def python(*arguments: str) -> AsyncGenerator[Process]:
    """Start a Python process that does not outlive the test."""
    running = await asyncio.create_subprocess_exec(
        sys.executable, *arguments, stdout=PIPE, stderr=PIPE
    )
    try:
        yield running
    finally:
        with suppress(ProcessLookupError):
            running.kill()
        await running.communicate()


async def output_of(*arguments: str, code: int = 0) -> str:
    """Return what ``skerry checkpoints`` with these arguments prints, or its errors if it fails."""
    async with python("-m", "skerry_checkpointer", "checkpoints", *arguments) as running:
        out, err = await asyncio.wait_for(running.communicate(), DEADLINE_S)
        assert running.returncode == code, err.decode()
        return (err if code else out).decode()


async def line_of(process: Process) -> bytes:
    """Return the next line that a process prints."""
    assert process.stdout is not None
    return await asyncio.wait_for(process.stdout.readline(), DEADLINE_S)
