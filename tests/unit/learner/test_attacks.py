"""No message that anybody may write ends, stalls or misleads a learner: each one is refused."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from skerry.client import network
from skerry.client.connection import LearnerConnection
from skerry.errors import BrokerUnavailable, Superseded
from skerry.log import run_records
from skerry.log.memory import MemoryBroker
from skerry.protocol.door import MOST_COUNT
from skerry.protocol.learner import DoorReason
from skerry.protocol.messages import LearnerPhase, Round, Start
from skerry.protocol.records import encode
from skerry.protocol.subjects import Subjects
from tests.support.builders import manifest, member, round_, until
from tests.support.learners import FakeLearner
from tests.support.scripted_run import ScriptedRun

RUN = "run"
SUBJECTS = Subjects(RUN)
HUGE = 2**40
VERSIONS = (1, 2, 9, HUGE)


@dataclass
class Attacked:
    """One real learner of a run whose syncer is the test."""

    scripted: ScriptedRun
    learner: FakeLearner
    task: asyncio.Task[None]

    @property
    def link(self) -> LearnerConnection:
        assert self.learner.network is not None
        return self.learner.network.link

    @property
    def phase(self) -> LearnerPhase:
        assert self.learner.training is not None
        return self.learner.training.meter.phase

    def round(self, version: int, fragment: int = 0, **changes: Any) -> Round:
        changes = {"due_step": 1, "plan_digest": self.scripted.plan.digest, **changes}
        return round_(version, fragment, **changes)

    def _has_sent(self, count: int) -> bool:
        return self.link.traffic.contributions >= count

    def _has_adopted(self, fragment: int, version: int) -> bool:
        assert self.learner.training is not None
        return self.learner.training.session.versions[fragment] == version

    async def refused(self, reason: DoorReason) -> None:
        """Return once something was refused for this reason."""
        await until(lambda: self.link.door.refused[reason] > 0)

    async def forge(self, subject: str, payload: bytes) -> None:
        await self.scripted.bus.publish(subject, payload)

    async def goes_on(self) -> None:
        """Return once the learner has adopted, answered and stepped as if nothing had been."""
        assert not self.task.done()
        for fragment in self.scripted.plan.fragments:
            sent, index = self.link.traffic.contributions, fragment.index
            done = await self.scripted.commit(index, step=1)
            await run_records.publish(self.scripted.bus, self.round(done.commit.version + 1, index))
            await until(partial(self._has_sent, sent + 1))
            done = await self.scripted.commit(index, step=1)
            await until(partial(self._has_adopted, index, done.commit.version))
        step = self.learner.step
        await until(lambda: self.learner.step > step)
        assert self.phase is LearnerPhase.TRAINING
        assert not self.task.done()


@asynccontextmanager
async def attacked(
    prepare: Callable[[ScriptedRun], Any] | None = None,
) -> AsyncGenerator[Attacked]:
    """A learner that trains; ``prepare`` strikes before it starts."""
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    await scripted.commit_all()
    if prepare is not None:
        await prepare(scripted)
    learner = FakeLearner(scripted.bus, RUN, scripted.plan, "a", step_s=0.005)
    task = asyncio.create_task(learner.train())
    try:
        await until(lambda: task.done() or learner.step > 0)
        yield Attacked(scripted, learner, task)
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_a_learner_steps_though_no_stream_takes_its_pulses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A broker that restarted forgot it, and only a syncer may make it again."""

    async def lost(*_: object) -> None:
        msg = "Nothing takes it."
        raise BrokerUnavailable(msg)

    faulty = SimpleNamespace(**vars(run_records) | {"publish": lost})
    monkeypatch.setattr(network, "run_records", faulty)
    async with attacked() as learner:
        assert learner.phase is LearnerPhase.TRAINING


Attack = Callable[[ScriptedRun], tuple[str, Any]]


