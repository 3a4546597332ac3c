"""Do to a cluster what a fault plan says, and note what came of each fault."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from skerry.errors import SkerryError
from skerry.tasks import TaskGroup, now_s
from skerry_tools.chaos.drilled import LOOK_S, Absent, DrilledRun, Injection
from skerry_tools.chaos.plan import ROUTE, Fault, FaultPlan, choose

PROOF_S = 6.0
"""A fault without a sign of its effect lasts up to this much longer than planned: an idle service
says something to its broker every five seconds."""
UNSEEN = "nothing of it could be seen"
INTERRUPTED = "it was interrupted before anything of it could be seen"


@dataclass(frozen=True, slots=True)
class Firing:
    """What became of one fault: seconds from the plan's start, and the proof that it fired.

    Where it did not, ``proof`` says why, and ``up`` whether there was anything to strike: a target
    that runs, with a broker that answers where messages are struck.
    """

    index: int
    kind: str
    target: str
    planned_s: float
    began_s: float
    ended_s: float
    began_ns: int
    fired: bool
    proof: str
    up: bool = True

    @property
    def beginning(self) -> str:
        """What a person reads when it begins."""
        return f"{self.began_s:6.1f} s  {self.kind} {self.target} begins"

    @property
    def end(self) -> str:
        """What a person reads when it is over."""
        if self.fired:
            return f"{self.ended_s:6.1f} s  {self.kind} {self.target} ends: {self.proof}"
        return f"{self.began_s:6.1f} s  {self.kind} {self.target} did not fire: {self.proof}"


@dataclass(slots=True)
class Engine:
    """Runs one plan, and says when a fault begins and when it is over.

    ``firings`` holds every fault that has begun by its index, also those that were interrupted.
    """

    plan: FaultPlan
    drilled: DrilledRun
    say: Callable[[str], None]
    firings: dict[int, Firing] = field(default_factory=dict[int, Firing])
    _at_work: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]], init=False)
    _began: float = field(default=0.0, init=False)

    @property
    def history(self) -> tuple[Firing, ...]:
        return tuple(firing for _, firing in sorted(self.firings.items()))

    async def run(self) -> None:
        """Run all faults, each at its time; those under way are ended when this is cancelled."""
        self._began = now_s()
        services = self.drilled.kinds()
        async with TaskGroup() as group:
            for index, fault in enumerate(self.plan.faults):
                target = choose(self.plan, index, services)
                group.create_task(self._fault(index, fault, target), name=f"fault-{index}")

    def _now(self) -> float:
        """Return the seconds since the plan began."""
        return now_s() - self._began

    async def _fault(self, index: int, fault: Fault, target: str) -> None:
        await asyncio.sleep(fault.at_s - self._now())
        began = (fault.at_s, self._now(), self._now(), time.time_ns())
        self.firings[index] = Firing(
            index, fault.kind.value, target, *began, fired=False, proof=INTERRUPTED
        )
        what = ("network" if fault.kind in ROUTE else fault.kind.value, target)
        try:
            if what in self._at_work:
                msg = f"{target} suffers a {what[0]} fault already"
                raise Absent(msg)
            self._at_work.add(what)
            try:
                await self._hold(index, fault, target)
            finally:
                self._at_work.discard(what)
        except (SkerryError, OSError) as error:
            self._note(index, proof=str(error), up=not isinstance(error, Absent))
        else:
            self._note(index, proof=UNSEEN)
        finally:
            self.firings[index] = replace(self.firings[index], ended_s=self._now())
        self.say(self.firings[index].end)

    async def _hold(self, index: int, fault: Fault, target: str) -> None:
        """Inject the fault, wait until it has lasted and has shown itself, take it back."""
        ends_s = self._now() + fault.duration_s
        injection = Injection.of(fault, target, f"{self.plan.seed}/{index}/action")
        async with self.drilled.inject(injection) as proof:
            self.say(self.firings[index].beginning)
            while True:
                fired = self.firings[index].fired
                if not fired and (words := await proof()):
                    self._note(index, fired=True, proof=words)
                if self._now() > ends_s + (0.0 if self.firings[index].fired else PROOF_S):
                    return
                await asyncio.sleep(LOOK_S)

    def _note(self, index: int, **changes: Any) -> None:
        """Note what is seen of a fault; what was seen first counts."""
        if not self.firings[index].fired:
            self.firings[index] = replace(self.firings[index], **changes)
