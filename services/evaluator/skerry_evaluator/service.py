"""The evaluator: reads the global state from the log, and says what it is worth on held-out text.

It is a reader like any other. No service waits for it, it asks none for anything, and any number of
them may run: what one has said of a state, another need not say again. It reads the f32 master
parameters, which are what checkpoints hold, so ``skerry eval`` says the same of the same state.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from skerry.errors import (
    Overtaken,
)
from skerry.log import ledger
from skerry.log.state import MASTER, read_latest, read_manifests
from skerry.protocol.messages import Evaluation
from skerry.protocol.run import plan_of
from skerry.service.shell import outlast, serve
from skerry.service.turns import TurnTrace, take_turns
from skerry.settings.loading import run_config_from_json
from skerry.store.manifest import step_of, tokens_of
from skerry.tasks import in_thread
from skerry.telemetry import instruments, metrics, spans

if TYPE_CHECKING:
    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit, RunRecord
    from skerry.settings.models import RunConfig
    from skerry_evaluator.judge import Judge

log = structlog.get_logger()

NICENESS = 10
"""A third of the right to the CPU of a learner that trains on it: behind all, starved by none."""
MOST_SHARE = 0.05
"""Of one core that evaluations take at most: a long one is followed by a long rest."""


@dataclass(slots=True)
class Evaluator:
    """Evaluates one run; it lives through any number of sessions with its log.

    The model is built, and JAX imported, once there is something to evaluate: at the start of a
    run the machine belongs to the learners. ``held`` are the commits whose parameters the judge
    has, ``said`` the versions of the newest state that was spoken of.
    """

    bus: Bus
    record: RunRecord
    name: str
    config: RunConfig
    plan: Plan
    judge: Judge | None = None
    held: dict[int, Commit] = field(default_factory=dict[int, "Commit"])
    said: tuple[int, ...] = ()
    rest_s: float = 0.0
    strangers: set[str] = field(default_factory=set[str])

    @classmethod
    def of(cls, bus: Bus, record: RunRecord, name: str) -> Evaluator:
        """Take config and plan from the record; RunMismatch if we cut its leaves otherwise."""
        plan, config = plan_of(record), run_config_from_json(record.config_json)
        return cls(bus, record, name, config, plan)

    async def run(self) -> None:
        """Evaluate until the run is finished and its last state has been evaluated.

        An evaluation that fails is logged and tried again at the next turn; at the end of the run
        that raises its error.
        """
        await take_turns(
            self.bus,
            self.record,
            self.plan,
            self.evaluate,
            lambda: max(self.config.eval.every_s, self.rest_s),
            "evaluation_failed",
        )

    async def evaluate(self) -> Evaluation | None:
        """Evaluate the newest state and say so in the ledger; None where there is nothing new."""
        run = self.record.run
        manifests = await read_manifests(self.bus, run, self.plan)
        if len(manifests) < len(self.plan.fragments):
            return None
        versions = tuple(manifests[f.index].commit.version for f in self.plan.fragments)
        if versions == self.said:
            return None
        judge = await self._ready()
        if await self._said_by_another(versions, judge.held_out.digest):
            self.said = versions
            return None
        turn = TurnTrace(self.record, spans.EVALUATE, spans.JUDGE)
        with turn.working():
            return await self._evaluate(judge, turn)

    async def _evaluate(self, judge: Judge, turn: TurnTrace) -> Evaluation:
        if self.said:  # not before the first evaluation: no stop shall wait for that
            await in_thread(judge.learn_to_write)
        began_s, cpu_s = time.monotonic(), time.process_time()
        await self._read(judge)
        turn.has_read()
        evaluation = self._evaluation(judge, await _losses(judge))
        sample = await in_thread(judge.write, sum(evaluation.versions))
        evaluation = replace(evaluation, sample=sample)
        await ledger.record_evaluation(self.bus, evaluation)
        self.said = evaluation.versions
        cpu_s = time.process_time() - cpu_s
        self.rest_s = cpu_s / MOST_SHARE
        self._tell(evaluation, time.monotonic() - began_s, cpu_s)
        attributes: dict[str, spans.Value] = {
            spans.LOSS: evaluation.loss,
            spans.STEP: evaluation.step,
            spans.VERSIONS: evaluation.versions,
        }
        turn.over(self.held.values(), attributes)
        return evaluation

    async def _ready(self) -> Judge:
        if self.judge is None:
            self.judge = await in_thread(_judge, self.config, self.plan)
            log.info(
                "evaluator_ready",
                run=self.record.run,
                evaluated_tokens=self.judge.held_out.tokens,
                text=f"{self.judge.held_out.digest:016x}",
            )
        return self.judge

    async def _said_by_another(self, versions: tuple[int, ...], digest: int) -> bool:
        """Say whether the ledger's newest evaluation is of this state, on the same text.

        Warns once of each evaluator that reads another text.
        """
        newest = await ledger.last_evaluation(self.bus, self.record.run)
        if newest is None:
            return False
        if newest.text_digest == digest:
            return newest.versions == versions
        if newest.evaluator not in self.strangers:
            self.strangers.add(newest.evaluator)
            log.warning(
                "held_out_text_differs",
                run=self.record.run,
                evaluator=newest.evaluator,
                text=f"{newest.text_digest:016x}",
                own=f"{digest:016x}",
                fix="give both evaluators the same text: their losses cannot be compared",
            )
        return False

    async def _read(self, judge: Judge) -> None:
        """Hand the judge every fragment that has changed since it got it."""
        manifests = await read_manifests(self.bus, self.record.run, self.plan)
        for fragment in self.plan.fragments:
            held = self.held.get(fragment.index)
            if held == manifests[fragment.index].commit:
                continue
            # Whatever happens from here on, what the judge has of it is not what was held.
            self.held.pop(fragment.index, None)
            found = await read_latest(self.bus, self.record.run, self.plan, fragment, [MASTER])
            if found is None:
                msg = f"The manifest of fragment {fragment.index} has gone while it was being read."
                raise Overtaken(msg)
            manifest, parts = found
            await in_thread(judge.take, fragment.index, parts[MASTER])
            self.held[fragment.index] = manifest.commit

    def _evaluation(self, judge: Judge, losses: list[float]) -> Evaluation:
        commits = [self.held[fragment.index] for fragment in self.plan.fragments]
        score = judge.score(losses)
        return Evaluation(
            run=self.record.run,
            evaluator=self.name,
            step=step_of(commits),
            tokens=tokens_of(commits),
            versions=tuple(commit.version for commit in commits),
            loss=score.loss,
            perplexity=score.perplexity,
            bits_per_byte=math.nan if score.bits_per_byte is None else score.bits_per_byte,
            evaluated_tokens=judge.held_out.tokens,
            text_digest=judge.held_out.digest,
            evaluated_ns=time.time_ns(),
        )

    def _tell(self, evaluation: Evaluation, took_s: float, cpu_s: float) -> None:
        log.info(
            "evaluated",
            run=evaluation.run,
            step=evaluation.step,
            tokens=evaluation.tokens,
            versions=list(evaluation.versions),
            loss=round(evaluation.loss, 6),
            perplexity=round(evaluation.perplexity, 4),
            bits_per_byte=round(evaluation.bits_per_byte, 6),
            took_s=round(took_s, 3),
            cpu_s=round(cpu_s, 3),
        )
        of = {metrics.RUN: evaluation.run}
        instruments.record(metrics.EVALUATION_DURATION, took_s, of)
        attributes = {**of, metrics.EVALUATOR_NAME: evaluation.evaluator}
        instruments.record(metrics.HELD_OUT_LOSS, evaluation.loss, attributes)


def _judge(config: RunConfig, plan: Plan) -> Judge:
    from skerry_evaluator.judge import Judge  # JAX comes with it

    return Judge(config, plan)


async def _losses(judge: Judge) -> list[float]:
    """Return the losses of all batches; between two of them a cancellation is heard."""
    losses = judge.losses()
    found: list[float] = []
    while (loss := await in_thread(next, losses, None)) is not None:
        found.append(loss)
    return found


async def evaluator(bus: Bus, run: str, name: str, shutdown_s: float) -> None:
    """Serve one run until it is finished, across broker restarts and full broker disks."""
    at_work: Evaluator | None = None

    async def session() -> None:
        nonlocal at_work
        record = await ledger.wait_run(bus, run)
        if at_work is None or at_work.record.created_ns != record.created_ns:
            at_work = Evaluator.of(bus, record, name)
        await at_work.run()

    async with bus:
        await serve({"evaluator": lambda: outlast(session)}, shutdown_s=shutdown_s)
