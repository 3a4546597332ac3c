"""How far a run has come, by its own commits."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import aclosing

from skerry.log import ledger
from skerry.log.base import Bus
from skerry.protocol.messages import Commit, RefusalCause
from skerry.protocol.subjects import Subjects


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
        newest = await self._bus.last_each(Subjects(self._run).commit())
        last = max((record.sequence for record in newest), default=0)
        async with self._changed:
            await self._changed.wait_for(lambda: self._sequence >= last)

    def _count(self, commit: Commit) -> None:
        self.commits += 1
        self.refused += sum(refused.cause is not RefusalCause.GENESIS for refused in commit.refused)
        if commit.version > 1:
            self.merged += len(commit.consumed)
            self.late += sum(merged.staleness for merged in commit.consumed)
        self.params_digests[commit.fragment] = commit.params_digest
        self._tokens[commit.fragment] = sum(row.tokens for row in commit.progress)
        self.step = max(self.step, commit.step)
