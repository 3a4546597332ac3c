"""Whether a cluster works again after faults: every service that survived does its work again."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.errors import WireError, first_cause
from skerry.log import ledger, run_records
from skerry.protocol.messages import CheckpointRecord, SyncerPulse, is_leaving
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from skerry_tools.chaos.checks import Check

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from skerry.log.base import Bus

COMMITS = "a syncer that runs commits"
CHECKPOINT = "a checkpoint verifies"


def contributes(learner: str) -> str:
    return f"{learner} contributes"


def answers(syncer: str) -> str:
    return f"{syncer} answers"


@dataclass(slots=True)
class Convergence:
    """Waits for what has to happen after ``after``, a ledger sequence at which all was healed.

    ``kinds`` are the processes that ought to run, by name. Every learner has to be merged and every
    syncer to say what it holds; one syncer has to commit, and one checkpointer to write: which of
    several does is theirs to settle, and a checkpoint does not name its writer. ``damage`` says
    what is wrong with the checkpoint at a path, or nothing. In a run that finishes meanwhile there
    is nothing left to do. ``missing`` says by check why it has not passed, ``passed`` how it has.
    """

    bus: Bus
    run: str
    after: int
    kinds: Mapping[str, str]
    damage: Callable[[str], Awaitable[str]]
    finished: bool = field(default=False, init=False)
    missing: dict[str, str] = field(default_factory=dict[str, str], init=False)
    passed: dict[str, str] = field(default_factory=dict[str, str], init=False)
    broken: list[Check] = field(default_factory=list[Check], init=False)

    def __post_init__(self) -> None:
        learners, syncers = self._named("learner"), self._named("syncer")
        self.missing = dict.fromkeys(map(contributes, learners), "nothing of it was merged")
        self.missing |= dict.fromkeys(map(answers, syncers), "no new pulse of it")
        self.missing |= {COMMITS: "none did"} if syncers else {}
        self.missing |= {CHECKPOINT: "none was written"} if self._named("checkpointer") else {}

    async def checks(self, deadline_s: float) -> list[Check]:
        """Return checks per learner and syncer, and one each for the commits and checkpoints.

        What cannot be watched becomes a failed check of its own, beside the others.
        """
        work = asyncio.create_task(self._work(), name="work")
        end = asyncio.create_task(self._end(), name="end")
        try:
            await asyncio.wait({work, end}, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (work, end):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
        return [self._check(name, deadline_s) for name in self.missing] + self.broken

    def _check(self, name: str, deadline_s: float) -> Check:
        if name in self.passed:
            return Check(name, ok=True, detail=self.passed[name])
        if self.finished:
            return Check(name, ok=True, detail="the run is finished")
        late = f"{self.missing[name]} within {deadline_s:.0f} s of healing"
        return Check(name, ok=False, detail=late)

    def _pass(self, name: str, detail: str) -> None:
        if name in self.missing:
            self.passed.setdefault(name, detail)

    async def _work(self) -> None:
        async with TaskGroup() as group:
            group.create_task(self._watched("commits", self._commits))
            group.create_task(self._watched("checkpoints", self._checkpoints))
            group.create_task(self._watched("the syncers' pulses", self._pulses))

    async def _watched(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - a verdict has to come of it
            detail = str(first_cause(error)) or type(error).__name__
            self.broken.append(Check(f"{what} can be watched", ok=False, detail=detail))

    async def _commits(self) -> None:
        """Return once every learner has been merged, by a syncer that runs now."""
        syncers = self._named("syncer")
        wanted = {*map(contributes, self._named("learner")), *([COMMITS] if syncers else [])}
        commits = ledger.follow_commits(self.bus, self.run, after=self.after)
        async with aclosing(commits):
            async for sequence, commit in commits:
                for row in commit.consumed:
                    self._pass(contributes(row.learner), f"merged at ledger sequence {sequence}")
                if commit.syncer in syncers:
                    self._pass(COMMITS, f"{commit.syncer} did at ledger sequence {sequence}")
                if wanted <= self.passed.keys():
                    return

    async def _checkpoints(self) -> None:
        """Return once a checkpoint that was written after healing has been read back whole.

        Always the newest one: retention may remove an older one while it is being read.
        """
        if CHECKPOINT not in self.missing:
            return
        subject = Subjects(self.run).ledger("checkpoint")
        follower = self.bus.follow(subject, after=self.after)
        tried = 0
        async with aclosing(follower):
            async for record in follower:
                newest = await self.bus.last(subject) or record
                if newest.sequence <= tried:
                    continue
                tried = newest.sequence
                if await self._verified(newest.payload):
                    return

    async def _verified(self, payload: bytes) -> bool:
        """Return True if the checkpoint that a record names is whole."""
        try:
            path = decode(CheckpointRecord, payload, run=self.run).path
            damage = await self.damage(path)
        except WireError as error:
            path, damage = "", str(error)
        if damage:
            self.missing[CHECKPOINT] = damage
        else:
            self._pass(CHECKPOINT, path)
        return not damage

    async def _pulses(self) -> None:
        """Return once every syncer has said something new: the first of each may be an old one."""
        wanted = set(map(answers, self._named("syncer")))
        if not wanted:
            return
        first: dict[str, SyncerPulse] = {}
        pulses = run_records.follow(self.bus, self.run, SyncerPulse)
        async with aclosing(pulses):
            async for pulse in pulses:
                old = first.setdefault(pulse.syncer, pulse)
                new = (old.instance, old.sent_ns) != (pulse.instance, pulse.sent_ns)
                if new and not is_leaving(pulse):
                    shards = ", ".join(map(str, pulse.shards))
                    holds = f"holds shards {shards}" if shards else "stands by"
                    self._pass(answers(pulse.syncer), holds)
                if wanted <= self.passed.keys():
                    return

    async def _end(self) -> None:
        """Return once the run is finished."""
        await self._watched("the run's end", self._finish)
        if not self.finished:
            await asyncio.Event().wait()

    async def _finish(self) -> None:
        await ledger.wait_finished(self.bus, self.run)
        self.finished = True

    def _named(self, kind: str) -> list[str]:
        return sorted(name for name, held in self.kinds.items() if held == kind)
