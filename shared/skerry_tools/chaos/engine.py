"""Do to a cluster what a fault plan says, and note what came of each fault."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.errors import SkerryError
from skerry.tasks import TaskGroup
from skerry_tools.chaos.ground import NETWORK, Absent
from skerry_tools.chaos.plan import choose

if TYPE_CHECKING:
    from collections.abc import Callable

    from skerry_tools.chaos.ground import Action, Ground
    from skerry_tools.chaos.plan import Fault, FaultPlan

LOOK_S = 0.05
PROOF_S = 6.0
"""A fault without a sign of its effect lasts up to this much longer than planned: an idle service
says something to its broker every five seconds."""
UNSEEN = "nothing of it could be seen"


@dataclass(frozen=True, slots=True)
class Firing:
    """What became of one fault: seconds from the plan's start, and the proof that it fired.

    Where it did not, ``proof`` says why, and ``up`` whether there was anything to strike: a target
    that runs, with a broker behind it where messages are struck.
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


@dataclass(slots=True)
class Engine:
    """Runs one plan. ``on_firing`` hears of a fault when it has begun and when it is over.

    ``history`` holds every fault that has begun, also those that an interruption has ended.
    """

    plan: FaultPlan
    ground: Ground
    on_firing: Callable[[Firing, bool], None]
    history: list[Firing] = field(default_factory=list[Firing])
    _at_work: set[tuple[str, str]] = field(default_factory=set[tuple[str, str]], init=False)
    _began: float = field(default=0.0, init=False)

    async def run(self) -> None:
        """Run all faults, each at its time; those under way are ended when this is cancelled."""
        self._began = asyncio.get_running_loop().time()
        services = self.ground.kinds()
        try:
            async with TaskGroup() as group:
                for index, fault in enumerate(self.plan.faults):
                    target = choose(self.plan, index, services)
                    group.create_task(self._fault(index, fault, target), name=f"fault-{index}")
        finally:
            self.history.sort(key=lambda firing: firing.index)

    def now(self) -> float:
        """Return the seconds since the plan began."""
        return asyncio.get_running_loop().time() - self._began

    async def _fault(self, index: int, fault: Fault, target: str) -> None:
        await asyncio.sleep(fault.at_s - self.now())
        began_s, began_ns = self.now(), time.time_ns()

        def firing(*, fired: bool, proof: str, up: bool = True) -> Firing:
            when = (fault.at_s, began_s, self.now(), began_ns)
            return Firing(index, fault.kind.value, target, *when, fired=fired, proof=proof, up=up)

        action = self.ground.action(fault, target, f"{self.plan.seed}/{index}/action")
        what = (("network" if fault.kind in NETWORK else fault.kind.value), target)
        proofs: list[str] = []
        try:
            if what in self._at_work:
                msg = f"{target} suffers a {what[0]} fault already"
                raise Absent(msg)  # noqa: TRY301 - told like any other reason
            self._at_work.add(what)
            try:
                await self._held(action, fault, firing, proofs)
            finally:
                self._at_work.discard(what)
        except (SkerryError, OSError) as error:
            up = not isinstance(error, Absent)
            done = firing(fired=bool(proofs), proof="".join(proofs) or str(error), up=up)
        except BaseException:
            said = "".join(proofs) or "it was interrupted before anything of it could be seen"
            self.history.append(firing(fired=bool(proofs), proof=said))
            raise
        else:
            done = firing(fired=bool(proofs), proof="".join(proofs) or UNSEEN)
        self.history.append(done)
        self.on_firing(done, True)  # noqa: FBT003 - over

    async def _held(
        self, action: Action, fault: Fault, firing: Callable[..., Firing], proofs: list[str]
    ) -> None:
        """Begin, wait until the fault has lasted and put its proof into ``proofs``, end."""
        began = self.now()
        try:
            await action.begin()
            self.on_firing(firing(fired=True, proof=""), False)  # noqa: FBT003 - begun
            while not (proofs and self.now() >= began + fault.duration_s):
                if not proofs and (proof := await action.proof()):
                    proofs.append(proof)
                if self.now() > began + fault.duration_s + PROOF_S:
                    break
                await asyncio.sleep(LOOK_S)
        finally:
            await asyncio.shield(action.end())
