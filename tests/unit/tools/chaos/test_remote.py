"""A run by its log alone: who says that it is there, for how long, and what can be done to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from skerry.errors import ConfigError, SkerryError, first_cause
from skerry.log import ledger, run_records
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol.messages import LearnerPhase, Pulse, SyncerPulse
from skerry.settings.models import LivenessConfig, RunConfig, SyncConfig
from skerry.tasks import TaskGroup
from skerry_tools.chaos import healing
from skerry_tools.chaos import remote as remotes
from skerry_tools.chaos.checks import LivenessCheck
from skerry_tools.chaos.drilled import Absent, Injection, able, refuse, running
from skerry_tools.chaos.messages import MESSAGES
from skerry_tools.chaos.plan import BROKER, BROKER_KINDS, Fault, FaultPlan, Kind
from skerry_tools.chaos.remote import RemoteRun, remote
from tests.support.builders import pulse, syncer_pulse, until

RUN = "r"
CONFIG = RunConfig(sync=SyncConfig(lease_s=0.2), liveness=LivenessConfig(pulse_s=0.05))


def learner(name: str, sent: int, phase: LearnerPhase = LearnerPhase.TRAINING) -> Pulse:
    return pulse(name, 1, run=RUN, incarnation=2, phase=phase, sent_ns=sent, step_time_s=0.0)


def syncer(name: str, instance: str, sent: int, host: str = "host") -> SyncerPulse:
    return syncer_pulse(name, run=RUN, instance=instance, sent_ns=sent, host=host)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remotes, "LONGEST_S", 1.0)


@pytest.fixture
async def bus() -> MemoryBus:
    made = MemoryBroker().connect()
    await made.declare(specs(RUN))
    return made


async def say(bus: MemoryBus) -> None:
    """Say for ever that ``a`` and ``s`` are there; ``gone`` and ``was`` were, once."""
    await run_records.publish(bus, learner("gone", 1))
    await run_records.publish(bus, syncer("was", "host/1", 1))
    for sent in range(1, 1 << 30):
        await run_records.publish(bus, learner("a", sent))
        await run_records.publish(bus, syncer("s", "host/2", sent))
        await asyncio.sleep(0.02)


@asynccontextmanager
async def at_work(bus: MemoryBus) -> AsyncGenerator[tuple[RemoteRun, asyncio.Task[None]]]:
    async with TaskGroup() as group:
        saying = group.create_task(say(bus))
        await asyncio.sleep(0.05)
        async with remote(bus, RUN, CONFIG) as ground:
            yield ground, saying
        saying.cancel()


async def test_who_is_heard_takes_part_and_who_has_only_left_a_last_word_does_not(
    bus: MemoryBus,
) -> None:
    async with at_work(bus) as (ground, _):
        assert ground.kinds() == {"a": "learner", "s": "syncer"}
        assert {name: heard.which for name, heard in ground.entries().items() if heard.alive} == {
            "a": "incarnation 2",
            "s": "host/2",
        }
        with pytest.raises(Absent, match="gone is down already"):
            running(ground.entries(), "gone")


async def test_who_falls_silent_is_down_and_still_has_to_come_back(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "SILENT_S", 0.2)
    async with at_work(bus) as (ground, saying):
        assert ground.entries()["a"].alive
        saying.cancel()
        await until(lambda: not ground.entries()["a"].alive, 10)
        assert "a" in ground.kinds()


async def test_who_says_goodbye_is_down_at_once(bus: MemoryBus) -> None:
    async with at_work(bus) as (ground, saying):
        saying.cancel()
        await run_records.publish(bus, learner("a", 1 << 30, LearnerPhase.STOPPED))
        await run_records.publish(bus, syncer("s", "host/2", 1 << 30, host=""))
        for name in ("a", "s"):
            await until(lambda name=name: not ground.entries()[name].alive, 1)


async def test_who_was_gone_before_the_drill_is_not_said_to_have_ended_in_it(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "SILENT_S", 1.0)
    async with at_work(bus) as (ground, saying):
        liveness = LivenessCheck(ground, ground.kinds())
        await liveness.note()
        assert [(check.name, check.ok, check.detail) for check in await liveness.checks(5.0)] == [
            ("a runs", True, "incarnation 2"),
            ("s runs", True, "host/2"),
        ]
        assert await liveness.ended() == []
        saying.cancel()
        await run_records.publish(bus, learner("a", 1 << 30, LearnerPhase.STOPPED))
        assert await liveness.ended() == ["a", "s"]


@pytest.mark.drill
async def test_whose_last_word_is_still_fresh_has_not_come_back_nor_runs_nor_stayed(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remotes, "SILENT_S", 1.0)
    monkeypatch.setattr(healing, "BACK_S", 0.1)
    async with at_work(bus) as (ground, saying):
        liveness = LivenessCheck(ground, ground.kinds())
        await healing.heal(ground, set(ground.kinds()))
        assert all(check.ok for check in await liveness.checks(5.0))
        saying.cancel()
        with pytest.raises(SkerryError, match=r"a, s did not come back"):
            await healing.heal(ground, set(ground.kinds()))
    async with at_work(bus) as (ground, saying):
        saying.cancel()
        told = await LivenessCheck(ground, ground.kinds()).checks(0.0)
        assert [(check.name, check.ok) for check in told] == [("a runs", False), ("s runs", False)]
    async with at_work(bus) as (ground, saying):
        liveness = LivenessCheck(ground, ground.kinds())
        await liveness.checks(5.0)
        saying.cancel()
        assert await liveness.ended() == ["a", "s"]


async def test_a_run_on_which_nobody_works_is_refused(bus: MemoryBus) -> None:
    await run_records.publish(bus, learner("gone", 1))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with remote(bus, RUN, CONFIG):
            pytest.fail("there is nobody")
    refusal = first_cause(caught.value)
    assert isinstance(refusal, ConfigError)
    assert "Nothing works on run 'r'" in str(refusal)


async def test_a_learner_whose_first_steps_take_long_is_waited_for_and_one_that_is_gone_is_named(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def slow() -> None:
        """Say nothing at first, as behind a restart of the broker, and then say it seldom."""
        for sent in range(1, 1 << 30):
            await asyncio.sleep(0.7)
            await run_records.publish(bus, learner("slow", sent))

    monkeypatch.setattr(remotes, "LONGEST_S", 3.0)
    for name in ("a", "slow", "lost", "left", "back"):
        await ledger.join(bus, RUN, name, "host", 1)
    for name in ("left", "back"):
        gone = replace(learner(name, 1, LearnerPhase.STOPPED), incarnation=1)
        await run_records.publish(bus, gone)
    await ledger.join(bus, RUN, "back", "host", 2)
    saying = asyncio.create_task(slow())
    async with at_work(bus) as (ground, _):
        assert ground.kinds() == {"a": "learner", "s": "syncer", "slow": "learner"}
        assert ground.unheard == ["back", "gone", "lost"]
    saying.cancel()


async def test_a_run_on_which_no_learner_works_is_refused(bus: MemoryBus) -> None:
    async def stand_by() -> None:
        for sent in range(1, 1 << 30):
            await run_records.publish(bus, syncer("s", "host/2", sent))
            await asyncio.sleep(0.02)

    await ledger.join(bus, RUN, "gone", "host", 1)
    saying = asyncio.create_task(stand_by())
    with pytest.raises(BaseExceptionGroup) as caught:
        async with remote(bus, RUN, CONFIG):
            pytest.fail("there is no learner")
    saying.cancel()
    assert "No learner works on run 'r'" in str(first_cause(caught.value))


def test_only_messages_can_be_struck_and_any_other_kind_is_refused_with_the_reason() -> None:
    ground = RemoteRun(RUN, MemoryBroker().connect(), CONFIG)
    assert set(able(ground)) == set(MESSAGES)
    for kind in set(Kind) - set(able(ground)):
        target = BROKER if kind in BROKER_KINDS else "a"
        words = "there are only messages|simulation only"
        with pytest.raises(ConfigError, match=words):
            refuse(FaultPlan(0, (Fault(0.0, kind, target),)), ground)


async def test_a_fault_of_messages_is_the_same_as_on_a_cluster_of_this_machine(
    bus: MemoryBus,
) -> None:
    async with at_work(bus) as (ground, _):
        await bus.publish(f"skerry.{RUN}.contrib.0.0.a", b"12345678", msg_id="1")
        fault = Fault(0.0, Kind.DUPLICATE, "a", amount=1.0)
        async with ground.inject(Injection.of(fault, "a", "seed")) as proof:
            assert await proof() == "1 stored, from sequence 2 of CONTRIB_0"
        assert await ground.undo() == []
