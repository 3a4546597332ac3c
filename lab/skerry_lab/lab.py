"""A whole run in one process: real syncer, real learners, the log in memory, time virtual.

Nothing here trains, merges or decides: that is the services' own code. The lab starts them, moves
the clock, kills who is to fail, and has the result judged. Everything happens in one thread and in
one order, so that a scenario gives the same bits each time on the same machine.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from skerry.bus import ledger
from skerry.bus.base import Bus
from skerry.bus.memory import MemoryBroker
from skerry.core.outer import Outer, make_outer
from skerry.errors import LabError, first_cause
from skerry.runtime.virtual import VirtualLoop
from skerry.settings import RunConfig
from skerry.settings_checks import check_run
from skerry.tasks import TaskGroup
from skerry.wire.messages import Commit, RunRecord
from skerry.wire.subjects import Subjects
from skerry_lab.judge import Judge, Point
from skerry_lab.learner import Learner
from skerry_lab.link import LinkedBus
from skerry_lab.moments import Shelf
from skerry_lab.rho import Rho
from skerry_lab.scenario import Island, Scenario
from skerry_learner.joining import Work, create, prepare
from skerry_learner.trainer.trainer import Programs
from skerry_syncer.service import candidate

RUN = "lab"
EPOCH_NS = 1_700_000_000_000_000_000
"""Where the virtual wall clock begins; any moment would do."""
LONGEST_S = 1e7
"""Virtual seconds after which a run that does not end is given up."""
Tell = Callable[[Point], None]


@dataclass(slots=True)
class Result:
    """What a lab run found; times are virtual seconds but for ``took_s``."""

    name: str
    digest: str
    seed: int
    loss: float
    steps: int
    tokens: int
    trained_tokens: int
    virtual_s: float
    took_s: float
    commits: int
    merged: int
    refused: int
    staleness: float
    kills: int
    rho: float | None
    curve: list[dict[str, float]] = field(default_factory=list[dict[str, float]])
    parameters: int = 0
    params_digests: list[int] = field(default_factory=list[int])

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for JSON."""
        return asdict(self)


def run(scenario: Scenario, tell: Tell | None = None, work: Work | None = None) -> Result:
    """Run a scenario to its end; ``tell`` hears every evaluation.

    ``work`` is what ``prepare`` made of the same settings, if the caller has it already. Raises
    LabError when the run cannot end, and whatever a service would have ended with.
    """
    return _Lab(scenario, tell, work).run()


