"""The network's side of a learner on a memory broker; the test is the trainer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import structlog
from numpy.typing import NDArray
from structlog.testing import capture_logs

from skerry.algorithm.backend import cpu
from skerry.algorithm.merge import slice_norms
from skerry.client import connection, sending
from skerry.client import network as network_side
from skerry.client.joining import LearnerPlace, take_place
from skerry.client.mailbox import Event, Gone, Initial, OutgoingContribution
from skerry.client.network import Network, open_sync
from skerry.client.telemetry import LearnerIdentity
from skerry.errors import (
    BrokerUnavailable,
    ModelError,
    StateLost,
    Superseded,
    Truncated,
    WrongVersion,
)
from skerry.log import global_fragments, ledger, recovery, run_records, state, streams
from skerry.log.base import Bus, SharedReads
from skerry.log.global_fragments import GlobalReader
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.recovery import append_commit
from skerry.models.machine import Machine
from skerry.protocol.contribution import Contribution, ContributionAssembler
from skerry.protocol.genesis import MOST_WAIT_S
from skerry.protocol.learner import MissingCheck, TrainingProgress
from skerry.protocol.messages import (
    ContributionKind,
    Manifest,
    RefusalCause,
    Refused,
    RunRecord,
    SyncerPulse,
)
from skerry.protocol.parts import DELTA
from skerry.protocol.subjects import Subjects
from skerry.service import shell
from skerry.settings.models import LivenessConfig, RunConfig, SyncConfig
from skerry_tools.virtual import VirtualLoop
from tests.support.builders import commit, header, manifest, member, pulse, until
from tests.support.scripted_run import ScriptedRun
from tests.support.virtual_time import broker_of, far_of, simulate

FIRST = Subjects("run").shard(0).contribution(0, "a")


@dataclass
class Wire:
    """The network of learner ``a`` in a scripted run, without a trainer.

    ``fault`` is awaited before each publish; it may raise. ``events`` is all that was reported.
    """

    bus: MemoryBus
    scripted: ScriptedRun
    network: Network
    events: list[Event] = field(default_factory=list[Event])

    @classmethod
    async def begin(
        cls,
        bus: MemoryBus,
        chunk_bytes: int = 65_536,
        missing: tuple[int, ...] = (),
        **options: Any,
    ) -> Wire:
        scripted = await ScriptedRun.begin(bus)
        sync = SyncConfig(fragments=3, overlap_steps=2)
        config = RunConfig(
            sync=sync.model_copy(update={"chunk_bytes": chunk_bytes}),
            liveness=LivenessConfig(pulse_s=0.1),
        )
        parameters: Any = None
        start, me = TrainingProgress(0, 0, 0, 0), LearnerIdentity("run", "a", 2)
        place = LearnerPlace(me, member("a", 2), start, missing)
        _, network = open_sync(bus, place, scripted.plan, config, parameters, **options)
        network.link.mailbox._room = 2
        return cls(bus, scripted, network)

    def size(self, fragment: int = 0) -> int:
        return self.scripted.plan.fragments[fragment].padded_size

    def gradient(self, seed: int, fragment: int = 0) -> NDArray[np.float32]:
        return np.random.default_rng(seed).standard_normal(self.size(fragment)).astype(np.float32)

    def offer(
        self, fragment: int = 0, identity: int = 1, scheme: str = "int4", **changes: Any
    ) -> OutgoingContribution:
        """Contribute as a trainer does; the gradient is that of the identity as a seed."""
        offered = header(identity, fragment=fragment, incarnation=2, base_version=3, **changes)
        outgoing = OutgoingContribution(offered, self.gradient(identity, fragment), scheme)
        self.network.link.mailbox.order(outgoing)
        return outgoing

    async def send(self, **offer: Any) -> OutgoingContribution:
        """Contribute, and return once the log has it."""
        outgoing = self.offer(**offer)
        async with running(self.network.sender.run):
            await until(lambda: not self.network.sender.unsent)
        return outgoing

    def announce(self, fragment: int, version: int) -> None:
        """Have a version of a fragment read, as a manifest of it would."""
        named = manifest(version, fragment, plan_digest=self.scripted.plan.digest)
        self.network.receiver.wanted[fragment] = named
        self.network.receiver.changed.set()

    def heard(self) -> list[Event]:
        self.events += self.network.link.mailbox.take_events()
        return self.events

    def gone(self) -> list[tuple[int, bool]]:
        """Fragments whose contribution is not on its way any more, and whether it was sent."""
        return [(e.header.fragment, e.sent) for e in self.heard() if isinstance(e, Gone)]

    @property
    def fresh(self) -> list[tuple[int, int]]:
        commits = (fresh.manifest.commit for fresh in self.network.link.mailbox.fresh())
        return [(commit.fragment, commit.version) for commit in commits]

    async def logged(self) -> list[Contribution]:
        """Return the whole contributions in the log."""
        stream, inbox = (
            Subjects("run").shard(0).stream("CONTRIB"),
            ContributionAssembler("run", self.scripted.plan),
        )
        found = [await self.bus.get(stream, sequence) for sequence in range(1, 100)]
        got = [inbox.feed(record) for record in found if record is not None]
        return [item for item in got if isinstance(item, Contribution)]


@pytest.fixture
async def wire(bus: MemoryBus, monkeypatch: pytest.MonkeyPatch) -> Wire:
    monkeypatch.setattr(connection, "RETRY_S", 0.0)
    return await Wire.begin(bus)


Fault = Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]]


def faulty(
    monkeypatch: pytest.MonkeyPatch, bus: MemoryBus, fault: Fault, *, late: bool = False
) -> None:
    """Await ``fault`` before each publish, or ``late``: after it."""
    publish = bus.publish

    async def published(subject: str, payload: bytes, **options: Any) -> Any:
        if late:
            got = await publish(subject, payload, **options)
            await fault(subject, options | {"payload": payload})
            return got
        await fault(subject, options | {"payload": payload})
        return await publish(subject, payload, **options)

    monkeypatch.setattr(bus, "publish", published)


@asynccontextmanager
async def running(*loops: Callable[[], Coroutine[Any, Any, None]]) -> AsyncGenerator[None]:
    async with AsyncExitStack() as stack:
        for loop in loops:
            task = asyncio.ensure_future(loop())
            stack.callback(task.cancel)
        yield


async def test_a_sent_contribution_decodes_to_its_gradient_and_its_norms(wire: Wire) -> None:
    offered = wire.offer(1)
    async with running(wire.network.sender.run):
        await until(lambda: wire.gone() == [(1, True)])
    (whole,) = await wire.logged()
    planes = cpu().quantise("int4", np.array(offered.gradient))
    np.testing.assert_array_equal(whole.planes.codes, planes.codes)
    fragment = wire.scripted.plan.fragments[1]
    assert whole.header.norms == slice_norms(fragment, cpu().dequantise("int4", planes))
    assert replace(whole.header, norms=()) == offered.header
    traffic = wire.network.link.traffic
    assert (traffic.contributions, traffic.f32_bytes_up) == (1, 4 * fragment.size)
    assert 0 < traffic.bytes_up < traffic.f32_bytes_up
    assert not wire.network.sender.unsent


async def test_a_gradient_that_is_not_finite_is_dropped(wire: Wire) -> None:
    np.asarray(wire.offer().gradient)[0] = np.nan
    async with running(wire.network.sender.run):
        await until(lambda: wire.gone() == [(0, False)])
    assert not await wire.logged()


async def test_initial_parameters_that_are_not_finite_end_the_learner_with_a_sentence(
    wire: Wire,
) -> None:
    genesis = wire.offer(scheme="f32", kind=ContributionKind.GENESIS)
    np.asarray(genesis.gradient)[0] = np.nan
    async with asyncio.timeout(60):
        with pytest.raises(ModelError, match="initial parameters are not finite"):
            await wire.network.run()


async def test_a_contribution_does_not_wait_until_the_log_has_those_before_it(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = asyncio.Event()

    async def slow(subject: str, _: object) -> None:
        if subject == FIRST:
            await far.wait()

    faulty(monkeypatch, wire.bus, slow)
    wire.offer(0)
    wire.offer(1)
    async with running(wire.network.sender.run):
        await until(lambda: wire.gone() == [(1, True)])
        far.set()
        await until(lambda: wire.gone() == [(1, True), (0, True)])
    assert wire.network.link.traffic.contributions == 2


async def test_the_end_waits_for_answers_to_what_is_on_its_way_but_not_for_ever(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    far, arrived = asyncio.Event(), list[str]()

    async def slow(subject: str, _: object) -> None:
        arrived.append(subject)
        await far.wait()

    faulty(monkeypatch, wire.bus, slow, late=True)
    wire.offer(0)
    wire.offer(1)
    async with running(wire.network.sender.run):
        await until(lambda: len(arrived) == 2)
        await wire.network.sender.answered(0.01)
        assert wire.network.link.traffic.contributions == 0
        far.set()
        await wire.network.sender.answered(60)
        assert wire.network.link.traffic.contributions == 2
        await wire.network.sender.answered(60)


async def test_one_that_could_not_be_sent_is_sent_again_and_holds_up_no_other(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = list[str]()

    async def away(subject: str, _: object) -> None:
        if subject == FIRST and (1 in wire.network.sender.unsent or len(failures) < 2):
            failures.append(subject)
            raise BrokerUnavailable(subject)

    faulty(monkeypatch, wire.bus, away)
    wire.offer(0)
    wire.offer(1)
    async with running(wire.network.sender.run):
        await until(lambda: len(wire.gone()) == 2)
    assert [item.header.fragment for item in await wire.logged()] == [1, 0]


async def test_what_was_not_sent_when_the_loops_ended_is_sent_at_the_end(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = list[str]()

    async def away(subject: str, _: object) -> None:
        if len(failures) < 2:
            failures.append(subject)
            raise BrokerUnavailable(subject)

    faulty(monkeypatch, wire.bus, away)
    monkeypatch.setattr(connection, "RETRY_S", 60.0)
    wire.offer(0)
    async with running(wire.network.sender.run):
        await until(lambda: bool(failures))
    wire.offer(1)
    monkeypatch.setattr(connection, "RETRY_S", 0.0)
    await wire.network.flush()
    assert [item.header.fragment for item in await wire.logged()] == [0, 1]


async def test_a_contribution_with_feedback_that_is_sent_again_has_the_same_bytes(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await Wire.begin(bus, chunk_bytes=150)
    await wire.send(identity=1, scheme="int2")
    monkeypatch.setattr(connection, "RETRY_S", 0.0)
    sent, failed = list[tuple[str, bytes]](), list[str]()

    async def away(subject: str, options: dict[str, Any]) -> None:
        sent.append((options["msg_id"], options["payload"]))
        if len(sent) == 2 and not failed:
            failed.append(subject)
            raise BrokerUnavailable(subject)

    faulty(monkeypatch, bus, away)
    second = await wire.send(identity=2, scheme="int2")
    assert failed, "the fault needs a second chunk"
    assert len(set(sent)) == len({name for name, _ in sent}) < len(sent)
    planes = [item.planes for item in await wire.logged()]
    assert len(planes) == 2
    owed = wire.gradient(1) - cpu().dequantise("int2", planes[0])
    wanted = cpu().quantise("int2", np.asarray(np.array(second.gradient) + owed, np.float32))
    np.testing.assert_array_equal(planes[1].codes, wanted.codes)


@pytest.mark.parametrize(
    ("refused", "forgotten"),
    [
        (Refused(RefusalCause.DIVERGED, "a", 2, 1), True),
        (Refused(RefusalCause.DIVERGED, "a", 2, 2), False),
        (Refused(RefusalCause.DIVERGED, "a", 1, 1), False),
        (Refused(RefusalCause.DIVERGED, "b", 2, 1), False),
    ],
    ids=["ours", "another one", "another incarnation", "another learner"],
)
async def test_what_a_commit_refuses_does_not_come_back_with_the_next_contribution(
    wire: Wire, refused: Refused, *, forgotten: bool
) -> None:
    await wire.send(scheme="int2")
    done = await wire.scripted.commit(0)
    refusing = replace(done, commit=replace(done.commit, refused=(refused,)))
    wire.network.receiver._want(refusing)
    assert (wire.network.link.residuals.owed(0, 2) is None) is forgotten


async def test_contribution_that_the_log_has_lost_is_reported_and_does_not_come_back_twice(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.send(scheme="int2")
    assert wire.network.link.residuals.owed(0, 2) is not None
    checks = [MissingCheck("a", 2, 0, identity, 3) for identity in (3, 2, 1)]
    answers: list[bool | BrokerUnavailable] = [False, BrokerUnavailable("away"), True]

    async def looked_for(*_: object) -> bool:
        answer = answers.pop(0)
        if isinstance(answer, BrokerUnavailable):
            raise answer
        return answer

    monkeypatch.setattr(sending, "is_lost", looked_for)
    for check in checks:
        wire.network.link.mailbox.order(check)
    async with running(wire.network.sender.run):
        await until(lambda: checks[2] in wire.heard())
    assert [event for event in wire.events if isinstance(event, MissingCheck)] == checks[2:]
    assert wire.network.link.residuals.owed(0, 2) is None


async def test_a_global_fragment_that_cannot_be_read_is_asked_for_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    await wire.scripted.commit(0)
    failures = [WrongVersion("of a later release"), Truncated("cut short")]
    read = state.read_part

    async def flaky(*args: Any, **options: Any) -> NDArray[np.float32]:
        if failures:
            raise failures.pop()
        return await read(*args, **options)

    monkeypatch.setattr(global_fragments, "read_part", flaky)
    async with running(wire.network.receiver.manifests, wire.network.receiver.fragments):
        await until(lambda: wire.fresh == [(0, 1)])
    assert not failures


@dataclass
class SlowReads:
    """Reads of global fragments that wait for ``far``, those of ``held`` fragments."""

    wire: Wire
    held: tuple[int, ...]
    begun: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    far: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, manifest: Manifest, *_: object) -> NDArray[np.float32]:
        commit = manifest.commit
        self.begun.append((commit.fragment, commit.version))
        if commit.fragment in self.held:
            await self.far.wait()
        return np.zeros(self.wire.size(commit.fragment), np.float32)


PADDED = 2
"""A fragment that ends in zeros."""


@pytest.mark.parametrize("same", [True, False])
async def test_initial_parameters_that_a_learner_has_are_compared_before_they_are_read(
    bus: MemoryBus, *, same: bool
) -> None:
    wire = await Wire.begin(bus, missing=(PADDED,))
    committed = await wire.scripted.commit(PADDED)
    link, reader = wire.network.link, GlobalReader(bus, "run", wire.scripted.plan)
    vector = await reader.read(committed)
    async with running(wire.network.receiver.manifests, wire.network.receiver.fragments):
        await until(lambda: wire.fresh == [(PADDED, 1)])
        (asked,) = link.mailbox.fresh()
        assert asked.vector is None
        link.mailbox.take_fresh(asked)
        with capture_logs() as lines:
            own = np.float32(0) - vector  # what is 0 stays so, and not -0
            link.mailbox.order(Initial(asked.manifest, own if same else vector))
            await until(lambda: wire.fresh == [(PADDED, 1)])
    (fresh,) = link.mailbox.fresh()
    assert fresh.vector is not None
    np.testing.assert_array_equal(fresh.vector, vector)
    assert (link.traffic.bytes_down == 0) == same
    told = [line["log_level"] for line in lines if line["event"] == "initial_parameters_are_others"]
    assert told == ([] if same else ["warning"])


async def test_initial_parameters_that_come_after_the_next_version_change_nothing(
    bus: MemoryBus,
) -> None:
    wire = await Wire.begin(bus, missing=(PADDED,))
    link, receiver = wire.network.link, wire.network.receiver
    async with running(receiver.manifests, receiver.fragments):
        await wire.scripted.commit(PADDED)
        await until(lambda: wire.fresh == [(PADDED, 1)])
        (asked,) = link.mailbox.fresh()
        link.mailbox.take_fresh(asked)
        await wire.scripted.commit(PADDED)
        await until(lambda: wire.fresh == [(PADDED, 2)])
        with capture_logs() as lines:
            link.mailbox.order(Initial(asked.manifest, np.ones(wire.size(PADDED), np.float32)))
            await until(lambda: not receiver.wanted and not receiver.reading)
    assert wire.fresh == [(PADDED, 2)]
    assert not receiver.initial
    assert "initial_parameters_differ" not in [line["event"] for line in lines]


async def test_a_broker_that_is_away_as_the_run_ends_is_waited_for(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = await Wire.begin(bus)
    await ledger.finish_run(bus, wire.scripted.record)
    read, away = ledger.read_run, [BrokerUnavailable("away")]

    async def read_run(bus: Bus, run: str) -> RunRecord:
        if away:
            raise away.pop()
        return await read(bus, run)

    monkeypatch.setattr(ledger, "read_run", read_run)
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    await wire.network.finished()


async def test_a_trainer_hears_that_others_were_faster_to_offer_what_the_log_lacked(
    bus: MemoryBus,
) -> None:
    wire = await Wire.begin(bus, missing=(0,))
    wire.network.receiver.announced[0] = 1
    await wire.network.offer()
    assert wire.network.link.mailbox.to_offer == deque()


async def test_initial_parameters_that_another_learner_never_sends_are_offered(
    bus: MemoryBus,
) -> None:
    now = [0.0]
    wire = await Wire.begin(bus, missing=(0,), clock=lambda: now[0])
    for name in ("a", "b"):
        await ledger.join(bus, "run", name, "host", 1, offers=True)
    for said in (pulse("b", contributions=1), pulse("a", incarnation=3)):
        await run_records.publish(bus, said)
    mailbox = wire.network.link.mailbox
    async with running(wire.network.offer):
        await until(lambda: mailbox.to_offer is not None)
        assert not mailbox.to_offer, "another one lives, and says that it has begun"
        now[0] = MOST_WAIT_S + 1.0
        await until(lambda: bool(mailbox.to_offer))


async def test_a_global_fragment_does_not_wait_for_one_that_is_still_being_read(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowReads(wire, held=(0,))
    monkeypatch.setattr(GlobalReader, "read", slow)
    wire.announce(0, 5)
    wire.announce(1, 6)
    async with running(wire.network.receiver.fragments):
        await until(lambda: wire.fresh == [(1, 6)])
        wire.announce(0, 7)
        slow.far.set()
        await until(lambda: (0, 7) in wire.fresh)
    assert slow.begun == [(0, 5), (1, 6), (0, 7)]


def test_a_far_learner_has_joined_and_read_all_fragments_after_six_and_a_half_round_trips() -> None:
    complete = list[float]()

    async def main(loop: VirtualLoop) -> None:
        broker = broker_of(loop)
        scripted = await ScriptedRun.begin(broker.connect())
        for _ in range(3):
            await scripted.commit_all()
        bus, config = far_of(broker, 0.5), RunConfig(sync=SyncConfig(fragments=3))
        place = await take_place(bus, scripted.record, scripted.plan, "a", Machine("far"))
        parameters: Any = None

        def wake() -> None:
            if len(mailbox.fresh()) == 3:
                complete.append(loop.time())

        _, network = open_sync(bus, place, scripted.plan, config, parameters, wake=wake)
        mailbox = network.link.mailbox
        async with running(network.run):
            await until(lambda: complete)

    simulate(main)
    assert complete[0] == pytest.approx(6.5)


async def test_deltas_come_without_being_asked_for(wire: Wire) -> None:
    stored = list[int]()
    pushed, subjects = wire.network.receiver.reader.pushed, Subjects("run").shard(0)

    def held() -> bool:
        return any(pushed.take(subjects.stream("STATE"), sequence) for sequence in stored)

    async with running(wire.network.receiver.deltas):
        while not held():
            receipt = await wire.bus.publish(subjects.chunk(0, DELTA, 0, 0), b"a chunk")
            stored.append(receipt.sequence)


async def test_deltas_that_are_not_read_count_as_bytes_that_came(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state, "AHEAD_BYTES", 0)  # no room: each is let go at once
    chunk, traffic = Subjects("run").shard(0).chunk(0, DELTA, 0, 0), wire.network.link.traffic
    async with running(wire.network.receiver.deltas):
        while not traffic.bytes_down:
            await wire.bus.publish(chunk, b"a chunk")
    assert traffic.bytes_down % len(b"a chunk") == 0


async def test_deltas_of_a_region_are_left_to_its_cache(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryBus, "shared_reads", SharedReads(region="eu"))
    await wire.network.receiver.deltas()


async def test_large_deltas_are_asked_for(wire: Wire, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "AHEAD_BYTES", 4 * wire.scripted.plan.largest - 1)
    await wire.network.receiver.deltas()


async def test_no_more_fragments_are_read_than_there_is_room_for(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowReads(wire, held=(0, 1, 2))
    monkeypatch.setattr(GlobalReader, "read", slow)
    for fragment in range(3):
        wire.announce(fragment, 5)
    async with running(wire.network.receiver.fragments):
        await until(lambda: len(slow.begun) == 2)
        slow.far.set()
        await until(lambda: len(wire.fresh) == 2)
        wire.announce(0, 6)  # one that waits here may be replaced
        await until(lambda: (0, 6) in wire.fresh)
        assert slow.begun == [(0, 5), (1, 5), (0, 6)]
        mailbox = wire.network.link.mailbox
        mailbox.take_fresh(mailbox.fresh()[0])
        await until(lambda: slow.begun[3:] == [(2, 5)])


async def test_fragment_that_the_log_has_lost_is_said_once_per_version_and_asked_for_again(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def gone(*_: object, **__: object) -> NDArray[np.float32]:
        msg = "Fragment 0 lacks a chunk of version 1."
        raise StateLost(msg)

    monkeypatch.setattr(GlobalReader, "read", gone)
    with structlog.testing.capture_logs() as lines:
        for version in (1, 1, 2):
            await wire.network.receiver.fetch(manifest(version))
    said = [line["version"] for line in lines if line["event"] == "fragment_lost"]
    assert said == [1, 2]
    assert list(wire.network.receiver.wanted) == [0], "somebody may put the store back from a copy"
    assert not wire.fresh


async def test_a_log_that_has_gone_back_for_good_ends_the_learner(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SETTLED_PAUSE_S", 0.0)
    await wire.scripted.commit_all()
    name, streams = Subjects("run").shard(0).stream("STATE"), wire.bus.broker.streams
    held = streams[name]
    copy = replace(held, records=dict(held.records), newest=dict(held.newest), waiting=[])
    await wire.scripted.commit(1)
    following = asyncio.ensure_future(wire.network.receiver.manifests())
    async with running(wire.network.receiver.prove):
        await until(lambda: len(wire.network.receiver.wanted) == 3)
    streams[name], held.lost = copy, True
    held.wake()
    async with asyncio.timeout(60):
        with pytest.raises(StateLost, match="fragment 1 was at version 2 and is at 1, so an older"):
            await following


async def test_a_replica_that_tells_of_an_older_version_ends_nobody(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "SETTLED_PAUSE_S", 0.0)
    first, newest = await wire.scripted.commit(0), await wire.scripted.commit(0)
    answers: list[Manifest | Exception] = [first, BrokerUnavailable("away"), first, newest]

    async def lagging(*_: object) -> Manifest:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    async def announced(*_: object) -> AsyncGenerator[Manifest]:
        for held in (first, newest, first):
            yield held

    monkeypatch.setattr(recovery, "read_manifest", lagging)
    monkeypatch.setattr(state, "follow_manifests", announced)
    await wire.network.receiver.manifests()
    assert (answers, wire.network.receiver.wanted) == ([], {0: newest})


async def test_a_newer_incarnation_ends_the_older(wire: Wire) -> None:
    watching = asyncio.ensure_future(wire.network.watch_name())
    await ledger.join(wire.bus, "run", "b", "host", 4)
    await ledger.join(wire.bus, "run", "a", "elsewhere", 5)
    async with asyncio.timeout(60):
        with pytest.raises(Superseded, match="elsewhere"):
            await watching


@pytest.mark.parametrize("away", [False, True])
async def test_how_long_ago_the_run_began_is_what_the_brokers_clock_says(
    monkeypatch: pytest.MonkeyPatch, *, away: bool
) -> None:
    """The syncer's clock is an hour behind the broker's, this learner's a day ahead of it."""
    hour_ns, broker_ns = 3600 * 10**9, [10**18]
    bus = MemoryBroker(clock_ns=lambda: broker_ns[0]).connect()
    wire = await Wire.begin(bus, wall_ns=lambda: broker_ns[0] + 24 * hour_ns, clock=lambda: 1000.0)
    digest = wire.scripted.plan.digest
    await append_commit(bus, commit(1, plan_digest=digest, closed_ns=broker_ns[0] - hour_ns))
    broker_ns[0] += 40 * 10**9
    lost = ["its answer"] if away else []

    async def now_ns(_: str) -> int:
        if lost:
            raise BrokerUnavailable(lost.pop())
        return broker_ns[0]

    monkeypatch.setattr(bus, "now_ns", now_ns)
    mailbox = wire.network.link.mailbox
    async with running(wire.network.genesis):
        await until(lambda: mailbox.began_s is not None)
    assert mailbox.began_s == 960.0
    assert not lost


