"""Whether a cluster works again after faults: every service that survived does its work anew."""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.errors import WireError, first_cause
from skerry.log import ledger, presence
from skerry.protocol.messages import CheckpointRecord, is_leaving
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from skerry.log.base import Bus
    from skerry.protocol.messages import SyncerPulse


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to be true at the end; ``detail`` is for people."""

    name: str
    ok: bool
    detail: str


@dataclass(slots=True)
class Convergence:
    """Waits for what has to happen behind ``after``, a ledger sequence at which all was healed.

    ``kinds`` are the processes that ought to run, by name. Every learner has to be merged and every
    syncer to say what it holds; one syncer has to commit, and one checkpointer to write: which of
    several does is theirs to settle, and a checkpoint does not name its writer. ``damage`` says
    what is wrong with the checkpoint at a path, or nothing. In a run that finishes meanwhile nobody
    has anything left to do.
    """

    bus: Bus
    run: str
    after: int
    kinds: Mapping[str, str]
    damage: Callable[[str], Awaitable[str]]
    _merged: dict[str, int] = field(default_factory=dict[str, int], init=False)
    _commit: str = field(default="", init=False)
    _checkpoint: str = field(default="", init=False)
    _damage: str = field(default="none was written", init=False)
    _first: dict[str, SyncerPulse] = field(default_factory=dict[str, "SyncerPulse"], init=False)
    _answered: dict[str, str] = field(default_factory=dict[str, str], init=False)
    _broken: list[Check] = field(default_factory=list["Check"], init=False)
    finished: bool = field(default=False, init=False)

    async def checks(self, deadline_s: float) -> list[Check]:
        """Return checks per learner and syncer, and one each for the commits and checkpoints.

        What cannot be watched becomes a failed check of its own, and the others are told.
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
        return self._told(deadline_s)

    async def _work(self) -> None:
        async with TaskGroup() as group:
            watching = {
                "commits": self._commits,
                "checkpoints": self._checkpoints,
                "the syncers' pulses": self._pulses,
            }
            for what, work in watching.items():
                group.create_task(self._watched(what, work), name=what)

    async def _watched(self, what: str, work: Callable[[], Awaitable[None]]) -> None:
        try:
            await work()
        except Exception as error:  # noqa: BLE001 - a verdict has to come of it
            said = str(first_cause(error)) or type(error).__name__
            self._broken.append(Check(f"{what} can be watched", ok=False, detail=said))

    def _told(self, deadline_s: float) -> list[Check]:
        late = f" within {deadline_s:.0f} s of healing"
        told: list[Check] = []
        for name in self._named("learner"):
            at = self._merged.get(name)
            detail = f"merged at ledger sequence {at}" if at else f"nothing of it was merged{late}"
            told.append(self._check(f"{name} contributes", bool(at), detail))
        for name in self._named("syncer"):
            detail = self._answered.get(name, f"no new pulse of it{late}")
            told.append(self._check(f"{name} answers", name in self._answered, detail))
        if self._named("syncer"):
            detail = self._commit or f"none did{late}"
            told.append(self._check("a syncer that runs commits", bool(self._commit), detail))
        if self._named("checkpointer"):
            detail = self._checkpoint or f"{self._damage}{late}"
            told.append(self._check("a checkpoint verifies", bool(self._checkpoint), detail))
        return [*told, *self._broken]

    def _check(self, name: str, ok: bool, detail: str) -> Check:  # noqa: FBT001 - private
        if self.finished and not ok:
            return Check(name, ok=True, detail="the run is finished")
        return Check(name, ok, detail)

    async def _commits(self) -> None:
        """Return once every learner has been merged, by a syncer that runs now."""
        learners, syncers = set(self._named("learner")), set(self._named("syncer"))
        commits = ledger.follow_commits(self.bus, self.run, after=self.after)
        async with aclosing(commits):
            async for sequence, commit in commits:
                for row in commit.consumed:
                    self._merged.setdefault(row.learner, sequence)
                if commit.syncer in syncers and not self._commit:
                    self._commit = f"{commit.syncer} did at ledger sequence {sequence}"
                if learners <= set(self._merged) and (self._commit or not syncers):
                    return

    async def _checkpoints(self) -> None:
        """Return once a checkpoint that was written after healing has been read back whole.

        Always the newest one: retention may remove an older one while it is being read.
        """
        if not self._named("checkpointer"):
            return
        subject = Subjects(self.run).checkpoint()
        follower = self.bus.follow(subject, after=self.after)
        tried = 0
        async with aclosing(follower):
            async for record in follower:
                newest = await self.bus.last(subject) or record
                if newest.sequence <= tried:
                    continue
                tried = newest.sequence
                if not await self._damaged(newest.payload):
                    return

    async def _damaged(self, payload: bytes) -> bool:
        try:
            held = decode(CheckpointRecord, payload, run=self.run)
        except WireError as error:
            self._damage = str(error)
            return True
        self._damage = await self.damage(held.path)
        self._checkpoint = "" if self._damage else held.path
        return bool(self._damage)

    async def _pulses(self) -> None:
        """Return once every syncer has said something new: the first of each may be an old one."""
        syncers = set(self._named("syncer"))
        if not syncers:
            return
        pulses = presence.follow_syncer_pulses(self.bus, self.run)
        async with aclosing(pulses):
            async for pulse in pulses:
                first = self._first.setdefault(pulse.syncer, pulse)
                new = (first.instance, first.sent_ns) != (pulse.instance, pulse.sent_ns)
                if new and not is_leaving(pulse):
                    self._answered[pulse.syncer] = (
                        f"holds shards {', '.join(map(str, pulse.shards))}"
                        if pulse.shards
                        else "stands by"
                    )
                if syncers <= set(self._answered):
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
