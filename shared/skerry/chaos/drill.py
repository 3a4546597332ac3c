"""A whole drill: quiet, faults, healing, quiet again, and the verdict on it."""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from skerry.audit.verify import verify
from skerry.bus import presence
from skerry.chaos.convergence import Check, Convergence
from skerry.chaos.engine import Engine, Firing, heal
from skerry.chaos.meter import Goodput, Meter, Phase
from skerry.chaos.witness import Witness
from skerry.errors import HistoryBroken, SkerryError
from skerry.tasks import TaskGroup
from skerry.wire.subjects import Subjects

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from skerry.chaos.ground import Ground
    from skerry.chaos.plan import FaultPlan

READY_S = 600.0
"""How long a drill waits until every learner trains: they may still compile."""
LOOK_S = 0.1


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a drill."""

    run: str
    seed: int
    history: tuple[Firing, ...]
    checks: tuple[Check, ...]
    goodput: Goodput
    commits: int

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def fired(self) -> int:
        return sum(firing.fired for firing in self.history)

    def to_json(self) -> dict[str, object]:
        """Return it as plain types."""
        return {
            "run": self.run,
            "seed": self.seed,
            "ok": self.ok,
            "fired": self.fired,
            "commits_watched": self.commits,
            "checks": [asdict(check) for check in self.checks],
            "goodput": self.goodput.to_json(),
            "faults": [asdict(firing) for firing in self.history],
        }


@dataclass(slots=True)
class Drill:
    """Runs one plan against one cluster, and judges.

    ``quiet_s`` is how long the fault-free rate is measured, before and again after the faults;
    ``least`` the goodput that is good enough. ``say`` hears sentences, ``on_firing`` each fault.
    """

    ground: Ground
    plan: FaultPlan
    quiet_s: float
    least: float
    damage: Callable[[str], Awaitable[str]]
    say: Callable[[str], None]
    on_firing: Callable[[Firing, bool], None]
    meter: Meter = field(default_factory=Meter)
    _names: dict[str, str] = field(default_factory=dict[str, str], init=False)

    async def run(self) -> Result:
        """Run it to the verdict. However it ends, everything is healed first."""
        ground = self.ground
        self._names = ground.kinds()
        witness, engine = Witness(ground.bus, ground.run), self._engine()
        after = await self._newest()
        beside = (witness.watch(after), self._pulses(), self.meter.watch(ground.entries))
        async with _beside(*beside):
            try:
                await self._quiet(learners=self._learners())
                self.meter.enter(Phase.FAULTS)
                self.say(f"{len(self.plan.faults)} faults begin, seed {self.plan.seed}.")
                await engine.run()
            finally:
                self.meter.enter(Phase.OTHER)
                self.say("Healing: everything is resumed, reconnected and started again.")
                await asyncio.shield(heal(ground, set(self._names)))
            checks = [self._fired(engine.history), *await self._converged()]
            await self._quiet(learners=set())
            self.meter.enter(Phase.OTHER)
        self.say("Verifying the whole log.")
        checks += [await self._held(witness), await self._verified(), self._goodput()]
        history, told = tuple(engine.history), tuple(checks)
        result = self.meter.result()
        return Result(ground.run, self.plan.seed, history, told, result, len(witness.seen))

    def _engine(self) -> Engine:
        return Engine(self.plan, self.ground, self.on_firing)

    def _learners(self) -> set[str]:
        return {name for name, kind in self._names.items() if kind == "learner"}

    async def _newest(self) -> int:
        """Return the ledger's newest sequence."""
        stream = Subjects(self.ground.run).stream("LEDGER")
        return next((s.last_seq for s in await self.ground.bus.streams() if s.name == stream), 0)

    async def _pulses(self) -> None:
        async for pulse in presence.follow_pulses(self.ground.bus, self.ground.run):
            self.meter.observe(pulse)

    async def _quiet(self, learners: set[str]) -> None:
        """Wait until these learners train, then measure without faults."""
        try:
            async with asyncio.timeout(READY_S):
                while not learners <= self.meter.training:  # noqa: ASYNC110 - pulses, not events
                    await asyncio.sleep(LOOK_S)
        except TimeoutError as error:
            late = ", ".join(sorted(learners - self.meter.training))
            msg = f"{late} did not train within {READY_S:.0f} s: see `skerry status`."
            raise SkerryError(msg) from error
        self.say(f"Measuring {self.quiet_s:.0f} s without faults.")
        self.meter.enter(Phase.QUIET)
        await asyncio.sleep(self.quiet_s)

    async def _converged(self) -> list[Check]:
        after = await self._newest()
        self.say(f"Waiting until every service works again, at most {self.plan.heal_s:.0f} s.")
        kinds = self.ground.kinds()
        waiting = Convergence(self.ground.bus, self.ground.run, after, kinds, self.damage)
        return await waiting.checks(self.plan.heal_s)

    def _fired(self, history: list[Firing]) -> Check:
        fired = sum(firing.fired for firing in history)
        return Check("faults fired", fired > 0, f"{fired} of {len(history)}")

    async def _held(self, witness: Witness) -> Check:
        lost = await witness.lost()
        seen = len(witness.seen)
        detail = f"{seen} acknowledged commits are all in the ledger"
        if lost:
            detail = f"{len(lost)} of {seen} are gone, the first at ledger sequence {lost[0]}"
        return Check("nothing acknowledged was lost", bool(seen) and not lost, detail)

    async def _verified(self) -> Check:
        name = "the ledger verifies"
        try:
            report = await verify(self.ground.bus, self.ground.run)
        except HistoryBroken as error:
            return Check(name, ok=False, detail=str(error))
        if report.violations:
            return Check(name, ok=False, detail=str(report.violations[0]))
        return Check(name, ok=True, detail=f"{report.commits} commits, no violation")

    def _goodput(self) -> Check:
        now = self.meter.result()
        detail = (
            f"{now.goodput:.2f} of the fault-free share of learner time that was up"
            f" (tokens/s {now.rate_ratio:.2f})"
        )
        return Check("goodput", now.goodput >= self.least, detail)


@contextlib.asynccontextmanager
async def _beside(*work: Coroutine[object, object, None]) -> AsyncGenerator[None]:
    """Run these while the context lasts; an error of theirs ends it."""
    async with TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
