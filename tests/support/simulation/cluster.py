"""Processes of a simulated run: learners, syncers and a reader, each killed, stopped and started.

The syncers are the real ones. So are the learners, but that they have random numbers for a model.
A process is a task and its own client of the broker. Killed, its client lets nothing
more through and the task ends; started again, it knows what the log knows.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import dataclass, field, replace

import xxhash

from skerry.errors import (
    BrokerUnavailable,
    Corrupt,
    Fenced,
    Overtaken,
    StorageFull,
    Superseded,
    first_cause,
)
from skerry.log import ledger, state
from skerry.log.base import Bus
from skerry.log.global_fragments import GlobalReader
from skerry.log.streams import specs
from skerry.tasks import TaskGroup
from skerry_syncer.service import stand_by
from skerry_tools.virtual import OWNER, VirtualLoop
from tests.support.builders import run_record
from tests.support.learners import FakeLearner
from tests.support.simulation.network import SimulatedLink, SimulatedNetwork
from tests.support.simulation.scenario import SENT_BLOCKS, Scenario

RUN = "s"
RESTART_S = 0.3
RETRYABLE = (BrokerUnavailable, StorageFull, Fenced, Superseded)
"""With these a service ends in one sentence, and its supervisor starts it again."""


@dataclass(slots=True)
class Process:
    """One service by name; ``begin`` makes what it runs, given its client of the broker."""

    name: str
    kind: str
    begin: Callable[[Bus], Coroutine[None, None, None]]
    bus: Bus | None = None
    link: SimulatedLink | None = None
    task: asyncio.Task[None] | None = None
    down: int = 0
    starts: int = 0
    ended: bool = False


@dataclass(slots=True)
class Observations:
    """What the reader has seen, and what it must never see."""

    read: dict[tuple[int, int], int] = field(default_factory=dict[tuple[int, int], int])
    newest: dict[int, int] = field(default_factory=dict[int, int])
    wrong: list[str] = field(default_factory=list[str])


class Cluster:
    """Every process of one run, on one virtual loop."""

    def __init__(self, scenario: Scenario, seed: int) -> None:
        self.scenario = scenario
        self.plan = replace(scenario.plan, shards=scenario.shards)
        self.loop = VirtualLoop()
        self.network = SimulatedNetwork(self.loop, seed)
        self.observations = Observations()
        self.crashes: list[str] = []
        self.finished: asyncio.Future[None] = self.loop.create_future()
        self.processes: dict[str, Process] = {}
        for number in range(scenario.learners):
            self._add(f"learner-{number}", "learner", self._learner)
        for number in range(scenario.syncers):
            self._add(f"syncer-{number}", "syncer", self._syncer)
        self._add("checkpointer", "checkpointer", self._reader)

    @property
    def services(self) -> dict[str, str]:
        """Everything that a fault can strike, by name, with its kind."""
        return {p.name: p.kind for p in self.processes.values()} | {"broker": "broker"}

    def _add(
        self,
        name: str,
        kind: str,
        begin: Callable[[str, Bus], Coroutine[None, None, None]],
    ) -> None:
        self.processes[name] = Process(name, kind, lambda bus: begin(name, bus))

    # processes

    def start(self, name: str) -> None:
        """Start a process, unless it is held down or has done all it had to."""
        process = self.processes[name]
        if process.down or process.ended or (process.task and not process.task.done()):
            return
        process.bus, process.link = self.network.connect(name)
        process.starts += 1
        context = copy_context()
        context.run(OWNER.set, name)
        process.task = self.loop.create_task(self._live(process), context=context)

    def kill(self, name: str) -> bool:
        """End a process at once; False if there was none."""
        process = self.processes[name]
        self.loop.thaw(name)
        if process.task is None or process.task.done():
            return False
        if process.link is not None:
            process.link.sever()
        process.task.cancel()
        process.task = None
        return True

    async def _live(self, process: Process) -> None:
        """Run a process to its end; what a supervisor would start again is started again."""
        bus, link = process.bus, process.link
        if bus is None or link is None:
            return
        try:
            await process.begin(bus)
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is, the oracle hears of it
            cause = first_cause(error)
            if link.severed:
                return
            if not isinstance(cause, RETRYABLE):
                at_s = self.loop.time()
                what = f"{type(cause).__name__}: {cause}"
                self.crashes.append(f"{process.name} ended at {at_s:.3f} s with {what}")
        else:
            process.ended = True
        link.sever()
        if process.task is asyncio.current_task():
            process.task = None
            self.network.later(RESTART_S, self.start, process.name)

    # what they run

    async def _learner(self, name: str, bus: Bus) -> None:
        scenario = self.scenario
        await bus.declare(specs(RUN, shards=self.plan.shards, window_bytes=1024**2))
        record = run_record(RUN, self.plan, scenario.config_json)
        await ledger.create_run(bus, record)
        learner = FakeLearner(
            bus,
            RUN,
            self.plan,
            name,
            scheme=scenario.scheme,
            chunk_blocks=SENT_BLOCKS,
            step_s=scenario.step_s * (1 + 0.2 * int(name[-1])),
            steps=scenario.steps,
            pulse_s=scenario.pulse_s,
            wall_ns=self.network.wall_of(name),
        )
        async with TaskGroup() as group:
            training = group.create_task(learner.train())
            await ledger.wait_finished(bus, RUN)
            training.cancel()
        if not self.finished.done():
            self.finished.set_result(None)

    async def _syncer(self, name: str, bus: Bus) -> None:
        wall_ns = self.network.wall_of(name)
        await stand_by(bus, RUN, name, wall_ns=wall_ns, instance=f"{name}/{wall_ns()}")

    async def _reader(self, name: str, bus: Bus) -> None:
        """Follow manifests and read every version that can still be read, whole."""
        del name
        seen = self.observations
        manifests = state.follow_manifests(bus, RUN, self.plan)
        reader = GlobalReader(bus, RUN, self.plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                commit = manifest.commit
                key = (commit.fragment, commit.version)
                if commit.version < seen.newest.get(commit.fragment, 0):
                    seen.wrong.append(f"fragment {commit.fragment} went back to {commit.version}")
                seen.newest[commit.fragment] = commit.version
                try:
                    vector = await reader.read(manifest)
                except Overtaken:
                    continue
                except Corrupt as error:
                    seen.wrong.append(f"torn read of fragment, version {key}: {error}")
                    continue
                digest = xxhash.xxh3_64_intdigest(vector.tobytes())
                if seen.read.setdefault(key, digest) != digest:
                    seen.wrong.append(f"fragment, version {key} was read with two contents")

    # the end

    def close(self) -> None:
        """End every process and let clean-up run, with no wire to the broker."""
        tasks = [p.task for p in self.processes.values() if p.task is not None]
        for name in self.processes:
            self.kill(name)
        ending = self.loop.create_task(_all(tasks))
        self.loop.run_until(ending, self.loop.time() + 60.0)
        self.loop.close()


async def _all(tasks: list[asyncio.Task[None]]) -> None:
    await asyncio.gather(*tasks, return_exceptions=True)