class _Lab:
    def __init__(self, scenario: Scenario, tell: Tell | None, work: Work | None) -> None:
        train = scenario.run.train.model_copy(update={"seed": scenario.seed})
        self.config = scenario.run.model_copy(update={"train": train})
        check_run(self.config)
        self.scenario = scenario
        self.tell = tell
        self.loop = VirtualLoop()
        self.broker = MemoryBroker(clock_ns=self.wall_ns)
        self.work = replace(work, config=self.config) if work else prepare(self.config)
        self.programs = Programs.of(self.work.model, self.config, self.work.plan)
        self.draw = random.Random(f"{scenario.seed}/failures")  # noqa: S311 - a schedule, no secret
        self.kills = 0
        self.steps = 0

    def wall_ns(self) -> int:
        return EPOCH_NS + round(self.loop.time() * 1e9)

    def run(self) -> Result:
        began = time.perf_counter()
        main = self.loop.create_task(self._main())
        try:
            ended = self.loop.run_until(main, LONGEST_S)
        finally:
            if not main.done():
                main.cancel()
        if not ended:
            msg = f"The run has not ended after {LONGEST_S:g} virtual seconds: is a quorum alive?"
            raise LabError(msg)
        try:
            result = main.result()
        except BaseExceptionGroup as error:
            raise first_cause(error) from error
        result.took_s = round(time.perf_counter() - began, 2)
        self.loop.close()
        return result

    async def _main(self) -> Result:
        bus = self.broker.connect()
        record = await create(bus, RUN, self.work, self.wall_ns())
        judge = Judge(bus, RUN, self.work, self.programs, self.scenario.judging)
        rho = Rho(bus, RUN, self.work.plan, _outer_of(self.config))
        async with TaskGroup() as group:
            tasks = [
                group.create_task(self._syncer(), name="syncer"),
                group.create_task(judge.follow(self.loop.time, self.tell), name="judge"),
                *(
                    group.create_task(self._island(record, island), name=island.name)
                    for island in self.scenario.fleet
                ),
            ]
            if self.scenario.rho:
                tasks.append(group.create_task(rho.follow(), name="rho"))
            await ledger.wait_finished(bus, RUN)
            verdict = await judge.verdict(self.loop.time())
            for task in tasks:
                task.cancel()
        return await self._result(judge.points, verdict, rho)

    async def _syncer(self) -> None:
        await candidate(
            self.broker.connect(), RUN, "syncer", wall_ns=self.wall_ns, instance="syncer/0"
        )
        await asyncio.Event().wait()

    # islands

    async def _island(self, record: RunRecord, island: Island) -> None:
        """Have a learner live on an island, and fail, and come back, as the scenario says."""
        failures = self.scenario.failures
        fails = island.name in failures.islands
        shelf = Shelf(failures.save_every_s, self.loop.time) if fails and failures.warm else None
        await self._until(island.joins)
        leaving = asyncio.ensure_future(self._until(island.leaves))
        try:
            while not leaving.done():
                ended = await self._life(record, island, shelf, leaving, fails=fails)
                if ended or leaving.done():
                    break
                await asyncio.sleep(self.draw.expovariate(1.0) * failures.down_s)
        finally:
            leaving.cancel()

    async def _life(
        self,
        record: RunRecord,
        island: Island,
        shelf: Shelf | None,
        leaving: asyncio.Future[None],
        *,
        fails: bool,
    ) -> bool:
        """Have one incarnation live until it is killed or the run is finished; True if that."""
        bus = LinkedBus(self.broker.connect(), self.scenario.link)
        learner = Learner(
            bus,
            record,
            self.work,
            self.programs,
            island,
            shelf,
            self.scenario.seed,
            self.wall_ns,
        )
        life = asyncio.ensure_future(learner.live())
        left_s = self.draw.expovariate(1.0) * self.scenario.failures.every_s if fails else None
        await asyncio.wait({life, leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
        self.steps += learner.steps
        if life.done():
            life.result()
            return True
        self.kills += 1
        life.cancel()
        await asyncio.wait({life})
        return False

    async def _until(self, share: float | None) -> None:
        """Wait until the global clock has come to a share of the run; None: for ever."""
        if share is None:
            await asyncio.Event().wait()
        if not share:
            return
        async for _, commit in ledger.follow_commits(self.broker.connect(), RUN):
            if commit.step >= share * self.config.train.steps:
                return

    # the end

    async def _result(self, points: list[Point], verdict: Point, rho: Rho) -> Result:
        bus = self.broker.connect()
        commits = [commit async for commit in _commits(bus)]
        merged = [m for commit in commits if commit.version > 1 for m in commit.consumed]
        digests = {commit.fragment: commit.params_digest for commit in commits}
        data = self.config.data
        return Result(
            name=self.scenario.name,
            digest=self.scenario.digest,
            seed=self.scenario.seed,
            loss=verdict.loss,
            steps=verdict.step,
            tokens=verdict.tokens,
            trained_tokens=self.steps * data.batch * data.seq_len,
            virtual_s=round(self.loop.time(), 3),
            took_s=math.nan,
            commits=len(commits),
            merged=len(merged),
            refused=sum(len(commit.refused) for commit in commits),
            staleness=sum(m.staleness for m in merged) / max(1, len(merged)),
            kills=self.kills,
            rho=rho.mean,
            curve=[asdict(point) for point in (*points, verdict)],
            parameters=self.work.plan.parameters,
            params_digests=[digests[index] for index in sorted(digests)],
        )


async def _commits(bus: Bus) -> AsyncGenerator[Commit]:
    """Yield every commit of a run that has ended."""
    newest = await bus.last_each(Subjects(RUN).commits())
    last = max(record.sequence for record in newest)
    async for sequence, commit in ledger.follow_commits(bus, RUN):
        yield commit
        if sequence >= last:
            return


def _outer_of(config: RunConfig) -> Outer:
    given = config.outer
    return make_outer(
        given.preset, lr=given.lr, momentum=given.momentum, h_steps=config.sync.h_steps
    )
