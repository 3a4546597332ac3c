"""What becomes of one island in a run: it joins, fails, comes back, and leaves."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass, field

from skerry.algorithm.goodput import Share, allocated_s
from skerry_tools.lab.learner import Ground, LabLearner, TrainedTime
from skerry_tools.lab.progress import RunProgress
from skerry_tools.lab.saved_optimizer import SavedOptimizer
from skerry_tools.lab.scenario import Failures, Island


@dataclass(slots=True)
class IslandLifecycle:
    """One island over all incarnations of its learner.

    When it fails depends on the seed and its name alone, so that runs which differ in anything
    else meet the same failures.
    """

    ground: Ground
    island: Island
    failures: Failures
    progress: RunProgress
    tally: TrainedTime = field(default_factory=TrainedTime)
    kills: int = 0
    joined_s: float | None = None
    ended_s: float | None = None
    left: bool = False

    async def run(self) -> None:
        """Live until the run is finished or the island leaves."""
        ground, island, failures = self.ground, self.island, self.failures
        draw = random.Random(f"{ground.seed}/failures/{island.name}")  # noqa: S311 - a schedule, no secret
        fails = island.name in failures.islands
        saved = (
            SavedOptimizer(failures.save_every_s, ground.clock) if fails and failures.warm else None
        )
        await self._at(island.joins)
        self.joined_s = ground.clock()
        leaving = asyncio.create_task(self._leaving(), name=f"{island.name} leaves")
        try:
            while not leaving.done():
                left_s = draw.expovariate(1.0) * failures.every_s if fails else None
                if await self._live(saved, leaving, left_s):
                    return
                if not leaving.done():
                    self.kills += 1
                    down_s = draw.expovariate(1.0) * failures.down_s
                    await asyncio.wait({leaving}, timeout=down_s)
            self.left = True
        finally:
            self.ended_s = ground.clock()
            await _ended(leaving)

    def share(self, now_s: float) -> Share:
        """Return the island's time by now: in training steps, and since it joined."""
        joined_s = now_s if self.joined_s is None else self.joined_s
        return Share(self.tally.busy_s, allocated_s(joined_s, now_s, self.ended_s))

    async def _leaving(self) -> None:
        if self.island.leaves is None:
            await asyncio.Event().wait()
        else:
            await self._at(self.island.leaves)

    async def _at(self, share: float) -> None:
        """Wait until so much of the run is done by the global clock."""
        await self.progress.reached(round(share * self.progress.steps))

    async def _live(
        self, saved: SavedOptimizer | None, leaving: asyncio.Task[None], left_s: float | None
    ) -> bool:
        """Run one incarnation, ``left_s`` at most; return True at the run's end."""
        learner = LabLearner(self.ground, self.island, saved, self.tally)
        life = asyncio.create_task(learner.live(), name=self.island.name)
        try:
            await asyncio.wait({life, leaving}, timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if life.done():
                life.result()
                return True
        finally:
            await _ended(life)
        return False


async def _ended(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end; an error that it ends with comes too late."""
    task.cancel()
    await asyncio.wait({task})
    if not task.cancelled():
        task.exception()
