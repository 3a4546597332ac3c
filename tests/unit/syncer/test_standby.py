"""Several syncers beside each other on virtual time: take-over, hand-over, zombies, the end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from contextvars import copy_context
from dataclasses import dataclass, field, replace
from inspect import signature
from itertools import count
from typing import Any

import pytest
from structlog.testing import capture_logs

from skerry.algorithm import schedule
from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.errors import BrokerUnavailable, ConfigError, Conflict, StateLost, first_cause
from skerry.log import fences, ledger, run_records, state
from skerry.log.base import Receipt, Record
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import specs
from skerry.protocol import succession
from skerry.protocol.coordinator import Action, Publish, RoundCoordinator
from skerry.protocol.messages import Commit, Round, RunState
from skerry.protocol.parts import MASTER
from skerry.protocol.subjects import Subjects
from skerry.settings.models import DataConfig, OuterConfig, RunConfig, SyncConfig, TrainConfig
from skerry.tasks import computed
from skerry_syncer import restoring, standby
from skerry_syncer.committer import Committer
from skerry_syncer.leadership import Leadership, LeadershipEnd
from skerry_syncer.service import stand_by
from skerry_tools.virtual import OWNER, VirtualLoop
from tests.support.builders import run_record
from tests.support.history import read_history
from tests.support.learners import FakeLearner, ScriptedLearner
from tests.support.log import begin_anew

RUN = "t"
LEASE_S = 2.0
LEAVES = [LeafSpec("embed", (30, 64), embedding=True), LeafSpec("w", (60, 64))]
PLAN = plan(LEAVES, 4)


def config(shards: int = 1, *, steps: int = 1000, **changes: Any) -> RunConfig:
    given: dict[str, Any] = {
        "contribution_scheme": "f32",
        "fragments": 4,
        "h_steps": 8,
        "merge": "average",
        "chunk_bytes": 4096,
        "shards": shards,
        "lease_s": LEASE_S,
    }
    return RunConfig(
        sync=SyncConfig(**(given | changes)),
        outer=OuterConfig(preset="direct"),
        data=DataConfig(seq_len=100, batch=1),
        train=TrainConfig(steps=steps),
    )


class MutedBus(MemoryBus):
    """A client whose syncer's pulses get lost once it is told so."""

    muted = False

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Receipt:
        if self.muted and ".syncer." in subject:
            return Receipt(0)
        return await super().publish(subject, payload, **options)


