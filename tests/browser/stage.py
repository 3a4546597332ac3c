"""A run that plays on the page: a log in memory, the real monitor and server, invented learners.

Everything the page shows comes the way it comes in a real run: through records in a log.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.log import ledger, recovery, run_records
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.protocol.messages import (
    CloseReason,
    Commit,
    CommitOrigin,
    Consumed,
    LearnerPhase,
    LearnerProgress,
    RefusalCause,
    Refused,
    Round,
)
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from skerry.settings.local import HealthSettings
from skerry.settings.models import RunConfig
from skerry_health_monitor.service import Monitor, page_of
from skerry_health_monitor.web.faults import Inject
from skerry_health_monitor.web.server import listen, serve_http
from tests.support.builders import (
    background,
    checkpoint_record,
    commit,
    consumed,
    evaluation,
    pulse,
    round_,
    run_record,
)

CLOSED = (CloseReason.GRACE_OVER, CloseReason.ALL_ARRIVED)
"""Why the rounds on the stage close."""
RUN = "stage"
STEP_S = 0.25
TOKENS = 1024
PULSE_S = 5.0
"""Long, so that nobody is missed while a slow machine opens a browser."""


def leaves(count: int) -> tuple[LeafSpec, ...]:
    return (
        LeafSpec("embed", (256, 64), embedding=True),
        *(LeafSpec(f"block{i}/w", (96, 128)) for i in range(count)),
    )


def loss_at(step: int) -> float:
    """A loss curve as one knows it: down fast, then slowly."""
    return 1.35 + 4.2 * math.exp(-step / 90) + 0.9 * math.exp(-step / 900)


@dataclass
class Actor:
    """One invented learner."""

    name: str
    incarnation: int = 1
    speed: float = 1.0
    phase: LearnerPhase = LearnerPhase.TRAINING
    silent: bool = False
    step: int = 0
    steps: int = 0
    began_s: float = 0.0
    contributions: int = 0
    versions: dict[int, int] = field(default_factory=dict[int, int])
    merged: dict[int, int] = field(default_factory=dict[int, int])


@dataclass
class Stage:
    """The run; ``pulse`` and ``commit`` make records, whoever directs decides when."""

    learners: int = 3
    fragments: int = 8
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])
    seed: int = 1

    def __post_init__(self) -> None:
        self.broker = MemoryBroker(clock_ns=lambda: self.ns)
        self.bus = self.broker.connect()
        self.chance = random.Random(self.seed)
        self.plan = plan(leaves(max(4, self.fragments)), self.fragments)
        given = {
            "liveness": {"pulse_s": PULSE_S},
            "train": {"steps": 12_000},
            "sync": {"learners": self.learners, "fragments": self.fragments},
        }
        self.settings = RunConfig.model_validate({**given, **self.config})
        self.actors = {
            name: Actor(name, speed=self.chance.uniform(0.75, 1.15))
            for name in (f"learner-{n}" for n in range(1, self.learners + 1))
        }
        self.versions = dict.fromkeys(range(self.fragments), 0)
        self.now_s = time.time()
        self.rounds = 0

    async def begin(self, age_s: float = 0.0) -> None:
        """Create the run ``age_s`` ago, with its learners."""
        self.now_s = time.time() - age_s
        await self.bus.declare(specs(RUN, window_bytes=2**20))
        text = self.settings.model_dump_json()
        await ledger.create_run(self.bus, run_record(RUN, self.plan, text, created_ns=self.ns))
        for actor in self.actors.values():
            await ledger.join(self.bus, RUN, actor.name, f"host-{len(actor.name)}", self.ns)
            actor.began_s = self.now_s

    @property
    def ns(self) -> int:
        return int(self.now_s * 1e9)

    async def pulse(self, actor: Actor, **changes: Any) -> None:
        """Have a learner say how it is."""
        alive_s = self.now_s - actor.began_s
        loss = loss_at(actor.step) + self.chance.gauss(0, 0.04)
        told = pulse(
            actor.name,
            actor.step,
            run=RUN,
            incarnation=actor.incarnation,
            phase=actor.phase,
            sent_ns=self.ns,
            steps=actor.steps,
            tokens=actor.steps * TOKENS,
            cursor=actor.steps,
            loss=loss,
            step_time_s=STEP_S / actor.speed,
            busy_s=0.86 * alive_s,
            alive_s=alive_s,
            bytes_up=actor.contributions * 40_000,
            bytes_down=actor.contributions * 130_000,
            contributions=actor.contributions,
            versions=tuple(actor.versions.get(f, 0) for f in range(self.fragments)),
            compile_s=min(9.0, 0.05 * alive_s),
            recover_s=0.01 * alive_s,
        )
        told = replace(told, **changes)
        await self.bus.publish(Subjects(RUN).pulse(actor.name), encode(told))

    async def open(self, fragment: int) -> Round:
        """Open the next round of a fragment."""
        version = self.versions[fragment] + 1
        told = round_(
            version,
            fragment,
            run=RUN,
            plan_digest=self.plan.digest,
            due_step=max(a.step for a in self.actors.values()),
            opened_ns=self.ns,
            trace_id=self.trace(fragment, version),
        )
        await run_records.publish(self.bus, told)
        return told

    def trace(self, fragment: int, version: int) -> str:
        return f"{random.Random(f'{fragment}/{version}').getrandbits(128):032x}"

    async def commit(self, fragment: int, **changes: Any) -> Commit:
        """Commit the next version of a fragment, with everybody who trains."""
        version = self.versions[fragment] + 1
        taking = [a for a in self.actors.values() if not a.silent] if version > 1 else []
        quorum_s, grace_s = self.chance.uniform(0.05, 0.25), self.chance.uniform(0.0, 0.3)
        opened_ns = self.ns - int((quorum_s + grace_s) * 1e9)
        step = max(a.step for a in self.actors.values())
        took_s = quorum_s + grace_s
        merged = tuple(self._consumed(a, fragment, opened_ns, took_s) for a in taking)
        rows = (
            LearnerProgress(a.name, a.incarnation, version, a.steps * TOKENS, a.steps)
            for a in taking
        )
        base: dict[str, Any] = {
            "plan_digest": self.plan.digest,
            "step": step,
            "origin": CommitOrigin.GENESIS if version == 1 else CommitOrigin.ROUND,
            "reason": None if version == 1 else self.chance.choice(CLOSED),
            "opened_ns": opened_ns,
            "closed_ns": self.ns,
            "quorum_s": quorum_s,
            "grace_s": grace_s,
            "consumed": merged,
            "progress": tuple(rows),
            "trace_id": self.trace(fragment, version),
        }
        done = commit(version, fragment, run=RUN, **(base | changes))
        await recovery.append_commit(self.bus, done)
        self.versions[fragment] = version
        self.rounds += version > 1
        for actor in taking or self.actors.values():
            actor.versions[fragment] = version
            actor.contributions += 1
        return done

    def _consumed(self, actor: Actor, fragment: int, opened_ns: int, within_s: float) -> Consumed:
        late = self.chance.random() < 0.08
        version, steps = self.versions[fragment] + 1, actor.steps - actor.merged.get(fragment, 0)
        actor.merged[fragment] = actor.steps
        arrived = 0 if late else opened_ns + int(self.chance.uniform(0.2, 1.0) * within_s * 1e9)
        return consumed(
            actor.name,
            version,
            incarnation=actor.incarnation,
            base_version=version - 1,
            staleness=int(late),
            step=actor.step,
            steps=steps,
            tokens=steps * TOKENS,
            cursor_to=steps,
            weight=1 / sum(not a.silent for a in self.actors.values()),
            loss=loss_at(actor.step) + self.chance.gauss(0, 0.04),
            arrived_ns=arrived,
        )

    async def refuse(self, fragment: int, cause: RefusalCause, learner: str) -> None:
        """Commit a round that refuses a contribution."""
        await self.commit(fragment, refused=(Refused(cause, learner, 1, 1, 1, 0, 1),))

    async def evaluate(self, **changes: Any) -> None:
        """Have the evaluator judge the newest state, and say what it writes."""
        step = max(a.step for a in self.actors.values())
        loss = loss_at(step) + 0.06
        said = evaluation(
            step,
            run=RUN,
            tokens=sum(a.steps for a in self.actors.values()) * TOKENS,
            versions=tuple(self.versions.values()),
            loss=loss,
            perplexity=math.exp(loss),
            bits_per_byte=loss / math.log(2),
            evaluated_ns=self.ns,
            sample=f"what the model of step {step} writes",
        )
        await ledger.record_evaluation(self.bus, replace(said, **changes))

    async def checkpoint(self) -> None:
        """Note a checkpoint of the newest state."""
        step = max(a.step for a in self.actors.values())
        record = checkpoint_record(
            f"/data/checkpoints/stage/step-{step:08}",
            run=RUN,
            versions=tuple(self.versions.values()),
            step=step,
            tokens=step * TOKENS,
            written_ns=self.ns,
            size_bytes=9_300_000,
            ledger_sequence=sum(self.versions.values()),
        )
        await ledger.record_checkpoint(self.bus, record)

    async def finish(self) -> None:
        """End the run."""
        await ledger.finish_run(self.bus, await ledger.read_run(self.bus, RUN))

    async def past(self, age_s: float, every_s: float) -> None:
        """Let a run have gone on for ``age_s`` by now, a round every ``every_s`` seconds."""
        await self.begin(age_s)
        for fragment in range(self.fragments):
            await self.commit(fragment)
        rounds = int(age_s / every_s)
        for number in range(rounds):
            self.now_s += every_s
            for actor in self.actors.values():
                actor.steps = int((self.now_s - actor.began_s) / STEP_S * actor.speed)
                actor.step = actor.steps
            await self.commit(number % self.fragments)
            if number % max(1, rounds // 40) == 0:
                await self.evaluate()
            if number % max(1, rounds // 8) == 0:
                await self.checkpoint()
        for actor in self.actors.values():
            await self.pulse(actor)

    async def play(self, every_s: float = 0.4) -> None:
        """Go on for ever: pulses of everybody, rounds, now and then an evaluation."""
        number = 0
        while True:
            self.now_s = time.time()
            for actor in self.actors.values():
                if not actor.silent:
                    actor.steps = int((self.now_s - actor.began_s) / STEP_S * actor.speed)
                    actor.step = actor.steps
                    await self.pulse(actor)
            fragment = number % self.fragments
            await self.open((fragment + 1) % self.fragments)
            await self.commit(fragment)
            number += 1
            if number % 25 == 0:
                await self.evaluate()
                await self.checkpoint()
            await asyncio.sleep(every_s)


@asynccontextmanager
async def served(
    stage: Stage,
    health: HealthSettings | None = None,
    faults: Inject | None = None,
    port: int = 0,
    clock_s: Callable[[], float] = time.time,
) -> AsyncGenerator[tuple[str, Monitor]]:
    """Yield the address of a monitor's page over a stage, and the monitor."""
    monitor = Monitor(stage.broker.connect(), RUN, until_finished=False, clock_s=clock_s)
    hub, app = page_of(monitor, health or HealthSettings(), faults)
    listening = listen("127.0.0.1", port)
    serving = serve_http(app, listening, hub.close)
    async with background(monitor.follow(), hub.run(), serving):
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/", monitor
