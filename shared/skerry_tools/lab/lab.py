"""A whole run in one process: real syncer, real learners, the log in memory, time virtual.

Nothing here trains, merges or decides: that is the services' own code. The lab starts them, moves
the clock, kills learners that are to fail, and evaluates the result. Everything happens in one
thread and in one order, so that a scenario gives the same bits each time on the same machine.
"""

from __future__ import annotations

import asyncio
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import jax

from skerry.algorithm.goodput import goodput
from skerry.algorithm.outer import outer_of
from skerry.client.joining import create
from skerry.errors import LabError, first_cause
from skerry.log import ledger
from skerry.log.base import Bus
from skerry.log.memory import MemoryBroker
from skerry.models.base import judged_loss, whole
from skerry.settings.checks import check_run
from skerry.settings.models import RunConfig
from skerry.tasks import TaskGroup
from skerry_learner.trainer.trainer import Programs
from skerry_learner.work import Work, prepare
from skerry_syncer.service import stand_by
from skerry_tools.lab.learner import Ground, IslandLifecycle
from skerry_tools.lab.link import DistantLink
from skerry_tools.lab.progress import LabEvaluation, LabEvaluator, Loss, Rho, RunProgress
from skerry_tools.lab.scenario import LabScenario, LinkSettings, check
from skerry_tools.virtual import Stuck, VirtualLoop

RUN = "lab"
EPOCH_NS = 1_700_000_000_000_000_000
"""Where the virtual wall clock begins; any moment would do."""
PATIENCE = 100
"""A run that takes so many times as long as its slowest island would need is given up."""
MOST_COMPILED = 8
"""Configurations whose programs are kept for the next run of this process that needs them."""
_compiled: dict[str, tuple[Programs, Loss]] = {}


@dataclass(slots=True)
class LabResult:
    """What a lab run found; times are virtual seconds but for ``took_s``.

    ``tokens`` are those merged, mean over fragments, ``trained_tokens`` those of every step that
    was taken. ``goodput``: the islands' time in training steps over the time since they joined.
    ``average_loss`` is of the moving average, where ``eval.ema`` asks for one. ``training_text``
    and ``held_out_text`` are digests of what was trained and evaluated on.
    """

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
    goodput: float = 0.0
    bits_per_byte: float | None = None
    average_loss: float | None = None
    training_text: str = ""
    held_out_text: str = ""