@dataclass
class World:
    """One run on one virtual loop: candidates and learners as tasks that can be stopped."""

    loop: VirtualLoop
    broker: MemoryBroker = field(default_factory=MemoryBroker)
    plan: Plan = PLAN
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    buses: dict[str, MutedBus] = field(default_factory=dict)

    @property
    def bus(self) -> MemoryBus:
        return self.broker.connect()

    async def begin(self, settings: RunConfig, learners: int = 2) -> None:
        self.plan = replace(PLAN, shards=settings.sync.shards)
        await self.bus.declare(specs(RUN, shards=self.plan.shards))
        await ledger.create_run(self.bus, run_record(RUN, self.plan, settings.model_dump_json()))
        for number in range(learners):
            name = f"l{number}"
            steps = settings.train.steps
            learner = FakeLearner(self.bus, RUN, self.plan, name, step_s=0.1, steps=steps)
            self.start(f"learner {name}", learner.train())

    def start(self, key: str, coroutine: Coroutine[Any, Any, None]) -> None:
        context = copy_context()
        context.run(OWNER.set, key)
        self.tasks[key] = self.loop.create_task(coroutine, context=context)

    def syncer(self, name: str, key: str = "") -> None:
        self.buses[key or name] = MutedBus(self.broker)
        self.start(key or name, stand_by(self.buses[key or name], RUN, name))

    async def at_work(self, *beside: str) -> None:
        """Have syncer a at version 3, and others stand by for long."""
        await self.begin(config())
        self.syncer("a")
        await self.commits(lambda c: c.version == 3)
        for name in beside:
            self.syncer(name)
            await asyncio.sleep(10)

    def kill(self, name: str) -> float:
        """End a syncer without a word, and return when."""
        self.buses[name].muted = True
        self.tasks[name].cancel()
        return self.loop.time()

    async def commits(self, wanted: Callable[[Commit], bool]) -> Commit:
        """Return the first commit, from the newest of each fragment on, that is wanted."""
        manifests = state.follow_manifests(self.bus, RUN, self.plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                if wanted(manifest.commit):
                    return manifest.commit
        raise AssertionError

    async def served_by(self, owners: dict[int, str]) -> None:
        """Return once each shard's fence was taken by the one named and has committed since."""
        shards = len(owners)
        while True:
            held = {s: await fences.newest(self.bus, RUN, s) for s in owners}
            manifests = await state.read_manifests(self.bus, RUN, self.plan)
            served = all(
                (fence := held[s]) is not None
                and fence.holder == owners[s]
                and any(
                    m.commit.fence == fence.token for f, m in manifests.items() if f % shards == s
                )
                for s in owners
            )
            if served:
                return
            await asyncio.sleep(0.05)

    async def whole(self) -> None:
        """Show that nothing was lost or counted twice."""
        history = await read_history(self.bus, RUN)
        assert history.violations == ()


def virtual(play: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """Make a test of a play: run it on a virtual loop of its own, and end what it has left."""

    def test(**given: Any) -> None:
        loop = VirtualLoop()
        world = World(loop)

        async def whole() -> None:
            try:
                await play(world, **given)
            finally:
                for task in world.tasks.values():
                    task.cancel()
                await asyncio.gather(*world.tasks.values(), return_exceptions=True)

        task = loop.create_task(whole())
        assert loop.run_until(task, 600.0), "it took too long"
        loop.close()
        task.result()

    told = signature(play)
    given = [parameter for name, parameter in told.parameters.items() if name != "world"]
    test.__signature__ = told.replace(parameters=given)  # type: ignore[attr-defined] # pytest reads it
    test.__name__, test.__doc__ = play.__name__, play.__doc__
    return test


@virtual
async def test_stand_by_commits_within_a_lease_and_a_second_of_a_kill(world: World) -> None:
    await world.at_work("b")
    killed_s = world.kill("a")
    commit = await world.commits(lambda c: c.syncer == "b")
    assert world.loop.time() - killed_s < LEASE_S + 1
    assert commit.version > 3
    await world.whole()


@virtual
async def test_stand_by_has_the_state_at_hand_when_it_takes_over(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, read_part = list[object](), restoring.read_part

    async def counted(*given: Any, **options: Any) -> Any:
        parts.append(given[4])
        return await read_part(*given, **options)

    monkeypatch.setattr(restoring, "read_part", counted)
    await world.at_work("b")
    assert parts == [MASTER] * len(PLAN.fragments)
    world.kill("a")
    commit = await world.commits(lambda c: c.syncer == "b")
    assert commit.master_origin is None
    assert parts == [MASTER] * len(PLAN.fragments)
    await world.whole()


@virtual
async def test_frozen_syncer_is_succeeded_and_stands_by_when_it_wakes(world: World) -> None:
    await world.at_work("b")
    world.loop.freeze("a")
    commit = await world.commits(lambda c: c.syncer == "b")
    with capture_logs() as said:
        world.loop.thaw("a")
        await world.commits(lambda c: c.version > commit.version + 3)
    stepped = [line for line in said if line["event"] == "stepped_down"]
    assert len(stepped) == 1
    assert "'a' steps down and stands by" in stepped[0]["cause"]
    assert not world.tasks["a"].done()
    world.kill("b")
    await world.commits(lambda c: c.syncer == "a" and c.version > commit.version + 3)
    await world.whole()


@virtual
async def test_syncer_whose_pulses_get_lost_is_overtaken_and_refused(world: World) -> None:
    await world.at_work("b")
    world.buses["a"].muted = True
    commit = await world.commits(lambda c: c.syncer == "b")
    await world.commits(lambda c: c.version > commit.version + 5)
    held = await fences.newest(world.bus, RUN, 0)
    assert held is not None
    assert held.holder == "b"
    assert not world.tasks["a"].done()
    await world.whole()


@virtual
async def test_restarted_syncer_of_the_same_name_goes_on_at_once(world: World) -> None:
    await world.begin(config())
    world.syncer("a")
    reached = await world.commits(lambda c: c.version == 3)
    killed_s = world.kill("a")
    world.syncer("a", "a again")
    await world.commits(lambda c: c.version > reached.version + 1)
    assert world.loop.time() - killed_s < LEASE_S
    await world.whole()


@virtual
async def test_shards_are_shared_out_when_another_joins_and_taken_back_when_it_dies(
    world: World,
) -> None:
    await world.begin(config(shards=4))
    world.syncer("a")
    await world.served_by(dict.fromkeys(range(4), "a"))
    world.syncer("b")
    await world.served_by({0: "a", 1: "a", 2: "b", 3: "b"})
    before = {s: await fences.newest(world.bus, RUN, s) for s in range(4)}
    await asyncio.sleep(10)
    assert {s: await fences.newest(world.bus, RUN, s) for s in range(4)} == before
    killed_s = world.kill("a")
    await world.served_by(dict.fromkeys(range(4), "b"))
    assert world.loop.time() - killed_s < LEASE_S + 3
    await world.whole()


@pytest.mark.parametrize("shards", [1, 2, 3])
@virtual
async def test_run_over_several_syncers_ends_with_every_fragment_final(
    world: World, shards: int
) -> None:
    for name in "abc":
        world.syncer(name)
    await world.begin(config(shards=shards, steps=120))
    for name in "abc":
        await world.tasks[name]
    record = await ledger.read_run(world.bus, RUN)
    manifests = await state.read_manifests(world.bus, RUN, world.plan)
    assert record.state is RunState.FINISHED
    assert [manifests[f].commit.final for f in range(4)] == [True] * 4
    assert len({m.commit.syncer for m in manifests.values()}) == shards
    await world.whole()


class LateBus(MutedBus):
    """A client that hears of what learners say before it has what they have sent."""

    def follow(self, pattern: str | Sequence[str], **options: Any) -> AsyncGenerator[Record]:
        source = super().follow(pattern, **options)
        return self._late(source) if ".contrib." in str(pattern) else source

    async def _late(self, source: AsyncGenerator[Record]) -> AsyncGenerator[Record]:
        async with aclosing(source):
            async for record in source:
                await asyncio.sleep(0.1)
                yield record


def test_last_rounds_wait_for_the_room_that_rounds_in_the_air_take(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Learners answer as many at once as may be open: with more, they wait for each other."""
    held: list[tuple[int, bool]] = []
    decide = RoundCoordinator.decide

    def counted(self: RoundCoordinator, now_s: float, now_ns: int) -> Action | None:
        before = {index: opened.record for index, opened in self.open.items()}
        action = decide(self, now_s, now_ns)
        if isinstance(action, Publish) and before.get(action.round.fragment) != action.round:
            others = [r for index, r in before.items() if index != action.round.fragment]
            held.append((len(others), action.round.final and any(not r.final for r in others)))
            assert len(others) < schedule.max_in_flight(self.settings.timetable)
        return action

    monkeypatch.setattr(RoundCoordinator, "decide", counted)

    async def play(world: World, steps: int) -> None:
        await world.begin(config(quorum=2, steps=steps))
        world.start("a", stand_by(LateBus(world.broker), RUN, "a"))
        await world.tasks["a"]

    for steps in range(24, 28):
        virtual(play)(steps=steps)
    assert any(beside for _, beside in held), "no last round was opened beside one in the air"


@virtual
async def test_one_that_dies_at_the_end_leaves_a_run_that_still_ends(world: World) -> None:
    for name in "ab":
        world.syncer(name)
    await world.begin(config(shards=2, steps=120))
    await world.commits(lambda c: c.final and c.syncer == "a")
    world.kill("a")
    await world.tasks["b"]
    assert (await ledger.read_run(world.bus, RUN)).state is RunState.FINISHED
    await world.whole()


@virtual
async def test_losing_one_shard_ends_no_other(world: World) -> None:
    await world.begin(config(shards=2))
    world.syncer("a")
    await world.served_by({0: "a", 1: "a"})
    before = await fences.newest(world.bus, RUN, 1)
    await fences.take(world.bus, RUN, 0, holder="someone", now_ns=1)
    reached = await world.commits(lambda c: c.fragment % 2 == 1)
    await world.commits(lambda c: c.fragment % 2 == 1 and c.version > reached.version + 3)
    assert await fences.newest(world.bus, RUN, 1) == before
    await world.served_by({0: "a", 1: "a"})
    assert await fences.newest(world.bus, RUN, 1) == before
    await world.whole()


@virtual
async def test_broker_that_forgets_all_pulses_moves_no_shard(world: World) -> None:
    await world.begin(config(shards=2))
    for name in "ab":
        world.syncer(name)
    await world.served_by({0: "a", 1: "b"})
    before = {s: await fences.newest(world.bus, RUN, s) for s in range(2)}
    world.syncer("c")
    world.broker.streams[Subjects(RUN).stream("PULSE")].records.clear()
    world.broker.streams[Subjects(RUN).stream("PULSE")].newest.clear()
    await asyncio.sleep(30)
    assert {s: await fences.newest(world.bus, RUN, s) for s in range(2)} == before


@virtual
async def test_shard_whose_conductor_hangs_goes_to_another(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    merge = Committer.merge

    async def hanging(self: Committer, *arguments: Any) -> Any:
        if self.writer.holder == "a" and self.writer.token == 1:
            await asyncio.Event().wait()
        return await merge(self, *arguments)

    monkeypatch.setattr(Committer, "merge", hanging)
    await world.begin(config())
    world.syncer("a")
    await world.commits(lambda c: c.version == 1)
    world.syncer("b")
    commit = await world.commits(lambda c: c.syncer == "b")
    assert world.loop.time() < standby.STUCK_S + 15
    await world.commits(lambda c: c.version > commit.version + 3)
    assert not world.tasks["a"].done()
    await world.whole()


@virtual
async def test_each_shard_keeps_its_part_of_the_launch_floor(world: World) -> None:
    """Two fragments of a shard, each once per 8 steps of half a second: one launch per 2 s."""
    await world.begin(config(shards=2), learners=0)
    learner = ScriptedLearner(world.bus, RUN, world.plan, "l", step_s=0.5)
    await learner.offer_genesis()
    world.syncer("a")
    await world.served_by({0: "a", 1: "a"})
    opened_s: dict[int, list[float]] = {0: [], 1: []}
    rounds = run_records.follow(world.bus, RUN, Round, PLAN.digest)
    await learner.pulse(1000)
    seen: set[int] = set()
    async with aclosing(rounds):
        async for opened in rounds:
            if opened.fragment not in seen:
                seen.add(opened.fragment)
                opened_s[opened.fragment % 2].append(world.loop.time())
            if len(seen) == 4:
                break
            await learner.pulse(1000)
    for first_s, second_s in opened_s.values():
        assert 1.9 < second_s - first_s < 4.0


@virtual
async def test_final_round_to_which_nobody_comes_still_tells_the_other_shards(world: World) -> None:
    await world.begin(config(shards=2, round_timeout_s=3.0, steps=10), learners=0)
    learner = ScriptedLearner(world.bus, RUN, world.plan, "l", step_s=0.05, steps=10)
    await learner.offer_genesis()
    for name in "ab":
        world.syncer(name)
    await world.commits(lambda c: c.fragment == 3)
    while not world.tasks["a"].done():
        held = await fences.newest(world.bus, RUN, 1)
        await learner.pulse(10 if held is not None and held.holder == "b" else 5)
        await asyncio.sleep(0.2)
    await world.tasks["b"]
    manifests = await state.read_manifests(world.bus, RUN, world.plan)
    assert {m.commit.reason for m in manifests.values()} == {"final_empty"}


class SlowBus(LateBus):
    """A client to which contributions do not get through as long as it is told so.

    ``most``: except so many of their messages.
    """

    held = False
    most = 0

    async def _late(self, source: AsyncGenerator[Record]) -> AsyncGenerator[Record]:
        async with aclosing(source):
            async for record in source:
                while self.held and not self.most:  # noqa: ASYNC110  it has no event
                    await asyncio.sleep(0.1)
                self.most -= self.held
                yield record


async def history(bus: MemoryBus) -> list[Commit]:
    """Return all commits by now."""
    found: list[Commit] = []
    newest = (await bus.last_each(Subjects(RUN).commit()))[-1].sequence
    async with aclosing(ledger.follow_commits(bus, RUN)) as commits:
        async for sequence, commit in commits:
            found.append(commit)
            if sequence >= newest:
                break
    return found


async def say(learner: ScriptedLearner) -> None:
    """Pulse for ever, as one that has finished."""
    while True:
        await learner.pulse(learner.steps)
        await asyncio.sleep(0.2)


async def begun(world: World, owners: str) -> None:
    """Return once every fragment has a version, and each shard has the owner named for it."""
    while True:
        await asyncio.sleep(0.1)
        held = [await fences.newest(world.bus, RUN, shard) for shard in range(len(owners))]
        whole = len(await state.read_manifests(world.bus, RUN, world.plan)) == len(PLAN.fragments)
        if whole and [fence and fence.holder for fence in held] == list(owners):
            return


async def all_final(world: World) -> None:
    """Return once every fragment has had its last round."""
    final: set[int] = set()
    async with aclosing(state.follow_manifests(world.bus, RUN, world.plan)) as manifests:
        async for manifest in manifests:
            final |= {manifest.commit.fragment} if manifest.commit.final else set()
            if len(final) == len(PLAN.fragments):
                return


@pytest.mark.parametrize("shards", [1, 2])
@virtual
async def test_contribution_that_is_acknowledged_at_the_end_is_merged_before_the_run_is_finished(
    world: World, shards: int
) -> None:
    """Its shard's syncer hears of it only after every last round; others may not end the run."""
    await world.begin(config(shards=shards, round_timeout_s=3.0, steps=10), learners=0)
    learner = ScriptedLearner(world.bus, RUN, world.plan, "l", step_s=0.05, steps=10)
    await learner.offer_genesis()
    slow = {name: SlowBus(world.broker) for name in "ab"[:shards]}
    for name, bus in slow.items():
        world.start(name, stand_by(bus, RUN, name))
    await begun(world, "ab"[:shards])
    for bus in slow.values():
        bus.held = True
    learner.versions = dict.fromkeys(range(4), 1)
    await learner.send_gradient(1, 2)
    world.start("pulse", say(learner))
    await all_final(world)
    await asyncio.sleep(5)
    assert (await ledger.read_run(world.bus, RUN)).state is RunState.OPEN
    for bus in slow.values():
        bus.held = False
    for name in slow:
        await world.tasks[name]
    merged = [c for c in await history(world.bus) if c.version > 1 and c.consumed]
    assert [(c.fragment, c.final, c.consumed[0].steps > 0) for c in merged] == [(1, True, True)]


@virtual
async def test_contribution_that_is_still_being_read_at_the_end_is_whole(world: World) -> None:
    """Its learner has stopped, and its pulse overtook the rest of what it had sent."""
    await world.begin(config(round_timeout_s=3.0, steps=10), learners=0)
    learner = ScriptedLearner(world.bus, RUN, world.plan, "l", step_s=0.05, steps=10)
    gone = ScriptedLearner(world.bus, RUN, world.plan, "gone", steps=10, chunk_blocks=1)
    await learner.offer_genesis()
    slow = SlowBus(world.broker)
    world.start("a", stand_by(slow, RUN, "a"))
    await begun(world, "a")
    slow.held, slow.most = True, 1
    gone.versions = dict.fromkeys(range(4), 1)
    await gone.send_gradient(1, 2)
    world.start("pulse", say(learner))
    await all_final(world)
    await asyncio.sleep(10)
    slow.held = False
    await world.tasks["a"]
    told = [c for c in await history(world.bus) if c.version > 1 and (c.consumed or c.refused)]
    assert [(c.fragment, [r.learner for r in c.consumed], c.refused) for c in told] == [
        (1, ["gone"], ())
    ]


class CutBus(MutedBus):
    """A client that lets one chunk of a contribution through."""

    chunks = 0

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Receipt:
        self.chunks += ".contrib." in subject
        if self.chunks > 1:
            msg = "It is away."
            raise BrokerUnavailable(msg)
        return await super().publish(subject, payload, **options)


@pytest.mark.parametrize("alive", [False, True])
@virtual
async def test_contribution_that_never_came_whole_is_refused_before_the_run_is_finished(
    world: World, *, alive: bool
) -> None:
    await world.begin(config(round_timeout_s=3.0, steps=10), learners=0)
    learner = ScriptedLearner(world.bus, RUN, world.plan, "l", step_s=0.05, steps=10)
    cut = CutBus(world.broker)
    gone = ScriptedLearner(cut, RUN, world.plan, "gone", steps=10, chunk_blocks=1)
    await learner.offer_genesis()
    world.syncer("a")
    await begun(world, "a")
    gone.versions = dict.fromkeys(range(4), 1)
    with pytest.raises(BrokerUnavailable):
        await gone.send_gradient(1, 2)
    world.start("pulse", say(learner))
    if alive:
        cut.chunks = 0
        world.start("its pulse", say(gone))
    await world.tasks["a"]
    told = [(c.fragment, c.final, r) for c in await history(world.bus) for r in c.refused]
    ((fragment, final, refused),) = told
    assert (fragment, final) == (1, True)
    assert (refused.learner, refused.cause) == ("gone", "incomplete")
    assert world.loop.time() < 60


@virtual
async def test_answer_without_steps_that_another_shard_leaves_does_not_hold_up_the_end_for_ever(
    world: World,
) -> None:
    await world.begin(config(shards=2, round_timeout_s=3.0, steps=10), learners=0)
    learner = ScriptedLearner(world.bus, RUN, world.plan, "l", step_s=0.05, steps=10)
    await learner.offer_genesis()
    for name in "ab":
        world.syncer(name)
    await begun(world, "ab")
    world.start("pulse", say(learner))
    await all_final(world)
    learner.versions = dict.fromkeys(range(4), 2)
    for fragment in (0, 1):
        await learner.send_gradient(fragment, 2, steps=0)
    for name in "ab":
        await world.tasks[name]
    assert (await ledger.read_run(world.bus, RUN)).state is RunState.FINISHED


class Idle:
    """Stands for a leadership that makes no progress."""

    shard = 0
    progress = (1, 1)
    token = 1
    taken = True


async def test_only_time_in_which_the_process_ran_counts_as_standstill() -> None:
    view, policy = succession.View("a", "a1"), succession.Policy(1, LEASE_S)
    idle: Any = Idle()
    waiting: Any = asyncio.create_task(asyncio.Event().wait())
    held = standby.StandBy(idle, "h", view, policy)
    held.leaderships[0], held.tasks[0] = idle, waiting
    held._give_up_stuck(1000.0)
    held._give_up_stuck(1000.0 + 10 * standby.STUCK_S)
    assert 0 in held.leaderships
    for second in range(int(standby.STUCK_S) + 1):
        held._give_up_stuck(2000.0 + second)
    assert held.leaderships == {}


async def test_a_shard_whose_merge_takes_minutes_is_not_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, over = asyncio.Event(), threading.Event()

    async def merging(_: Leadership) -> LeadershipEnd:
        begun.set()
        await computed(over.wait)
        return LeadershipEnd.FINISHED

    monkeypatch.setattr(Leadership, "_session", merging)
    view, policy = succession.View("a", "a1"), succession.Policy(1, LEASE_S)
    idle: Any = Idle()
    held = standby.StandBy(idle, "h", view, policy)
    led = held.leaderships[0] = Leadership(idle, 0, 0, held.wake.set)
    held.tasks[0] = asyncio.create_task(held._serve(led))
    await begun.wait()
    for second in range(3 * int(standby.STUCK_S)):
        held._give_up_stuck(1000.0 + second)
    over.set()
    assert held.leaderships == {0: led}
    await held.tasks[0]


@virtual
async def test_round_to_which_nobody_came_is_counted(world: World) -> None:
    await world.begin(config(round_timeout_s=5.0), learners=0)
    learner = ScriptedLearner(world.bus, RUN, world.plan, "l", step_s=0.05)
    await learner.offer_genesis()
    world.syncer("a")
    await world.commits(lambda c: c.version == 1)
    seen: list[Round] = []
    rounds = run_records.follow(world.bus, RUN, Round, PLAN.digest)
    await learner.pulse(100)
    async with aclosing(rounds):
        async for opened in rounds:
            await learner.pulse(100)
            if opened.fragment == (seen or [opened])[0].fragment and opened not in seen:
                seen.append(opened)
            if len(seen) == 3:
                break
    assert [opened.attempt for opened in seen] == [0, 1, 2]
    assert {opened.version for opened in seen} == {2}


@virtual
async def test_state_that_is_lost_ends_a_syncer_with_what_is_missing(world: World) -> None:
    await world.begin(config())
    world.syncer("a")
    await world.commits(lambda c: c.fragment == 2 and c.version == 3)
    world.kill("a")
    stream = world.broker.streams[Subjects(RUN).shard(0).stream("STATE")]
    stream.drop(stream.newest[Subjects(RUN).shard(0).manifest(2)])
    world.syncer("b")
    with pytest.raises(BaseException) as raised:  # noqa: PT011  a group or the error itself
        await world.tasks["b"]
    cause = first_cause(raised.value)
    assert isinstance(cause, StateLost)
    assert "fragment 2 at version" in str(cause)


def lose(world: World, *kinds: str) -> None:
    """Begin streams of the run anew, as a hand would, or a broker that has lost its disk."""
    begin_anew(world.broker, [n for n in world.broker.streams if n.split("_")[2] in kinds])


async def ended(world: World, name: str) -> BaseException:
    """Return what a syncer ends with."""
    with pytest.raises(BaseException) as raised:  # noqa: PT011  a group or the error itself
        await world.tasks[name]
    return first_cause(raised.value)


@pytest.mark.parametrize("emptied", ["purged", "begun anew"])
@pytest.mark.parametrize("standing_by", [False, True])
@virtual
async def test_running_syncer_whose_state_is_taken_from_it_ends_with_what_is_missing(
    world: World, emptied: str, *, standing_by: bool
) -> None:
    await world.begin(config())
    world.syncer("a")
    await world.commits(lambda c: c.fragment == 2 and c.version == 3)
    if standing_by:
        world.syncer("b")
        await asyncio.sleep(10)
    with capture_logs() as said:
        if emptied == "purged":
            stream = world.broker.streams[Subjects(RUN).shard(0).stream("STATE")]
            for sequence in list(stream.records):
                stream.drop(sequence)
        else:
            lose(world, "STATE")
        causes = [await ended(world, name) for name in ("a", "b")[: 1 + standing_by]]
    for cause in causes:
        assert isinstance(cause, StateLost)
        assert "fragment 0 at version" in str(cause)
    events = [line["event"] for line in said]
    assert "fence_lost" in events
    assert standing_by or "stepped_down" not in events  # the other one may well come before it
    assert events.count("shard_not_taken") < 5


def empty(world: World) -> None:
    """Do what a broker does that has lost its disk and begins with an empty one."""
    lose(world, "STATE", "LEDGER", "CONTRIB", "PULSE")


@virtual
async def test_run_that_was_begun_anew_ends_the_syncers_of_the_one_before(world: World) -> None:
    await world.at_work("b")
    record = await ledger.read_run(world.bus, RUN)
    empty(world)
    await ledger.create_run(world.bus, replace(record, created_ns=record.created_ns + 1))
    for name in "ab":
        cause = await ended(world, name)
        assert isinstance(cause, StateLost)
        assert "was created again in this log" in str(cause)


@virtual
async def test_syncer_writes_nothing_more_where_the_whole_run_is_lost(world: World) -> None:
    await world.at_work()
    empty(world)
    cause = await ended(world, "a")
    assert isinstance(cause, StateLost)
    assert "The log has lost run 't' whole" in str(cause)
    assert world.broker.streams[Subjects(RUN).shard(0).stream("STATE")].last_seq == 0
    assert world.broker.streams[Subjects(RUN).stream("LEDGER")].last_seq == 0


class RefusingBus(MutedBus):
    """A client whose writes of fences are all refused, whatever it has read."""

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Receipt:
        if subject.endswith(".fence"):
            msg = "The newest is another one."
            raise Conflict(msg, subject=subject)
        return await super().publish(subject, payload, **options)


@virtual
async def test_shard_that_cannot_be_taken_is_tried_for_once_a_second(world: World) -> None:
    await world.begin(config())
    with capture_logs() as said:
        world.start("a", stand_by(RefusingBus(world.broker), RUN, "a"))
        await asyncio.sleep(60)
    tried = sum(line["event"] == "shard_not_taken" for line in said)
    assert 10 < tried <= 61


class DeafBus(MutedBus):
    """A client that hears no acknowledgement of the fence that it takes next, once it is told so.

    ``cut``: it loses its broker for a moment before that, at the next commit.
    """

    deaf = False
    cut = False

    async def publish(self, subject: str, payload: bytes, **options: Any) -> Receipt:
        if self.cut and ".manifest" in subject:
            self.cut, self.deaf = False, True
            msg = "It is away."
            raise BrokerUnavailable(msg)
        receipt = await super().publish(subject, payload, **options)
        if self.deaf and subject.endswith(".fence"):
            self.deaf = False
            msg = "Sent again, it meets itself."
            raise Conflict(msg, subject=subject)
        return receipt


@pytest.mark.parametrize("again", [False, True])
@virtual
async def test_own_fence_whose_acknowledgement_got_lost_is_nobody_elses(
    world: World, *, again: bool
) -> None:
    await world.begin(config())
    bus = DeafBus(world.broker)
    bus.deaf = not again
    with capture_logs() as said:
        world.start("a", stand_by(bus, RUN, "a", wall_ns=count(1).__next__))
        reached = await world.commits(lambda c: c.version == 3)
        if again:
            bus.cut, began_s = True, world.loop.time()
            await world.commits(lambda c: c.fence > reached.fence)
            assert world.loop.time() - began_s < LEASE_S + 1
    events = [line["event"] for line in said]
    assert "stepped_down" not in events
    assert "shard_not_taken" not in events
    await world.whole()


@virtual
async def test_process_that_was_stopped_for_long_steps_down_and_does_not_call_itself_stuck(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standby, "STUCK_S", 6.0)
    await world.at_work("b")
    world.loop.freeze("a")
    await asyncio.sleep(3 * standby.STUCK_S)
    with capture_logs() as said:
        world.loop.thaw("a")
        await asyncio.sleep(5)
    events = [line["event"] for line in said]
    assert "stepped_down" in events
    assert "shard_stuck" not in events
    await world.whole()


@virtual
async def test_name_that_cannot_be_part_of_a_subject_is_refused_at_once(world: World) -> None:
    await world.begin(config(), learners=0)
    with pytest.raises(ConfigError, match="cannot be part of a subject"):
        await stand_by(world.bus, RUN, "a.b")
