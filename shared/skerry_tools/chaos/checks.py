"""What a drill checks of its own: commits that stay, processes that run, services that work again.

Every check is a promise about a run that has been healed; the log's own promises are the audit's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from hashlib import blake2b

from skerry.errors import SkerryError, WireError, first_cause
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.protocol.messages import CheckpointRecord, SyncerPulse, is_leaving
from skerry.protocol.records import decode
from skerry.protocol.subjects import Subjects
from skerry.tasks import now_s
from skerry_tools.chaos.drilled import LOOK_S, DrilledRun, beside, holds

COMMITS = "a syncer that runs commits"
CHECKPOINT = "a checkpoint verifies"


@dataclass(frozen=True, slots=True)
class Check:
    """One thing that has to be true at the end; ``detail`` is for people."""

    name: str
    ok: bool
    detail: str

    @classmethod
    def failed(cls, name: str, error: Exception) -> Check:
        """Return the check that an error keeps from being made."""
        cause = first_cause(error)
        kind = "" if isinstance(cause, SkerryError) else type(cause).__name__
        return cls(name, ok=False, detail=": ".join(filter(None, (kind, str(cause)))))


@dataclass(slots=True)
class CommitCheck:
    """Remembers commits as the ledger acknowledged them, and checks that it still holds them."""

    bus: Bus
    run: str
    seen: dict[int, bytes] = field(default_factory=dict[int, bytes])

    async def watch(self, after: int) -> None:
        """Remember every commit after a ledger sequence, until cancelled."""
        follower = self.bus.follow(Subjects(self.run).commit(), after=after)
        async with aclosing(follower):
            async for record in follower:
                self.seen[record.sequence] = blake2b(record.payload).digest()

    async def lost(self) -> list[int]:
        """Return the ledger sequences at which what was acknowledged is gone or has changed."""
        stream = Subjects(self.run).stream("LEDGER")
        missing: list[int] = []
        for sequence, digest in sorted(self.seen.items()):
            record = await self.bus.get(stream, sequence)
            if record is None or blake2b(record.payload).digest() != digest:
                missing.append(sequence)
        return missing


@dataclass(slots=True)
class LivenessCheck:
    """Checks that the processes of these names run, hear their broker, and stay.

    ``note`` is called once everything has been healed. What a process makes of what it hears is
    for ``Convergence``, which reads it from the log.
    """

    drilled: DrilledRun
    names: Collection[str]
    _heard: dict[str, int] = field(default_factory=dict[str, int], init=False)
    _starts: dict[str, str] = field(default_factory=dict[str, str], init=False)

    async def note(self) -> None:
        """Remember how much every process has heard from its broker by now."""
        self._heard = await self._down_bytes()

    async def checks(self, deadline_s: float) -> list[Check]:
        """Wait until every process runs and has heard something since; one check for each."""
        await self.drilled.settle()
        until = now_s() + deadline_s
        while True:
            heard = await self._down_bytes()
            found = [self._check(name, heard) for name in sorted(self.names)]
            if all(check.ok for check in found) or now_s() > until:
                break
            await asyncio.sleep(LOOK_S)
        entries = self.drilled.entries()
        self._starts = {name: entries[name].which for name in self.names if name in entries}
        return found

    async def ended(self) -> list[str]:
        """Return the processes that have ended since ``checks``."""
        await self.drilled.settle()
        now = {name: entry.which for name, entry in self.drilled.entries().items() if entry.alive}
        return sorted(name for name, which in self._starts.items() if now.get(name) != which)

    def _check(self, name: str, heard: dict[str, int]) -> Check:
        title, entry = f"{name} runs", self.drilled.entries().get(name)
        if entry is None or not entry.alive:
            return Check(title, ok=False, detail="it does not")
        if entry.paused:
            return Check(title, ok=False, detail=f"{entry.which} is stopped")
        if name not in heard:
            return Check(title, ok=True, detail=entry.which)
        more = heard[name] - self._heard.get(name, 0)
        return Check(title, more > 0, f"{entry.which}, {more} bytes from the broker since healing")

    async def _down_bytes(self) -> dict[str, int]:
        routes = await self.drilled.routes()
        return {name: int(route["bytes_down"]) for name, route in routes.items()}


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
    kinds: Mapping[str, str]
    damage: Callable[[str], Awaitable[str]]
    after: int = 0
    finished: bool = False
    missing: dict[str, str] = field(default_factory=dict[str, str])
    passed: dict[str, str] = field(default_factory=dict[str, str])
    broken: list[Check] = field(default_factory=list[Check])

    async def checks(self, deadline_s: float) -> list[Check]:
        """Return checks per learner and syncer, and one each for the commits and checkpoints.

        What cannot be watched becomes a failed check of its own, beside the others.
        """
        self._expect("learner", "{} contributes", "nothing of it was merged")
        syncers = self._expect("syncer", "{} answers", "no new pulse of it")
        self.missing |= {COMMITS: "none did"} if syncers else {}
        self._expect("checkpointer", CHECKPOINT, "none was written")
        async with beside(
            self._watched("commits", self._commits(syncers)),
            self._watched("checkpoints", self._checkpoints()),
            self._watched("the syncers' pulses", self._pulses()),
            self._watched("the run's end", self._end()),
        ):
            await holds(
                lambda: self.finished or self.missing.keys() <= self.passed.keys(), deadline_s
            )
        late = f"within {deadline_s:.0f} s of healing"
        found = self.broken
        for name, why in self.missing.items():
            passed = self.passed.get(name, "the run is finished" if self.finished else "")
            found.append(Check(name, bool(passed), passed or f"{why} {late}"))
        return found

    def _expect(self, kind: str, name: str, why: str) -> list[str]:
        names = sorted(process for process, held in self.kinds.items() if held == kind)
        self.missing |= {name.format(process): why for process in names}
        return names

    async def _watched(self, what: str, work: Awaitable[None]) -> None:
        try:
            await work
        except Exception as error:  # noqa: BLE001 - a verdict has to come of it
            self.broken.append(Check.failed(f"{what} can be watched", error))

    async def _commits(self, syncers: Collection[str]) -> None:
        commits = ledger.follow_commits(self.bus, self.run, after=self.after)
        async with aclosing(commits):
            async for sequence, commit in commits:
                for row in commit.consumed:
                    name = f"{row.learner} contributes"
                    self.passed.setdefault(name, f"merged at ledger sequence {sequence}")
                if commit.syncer in syncers:
                    detail = f"{commit.syncer} did at ledger sequence {sequence}"
                    self.passed.setdefault(COMMITS, detail)

    async def _checkpoints(self) -> None:
        """Look for a checkpoint that was written after healing and can be read back whole.

        Always the newest one: retention may remove an older one while it is being read.
        """
        if CHECKPOINT not in self.missing:
            return
        subject, tried = Subjects(self.run).ledger("checkpoint"), 0
        follower = self.bus.follow(subject, after=self.after)
        async with aclosing(follower):
            async for record in follower:
                newest = await self.bus.last(subject) or record
                if newest.sequence <= tried or CHECKPOINT in self.passed:
                    continue
                tried = newest.sequence
                try:
                    path = decode(CheckpointRecord, newest.payload, run=self.run).path
                    damage = await self.damage(path)
                except WireError as error:
                    path, damage = "", str(error)
                if damage:
                    self.missing[CHECKPOINT] = damage
                else:
                    self.passed[CHECKPOINT] = path

    async def _pulses(self) -> None:
        """Look for something new from each syncer: the first pulse of each may be an old one."""
        first: dict[str, SyncerPulse] = {}
        pulses = run_records.follow(self.bus, self.run, SyncerPulse)
        async with aclosing(pulses):
            async for pulse in pulses:
                old = first.setdefault(pulse.syncer, pulse)
                new = (old.instance, old.sent_ns) != (pulse.instance, pulse.sent_ns)
                if new and not is_leaving(pulse):
                    shards = ", ".join(map(str, pulse.shards))
                    holds = f"holds shards {shards}" if shards else "stands by"
                    self.passed.setdefault(f"{pulse.syncer} answers", holds)

    async def _end(self) -> None:
        await ledger.wait_finished(self.bus, self.run)
        self.finished = True
