"""A whole drill: quiet, faults, healing, quiet again, and the verdict on it.

From the first fault on nothing keeps the verdict back: what goes wrong while faults run, in healing
or in judging is a failed check of its own, and the other checks are made. What there is can be had
at any time, so that an interrupted drill still tells its history.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from skerry.errors import HistoryBroken, SkerryError, first_cause
from skerry.log import ledger, presence
from skerry.protocol.messages import RunState
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from skerry_tools.audit.log import Log
from skerry_tools.audit.verify import verify
from skerry_tools.chaos.convergence import Check, Convergence
from skerry_tools.chaos.engine import Engine, Firing
from skerry_tools.chaos.healing import heal
from skerry_tools.chaos.meter import Goodput, Meter, Phase
from skerry_tools.chaos.survivors import Survivors
from skerry_tools.chaos.witness import Witness

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine

    from skerry_tools.chaos.ground import Ground
    from skerry_tools.chaos.plan import FaultPlan

READY_S = 600.0
"""How long a drill waits until every learner trains: they may still compile."""
HEARD_S = 60.0
"""How long every process has, once the run works again, to hear something from its broker."""
VERDICT_S = 1800.0
"""A check of the log that takes longer has failed."""
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
    planned: int

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
            "planned": self.planned,
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
    checks: list[Check] = field(default_factory=list[Check], init=False)
    engine: Engine = field(init=False)
    witness: Witness = field(init=False)
    _names: dict[str, str] = field(default_factory=dict[str, str], init=False)
    _at: str = field(default="before the first fault", init=False)
    _over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.plan, self.ground, self.on_firing)
        self.witness = Witness(self.ground.bus, self.ground.run)

    async def run(self) -> Result:
        """Run it to the verdict. However it ends, everything is healed first.

        Raises only if it is cancelled, or cannot begin; ``result`` tells what there is even then.
        """
        ground, self._names = self.ground, self.ground.kinds()
        fragments = (await ledger.read_run(ground.bus, ground.run)).fragments
        for commit in (await ledger.last_commits(ground.bus, ground.run)).values():
            self.meter.merged(commit, fragments)
        after = await self._newest()
        watching = {
            "acknowledged commits": self.witness.watch(after),
            "pulses": self._pulses(),
            "merged tokens": self._commits(after, fragments),
            "processes": self.meter.watch(ground.entries),
        }
        async with _beside(*(self._watched(what, work) for what, work in watching.items())):
            await self._suffer()
            self._at = "before it was judged"
            self.checks.append(self._fired())
            await self._converge()
        self.say("Verifying the whole log.")
        judged = {
            "nothing acknowledged was lost": self._held,
            "the ledger verifies": self._verified,
            "the window replays": self._replayed,
        }
        for name, check in judged.items():
            self.checks.append(await _judged(name, check()))
        self.checks.append(self._goodput())
        self._over = True
        return self.result()

    def result(self) -> Result:
        """Return what has come of it so far; a drill that did not run to its end is not ok."""
        checks = list(self.checks)
        if not self._over:
            checks.append(Check("the drill ran to its end", ok=False, detail=f"no: {self._at}"))
        history = tuple(sorted(self.engine.history, key=lambda firing: firing.index))
        return Result(
            run=self.ground.run,
            seed=self.plan.seed,
            history=history,
            checks=tuple(checks),
            goodput=self.meter.result(),
            commits=len(self.witness.seen),
            planned=len(self.plan.faults),
        )

    async def _suffer(self) -> None:
        """Measure, run the faults, and undo them whatever came."""
        try:
            await self._quiet(learners=self._learners())
            self.meter.enter(Phase.FAULTS)
            self._at = "while faults ran"
            self.say(f"{len(self.plan.faults)} faults begin, seed {self.plan.seed}.")
            ran = await _judged("the plan ran", self._faults(), limit_s=None)
            if not ran.ok:
                self.checks.append(ran)
        finally:
            self.meter.enter(Phase.OTHER)
            try:
                self.say("Healing: whatever lasts of the faults is undone.")
            finally:  # whoever listens may be gone
                await self._healed()

    async def _faults(self) -> str:
        await self.engine.run()
        return ""

    async def _healed(self) -> None:
        """Heal to the end, though a lost lease may come on top of whatever has ended the faults."""
        healing = asyncio.ensure_future(self._heal())
        try:
            await asyncio.shield(healing)
        except asyncio.CancelledError:
            await asyncio.wait({healing})
            raise

    async def _heal(self) -> None:
        async def healed() -> str:
            await heal(self.ground, set(self._names))
            return f"{len(self._names)} processes"

        self.checks.append(await _judged("everything is healed", healed(), limit_s=None))

    async def _converge(self) -> None:
        """Wait until everybody works again, and look whether that lasts while it is quiet."""
        survivors = Survivors(self.ground, self._names)
        noted = await _judged("the routes can be read", _done(survivors.note()))
        self.checks += [] if noted.ok else [noted]
        found = Convergence(self.ground.bus, self.ground.run, 0, self._names, self.damage)
        told = await _judged("the run works again", self._converged(found), limit_s=None)
        self.checks += [] if told.ok else [told]
        if not found.finished:
            looked = await _judged("every process runs", self._alive(survivors))
            self.checks += [] if looked.ok else [looked]
        await self._quiet(learners=set())
        self.meter.enter(Phase.OTHER)
        if not found.finished:
            self.checks.append(await _judged("nobody ended meanwhile", self._stayed(survivors)))

    async def _converged(self, found: Convergence) -> str:
        found.after = await self._newest()
        self.say(f"Waiting until every service works again, at most {self.plan.heal_s:.0f} s.")
        self.checks += await found.checks(self.plan.heal_s)
        return ""

    async def _alive(self, survivors: Survivors) -> str:
        self.checks += await survivors.checks(HEARD_S)
        return ""

    async def _stayed(self, survivors: Survivors) -> str:
        gone = await survivors.stayed()
        if gone and not await self._is_finished():
            msg = f"{gone} ended in the {self.quiet_s:.0f} s without faults"
            raise SkerryError(msg)
        return f"for {self.quiet_s:.0f} s without faults"

    async def _is_finished(self) -> bool:
        record = await ledger.read_run(self.ground.bus, self.ground.run)
        return record.state is RunState.FINISHED

    def _learners(self) -> set[str]:
        return {name for name, kind in self._names.items() if kind == "learner"}

    async def _newest(self) -> int:
        """Return the ledger's newest sequence."""
        stream = Subjects(self.ground.run).stream("LEDGER")
        return next((s.last_seq for s in await self.ground.bus.streams() if s.name == stream), 0)

    async def _watched(self, what: str, work: Coroutine[object, object, None]) -> None:
        """Do this beside the drill; an error of it is a failed check, and the drill goes on."""
        told = await _judged(f"{what} could be watched", _done(work), limit_s=None)
        if not told.ok:
            self.checks.append(told)

    async def _pulses(self) -> None:
        async for pulse in presence.follow_pulses(self.ground.bus, self.ground.run):
            self.meter.observe(pulse)

    async def _commits(self, after: int, fragments: int) -> None:
        commits = ledger.follow_commits(self.ground.bus, self.ground.run, after=after)
        async for _, commit in commits:
            self.meter.merged(commit, fragments)

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

    def _fired(self) -> Check:
        """Every kind in the plan has to have fired, unless there was never anything to strike."""
        planned = Counter(fault.kind.value for fault in self.plan.faults)
        history = self.engine.history
        fired = Counter(firing.kind for firing in history if firing.fired)
        spared = {f.kind for f in history} - {f.kind for f in history if f.up}
        never = [kind for kind in sorted(planned) if not fired[kind]]
        silent = [kind for kind in never if kind not in spared]
        by_kind = ", ".join(f"{kind} {fired[kind]}/{planned[kind]}" for kind in sorted(planned))
        detail = f"{fired.total()} of {planned.total()} ({by_kind})"
        if silent:
            detail += f"; never, though there was a target: {', '.join(silent)}"
        if absent := [kind for kind in never if kind in spared]:
            detail += f"; never, for want of a target that was up: {', '.join(absent)}"
        return Check("every kind of fault fired", bool(fired) and not silent, detail)

    async def _held(self) -> str:
        lost, seen = await self.witness.lost(), len(self.witness.seen)
        if lost:
            msg = f"{len(lost)} of {seen} are gone, the first at ledger sequence {lost[0]}"
            raise HistoryBroken(msg)
        if not seen:
            msg = "no commit was seen"
            raise SkerryError(msg)
        return f"{seen} acknowledged commits are all in the ledger"

    async def _verified(self) -> str:
        report = await verify(self.ground.bus, self.ground.run)
        if report.violations:
            raise HistoryBroken(report.violations[0].sentence)
        return f"{report.commits} commits, no violation"

    async def _replayed(self) -> str:
        """Rebuild from genesis what the window still holds, and compare each version's digest."""
        from skerry_tools.audit.replay import replay

        record = await ledger.read_run(self.ground.bus, self.ground.run)
        done = await replay(Log.of(self.ground.bus, record))
        if done.wrong:
            raise HistoryBroken(done.wrong[0].sentence)
        reached = sum(part.reached - part.base for part in done.fragments)
        of = sum(part.version for part in done.fragments)
        why = next(
            (f"; not the rest: {part.stopped}" for part in done.fragments if part.stopped), ""
        )
        return f"{reached} of {of} versions, each to its digest{why}"

    def _goodput(self) -> Check:
        now = self.meter.result()
        detail = (
            f"{now.goodput:.2f} of the fault-free share of learner time that was up"
            f" (merged tokens/s {now.rate_ratio:.2f}, {now.replay_s:.1f} s replayed)"
        )
        return Check("goodput", now.goodput >= self.least, detail)


async def _judged(name: str, work: Awaitable[str], limit_s: float | None = VERDICT_S) -> Check:
    """Return a check: ok, with what ``work`` says about it, or failed with its error."""
    try:
        async with asyncio.timeout(limit_s):
            detail = await work
    except Exception as error:  # noqa: BLE001 - whatever it is, a verdict has to come of it
        cause = first_cause(error)
        kind = "" if isinstance(cause, SkerryError) else type(cause).__name__
        return Check(name, ok=False, detail=": ".join(filter(None, (kind, str(cause)))))
    return Check(name, ok=True, detail=detail)


async def _done(work: Awaitable[None]) -> str:
    await work
    return ""


@contextlib.asynccontextmanager
async def _beside(*work: Coroutine[object, object, None]) -> AsyncGenerator[None]:
    """Run these while the context lasts."""
    async with TaskGroup() as group:
        tasks = [group.create_task(one) for one in work]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
