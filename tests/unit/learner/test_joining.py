"""Joining a run: who creates it, what is refused before anything compiles, and settling in."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import structlog

from skerry import folders
from skerry.algorithm.fragments import LeafSpec, Plan, plan
from skerry.client import joining
from skerry.client.inner import RestoredState, fresh
from skerry.client.joining import check_manifests, check_window, offers, take_place
from skerry.errors import (
    BrokerUnavailable,
    BrokerUnfit,
    ConfigError,
    CorpusError,
    RunMismatch,
    StateLost,
    StorageFull,
)
from skerry.log import ledger, recovery, run_records
from skerry.log import place as places
from skerry.log.memory import MemoryBroker, MemoryBus
from skerry.log.streams import check_payload, specs
from skerry.models import hf
from skerry.models.adapters import base_folder
from skerry.models.lora import Lora
from skerry.models.machine import Machine
from skerry.models.presets import OWN
from skerry.protocol.messages import InnerState
from skerry.service import shell
from skerry.settings.loading import decided, run_config_from_json
from skerry.settings.models import (
    DataConfig,
    LogConfig,
    ModelConfig,
    RunConfig,
    SyncConfig,
    TrainConfig,
)
from skerry_learner import work as works
from skerry_learner.work import find_or_create, prepare
from skerry_tools.audit.verify import verify
from tests.support.builders import pulse
from tests.support.hf_folder import random_folder
from tests.support.scripted_run import ScriptedRun


async def test_the_first_learner_creates_the_run_and_the_next_takes_its_config(
    bus: MemoryBus, config: RunConfig
) -> None:
    record, work = await find_or_create(bus, "run", config)
    other = config.model_copy(update={"train": TrainConfig(steps=7)})
    again, theirs = await find_or_create(bus, "run", other)
    assert again == record
    assert theirs.config == work.config == decided(config)
    assert theirs.plan.digest == work.plan.digest == record.plan_digest


async def test_a_learner_of_another_release_than_the_runs_is_told_so(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    await find_or_create(bus, "run", config)
    monkeypatch.setattr(joining, "version", lambda _: "9.9.9")
    with structlog.testing.capture_logs() as logs:
        record, _ = await find_or_create(bus, "run", config)
    (said,) = [entry for entry in logs if entry["event"] == "other_release"]
    assert (said["created_by"], said["here"]) == (record.skerry_version, "9.9.9")


async def test_learners_that_create_at_once_agree(bus: MemoryBus, config: RunConfig) -> None:
    other = config.model_copy(update={"train": TrainConfig(steps=7)})
    one, two = await asyncio.gather(
        find_or_create(bus, "run", config), find_or_create(bus, "run", other)
    )
    assert one[0] == two[0]
    assert one[1].config == two[1].config


async def test_of_learners_that_create_at_once_none_trains_beside_other_frozen_weights(
    bus: MemoryBus, config: RunConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folders, "_offered", [])
    copies = [str(random_folder(tmp_path / str(seed), seed=seed)) for seed in range(2)]
    for folder in copies:
        folders.offer(folder)
    given = [ModelConfig(path=folder, lora_rank=2, lora_targets=("q_proj",)) for folder in copies]
    found = await asyncio.gather(
        *(find_or_create(bus, "run", config.model_copy(update={"model": one})) for one in given)
    )
    models = [work.model for _, work in found]
    read = [base_folder(model.config) for model in models if isinstance(model, Lora)]
    wanted = found[0][1].config.model.weights
    assert [hf.digest(str(folder)) for folder in read] == [wanted] * 2


async def test_run_whose_ledger_is_gone_is_not_created_again(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recovery, "LOOK_PAUSES_S", (0.0,) * 8)
    scripted = await ScriptedRun.begin(bus, "run")
    await scripted.commit_all()
    del bus.broker.streams["SKERRY_run_LEDGER"]
    with pytest.raises(StateLost, match="has lost its record in the ledger"):
        await find_or_create(bus, "run", config)
    assert "SKERRY_run_LEDGER" not in bus.broker.streams


async def test_another_plan_digest_is_a_mismatch(bus: MemoryBus, config: RunConfig) -> None:
    record, _ = await find_or_create(bus, "run", config)
    wrong = replace(record, run="other", plan_digest=record.plan_digest ^ 1)
    await bus.declare(specs("other"))
    await ledger.create_run(bus, wrong)
    with pytest.raises(RunMismatch, match="another fragment plan"):
        await find_or_create(bus, "other", config)


@pytest.mark.parametrize(
    ("leaves", "about"),
    [
        ({"a": (4,), "b": (2, 3)}, r"b is \[2, 2\] in the run and \[2, 3\] here"),
        ({"a": (4,)}, r"b is \[2, 2\] in the run and missing here"),
        ({"a": (4,), "b": (2, 2), "c": (1,)}, r"c is missing in the run and \[1\] here"),
    ],
)
async def test_the_first_tensor_that_differs_is_named(
    bus: MemoryBus, leaves: dict[str, tuple[int, ...]], about: str
) -> None:
    @dataclass(frozen=True)
    class Cut:
        plan: Plan

    def cut(shapes: dict[str, tuple[int, ...]]) -> Cut:
        return Cut(plan([LeafSpec(name, shape) for name, shape in shapes.items()], 1))

    await joining.find_or_create(bus, "run", RunConfig(), lambda _: cut({"a": (4,), "b": (2, 2)}))
    with pytest.raises(RunMismatch, match=about):
        await joining.find_or_create(bus, "run", RunConfig(), lambda _: cut(leaves))


@pytest.mark.parametrize("steps", [1, 7])
async def test_a_loop_hears_of_settings_that_do_not_count_only_where_it_gave_them(
    bus: MemoryBus, steps: int
) -> None:
    @dataclass(frozen=True)
    class Cut:
        plan: Plan

    def begun(steps: int) -> RunConfig:
        return RunConfig.model_validate({"train": {"steps": steps}, "sync": {"learners": 1}})

    own, cut = ModelConfig(preset=OWN), Cut(plan([LeafSpec("w", (4, 4))], 1))
    await joining.find_or_create(bus, "run", begun(1), lambda _: cut, own)
    with structlog.testing.capture_logs() as logs:
        await joining.find_or_create(bus, "run", begun(steps), lambda _: cut, own)
        await joining.find_or_create(bus, "run", RunConfig(), lambda _: cut, own)
    said = [entry["ignored"] for entry in logs if entry["event"] == "config_from_ledger"]
    assert said == ([] if steps == 1 else [("train.steps",)])


async def test_each_name_has_its_own_shard_and_each_start_its_own_incarnation(
    bus: MemoryBus, config: RunConfig
) -> None:
    record, work = await find_or_create(bus, "run", config)
    places = [
        await take_place(bus, record, work.plan, name, Machine("host")) for name in ("a", "b", "a")
    ]
    assert [p.member.shard for p in places] == [0, 1, 0]
    assert [p.learner.incarnation for p in places] == [1, 1, 2]
    assert places[0].missing == (0, 1)


async def test_what_each_start_reads_is_in_the_ledger_and_a_change_is_noted(
    bus: MemoryBus, config: RunConfig
) -> None:
    record, work = await find_or_create(bus, "run", config)
    for data in (work.corpus.digest, work.corpus.digest, "another"):
        place = await take_place(bus, record, work.plan, "a", Machine("host"), data=data)
        await joining.settle(bus, place.member, fresh(place.learner.incarnation, 0, "new"))
        report = await verify(bus, "run")
        assert [row.data for row in report.learners] == [data]
        assert len([note for note in report.notes if "reads other text" in note]) == (
            data == "another"
        )


async def test_how_far_an_earlier_incarnation_had_read_is_known_from_its_last_pulse(
    bus: MemoryBus, config: RunConfig
) -> None:
    record, work = await find_or_create(bus, "run", config)
    first = await take_place(bus, record, work.plan, "a", Machine("host"))
    said = pulse(step=6, tokens=96, cursor=48)
    await run_records.publish(bus, said)
    second = await take_place(bus, record, work.plan, "a", Machine("host"))
    assert (first.seen, second.seen, second.start.cursor) == (0, 48, 0)


async def test_settling_in_waits_for_a_broker_that_is_away(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    record, work = await find_or_create(bus, "run", config)
    place = await take_place(bus, record, work.plan, "a", Machine("host"))
    failures = [BrokerUnavailable("away"), StorageFull("full")]
    settle_in = places.settle_in

    async def flaky(*args: Any) -> None:
        if failures:
            raise failures.pop()
        await settle_in(*args)

    monkeypatch.setattr(places, "settle_in", flaky)
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    await joining.settle(bus, place.member, RestoredState(InnerState.WARM, "saved", 12))
    member = (await ledger.members(bus, "run"))["a"]
    assert (member.inner, member.inner_age_steps) == (InnerState.WARM, 12)


def test_a_corpus_or_model_that_does_not_work_is_found_before_the_run_exists(
    config: RunConfig,
) -> None:
    broken = config.model_copy(update={"data": DataConfig(source="text", paths=("/nowhere",))})
    with pytest.raises(CorpusError):
        prepare(broken)


async def test_a_window_nobody_chose_grows_until_it_covers_what_is_replayed(
    bus: MemoryBus, config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = plan([LeafSpec("w", (16384, 8192))], 1)
    prepared = replace(prepare(config), config=config, plan=large)
    monkeypatch.setattr(works, "prepare", lambda given: replace(prepared, config=given))
    unset = config.model_copy(update={"log": LogConfig()})
    with structlog.testing.capture_logs() as logs:
        record, work = await find_or_create(bus, "run", unset)
        _, again = await find_or_create(bus, "run", unset)
    rounds, blocks = config.sync.snapshot_every + 1, 16384 * 8192 // 256
    assert work.config.log.window_bytes == rounds * config.sync.learners * 130 * blocks
    assert again.config == work.config == run_config_from_json(record.config_json)
    streams = {info.spec.name: info.spec.max_bytes for info in await bus.streams()}
    assert streams["SKERRY_run_CONTRIB_0"] == work.config.log.window_bytes
    assert "config_from_ledger" not in [entry["event"] for entry in logs]


def test_window_too_small_for_initial_parameters_is_refused_with_the_size_to_set() -> None:
    cut = plan([LeafSpec("w", (1024, 1024))], 1)
    config = RunConfig(log=LogConfig(window_bytes=4 * 1024**2 - 1))
    with pytest.raises(ConfigError, match=r"set log\.window_bytes=8388608"):
        check_window(cut, config)


def test_a_fragment_of_more_chunks_than_a_manifest_names_is_refused_with_what_to_set() -> None:
    leaves = [LeafSpec(f"w{number}", (1 << 20,)) for number in range(40)]
    config = RunConfig(sync=SyncConfig(fragments=1, chunk_bytes=4096))
    with pytest.raises(ConfigError, match=r"set sync\.fragments to at least 4, or") as refused:
        check_manifests(plan(leaves, 1), config)
    assert refused.value.path == "sync.fragments"
    check_manifests(plan(leaves, 4), config)


async def test_broker_whose_messages_are_too_small_is_named_with_its_setting() -> None:
    bus = MemoryBroker(max_payload_bytes=64 * 1024).connect()
    with pytest.raises(BrokerUnfit, match="put `max_payload: 532480` into its config file"):
        check_payload(bus, 512 * 1024)


@pytest.mark.parametrize(
    ("model", "folder", "has"),
    [
        ({}, "", True),
        ({"weights": "aa"}, "", False),
        ({"weights": "aa"}, "models/mine", True),
        ({"weights": "aa", "lora_rank": 4}, "", True),
    ],
    ids=["fresh parameters", "another's weights", "one's own copy", "adapters"],
)
def test_a_learner_without_a_runs_weights_offers_no_parameters(
    model: dict[str, Any], folder: str, *, has: bool
) -> None:
    assert offers(ModelConfig.model_validate(model), folder) == has
