"""What a run's commits say of it: how far it is, how good its model, how alike its gradients."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import jax
import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import Plan, scatter
from skerry.algorithm.outer import MOMENTUM, Outer
from skerry.data.corpus import HostBatch
from skerry.errors import Overtaken
from skerry.log import ledger, state
from skerry.log.base import Bus
from skerry.log.global_fragments import GlobalReader
from skerry.log.reading import newest_sequence
from skerry.models.base import Params, layout_of, mean_loss
from skerry.protocol.messages import Commit, refusals
from skerry.protocol.parts import MASTER
from skerry.protocol.subjects import Subjects
from skerry_evaluator.average import MovingAverage
from skerry_learner.work import Work
from skerry_tools.lab.scenario import Judging

Loss: TypeAlias = Callable[[Params, HostBatch], tuple[jax.Array, jax.Array]]
"""The compiled loss of a batch: its mean, and what its targets weigh, f32 scalars."""
Vector: TypeAlias = NDArray[np.float32]
OUTER_MOMENTUM = f"outer.{MOMENTUM}"
"""The outer optimizer's momentum in a manifest."""


class RunProgress:
    """Follows the ledger for all that wait for a share of the run, and counts.

    ``step`` is on the global clock, ``tokens`` are those merged so far, mean over fragments.
    ``merged``, ``late`` (staleness, summed) and ``refused`` are about contributions; a second
    offer of initial parameters counts as none of them.
    """

    def __init__(self, bus: Bus, run: str, steps: int, fragments: int) -> None:
        self._bus = bus
        self._run = run
        self._tokens = [0] * fragments
        self._sequence = 0
        self._changed = asyncio.Condition()
        self.steps = steps
        self.step = 0
        self.commits = 0
        self.merged = 0
        self.late = 0
        self.refused = 0
        self.params_digests: dict[int, int] = {}

    @property
    def tokens(self) -> int:
        return sum(self._tokens) // len(self._tokens)

    async def follow(self, changed: Callable[[], object]) -> None:
        """Read every commit, for ever, and call ``changed`` after each."""
        commits = ledger.follow_commits(self._bus, self._run)
        async with aclosing(commits):
            async for sequence, commit in commits:
                async with self._changed:
                    self._count(commit)
                    self._sequence = sequence
                    self._changed.notify_all()
                changed()

    async def reached(self, step: int) -> None:
        """Wait until the global clock says this step, or a later one."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.step >= step)

    async def read_all(self) -> None:
        """Wait until every commit that the ledger has now has been counted."""
        last = await newest_sequence(self._bus, Subjects(self._run).commit())
        async with self._changed:
            await self._changed.wait_for(lambda: self._sequence >= last)

    def _count(self, commit: Commit) -> None:
        self.commits += 1
        self.refused += len(refusals(commit))
        if commit.version > 1:
            self.merged += len(commit.consumed)
            self.late += sum(merged.staleness for merged in commit.consumed)
        self.params_digests[commit.fragment] = commit.params_digest
        self._tokens[commit.fragment] = sum(row.tokens for row in commit.progress)
        self.step = max(self.step, commit.step)


@dataclass(frozen=True, slots=True)
class LabEvaluation:
    """One evaluation: ``step`` of the global clock, ``tokens`` merged so far, loss in nats."""

    at_s: float
    step: int
    tokens: int
    loss: float


class LabEvaluator:
    """Reads the global model from the log and evaluates it."""

    def __init__(self, bus: Bus, run: str, work: Work, loss: Loss, judging: Judging) -> None:
        self._bus = bus
        self._run = run
        self._reader = GlobalReader(bus, run, work.plan)
        self._work = work
        self._loss = loss
        self._judging = judging
        self._leaves = [np.zeros(leaf.shape, np.float32) for leaf in work.plan.leaves]
        self._layout = layout_of(work.model)
        self._average = MovingAverage(work.config.eval.ema)
        self._versions = GlobalReader(bus, run, work.plan)
        self.seen: list[LabEvaluation] = []

    def _batches(self, batches: int) -> Sequence[HostBatch]:
        return list(self._work.corpus.held_out_batches(self._judging.batch, batches))

    async def follow(
        self,
        progress: RunProgress,
        clock: Callable[[], float],
        report: Callable[[LabEvaluation], object],
    ) -> None:
        """Evaluate each time the global clock has come a share of the run further."""
        due = every = max(1, progress.steps // self._judging.points)
        batches = self._batches(self._judging.batches)
        while True:
            await progress.reached(due)
            due = (progress.step // every + 1) * every
            self.seen.append(await self._evaluate(clock(), batches))
            report(self.seen[-1])

    async def follow_average(self) -> None:
        """Take every version into the moving average, for ever; only where the run wants one."""
        if not self._average.decay:
            return
        manifests = state.follow_manifests(self._bus, self._run, self._work.plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                await self._average_newest(manifest.commit.fragment)

    async def last(self, at_s: float) -> LabEvaluation:
        """Evaluate the newest global state on all the text that a run's result is of."""
        return await self._evaluate(at_s, self._batches(self._judging.final_batches))

    async def last_average(self) -> float | None:
        """Return the loss of the moving average on that text, None where there is none."""
        if not self._average.decay:
            return None
        for fragment in self._work.plan.fragments:
            await self._average_newest(fragment.index)
        return self._loss_of(self._average.vectors, self._batches(self._judging.final_batches))

    async def _average_newest(self, fragment: int) -> None:
        found = await self._versions.latest(fragment)
        if found is not None:
            self._average.follow(*found)

    async def _evaluate(self, at_s: float, batches: Sequence[HostBatch]) -> LabEvaluation:
        step, tokens, plan = 0, 0, self._work.plan
        vectors: dict[int, Vector] = {}
        for fragment in plan.fragments:
            found = await self._reader.latest(fragment.index)
            if found is None:
                return LabEvaluation(at_s, 0, 0, math.nan)
            manifest, vectors[fragment.index] = found
            step = max(step, manifest.commit.step)
            tokens += sum(row.tokens for row in manifest.commit.progress)
        loss = self._loss_of(vectors, batches)
        return LabEvaluation(at_s, step, tokens // len(plan.fragments), loss)

    def _loss_of(self, vectors: Mapping[int, Vector], batches: Sequence[HostBatch]) -> float:
        for fragment in self._work.plan.fragments:
            scatter(fragment, vectors[fragment.index], self._leaves)
        params = self._layout.params([jax.device_put(leaf) for leaf in self._leaves])
        return mean_loss([self._loss(params, batch) for batch in batches])


class _Version(NamedTuple):
    """The newest version of a fragment that was read, and the gradient that led to it, if known."""

    number: int
    parts: Mapping[str, Vector]
    gradient: Vector | None


class Rho:
    """How alike successive merged outer gradients are: the autocorrelation that momentum meets.

    With momentum mu the steady step is ``lr (1 + mu / (1 - mu rho))`` times the gradient (a
    geometric sum over gradients of which each has cosine rho with the one before). It follows every
    commit and recovers the merged gradient from what that did to the state.
    """

    def __init__(self, bus: Bus, run: str, plan: Plan, outer: Outer) -> None:
        self._bus = bus
        self._run = run
        self._plan = plan
        self._sgd = outer.fused
        self._newest: dict[int, _Version] = {}
        self.cosines: list[float] = []

    @property
    def mean(self) -> float | None:
        """The mean cosine of neighbours, None if there were none."""
        return float(np.mean(self.cosines)) if self.cosines else None

    async def follow(self) -> None:
        """Look at every version of every fragment that can still be read when it is heard of."""
        if self._sgd is None:
            return
        names = [MASTER] + ([OUTER_MOMENTUM] if self._sgd.momentum else [])
        manifests = state.follow_manifests(self._bus, self._run, self._plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                stored = {p.name for p in manifest.parts if p.version == manifest.commit.version}
                if not stored.issuperset(names):
                    continue
                try:
                    where = (self._bus, self._run, self._plan, manifest)
                    parts = {name: await state.read_part(*where, name) for name in names}
                except Overtaken:
                    continue
                self._saw(manifest.commit, parts)

    def _saw(self, commit: Commit, parts: Mapping[str, Vector]) -> None:
        """Note a version; one that does not follow the last one directly gives no gradient."""
        fragment, version = commit.fragment, commit.version
        before = self._newest.get(fragment)
        if before is not None and before.number != version - 1:
            before = None
        if before is not None and not commit.consumed:  # nothing was merged: it is the one before
            self._newest[fragment] = before._replace(number=version)
            return
        gradient = None if before is None else self._between(before.parts, parts)
        self._newest[fragment] = _Version(version, parts, gradient)
        last = None if before is None else before.gradient
        if gradient is not None and last is not None:
            lengths = float(np.linalg.norm(gradient)) * float(np.linalg.norm(last))
            if lengths > 0:
                self.cosines.append(float(gradient @ last) / lengths)

    def _between(self, before: Mapping[str, Vector], after: Mapping[str, Vector]) -> Vector:
        """Return the merged gradient by which a version came from the one before it."""
        assert self._sgd is not None
        if self._sgd.momentum:
            name = OUTER_MOMENTUM
            gradient = after[name] - self._sgd.momentum * before[name]
        else:
            gradient = (before[MASTER] - after[MASTER]) / self._sgd.lr
        return gradient.astype(np.float32, copy=False)
