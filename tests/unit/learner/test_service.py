"""A learner on a memory broker: joining, the network's loops, and a whole life beside a syncer."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry import settings
from skerry.bus import ledger, presence, state
from skerry.bus.base import Record
from skerry.bus.contributions import Contribution, Inbox
from skerry.bus.memory import MemoryBroker, MemoryBus
from skerry.bus.state import NewPart, StateWriter
from skerry.bus.streams import specs
from skerry.core.backend import cpu
from skerry.core.fragments import LeafSpec, plan
from skerry.core.merge import slice_norms
from skerry.errors import (
    BrokerUnfit,
    ConfigError,
    CorpusError,
    ModelError,
    RunMismatch,
    Superseded,
    Truncated,
    WrongVersion,
)
from skerry.settings import (
    DataConfig,
    LogConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
)
from skerry.wire.messages import (
    Commit,
    ContributionHeader,
    ContributionKind,
    LearnerPhase,
    RunState,
)
from skerry.wire.subjects import Subjects
from skerry_learner.joining import (
    Work,
    check_payload,
    check_window,
    find_or_create,
    prepare,
    take_place,
)
from skerry_learner.service import learner
from skerry_learner.sync import network
from skerry_learner.sync.mailbox import Mailbox, Outgoing
from skerry_learner.sync.network import Network
from skerry_learner.sync.session import Learner
from skerry_syncer.service import session as syncer_session


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    """A run small enough to compile in a second or two."""
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog. " * 200)
    return RunConfig(
        model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
        data=DataConfig(source="text", paths=(str(text),), batch=2, seq_len=16, streams=2),
        train=TrainConfig(steps=40),
        sync=SyncConfig(learners=1, fragments=2, h_steps=8),
        liveness=settings.LivenessConfig(pulse_s=0.05),
    )


@pytest.fixture
async def bus() -> AsyncIterator[MemoryBus]:
    async with MemoryBroker().connect() as connected:
        yield connected


async def until(holds: Callable[[], bool]) -> None:
    """Let other tasks run until something holds; the test fails after ten seconds."""
    async with asyncio.timeout(10):
        while not holds():  # noqa: ASYNC110  the condition has no event of its own
            await asyncio.sleep(0.005)


async def test_the_first_learner_creates_the_run_and_the_next_takes_its_config(
    bus: MemoryBus, config: RunConfig
) -> None:
    record, work = await find_or_create(bus, "run", config)
    other = config.model_copy(update={"train": TrainConfig(steps=7)})
    again, theirs = await find_or_create(bus, "run", other)
    assert again == record
    assert theirs.config == config
    assert theirs.plan.digest == work.plan.digest == record.plan_digest


async def test_learners_that_create_at_once_agree(bus: MemoryBus, config: RunConfig) -> None:
    other = config.model_copy(update={"train": TrainConfig(steps=7)})
    one, two = await asyncio.gather(
        find_or_create(bus, "run", config), find_or_create(bus, "run", other)
    )
    assert one[0] == two[0]
    assert one[1].config == two[1].config


async def test_another_plan_digest_is_a_mismatch(bus: MemoryBus, config: RunConfig) -> None:
    record, _ = await find_or_create(bus, "run", config)
    wrong = replace(record, run="other", plan_digest=record.plan_digest ^ 1)
    await bus.declare(specs("other"))
    await ledger.create_run(bus, wrong)
    with pytest.raises(RunMismatch, match="another model"):
        await find_or_create(bus, "other", config)


async def test_each_name_has_its_own_shard_and_each_start_its_own_incarnation(
    bus: MemoryBus, config: RunConfig
) -> None:
    record, work = await find_or_create(bus, "run", config)
    places = [await take_place(bus, record, work, name, "host") for name in ("a", "b", "a")]
    assert [p.member.shard for p in places] == [0, 1, 0]
    assert [p.learner.incarnation for p in places] == [1, 1, 2]
    assert places[0].missing == (0, 1)


class Wire:
    """A network without a trainer: the test is the trainer."""

    def __init__(self, bus: MemoryBus, work: Work) -> None:
        loop, wake = asyncio.get_running_loop(), asyncio.Event()

        def notify() -> None:
            loop.call_soon_threadsafe(wake.set)

        self.mailbox = Mailbox(2, notify)
        self.who = Learner("run", "a", 1)
        self.network = Network(
            bus, self.who, work.plan, self.mailbox, wake, chunk_bytes=4096, pulse_s=0.1
        )


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
    wire = Wire(bus, work)
    fragment = work.plan.fragments[1]
    gradient = jax.random.normal(jax.random.key(0), (fragment.padded_size,), jnp.float32)
    header = ContributionHeader(
        ContributionKind.OUTER_GRADIENT, "a", 1, 1, 1, 3, 4, 9, 2, 64, 0, 4, 1.5, 0
    )
    wire.mailbox.post_outgoing(Outgoing(header, gradient, "int4"))
    async with running(wire.network.dispatch, wire.network.send):
        await until(lambda: wire.mailbox.unsent() == 0)
    inbox = Inbox("run", work.plan)
    got = [inbox.feed(r) for r in await contributed(bus)]
    (whole,) = [item for item in got if item is not None]
    assert isinstance(whole, Contribution)
    planes = cpu().quantise("int4", np.array(gradient))
    np.testing.assert_array_equal(whole.planes.codes, planes.codes)
    assert whole.header.norms == slice_norms(fragment, cpu().dequantise("int4", planes))
    assert replace(whole.header, norms=()) == header
    assert wire.mailbox.traffic.contributions == 1


async def contributed(bus: MemoryBus) -> list[Record]:
    stream = Subjects("run").stream("CONTRIB")
    found = [await bus.get(stream, sequence) for sequence in range(1, 100)]
    return [record for record in found if record is not None]


async def test_a_gradient_that_is_not_finite_is_dropped(bus: MemoryBus, config: RunConfig) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work)
    gradient = jnp.full((work.plan.fragments[0].padded_size,), jnp.nan, jnp.float32)
    header = ContributionHeader(
        ContributionKind.OUTER_GRADIENT, "a", 1, 1, 0, 3, 4, 9, 2, 64, 0, 4, 1.5, 0
    )
    wire.mailbox.post_outgoing(Outgoing(header, gradient, "int4"))
    async with running(wire.network.dispatch, wire.network.send):
        await until(lambda: wire.mailbox.unsent() == 0)
    assert not await contributed(bus)
    assert wire.mailbox.take_diverged() == {0}
    assert not wire.mailbox.take_diverged()


async def test_initial_parameters_that_are_not_finite_end_the_learner_with_a_sentence(
    bus: MemoryBus, config: RunConfig
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work)
    gradient = jnp.full((work.plan.fragments[0].padded_size,), jnp.nan, jnp.float32)
    header = ContributionHeader(ContributionKind.GENESIS, "a", 1, 1, 0, 0, 1, 0, 0, 0, 0, 0, 0.0, 0)
    wire.mailbox.post_outgoing(Outgoing(header, gradient, "f32"))
    async with asyncio.timeout(10):
        with pytest.raises(ModelError, match="initial parameters are not finite"):
            await wire.network.send()


async def test_a_global_fragment_that_cannot_be_read_is_asked_for_again(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, work = await find_or_create(bus, "run", config)
    wire = Wire(bus, work)
    fragment = work.plan.fragments[0]
    writer = await StateWriter.acquire(bus, "run", work.plan, holder="s", now_ns=1)
    vector = np.zeros(fragment.padded_size, np.float32)
    parts = [NewPart("params", "bf16", vector), NewPart("master", "f32", vector)]
    commit = Commit(
        "run", work.plan.digest, 0, 1, 0, "", "s", 1, 0, 0, 0.0, 0.0, (), (), 0, (), 0, 0
    )
    await writer.commit(commit, parts, None)
    failures = [WrongVersion("of a later release"), Truncated("cut short")]
    read = state.read_part

    async def flaky(*args: Any, **options: Any) -> NDArray[np.float32]:
        if failures:
            raise failures.pop()
        return await read(*args, **options)

    monkeypatch.setattr(state, "read_part", flaky)
    monkeypatch.setattr(network, "RETRY_S", 0.0)
    async with running(wire.network.manifests, wire.network.fetch):
        await until(lambda: bool(wire.mailbox.fresh()))
    assert not failures


async def test_a_newer_incarnation_ends_the_older(bus: MemoryBus, config: RunConfig) -> None:
    record, work = await find_or_create(bus, "run", config)
    await take_place(bus, record, work, "a", "host")
    watching = asyncio.ensure_future(Wire(bus, work).network.watch_name())
    await take_place(bus, record, work, "b", "host")
    await take_place(bus, record, work, "a", "elsewhere")
    async with asyncio.timeout(10):
        with pytest.raises(Superseded, match="elsewhere"):
            await watching


async def test_a_learner_lives_to_the_end_of_its_run(config: RunConfig) -> None:
    broker = MemoryBroker()
    async with broker.connect() as syncing, broker.connect() as watching:
        await find_or_create(watching, "run", config)
        async with asyncio.timeout(90), asyncio.TaskGroup() as group:
            conducting = group.create_task(syncer_session(syncing, "run", "s"))
            await _live(broker, config)
            await conducting
        record = await ledger.read_run(watching, "run")
        pulse = (await presence.last_pulses(watching, "run"))["a"]
        commits = await ledger.last_commits(watching, "run")
    assert record.state is RunState.FINISHED
    assert (pulse.phase, pulse.step, pulse.steps) == (LearnerPhase.FINISHED, 40, 40)
    assert (pulse.tokens, pulse.cursor) == (40 * 32, 80)
    assert all(commit.final for commit in commits.values())
    for commit in commits.values():
        (row,) = commit.progress
        assert (row.tokens, row.cursor) == (40 * 32, 80), "a step was lost or counted twice"


async def test_a_signal_stops_it_with_a_goodbye_and_a_restart_goes_on(config: RunConfig) -> None:
    endless = config.model_copy(update={"train": TrainConfig(steps=1_000_000)})
    broker = MemoryBroker()
    async with broker.connect() as syncing, broker.connect() as watching:
        await find_or_create(watching, "run", endless)
        conducting = asyncio.ensure_future(syncer_session(syncing, "run", "s"))
        async with asyncio.timeout(90):
            living = asyncio.ensure_future(_live(broker, endless))
            async for _, commit in ledger.follow_commits(watching, "run"):
                if commit.version == 4:
                    break
            os.kill(os.getpid(), signal.SIGTERM)
            await living
        pulse = (await presence.last_pulses(watching, "run"))["a"]
        record, work = await find_or_create(watching, "run", endless)
        place = await take_place(watching, record, work, "a", "host")
        conducting.cancel()
        await asyncio.gather(conducting, return_exceptions=True)
    assert pulse.phase is LearnerPhase.STOPPED
    assert place.learner.incarnation == 2
    assert place.missing == ()
    assert 0 < place.start.cursor <= pulse.cursor
    assert 0 < place.start.step <= pulse.step


async def _live(broker: MemoryBroker, config: RunConfig) -> None:
    bus = broker.connect()
    await learner(bus, "run", "a", config, shutdown_s=20.0, started_s=time.monotonic())


def test_a_corpus_or_model_that_does_not_work_is_found_before_the_run_exists(
    config: RunConfig,
) -> None:
    broken = config.model_copy(update={"data": DataConfig(source="text", paths=("/nowhere",))})
    with pytest.raises(CorpusError):
        prepare(broken)


def test_window_too_small_for_the_first_offers_is_refused_with_the_size_to_set() -> None:
    cut = plan([LeafSpec("w", (1024, 1024))], 1)
    config = RunConfig(log=LogConfig(window_bytes=4 * 1024**2))
    with pytest.raises(ConfigError, match=r"set log\.window_bytes=16777216"):
        check_window(cut, config)


async def test_broker_whose_messages_are_too_small_is_named_with_its_setting() -> None:
    bus = MemoryBroker(max_payload_bytes=64 * 1024).connect()
    with pytest.raises(BrokerUnfit, match="put `max_payload: 532480` into its config file"):
        check_payload(bus, RunConfig())
