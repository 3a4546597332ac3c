"""The network's side of a learner on a memory broker; the test is the trainer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import Plan
from skerry.algorithm.merge import slice_norms
from skerry.errors import (
    BrokerUnavailable,
    ModelError,
    StateLost,
    Superseded,
    Truncated,
    WrongVersion,
)
from skerry.log import recovery, run_records, state
from skerry.log.base import Bus, Record
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.recovery import append_commit
from skerry.log.state_writer import NewPart, StateWriter
from skerry.protocol.contribution import Contribution, ContributionAssembler
from skerry.protocol.learner import MissingCheck, TrainingProgress
from skerry.protocol.messages import (
    Commit,
    ContributionHeader,
    ContributionKind,
    LearnerPhase,
    Manifest,
    RefusalCause,
    Refused,
)
from skerry.protocol.subjects import Subjects
from skerry.settings.models import LivenessConfig, RunConfig, SyncConfig
from skerry_learner.joining import (
    Work,
    find_or_create,
    take_place,
)
from skerry_learner.sync import connection, sending
from skerry_learner.sync.identity import LearnerIdentity
from skerry_learner.sync.mailbox import OutgoingContribution
from skerry_learner.sync.network import open_sync
from tests.support.builders import commit, header, manifest, pulse, until
from tests.support.scripted_run import ScriptedRun


class Wire:
    """A network without a trainer: the test is the trainer."""

    def __init__(self, bus: Bus, plan: Plan, chunk_bytes: int = 4096) -> None:
        self.identity = LearnerIdentity("run", "a", 1)
        sync = SyncConfig(fragments=len(plan.fragments), chunk_bytes=chunk_bytes)
        config = RunConfig(sync=sync, liveness=LivenessConfig(pulse_s=0.1))
        parameters: Any = None
        start = TrainingProgress(0, 0, 0, 0)
        _, self.network = open_sync(bus, self.identity, plan, config, parameters, start)
        self.link = self.network.link
        self.mailbox = self.link.mailbox
        self.mailbox._room = 2


@asynccontextmanager
async def running(*loops: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[None]:
    async with AsyncExitStack() as stack:
        for loop in loops:
            task = asyncio.ensure_future(loop())
            stack.callback(task.cancel)
        yield


async def test_a_sent_contribution_decodes_to_its_gradient_and_its_norms(
    bus: MemoryBus, config: RunConfig
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    fragment = work.plan.fragments[1]
    gradient = jax.random.normal(jax.random.key(0), (fragment.padded_size,), jnp.float32)
    offered = told(fragment=1)
    wire.mailbox.post_outgoing(OutgoingContribution(offered, gradient, "int4"))
    async with running(wire.network.transfer):
        await until(lambda: wire.mailbox.unsent() == 0)
    inbox = ContributionAssembler("run", work.plan)
    got = [inbox.feed(r) for r in await contributed(bus)]
    (whole,) = [item for item in got if item is not None]
    assert isinstance(whole, Contribution)
    planes = cpu().quantise("int4", np.array(gradient))
    np.testing.assert_array_equal(whole.planes.codes, planes.codes)
    assert whole.header.norms == slice_norms(fragment, cpu().dequantise("int4", planes))
    assert replace(whole.header, norms=()) == offered
    traffic = wire.link.traffic
    assert (traffic.contributions, traffic.f32_bytes_up) == (1, 4 * fragment.size)
    assert 0 < traffic.bytes_up < traffic.f32_bytes_up


async def contributed(bus: MemoryBus) -> list[Record]:
    stream = Subjects("run").stream("CONTRIB")
    found = [await bus.get(stream, sequence) for sequence in range(1, 100)]
    return [record for record in found if record is not None]


async def test_a_gradient_that_is_not_finite_is_dropped(bus: MemoryBus, config: RunConfig) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    gradient = jnp.full((work.plan.fragments[0].padded_size,), jnp.nan, jnp.float32)
    wire.mailbox.post_outgoing(OutgoingContribution(told(), gradient, "int4"))
    async with running(wire.network.transfer):
        await until(lambda: wire.mailbox.unsent() == 0)
    assert not await contributed(bus)
    assert list(wire.mailbox.take_diverged()) == [0]
    assert not wire.mailbox.take_diverged()


async def test_a_contribution_does_not_wait_until_the_log_has_those_before_it(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    publish, far = bus.publish, asyncio.Event()

    async def slow(subject: str, payload: bytes, **options: Any) -> Any:
        if subject == Subjects("run").contribution(0, "a"):
            await far.wait()
        return await publish(subject, payload, **options)

    monkeypatch.setattr(bus, "publish", slow)
    post_two(wire, work)
    async with running(wire.network.transfer):
        await until(lambda: not wire.mailbox.sending(1))
        assert wire.mailbox.sending(0)
        far.set()
        await until(lambda: wire.mailbox.unsent() == 0)
    assert wire.link.traffic.contributions == 2


async def test_the_end_waits_for_answers_to_what_is_on_its_way_but_not_for_ever(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    publish, far = bus.publish, asyncio.Event()
    arrived = list[str]()

    async def slow(subject: str, payload: bytes, **options: Any) -> Any:
        got = await publish(subject, payload, **options)
        arrived.append(subject)
        await far.wait()
        return got

    monkeypatch.setattr(bus, "publish", slow)
    post_two(wire, work)
    async with running(wire.network.transfer):
        await until(lambda: len(arrived) == 2)
        await wire.network.sender.answered(0.01)
        assert wire.link.traffic.contributions == 0
        far.set()
        await wire.network.sender.answered(60)
        assert wire.link.traffic.contributions == 2
        await wire.network.sender.answered(60)


async def test_one_that_could_not_be_sent_is_sent_again_and_holds_up_no_other(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    publish, failures = bus.publish, list[str]()

    async def flaky(subject: str, payload: bytes, **options: Any) -> Any:
        first = subject == Subjects("run").contribution(0, "a")
        if first and (wire.mailbox.sending(1) or len(failures) < 2):
            failures.append(options["msg_id"])
            msg = "away"
            raise BrokerUnavailable(msg)
        return await publish(subject, payload, **options)

    monkeypatch.setattr(bus, "publish", flaky)
    monkeypatch.setattr(connection, "RETRY_S", 0.01)
    post_two(wire, work)
    async with running(wire.network.transfer):
        await until(lambda: wire.mailbox.unsent() == 0)
    inbox = ContributionAssembler("run", work.plan)
    got = [inbox.feed(record) for record in await contributed(bus)]
    whole = [item.header.fragment for item in got if isinstance(item, Contribution)]
    assert whole == [1, 0]


def told(identity: int = 1, fragment: int = 0) -> ContributionHeader:
    return header(identity, fragment=fragment, base_version=3)


def post_two(wire: Wire, work: Work) -> None:
    """Post a contribution to each of the first two fragments."""
    for fragment in (0, 1):
        size = work.plan.fragments[fragment].padded_size
        header = told(fragment=fragment)
        wire.mailbox.post_outgoing(
            OutgoingContribution(header, jnp.ones((size,), jnp.float32), "int4")
        )


def announce(wire: Wire, work: Work, fragment: int, version: int) -> None:
    """Have a version of a fragment read, as a manifest of it would."""
    named = manifest(version, fragment, plan_digest=work.plan.digest)
    wire.network.receiver.wanted[fragment] = named
    wire.link.wake.set()


def refusing(work: Work, *refused: Refused) -> Commit:
    return commit(1, plan_digest=work.plan.digest, refused=refused)


async def test_a_contribution_with_feedback_that_is_sent_again_has_the_same_bytes(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    wire.link.config = RunConfig.model_construct(sync=SyncConfig.model_construct(chunk_bytes=400))
    size = work.plan.fragments[0].padded_size
    first, second = jax.random.normal(jax.random.key(0), (2, size), jnp.float32)
    await wire.network.sender.send(posted(wire, first, 1))
    before = len(await contributed(bus))
    assert before > 1, "the fault needs a second chunk"
    publish, sent = bus.publish, list[tuple[str, bytes]]()

    async def flaky(subject: str, payload: bytes, **options: Any) -> Any:
        sent.append((options["msg_id"], payload))
        if len(sent) == before:
            msg = "away"
            raise BrokerUnavailable(msg)
        return await publish(subject, payload, **options)

    monkeypatch.setattr(bus, "publish", flaky)
    monkeypatch.setattr(connection, "RETRY_S", 0.0)
    outgoing = posted(wire, second, 2)
    await wire.network.sender.send(outgoing)
    assert wire.mailbox.unsent() == 1, "the fault did not fire"
    await wire.network.sender.send(outgoing)
    assert len(sent) > len({name for name, _ in sent}), "nothing was sent again"
    assert len(set(sent)) == before

    inbox = ContributionAssembler("run", work.plan)
    got = [inbox.feed(record) for record in await contributed(bus)]
    planes = [item.planes for item in got if isinstance(item, Contribution)]
    assert len(planes) == 2
    owed = np.array(first) - cpu().dequantise("int2", planes[0])
    wanted = cpu().quantise("int2", np.array(second) + owed)
    np.testing.assert_array_equal(planes[1].codes, wanted.codes)


def posted(wire: Wire, gradient: jax.Array, identity: int) -> OutgoingContribution:
    outgoing = OutgoingContribution(told(identity), gradient, "int2")
    wire.mailbox.post_outgoing(outgoing)
    return outgoing


@pytest.mark.parametrize(
    ("refused", "forgotten"),
    [
        (Refused(RefusalCause.DIVERGED, "a", 1, 1), True),
        (Refused(RefusalCause.DIVERGED, "a", 1, 2), False),
        (Refused(RefusalCause.DIVERGED, "a", 2, 1), False),
        (Refused(RefusalCause.DIVERGED, "b", 1, 1), False),
    ],
    ids=["ours", "another one", "another incarnation", "another learner"],
)
async def test_what_a_commit_refuses_does_not_come_back_with_the_next_contribution(
    bus: MemoryBus, config: RunConfig, refused: Refused, *, forgotten: bool
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    gradient = jax.random.normal(jax.random.key(0), (work.plan.fragments[0].padded_size,))
    await wire.network.sender.send(posted(wire, gradient, 1))
    writer = await StateWriter.acquire(bus, "run", work.plan, holder="s", now_ns=1)
    vector = np.zeros(work.plan.fragments[0].padded_size, np.float32)
    parts = [NewPart("params", "bf16", vector), NewPart("master", "f32", vector)]
    await writer.commit(refusing(work, refused), parts, None)
    async with running(wire.network.receiver.manifests):
        await until(lambda: bool(wire.network.receiver.wanted))
    assert (wire.link.residuals.owed(0, 2) is None) is forgotten


async def test_what_the_log_has_lost_does_not_come_back_twice(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    gradient = jax.random.normal(jax.random.key(0), (work.plan.fragments[0].padded_size,))
    await wire.network.sender.send(posted(wire, gradient, 1))
    assert wire.link.residuals.owed(0, 2) is not None

    async def yes(*_: object) -> bool:
        return True

    monkeypatch.setattr(sending, "is_lost", yes)
    wire.mailbox.post_check(MissingCheck("a", 1, 0, 1, 4))
    lost = set[MissingCheck]()
    async with running(wire.network.transfer):
        await until(lambda: bool(lost.update(wire.mailbox.take_lost()) or lost))
    assert wire.link.residuals.owed(0, 2) is None


async def test_initial_parameters_that_are_not_finite_end_the_learner_with_a_sentence(
    bus: MemoryBus, config: RunConfig
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    gradient = jnp.full((work.plan.fragments[0].padded_size,), jnp.nan, jnp.float32)
    genesis = header(kind=ContributionKind.GENESIS, base_version=0)
    wire.mailbox.post_outgoing(OutgoingContribution(genesis, gradient, "f32"))
    async with asyncio.timeout(60):
        with pytest.raises(ModelError, match="initial parameters are not finite"):
            await wire.network.transfer()


async def test_a_global_fragment_that_cannot_be_read_is_asked_for_again(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    fragment = work.plan.fragments[0]
    writer = await StateWriter.acquire(bus, "run", work.plan, holder="s", now_ns=1)
    vector = np.zeros(fragment.padded_size, np.float32)
    parts = [NewPart("params", "bf16", vector), NewPart("master", "f32", vector)]
    await writer.commit(commit(1, plan_digest=work.plan.digest), parts, None)
    failures = [WrongVersion("of a later release"), Truncated("cut short")]
    read = state.read_part

    async def flaky(*args: Any, **options: Any) -> NDArray[np.float32]:
        if failures:
            raise failures.pop()
        return await read(*args, **options)

    monkeypatch.setattr(state, "read_part", flaky)
    monkeypatch.setattr(connection, "RETRY_S", 0.0)
    async with running(wire.network.receiver.manifests, wire.network.transfer):
        await until(lambda: bool(wire.mailbox.fresh()))
    assert not failures


async def test_a_global_fragment_does_not_wait_for_one_that_is_still_being_read(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    far = asyncio.Event()
    reading: list[int] = []

    async def slow(*args: Any, **_: object) -> NDArray[np.float32]:
        commit = args[3].commit
        reading.append(commit.version)
        if commit.fragment == 0:
            await far.wait()
        return np.zeros(work.plan.fragments[commit.fragment].padded_size, np.float32)

    monkeypatch.setattr(state, "read_part", slow)
    announce(wire, work, 0, 5)
    announce(wire, work, 1, 6)
    async with running(wire.network.transfer):
        await until(lambda: bool(wire.mailbox.fresh()))
        assert [f.manifest.commit.fragment for f in wire.mailbox.fresh()] == [1]
        announce(wire, work, 0, 7)
        far.set()
        await until(lambda: reading == [5, 6, 7])
        await until(lambda: 7 in {f.manifest.commit.version for f in wire.mailbox.fresh()})


async def test_no_more_fragments_are_read_than_there_is_room_for(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    far = asyncio.Event()
    reading: list[int] = []

    async def slow(*args: Any, **_: object) -> NDArray[np.float32]:
        reading.append(args[3].commit.fragment)
        await far.wait()
        return np.zeros(1, np.float32)

    monkeypatch.setattr(state, "read_part", slow)
    for fragment in range(4):
        announce(wire, work, fragment, 5)
    async with running(wire.network.transfer):
        await until(lambda: len(reading) == 2)
        far.set()
        await until(lambda: len(wire.mailbox.fresh()) == 2)
        announce(wire, work, 0, 6)  # one that waits here may be replaced
        await until(lambda: 6 in {f.manifest.commit.version for f in wire.mailbox.fresh()})
        assert reading == [0, 1, 0]
        wire.mailbox.take_fresh(wire.mailbox.fresh()[0])
        await until(lambda: reading == [0, 1, 0, 2])


async def test_contribution_that_the_log_has_lost_is_told_to_the_trainer(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    checks = [MissingCheck("a", 1, 0, identity, 3) for identity in (1, 2, 3)]
    answers: list[bool | BrokerUnavailable] = [False, BrokerUnavailable("away"), True]

    async def looked_for(*_: object) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, BrokerUnavailable):
            raise answer
        return answer

    monkeypatch.setattr(sending, "is_lost", looked_for)
    for check in checks:
        wire.mailbox.post_check(check)
    async with running(wire.network.transfer):
        await until(lambda: not answers)
    assert wire.mailbox.take_lost() == {checks[2]}


async def test_fragment_that_the_log_has_lost_is_said_once_per_version_and_asked_for_again(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work.plan)
    reads: list[int] = []

    async def gone(*args: Any, **_: object) -> NDArray[np.float32]:
        reads.append(args[3].commit.version)
        msg = "Fragment 0 lacks a chunk of version 1."
        raise StateLost(msg)

    monkeypatch.setattr(state, "read_part", gone)
    monkeypatch.setattr(connection, "RETRY_S", 0.0)

    with structlog.testing.capture_logs() as lines:
        for version in (1, 1, 2):
            await wire.network.receiver.fetch(manifest(version, plan_digest=work.plan.digest))
    said = [line["version"] for line in lines if line["event"] == "fragment_lost"]
    assert (reads, said) == ([1, 1, 2], [1, 2])
    assert list(wire.network.receiver.wanted) == [0], "somebody may put the store back from a copy"
    assert not wire.mailbox.fresh()


async def test_a_log_that_has_gone_back_for_good_ends_the_learner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "SETTLED_PAUSE_S", 0.0)
    broker = MemoryBroker()
    scripted = await ScriptedRun.begin(broker.connect())
    await scripted.commit_all()
    name = Subjects("run").stream("STATE")
    held = broker.streams[name]
    copy = replace(held, records=dict(held.records), newest=dict(held.newest), waiting=[])
    await scripted.commit(1)
    wire = Wire(broker.connect(), scripted.plan)
    following = asyncio.ensure_future(wire.network.receiver.manifests())
    async with running(wire.network.receiver.prove):
        await until(lambda: len(wire.network.receiver.wanted) == len(scripted.plan.fragments))
    broker.streams[name], held.lost = copy, True
    held.wake()
    async with asyncio.timeout(60):
        with pytest.raises(StateLost, match="fragment 1 was at version 2 and is at 1, so an older"):
            await following


async def test_a_replica_that_tells_of_an_older_version_ends_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recovery, "SETTLED_PAUSE_S", 0.0)
    scripted = await ScriptedRun.begin(MemoryBroker().connect())
    first = await scripted.commit(0)
    newest = await scripted.commit(0)
    answers: list[Manifest | Exception] = [first, BrokerUnavailable("away"), first, newest]

    async def lagging(*_: object) -> Manifest:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def told(*_: object) -> AsyncGenerator[Manifest]:
        for held in (first, newest, first):
            yield held

    monkeypatch.setattr(recovery, "read_manifest", lagging)
    monkeypatch.setattr(run_records, "follow", told)
    wire = Wire(scripted.bus, scripted.plan)
    await wire.network.receiver.manifests()
    assert (answers, wire.network.receiver.wanted) == ([], {0: newest})


async def test_a_newer_incarnation_ends_the_older(bus: MemoryBus, config: RunConfig) -> None:
    record, work = await find_or_create(bus, "run", config)
    await take_place(bus, record, work, "a", "host")
    watching = asyncio.ensure_future(Wire(bus, work.plan).network.watch_name())
    await take_place(bus, record, work, "b", "host")
    await take_place(bus, record, work, "a", "elsewhere")
    async with asyncio.timeout(60):
        with pytest.raises(Superseded, match="elsewhere"):
            await watching


@pytest.mark.parametrize("away", [False, True])
async def test_how_long_ago_the_run_began_is_what_the_brokers_clock_says(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch, *, away: bool
) -> None:
    """The syncer's clock is an hour behind the broker's, this learner's a day ahead of it."""
    hour_ns, broker_ns = 3600 * 10**9, [10**18]
    bus = MemoryBroker(clock_ns=lambda: broker_ns[0]).connect()
    _, work = await find_or_create(bus, "run", config)
    await append_commit(bus, replace(refusing(work), closed_ns=broker_ns[0] - hour_ns))
    broker_ns[0] += 40 * 10**9
    wire = Wire(bus, work.plan)
    wire.link.wall_ns = lambda: broker_ns[0] + 24 * hour_ns
    wire.link.clock = lambda: 1000.0
    lost = ["pulse"] if away else []
    publish = bus.publish

    async def flaky(*args: Any, **options: Any) -> Any:
        if lost:
            raise BrokerUnavailable(lost.pop())
        return await publish(*args, **options)

    monkeypatch.setattr(bus, "publish", flaky)

    def known() -> bool:
        return wire.mailbox.began_s is not None

    async with running(wire.network.genesis):
        await asyncio.sleep(0.02)
        assert not known(), "there is no pulse yet"
        wire.mailbox.post_pulse(pulse(step=0, phase=LearnerPhase.STARTING))
        await until(known)
    assert wire.mailbox.began_s == 960.0
    assert not lost
