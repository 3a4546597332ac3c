"""The global model on held-out text, as it goes along and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import jax
import numpy as np

from skerry.algorithm.fragments import scatter
from skerry.data.corpus import Batch
from skerry.log import state
from skerry.log.base import Bus
from skerry.models.base import Params
from skerry_learner.joining import Work
from skerry_tools.lab.progress import RunProgress
from skerry_tools.lab.scenario import Judging

Loss: TypeAlias = Callable[[Params, Batch], jax.Array]
"""The compiled mean loss of int32 [batch, seq + 1]: an f32 scalar."""
Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class LabEvaluation:
    """One evaluation: ``step`` of the global clock, ``tokens`` merged so far, loss in nats."""

    at_s: float
    step: int
    tokens: int
    loss: float


class LabEvaluator:
    """Reads the global state from the log and evaluates it: the f32 master, as checkpoints do."""

    def __init__(self, bus: Bus, run: str, work: Work, loss: Loss, judging: Judging) -> None:
        self._bus = bus
        self._run = run
        self._work = work
        self._loss = loss
        self._judging = judging
        self._some = self._rows(judging.batches)
        self._leaves = [np.zeros(leaf.shape, np.float32) for leaf in work.plan.leaves]
        self._tree = jax.tree.structure(jax.eval_shape(work.model.init, jax.random.key(0)))
        self.seen: list[LabEvaluation] = []

    def _rows(self, batches: int) -> Sequence[Batch]:
        return list(self._work.corpus.held_out_batches(self._judging.batch, batches))

    async def follow(
        self,
        progress: RunProgress,
        clock: Clock,
        report: Callable[[LabEvaluation], None] | None = None,
    ) -> None:
        """Evaluate each time the global clock has come a share of the run further."""
        every = max(1, progress.steps // self._judging.points)
        due = every
        while True:
            await progress.reached(due)
            due = (progress.step // every + 1) * every
            self.seen.append(await self._evaluate(clock(), self._some))
            if report is not None:
                report(self.seen[-1])

    async def last(self, at_s: float) -> LabEvaluation:
        """Evaluate the newest global state on all the text that a run's result is of."""
        return await self._evaluate(at_s, self._rows(self._judging.final_batches))

    async def _evaluate(self, at_s: float, rows: Sequence[Batch]) -> LabEvaluation:
        step, tokens, plan = 0, 0, self._work.plan
        for fragment in plan.fragments:
            found = await state.read_latest(self._bus, self._run, plan, fragment, [state.MASTER])
            if found is None:
                return LabEvaluation(at_s, 0, 0, math.nan)
            manifest, parts = found
            scatter(fragment, parts[state.MASTER], self._leaves)
            step = max(step, manifest.commit.step)
            tokens += sum(row.tokens for row in manifest.commit.progress)
        params = jax.tree.unflatten(self._tree, [jax.device_put(leaf) for leaf in self._leaves])
        loss = sum(float(self._loss(params, row)) for row in rows) / len(rows)
        return LabEvaluation(at_s, step, tokens // len(plan.fragments), loss)
