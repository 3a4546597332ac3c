"""A whole drill: quiet, faults, healing, quiet again, and the verdict on it.

From the first fault on nothing keeps the verdict back: what goes wrong while faults run, in healing
or in judging is a failed check of its own, and the other checks are made. What there is can be had
at any time, so that an interrupted drill still shows its history.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass, field

from skerry.errors import HistoryBroken, SkerryError
from skerry.log import ledger, run_records
from skerry.log.reading import newest_sequence
from skerry.protocol.messages import Pulse, RunState
from skerry.protocol.subjects import Subjects
from skerry_tools.audit.log import RunLog
from skerry_tools.audit.replay import replay
from skerry_tools.audit.verify import verify
from skerry_tools.chaos.checks import Check, CommitCheck, Convergence, LivenessCheck
from skerry_tools.chaos.drilled import DrilledRun, beside, holds
from skerry_tools.chaos.engine import Engine, Firing
from skerry_tools.chaos.healing import heal
from skerry_tools.chaos.meter import Goodput, GoodputMeter, Phase
from skerry_tools.chaos.plan import FaultPlan

READY_S = 600.0
"""How long a drill waits until every learner trains: they may still compile."""
HEARD_S = 60.0
"""How long every process has, once the run works again, to hear something from its broker."""
VERDICT_S = 1800.0
"""A check of the log that takes longer has failed."""


@dataclass(frozen=True, slots=True)
class DrillResult:
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

    def to_json(self) -> dict[str, object]:
        """Return it as plain types."""
        return {
            "run": self.run,
            "seed": self.seed,
            "ok": self.ok,
            "fired": sum(firing.fired for firing in self.history),
            "planned": self.planned,
            "commits_watched": self.commits,
            "checks": [asdict(check) for check in self.checks],
            "goodput": asdict(self.goodput),
            "faults": [asdict(firing) for firing in self.history],
        }


@dataclass(slots=True)
class FaultDrill:
    """Runs one plan against one run, and judges.

    ``quiet_s`` is how long the fault-free rate is measured, before and again after the faults;
    ``least`` the goodput that is good enough. ``say`` hears sentences.
    """

    drilled: DrilledRun
    plan: FaultPlan
    quiet_s: float
    least: float
    damage: Callable[[str], Awaitable[str]]
    say: Callable[[str], None]
    meter: GoodputMeter = field(default_factory=GoodputMeter)
    checks: list[Check] = field(default_factory=list[Check], init=False)
    engine: Engine = field(init=False)
    commits: CommitCheck = field(init=False)
    _at: str = field(default="before the first fault", init=False)

    def __post_init__(self) -> None:
        self.engine = Engine(self.plan, self.drilled, self.say)
        self.commits = CommitCheck(self.drilled.bus, self.drilled.run)

    async def run(self) -> DrillResult:
        """Run it to the verdict. However it ends, everything is healed first.

        Raises only if it is cancelled, or cannot begin; ``result`` has what there is even then.
        """
        bus, run, names = self.drilled.bus, self.drilled.run, self.drilled.kinds()
        fragments = (await ledger.read_run(bus, run)).fragments
        for commit in (await ledger.last_commits(bus, run)).values():
            self.meter.merged(commit, fragments)
        after = await self._newest()

        async def pulses() -> None:
            async for pulse in run_records.follow(bus, run, Pulse):
                self.meter.observe(pulse)

        async def tokens() -> None:
            async for _, commit in ledger.follow_commits(bus, run, after=after):
                self.meter.merged(commit, fragments)

        async with beside(
            self._make("acknowledged commits could be watched", self.commits.watch(after)),
            self._make("pulses could be watched", pulses()),
            self._make("merged tokens could be watched", tokens()),
            self._make("processes could be watched", self.meter.watch(self.drilled.entries)),
        ):
            await self._suffer(names)
            self._at = "before it was judged"
            self.checks.append(kinds_check(self.plan, self.engine.history))
            await self._converge(names)
        self.say("Verifying the whole log.")
        await self._make("nothing acknowledged was lost", self._held(), VERDICT_S)
        await self._make("the ledger verifies", self._verified(), VERDICT_S)
        await self._make("the window replays", self._replayed(), VERDICT_S)
        now = self.meter.result()
        detail = (
            f"{now.goodput:.2f} of the fault-free share of learner time that was up"
            f" (merged tokens/s {now.rate_ratio:.2f}, {now.replay_s:.1f} s replayed)"
        )
        self.checks.append(Check("goodput", now.goodput >= self.least, detail))
        self._at = ""
        return self.result()

    def result(self) -> DrillResult:
        """Return what has come of it so far; a drill that did not run to its end is not ok."""
        checks = list(self.checks)
        if self._at:
            checks.append(Check("the drill ran to its end", ok=False, detail=f"no: {self._at}"))
        return DrillResult(
            run=self.drilled.run,
            seed=self.plan.seed,
            history=self.engine.history,
            checks=tuple(checks),
            goodput=self.meter.result(),
            commits=len(self.commits.seen),
            planned=len(self.plan.faults),
        )

    async def _make(
        self, name: str, work: Awaitable[str | list[Check] | None], limit_s: float | None = None
    ) -> None:
        """Add a check: failed with the error of ``work``, or ok with the detail that it returns.

        Where ``work`` returns checks it is those; where it returns nothing only its failure is one.
        """
        try:
            async with asyncio.timeout(limit_s):
                found = await work
        except Exception as error:  # noqa: BLE001 - whatever it is, a verdict has to come of it
            self.checks.append(Check.failed(name, error))
        else:
            self.checks += [Check(name, ok=True, detail=found)] if isinstance(found, str) else []
            self.checks += found if isinstance(found, list) else []

    async def _suffer(self, names: dict[str, str]) -> None:
        """Measure, run the faults, and undo them whatever came."""
        try:
            await self._quiet({name for name, kind in names.items() if kind == "learner"})
            self.meter.enter(Phase.FAULTS)
            self._at = "while faults ran"
            self.say(f"{len(self.plan.faults)} faults begin, seed {self.plan.seed}.")
            await self._make("the plan ran", self.engine.run())
        finally:
            self.meter.enter(Phase.OTHER)
            try:
                self.say("Healing: whatever lasts of the faults is undone.")
            finally:  # its reader may be gone
                await self._heal(set(names))

    async def _heal(self, names: set[str]) -> None:
        """Heal to the end, though a lost lease may come on top of whatever has ended the faults."""

        async def healed() -> str:
            await heal(self.drilled, names)
            return f"{len(names)} processes"

        healing = asyncio.ensure_future(self._make("everything is healed", healed()))
        try:
            await asyncio.shield(healing)
        except asyncio.CancelledError:
            await asyncio.wait({healing})
            raise

    async def _converge(self, names: dict[str, str]) -> None:
        """Wait until every service works again, and look whether that lasts while it is quiet."""
        liveness = LivenessCheck(self.drilled, names)
        found = Convergence(self.drilled.bus, self.drilled.run, names, self.damage)

        async def converged() -> list[Check]:
            found.after = await self._newest()
            self.say(f"Waiting until every service works again, at most {self.plan.heal_s:.0f} s.")
            return await found.checks(self.plan.heal_s)

        async def stayed() -> str:
            ended = await liveness.ended()
            record = await ledger.read_run(self.drilled.bus, self.drilled.run)
            if ended and record.state is not RunState.FINISHED:
                msg = f"{', '.join(ended)} ended in the {self.quiet_s:.0f} s without faults"
                raise SkerryError(msg)
            return f"for {self.quiet_s:.0f} s without faults"

        await self._make("the routes can be read", liveness.note(), VERDICT_S)
        await self._make("the run works again", converged())
        if not found.finished:
            await self._make("every process runs", liveness.checks(HEARD_S), VERDICT_S)
        await self._quiet(set())
        self.meter.enter(Phase.OTHER)
        if not found.finished:
            await self._make("no process ended meanwhile", stayed(), VERDICT_S)

    async def _newest(self) -> int:
        """Return the ledger's newest sequence."""
        (pattern,) = Subjects(self.drilled.run).of_stream("LEDGER")
        return await newest_sequence(self.drilled.bus, pattern)

    async def _quiet(self, learners: set[str]) -> None:
        """Wait until these learners train, then measure without faults."""
        if not await holds(lambda: learners <= self.meter.training, READY_S):
            late = ", ".join(sorted(learners - self.meter.training))
            msg = f"{late} did not train within {READY_S:.0f} s: see `skerry status`."
            raise SkerryError(msg)
        self.say(f"Measuring {self.quiet_s:.0f} s without faults.")
        self.meter.enter(Phase.QUIET)
        await asyncio.sleep(self.quiet_s)

    async def _held(self) -> str:
        lost, seen = await self.commits.lost(), len(self.commits.seen)
        if lost:
            msg = f"{len(lost)} of {seen} are gone, the first at ledger sequence {lost[0]}"
            raise HistoryBroken(msg)
        if not seen:
            msg = "no commit was seen"
            raise SkerryError(msg)
        return f"{seen} acknowledged commits are all in the ledger"

    async def _verified(self) -> str:
        report = await verify(self.drilled.bus, self.drilled.run)
        if report.violations:
            raise HistoryBroken(report.violations[0].sentence)
        return f"{report.commits} commits, no violation"

    async def _replayed(self) -> str:
        """Rebuild from genesis what the window still holds, and compare each version's digest."""
        record = await ledger.read_run(self.drilled.bus, self.drilled.run)
        done = await replay(RunLog.of(self.drilled.bus, record))
        if done.wrong:
            raise HistoryBroken(done.wrong[0].sentence)
        reached = sum(part.reached - part.base for part in done.fragments)
        of = sum(part.version for part in done.fragments)
        stopped = [f"; not the rest: {part.stopped}" for part in done.fragments if part.stopped]
        return f"{reached} of {of} versions, each to its digest{''.join(stopped[:1])}"


def kinds_check(plan: FaultPlan, history: Iterable[Firing]) -> Check:
    """Check that every kind of the plan fired, unless there was never anything to strike."""
    firings = tuple(history)
    planned = Counter(fault.kind.value for fault in plan.faults)
    fired = Counter(firing.kind for firing in firings if firing.fired)
    spared = {f.kind for f in firings} - {f.kind for f in firings if f.up}
    never = [kind for kind in sorted(planned) if not fired[kind]]
    silent = [kind for kind in never if kind not in spared]
    by_kind = ", ".join(f"{kind} {fired[kind]}/{planned[kind]}" for kind in sorted(planned))
    detail = f"{fired.total()} of {planned.total()} ({by_kind})"
    if silent:
        detail += f"; never, though there was a target: {', '.join(silent)}"
    if absent := [kind for kind in never if kind in spared]:
        detail += f"; never, for want of a target that was up: {', '.join(absent)}"
    return Check("every kind of fault fired", bool(fired) and not silent, detail)
