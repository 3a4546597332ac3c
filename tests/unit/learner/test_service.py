"""A whole life of a learner beside a syncer, on a memory broker."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import pytest

from skerry.client.inner_file import origin_of, read_file
from skerry.client.inner_state import shapes_in
from skerry.client.jax_inner import flat
from skerry.client.joining import take_place
from skerry.client.sending import ContributionSender
from skerry.errors import StateLost, first_cause
from skerry.log import ledger, run_records
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.models.machine import Machine
from skerry.protocol.messages import Commit, LearnerPhase, MemberRecord, Pulse, RunRecord, RunState
from skerry.protocol.subjects import Subjects
from skerry.settings.local import LearnerSettings
from skerry.settings.models import RunConfig, TrainConfig
from skerry.tasks import TaskGroup
from skerry_learner.service import learner, step_back
from skerry_learner.trainer.trainer import Trainer
from skerry_learner.work import find_or_create
from skerry_syncer.service import stand_by
from tests.support.builders import pulse
from tests.support.log import begin_anew


@dataclass(frozen=True, slots=True)
class Life:
    """What the log holds of a learner that has lived to the end of its run."""

    record: RunRecord
    pulse: Pulse
    commits: Mapping[int, Commit]
    member: MemberRecord


async def whole_life(config: RunConfig, earlier: Pulse | None = None, **options: Any) -> Life:
    """Let learner ``a`` live beside a syncer; ``earlier`` is a pulse of its past."""
    broker = MemoryBroker()
    async with broker.connect() as syncing, broker.connect() as watching:
        await find_or_create(watching, "run", config)
        if earlier is not None:
            await run_records.publish(watching, earlier)
        async with asyncio.timeout(90), TaskGroup() as group:
            group.create_task(stand_by(syncing, "run", "s"))
            assert await _live(broker, config, **options), "its run is over"
        record = await ledger.read_run(watching, "run")
        pulse = (await run_records.newest_each(watching, "run", Pulse))[0]
        (member,) = await run_records.newest_each(watching, "run", MemberRecord)
        return Life(record, pulse, await ledger.last_commits(watching, "run"), member)


async def _live(broker: MemoryBroker, config: RunConfig, **options: Any) -> bool:
    began_s = time.monotonic()
    return await learner(
        broker.connect(), "run", "a", config, shutdown_s=20.0, started_s=began_s, **options
    )


async def test_a_learner_lives_to_the_end_of_its_run(config: RunConfig) -> None:
    life = await whole_life(config)
    assert life.record.state is RunState.FINISHED
    said = life.pulse
    assert (said.phase, said.step, said.steps) == (LearnerPhase.FINISHED, 40, 40)
    assert (said.tokens, said.cursor) == (40 * 32, 80)
    assert life.member.device == jax.devices()[0].device_kind
    for commit in life.commits.values():
        assert commit.final
        (row,) = commit.progress
        assert (row.tokens, row.cursor) == (40 * 32, 80), "a step was lost or counted twice"


async def test_what_its_last_commits_merged_counts_as_sent_though_the_answers_came_after_them(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, late = MemoryBus.publish, list[str]()

    async def answer_late(bus: MemoryBus, subject: str, payload: bytes, **options: Any) -> Any:
        got = await publish(bus, subject, payload, **options)
        if subject in {Subjects("run").shard(0).contribution(fragment, "a") for fragment in (0, 1)}:
            late.append(subject)
            await asyncio.sleep(0.3)
        return got

    monkeypatch.setattr(MemoryBus, "publish", answer_late)
    said = (await whole_life(config)).pulse
    assert late, "the fault did not fire"
    assert said.contributions == len(late)


async def test_a_signal_while_the_last_answers_are_waited_for_ends_it_as_finished(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = asyncio.get_running_loop()
    handlers, signalled = list[Callable[[], None]](), list[str]()

    async def interrupted(_: ContributionSender) -> None:
        handlers[-1]()
        signalled.append("SIGTERM")
        await asyncio.Event().wait()

    monkeypatch.setattr(ContributionSender, "answered", interrupted)
    # The syncer beside it would take the handlers of this process away when it ends.
    monkeypatch.setattr(loop, "add_signal_handler", lambda _, call: handlers.append(call))
    monkeypatch.setattr(loop, "remove_signal_handler", lambda _: True)
    said = (await whole_life(config)).pulse
    assert signalled
    assert said.phase is LearnerPhase.FINISHED


async def test_it_accounts_for_its_time_and_for_steps_that_an_earlier_incarnation_took_in_vain(
    config: RunConfig,
) -> None:
    lost = pulse(step=10, incarnation=0, tokens=320, cursor=20)
    said = (await whole_life(config, lost)).pulse
    assert said.steps == 40
    parts = (said.busy_s, said.replay_s, said.compile_s, said.recover_s)
    assert all(seconds > 0 for seconds in parts)
    assert sum(parts) < said.alive_s
    assert said.wait_s == 0, "only blocking modes wait"
    assert 0 < said.bytes_up < said.f32_bytes_up
    assert 0 < said.bytes_down < said.f32_bytes_down


async def test_it_steps_back_once_when_it_is_ready_and_before_the_first_step(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen, step = list[str](), Trainer.step

    def counted(*args: Any, **named: Any) -> Any:
        seen.append("step")
        return step(*args, **named)

    monkeypatch.setattr(Trainer, "step", counted)
    await whole_life(config, settled=lambda: seen.append("settled"))
    assert seen == ["settled", *["step"] * 40]


async def test_it_ends_when_its_run_is_begun_anew_under_it(config: RunConfig) -> None:
    endless = config.model_copy(update={"train": TrainConfig(steps=1_000_000)})
    broker = MemoryBroker()
    async with broker.connect() as syncing, broker.connect() as watching:
        record, _ = await find_or_create(watching, "run", endless)
        conducting = asyncio.ensure_future(stand_by(syncing, "run", "s"))
        async with asyncio.timeout(90):
            living = asyncio.ensure_future(_live(broker, endless))
            async for _, commit in ledger.follow_commits(watching, "run"):
                if commit.version == 2:
                    break
            conducting.cancel()
            begin_anew(broker)
            await ledger.create_run(watching, replace(record, created_ns=record.created_ns + 1))
            with pytest.raises(BaseException) as raised:  # noqa: PT011  a group or the error itself
                await living
    cause = first_cause(raised.value)
    assert isinstance(cause, StateLost)
    assert "Run 'run' was created again in this log" in str(cause)


async def test_a_signal_stops_it_with_a_goodbye_and_a_restart_goes_on(
    config: RunConfig, tmp_path: Path
) -> None:
    endless = config.model_copy(update={"train": TrainConfig(steps=1_000_000)})
    broker = MemoryBroker()
    async with broker.connect() as syncing, broker.connect() as watching:
        await find_or_create(watching, "run", endless)
        conducting = asyncio.ensure_future(stand_by(syncing, "run", "s"))
        async with asyncio.timeout(90):
            kept = LearnerSettings(path=tmp_path, save_every_s=3600.0)
            living = asyncio.ensure_future(_live(broker, endless, local=kept))
            async for _, commit in ledger.follow_commits(watching, "run"):
                if commit.version == 4:
                    break
            os.kill(os.getpid(), signal.SIGTERM)
            assert not await living, "its run is not over"
        pulse = (await run_records.newest_each(watching, "run", Pulse))[0]
        record, work = await find_or_create(watching, "run", endless)
        settled = (await ledger.members(watching, "run"))["a"]
        place = await take_place(watching, record, work.plan, "a", Machine("host"))
        conducting.cancel()
        await asyncio.gather(conducting, return_exceptions=True)
    assert pulse.phase is LearnerPhase.STOPPED
    assert (settled.inner, settled.cursor, settled.contrib_sequences) == ("new", 0, (1,))
    shapes = shapes_in(flat(Trainer(work.model, work.config, work.plan).moments_like()))
    saved, _ = read_file(tmp_path / "run" / "a" / "inner.state", shapes)
    assert (saved.origin, saved.incarnation) == (origin_of(record, "a"), 1)
    assert saved.step == pulse.step, "what an orderly stop saves is the end"
    assert place.learner.incarnation == 2
    assert place.missing == ()
    assert 0 < place.start.cursor <= pulse.cursor
    assert 0 < place.start.step <= pulse.step


@pytest.mark.parametrize(
    ("backend", "by", "asked"), [("cpu", 5, [5]), ("cpu", 0, []), ("gpu", 5, [])]
)
def test_only_who_trains_on_a_cpu_steps_back(
    monkeypatch: pytest.MonkeyPatch, backend: str, by: int, asked: list[int]
) -> None:
    seen: list[int] = []
    monkeypatch.setattr("skerry_learner.service.jax.default_backend", lambda: backend)
    monkeypatch.setattr("skerry_learner.service.yield_to_others", seen.append)
    step_back(by)
    assert seen == asked