async def test_of_pulses_that_wait_only_the_newest_is_sent_with_what_was_moved_by_then(
    wire: Wire,
) -> None:
    wire.network.link.traffic.bytes_up = 7
    for step in (1, 2):
        wire.network.link.mailbox.order(pulse(step=step, incarnation=2))
    await wire.network.pulse()
    last = wire.network.last_pulse
    assert last is not None
    assert (last.step, last.bytes_up) == (2, 7)
    await wire.network.pulse()
    assert wire.network.last_pulse is last


async def test_a_pulse_is_said_again_until_a_step_is_measured(
    wire: Wire, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first step runs for the first time what was compiled, and may take long."""
    said: list[str] = []

    async def note(subject: str, _options: object) -> None:
        said.append(subject)

    faulty(monkeypatch, wire.bus, note)
    mailbox, every_s = wire.network.link.mailbox, wire.network.link.config.liveness.pulse_s
    mailbox.order(pulse(step=1, incarnation=2, step_time_s=0.0))
    async with running(wire.network.pulses):
        await until(lambda: len(said) > 2)
        mailbox.order(pulse(step=2, incarnation=2, step_time_s=0.5))
        await asyncio.sleep(3 * every_s)
        count = len(said)
        await asyncio.sleep(3 * every_s)
    assert len(said) == count


async def test_learner_without_a_syncer_says_so_once_with_the_command_that_mends_it(
    bus: MemoryBus, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(network_side, "ALONE_S", 0.01)
    wire = await Wire.begin(bus)
    with capture_logs() as logs:
        async with running(wire.network.genesis):
            await until(lambda: bool(logs))
        assert [line["event"] for line in logs] == ["waits_for_syncer"]
        assert "skerry syncer --run run" in logs.pop()["hint"]
        await run_records.publish(bus, SyncerPulse("run", "s", "5f3a", 1, "host", (0,), (1,)))
        await wire.network._say_alone()
        assert not logs, "a syncer is there"
