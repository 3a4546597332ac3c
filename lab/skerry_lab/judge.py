"""The global model on held-out text, as it goes along and at the end."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeAlias

import jax

from skerry.bus import ledger, state
from skerry.bus.base import Bus
from skerry_lab.scenario import Judging
from skerry_learner.data.corpus import Batch
from skerry_learner.joining import Work
from skerry_learner.trainer.trainer import Programs, Trainer

Clock: TypeAlias = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Point:
    """One evaluation: ``step`` of the global clock, ``tokens`` merged so far, loss in nats."""

    at_s: float
    step: int
    tokens: int
    loss: float


class Judge:
    """Reads the global state as any learner would, and evaluates it."""

    def __init__(
        self, bus: Bus, run: str, work: Work, programs: Programs, judging: Judging
    ) -> None:
        self._bus = bus
        self._run = run
        self._work = work
        self._trainer = Trainer(work.model, work.config, work.plan, programs)
        self._loss = jax.jit(work.model.loss)
        self._judging = judging
        self._some = self._rows(judging.batches)
        self.points: list[Point] = []

    def _rows(self, batches: int) -> Sequence[Batch]:
        return list(self._work.corpus.held_out_batches(self._judging.batch, batches))

    async def follow(self, clock: Clock, tell: Callable[[Point], None] | None = None) -> None:
        """Evaluate each time the global clock has come a share of the run further."""
        every = max(1, self._work.config.train.steps // self._judging.points)
        due = every
        commits = ledger.follow_commits(self._bus, self._run)
        async with aclosing(commits):
            async for _, commit in commits:
                if commit.step < due:
                    continue
                due = (commit.step // every + 1) * every
                self.points.append(await self.look(clock(), self._some))
                if tell is not None:
                    tell(self.points[-1])

    async def verdict(self, at_s: float) -> Point:
        """Evaluate the newest global state on all the text that a run is judged by."""
        return await self.look(at_s, self._rows(self._judging.final_batches))

    async def look(self, at_s: float, rows: Sequence[Batch]) -> Point:
        """Evaluate the newest global state on these rows."""
        step, tokens = 0, 0
        for fragment in self._work.plan.fragments:
            found = await state.read_latest(
                self._bus, self._run, self._work.plan, fragment, [state.PARAMS]
            )
            if found is None:
                return Point(at_s, 0, 0, math.nan)
            manifest, parts = found
            self._trainer.adopt(fragment.index, parts[state.PARAMS])
            step = max(step, manifest.commit.step)
            tokens += sum(row.tokens for row in manifest.commit.progress)
        params = self._trainer.state.params
        loss = sum(float(self._loss(params, row)) for row in rows) / len(rows)
        return Point(at_s, step, tokens // len(self._work.plan.fragments), loss)