def of_round(version: int = 2, fragment: int = 0, **changes: Any) -> Attack:
    """Forge a round, towards a version that the learner does not have."""

    def forge(scripted: ScriptedRun) -> tuple[str, Any]:
        changed = {"due_step": 1, "plan_digest": scripted.plan.digest, **changes}
        return SUBJECTS.round(fragment), round_(version, fragment, **changed)

    return forge


def of_manifest(version: int, fragment: int = 0) -> Attack:
    def forge(scripted: ScriptedRun) -> tuple[str, Any]:
        forged = manifest(version, fragment, plan_digest=scripted.plan.digest)
        return SUBJECTS.shard(0).manifest(fragment), forged

    return forge


def of_member(incarnation: int) -> Attack:
    return lambda _: (SUBJECTS.member("a"), member("a", incarnation))


def of_start(incarnation: int) -> Attack:
    return lambda _: (SUBJECTS.shard(0).start("a"), Start(RUN, "a", incarnation, 1))


ROUNDS = {
    "a final round far ahead": (of_round(HUGE, final=True), DoorReason.TOO_NEW),
    "a round far ahead": (of_round(MOST_COUNT), DoorReason.TOO_NEW),
    "a round beyond the end": (of_round(due_step=MOST_COUNT), DoorReason.BEYOND_THE_END),
    "a final round": (of_round(final=True), DoorReason.NOT_OVER),
    "a round of no fragment": (of_round(fragment=77), DoorReason.NO_SUCH_FRAGMENT),
}
OTHERS = {
    **{f"of none {n}": (of_manifest(n, 77), DoorReason.NO_SUCH_FRAGMENT) for n in VERSIONS},
    **{f"manifest {n}": (of_manifest(n), DoorReason.NEVER_COMMITTED) for n in (9, HUGE, 2**60)},
    **{f"start {n}": (of_member(n), DoorReason.TOO_MANY_STARTS) for n in (99, HUGE, MOST_COUNT)},
}


@pytest.mark.parametrize("name", [*ROUNDS, *OTHERS])
async def test_what_cannot_be_is_refused_and_changes_nothing(name: str) -> None:
    attack, reason = (ROUNDS | OTHERS)[name]
    async with attacked() as scene:
        subject, forged = attack(scene.scripted)
        await scene.forge(subject, encode(forged))
        await scene.refused(reason)
        await scene.goes_on()


STARTS = {name: attack for name, (attack, _) in ROUNDS.items()} | {
    "a manifest of no fragment": of_manifest(3, 77),
    "a start": of_start(HUGE),
    "a start beyond 64 bits": of_start(2**63),
}


@pytest.mark.parametrize("name", STARTS)
async def test_a_learner_starts_beside_what_cannot_be(name: str) -> None:
    async def strike(scripted: ScriptedRun) -> None:
        subject, forged = STARTS[name](scripted)
        await scripted.bus.publish(subject, encode(forged))

    async with attacked(strike) as scene:
        await scene.goes_on()


async def test_the_next_start_still_ends_the_one_before() -> None:
    async with attacked() as scene:
        own = scene.link.identity.incarnation
        await scene.forge(SUBJECTS.member("a"), encode(member("a", own + 1)))
        with pytest.raises(BaseExceptionGroup) as raised:
            await asyncio.wait_for(scene.task, 60)
        assert raised.group_contains(Superseded)


async def test_a_flood_of_refused_rounds_is_reported_once_a_second() -> None:
    async with attacked() as scene:
        forged = encode(scene.round(2, 77))
        with capture_logs() as lines:
            loop = asyncio.get_running_loop()
            began_s = loop.time()
            for _ in range(200):
                await scene.forge(SUBJECTS.round(77), forged)
            await until(lambda: scene.link.door.refused[DoorReason.NO_SUCH_FRAGMENT] > 100)
            lasted_s = loop.time() - began_s
        said = [line for line in lines if line["event"] == "messages_refused"]
        assert 1 <= len(said) <= 1 + lasted_s
        assert said[0][DoorReason.NO_SUCH_FRAGMENT.value] >= 1
        await scene.goes_on()
