"""The evaluator: reads the global model from the log and measures its loss on held-out text.

No service waits for it. Any number of evaluators may run: a state that one has evaluated, another
does not evaluate again. It judges what learners start from, and reads what they read: deltas where
it is in step.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import structlog

from skerry.algorithm.fragments import Plan
from skerry.errors import Overtaken, StoreError
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.log.global_fragments import GlobalReader
from skerry.log.state import read_manifests
from skerry.models.presets import arch_of
from skerry.protocol.commit import tokens_of
from skerry.protocol.messages import Commit, Evaluation, RunRecord
from skerry.protocol.records import plan_of
from skerry.protocol.subjects import Subjects
from skerry.service.shell import outlast, serve
from skerry.service.turns import TurnTrace, take_turns
from skerry.settings.loading import run_config_from_json, with_own_data
from skerry.settings.local import Settings, StoreSettings
from skerry.settings.models import RunConfig
from skerry.store.checkpoint import step_of
from skerry.store.finding import FROM_ENVIRONMENT
from skerry.tasks import in_thread
from skerry.telemetry import instruments, metrics, spans
from skerry_evaluator.average import SavedAverage

if TYPE_CHECKING:
    from skerry_evaluator.global_model import GlobalModel

log = structlog.get_logger()

NICENESS = 10
"""Unix niceness: a third of the CPU share of a learner (5), so that it yields but never starves."""
MOST_SHARE = 0.05
"""Most share of one core for evaluations: after a long one comes a long rest."""


@dataclass(slots=True)
class Evaluator:
    """Evaluates one run, through any number of connections to its log.

    The model is built, and JAX imported, once there is something to evaluate: learners need the CPU
    when a run starts. ``held`` are the commits whose parameters ``model`` has, ``evaluated`` the
    versions of the newest state that has an evaluation.
    """

    bus: Bus
    record: RunRecord
    name: str
    config: RunConfig
    plan: Plan
    reader: GlobalReader
    model: GlobalModel | None = None
    held: dict[int, Commit] = field(default_factory=dict[int, "Commit"])
    evaluated: tuple[int, ...] = ()
    saved: SavedAverage | None = None
    rest_s: float = 0.0
    other_texts: set[str] = field(default_factory=set[str])

    @classmethod
    def of(
        cls,
        bus: Bus,
        record: RunRecord,
        name: str,
        access: StoreSettings = FROM_ENVIRONMENT,
        given: RunConfig | None = None,
    ) -> Evaluator:
        """Return the evaluator of a run; RunMismatch if its plan differs from ours.

        ``access`` says where a moving average is kept, if the run wants one; text that ``given``
        names is read instead of the run's. ModelError if no
        config says what its model computes, ConfigError for text that this machine does not offer.
        """
        plan, config = plan_of(record), run_config_from_json(record.config_json)
        config = with_own_data(config, given or RunConfig())
        if not config.model.factory:
            arch_of(config.model)
        made = cls(bus, record, name, config, plan, GlobalReader(bus, record.run, plan))
        if config.eval.ema:
            made.saved = SavedAverage.of(access, record, plan, config.eval.ema)
        return made

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
        """Evaluate the newest state and record it in the ledger; None if there is nothing new."""
        run = self.record.run
        manifests = await read_manifests(self.bus, run, self.plan)
        if len(manifests) < len(self.plan.fragments):
            return None
        versions = tuple(manifests[f.index].commit.version for f in self.plan.fragments)
        if versions == self.evaluated:
            return None
        model = await self._built()
        if await self._recorded(versions, model.held_out.digest):
            self.evaluated = versions
            return None
        turn = TurnTrace(self.record, spans.EVALUATE, spans.JUDGE)
        with turn.working():
            if self.evaluated:  # not before the first: no stop shall wait for that
                await in_thread(model.compile_writer)
            began_s, cpu_s = time.monotonic(), time.process_time()
            await self._read(model)
            turn.has_read()
            evaluation = await self._evaluation(model)
            await ledger.record_evaluation(self.bus, evaluation)
            self.evaluated = evaluation.versions
            if self.saved is not None:
                await self._save_average(self.saved)
            cpu_s = time.process_time() - cpu_s
            self.rest_s = cpu_s / MOST_SHARE
            self._report(evaluation, time.monotonic() - began_s, cpu_s)
            attributes: dict[str, spans.Value] = {
                spans.LOSS: evaluation.loss,
                spans.STEP: evaluation.step,
                spans.VERSIONS: evaluation.versions,
            }
            turn.over(self.held.values(), attributes)
            return evaluation

    async def _built(self) -> GlobalModel:
        if self.model is None:
            from skerry_evaluator.global_model import GlobalModel  # imports JAX

            self.model = await in_thread(GlobalModel, self.config, self.plan)
            held_out = self.model.held_out
            tokens, text = held_out.tokens, f"{held_out.digest:016x}"
            log.info("evaluator_ready", run=self.record.run, evaluated_tokens=tokens, text=text)
        return self.model

    async def _recorded(self, versions: tuple[int, ...], digest: int) -> bool:
        """Return True if the ledger's newest evaluation is of this state, on the same text.

        Warns once of each evaluator that reads another text.
        """
        subject = Subjects(self.record.run).ledger("eval")
        newest = await run_records.newest(self.bus, self.record.run, Evaluation, subject)
        if newest is None:
            return False
        if newest.text_digest == digest:
            return newest.versions == versions
        if newest.evaluator not in self.other_texts:
            self.other_texts.add(newest.evaluator)
            log.warning(
                "held_out_text_differs",
                run=self.record.run,
                evaluator=newest.evaluator,
                text=f"{newest.text_digest:016x}",
                own=f"{digest:016x}",
                fix="give both evaluators the same text: their losses cannot be compared",
            )
        return False

    async def _read(self, model: GlobalModel) -> None:
        """Give the model every fragment that has changed since it got it."""
        manifests = await read_manifests(self.bus, self.record.run, self.plan)
        for fragment in self.plan.fragments:
            held = self.held.get(fragment.index)
            if held == manifests[fragment.index].commit:
                continue
            # An error below leaves the model with part of a version: it is held no more.
            self.held.pop(fragment.index, None)
            found = await self.reader.latest(fragment.index)
            if found is None:
                msg = f"The manifest of fragment {fragment.index} was replaced while it was read."
                raise Overtaken(msg)
            manifest, vector = found
            await in_thread(model.set_fragment, fragment.index, vector)
            if self.saved is not None:
                await in_thread(self.saved.average.follow, manifest, vector)
            self.held[fragment.index] = manifest.commit

    async def _evaluation(self, model: GlobalModel) -> Evaluation:
        """Evaluate what the model holds; a cancellation takes effect between two batches."""
        commits = [self.held[fragment.index] for fragment in self.plan.fragments]
        versions = tuple(commit.version for commit in commits)
        score = model.held_out.score(await _losses(model.losses()))
        average_loss = 0.0
        if self.saved is not None:
            judged = await _losses(model.losses(self.saved.average.vectors))
            average_loss = model.held_out.score(judged).loss
        return Evaluation(
            run=self.record.run,
            evaluator=self.name,
            step=step_of(commits),
            tokens=tokens_of(commits),
            versions=versions,
            loss=score.loss,
            perplexity=score.perplexity,
            bits_per_byte=math.nan if score.bits_per_byte is None else score.bits_per_byte,
            evaluated_tokens=model.held_out.tokens,
            text_digest=model.held_out.digest,
            evaluated_ns=time.time_ns(),
            sample=await in_thread(model.write, sum(versions)),
            average_loss=average_loss,
        )

    async def _save_average(self, average: SavedAverage) -> None:
        """Save the moving average; a store that fails costs the save alone."""
        try:
            saved = await in_thread(average.save)
        except StoreError as error:
            log.warning("average_not_saved", run=self.record.run, cause=str(error))
        else:
            log.info("average_saved", run=self.record.run, saved=saved)

    def _report(self, evaluation: Evaluation, took_s: float, cpu_s: float) -> None:
        log.info(
            "evaluated",
            run=evaluation.run,
            step=evaluation.step,
            tokens=evaluation.tokens,
            versions=list(evaluation.versions),
            loss=round(evaluation.loss, 6),
            perplexity=round(evaluation.perplexity, 4),
            bits_per_byte=round(evaluation.bits_per_byte, 6),
            average_loss=round(evaluation.average_loss, 6) or None,
            took_s=round(took_s, 3),
            cpu_s=round(cpu_s, 3),
        )
        run = {metrics.RUN: evaluation.run}
        instruments.record(metrics.EVALUATION_DURATION, took_s, run)
        evaluator = {**run, metrics.EVALUATOR_NAME: evaluation.evaluator}
        instruments.record(metrics.HELD_OUT_LOSS, evaluation.loss, evaluator)
        if evaluation.average_loss:
            instruments.record(metrics.HELD_OUT_AVERAGE, evaluation.average_loss, evaluator)


async def _losses(losses: Iterator[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return all losses; a cancellation takes effect between two of them."""
    found: list[tuple[float, float]] = []
    while (loss := await in_thread(next, losses, None)) is not None:
        found.append(loss)
    return found


async def evaluator(bus: Bus, run: str, name: str, given: Settings) -> None:
    """Serve one run until it is finished, across broker restarts and full broker disks."""
    current: Evaluator | None = None
    local = given.local

    async def session() -> None:
        nonlocal current
        record = await ledger.wait_run(bus, run)
        if current is None or current.record.created_ns != record.created_ns:
            current = await in_thread(Evaluator.of, bus, record, name, local.store, given.run)
        await current.run()

    async with bus:
        loops = {"evaluator": lambda: outlast(session)}
        await serve(loops, shutdown_s=local.shutdown_s, stays=local.stays)