class Lab:
    """One run of one scenario; ``broker`` holds its log, also when the run is over.

    ``report`` is called with every evaluation, ``watch`` after every commit. Raises ConfigError for
    a scenario that contradicts itself.
    """

    def __init__(
        self,
        scenario: LabScenario,
        report: Callable[[LabEvaluation], object] = lambda _: None,
        watch: Callable[[Lab], object] = lambda _: None,
    ) -> None:
        self.config = seeded(scenario)
        check_run(self.config)
        check(scenario)
        self.scenario = scenario
        self.loop = VirtualLoop()
        self.broker = MemoryBroker(clock_ns=self.wall_ns)
        self.work = prepare(self.config)
        sync = self.config.sync
        self.progress = RunProgress(self.connect(), RUN, self.config.train.steps, sync.fragments)
        self.islands: list[IslandLifecycle] = []
        self._report = report
        self._watch = watch
        self.programs, self.loss = compiled(self.work)

    def wall_ns(self) -> int:
        return EPOCH_NS + round(self.loop.time() * 1e9)

    def connect(self) -> Bus:
        """Return a client that sits beside the broker."""
        return self.broker.connect()

    def run(self) -> LabResult:
        """Run to the end; once only.

        Raises LabError if there is no way to the end, and KeyboardInterrupt after Ctrl-C, when
        everything was ended in order.
        """
        began = time.perf_counter()
        main = self.loop.create_task(self._main(), name="lab")
        longest_s = self._longest_s()
        try:
            with _interruptible(self.loop, main):
                ended = self.loop.run_until(main, longest_s)
        except Stuck as error:
            msg = f"The run cannot end: {error}"
            raise LabError(msg) from error
        finally:
            main.cancel()
            self.loop.settle()
            self.loop.close()
        if not ended:
            msg = (
                f"The run has not ended after {longest_s:.0f} virtual seconds, at step"
                f" {self.progress.step} of {self.progress.steps}: is a quorum alive?"
            )
            raise LabError(msg)
        if main.cancelled():
            raise KeyboardInterrupt
        try:
            result = main.result()
        except BaseExceptionGroup as error:
            raise first_cause(error) from error
        result.took_s = round(time.perf_counter() - began, 2)
        return result

    def _longest_s(self) -> float:
        """Return the virtual seconds after which this run is given up."""
        slowest_s = max(island.step_s for island in self.scenario.fleet)
        config, failures = self.config, self.scenario.failures
        once_s = config.train.steps * slowest_s + config.sync.round_timeout_s
        return PATIENCE * once_s * (1.0 + failures.down_s / failures.every_s)

    async def _main(self) -> LabResult:
        record = await create(self.connect(), RUN, self.config, self.work.plan, self.wall_ns())
        evaluator = LabEvaluator(self.connect(), RUN, self.work, self.loss, self.scenario.judging)
        rho = Rho(self.connect(), RUN, self.work.plan, outer_of(self.config, self.work.plan))
        syncer = stand_by(self.connect(), RUN, "syncer", wall_ns=self.wall_ns, instance="syncer/0")
        ground = Ground(
            record=record,
            work=self.work,
            programs=self.programs,
            seed=self.scenario.seed,
            connect=self._far,
            clock=self.loop.time,
            wall_ns=self.wall_ns,
        )
        self.islands = [
            IslandLifecycle(ground, island, self.scenario.failures, self.progress)
            for island in self.scenario.fleet
        ]
        async with TaskGroup() as group:
            tasks = [
                group.create_task(self.progress.follow(lambda: self._watch(self)), name="progress"),
                group.create_task(syncer, name="syncer"),
                group.create_task(evaluator.follow(self.progress, self.loop.time, self._report)),
                group.create_task(evaluator.follow_average(), name="average"),
                group.create_task(self._live(), name="islands"),
            ]
            if self.scenario.rho:
                tasks.append(group.create_task(rho.follow(), name="rho"))
            await ledger.wait_finished(self.connect(), RUN)
            ended_s = self.loop.time()
            await self.progress.read_all()
            last = await evaluator.last(ended_s)
            average_loss = await evaluator.last_average()
            for task in tasks:
                task.cancel()
        return self._result(evaluator.seen, last, average_loss, rho)

    async def _live(self) -> None:
        """Run every island; LabError when all have left and the run goes on."""
        async with TaskGroup() as group:
            for one in self.islands:
                group.create_task(one.run(), name=one.island.name)
        if all(one.left for one in self.islands):
            msg = (
                f"Every island has left at step {self.progress.step} of {self.progress.steps}: "
                "let one of them stay."
            )
            raise LabError(msg)

    def _far(self) -> Bus:
        """Return a client that sits on an island, behind the link."""
        link = self.scenario.link
        if link == LinkSettings():
            return self.connect()
        distant = DistantLink(link, lambda stored_ns: (stored_ns - EPOCH_NS) / 1e9)
        return self.broker.connect(distant)

    def _result(
        self, seen: list[LabEvaluation], last: LabEvaluation, average_loss: float | None, rho: Rho
    ) -> LabResult:
        progress, data, corpus = self.progress, self.config.data, self.work.corpus
        steps, per_token = sum(one.tally.steps for one in self.islands), corpus.bytes_per_token
        return LabResult(
            name=self.scenario.name,
            digest=self.scenario.digest,
            seed=self.scenario.seed,
            loss=last.loss,
            steps=last.step,
            tokens=last.tokens,
            trained_tokens=steps * data.batch * data.seq_len,
            virtual_s=round(last.at_s, 3),
            took_s=math.nan,
            commits=progress.commits,
            merged=progress.merged,
            refused=progress.refused,
            staleness=progress.late / max(1, progress.merged),
            kills=sum(one.kills for one in self.islands),
            rho=rho.mean,
            curve=[asdict(point) for point in (*seen, last)],
            parameters=self.work.plan.parameters,
            params_digests=[progress.params_digests[f.index] for f in self.work.plan.fragments],
            goodput=goodput(one.share(last.at_s) for one in self.islands),
            bits_per_byte=last.loss / math.log(2) / per_token if per_token else None,
            average_loss=average_loss,
            training_text=corpus.train.digest,
            held_out_text=corpus.held_out.digest,
        )


def compiled(work: Work) -> tuple[Programs, Loss]:
    """Return the programs and the loss of this work, traced when first called; shapes may differ.

    An experiment runs one configuration with many seeds and scenarios, and compiling takes longer
    than some of them. Neither text nor policy of the syncer enters what is compiled, and the seed
    only where it makes frozen leaves.
    """
    config = work.config
    seed = set[str]() if getattr(work.model, "frozen", ()) else {"seed"}
    train = config.train.model_dump(mode="json", exclude={*seed, "steps", "duration_s", "tokens"})
    model = config.model.model_dump(mode="json")
    key = json.dumps((model, train, config.data.batch), sort_keys=True)
    if key not in _compiled:
        if len(_compiled) == MOST_COMPILED:
            del _compiled[next(iter(_compiled))]
        programs = Programs.of(work.model, config)
        loss = jax.jit(judged_loss(work.model))
        _compiled[key] = programs, lambda params, rows: loss(whole(params, programs.frozen), rows)
    return _compiled[key]


def seeded(scenario: LabScenario) -> RunConfig:
    """Return the scenario's run with its seed: of the initial parameters and of the shuffle.

    Where ``rho`` is asked for, its log holds the master of every version.
    """
    config = scenario.run
    every = 1 if scenario.rho else config.sync.snapshot_every
    return config.model_copy(
        update={
            "sync": config.sync.model_copy(update={"snapshot_every": every}),
            "train": config.train.model_copy(update={"seed": scenario.seed}),
            "data": config.data.model_copy(update={"seed": scenario.seed}),
        }
    )


@contextmanager
def _interruptible(loop: VirtualLoop, main: asyncio.Task[Any]) -> Generator[None]:
    """Have the first Ctrl-C cancel ``main`` between two events, as ``asyncio.run`` does."""
    before = signal.getsignal(signal.SIGINT)
    ours = threading.current_thread() is threading.main_thread()
    if not ours or before is not signal.default_int_handler:
        yield
        return

    def interrupt(*_: object) -> None:
        signal.signal(signal.SIGINT, before)
        loop.call_soon(main.cancel)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
