"""How a learner finds or creates its run, and what the log already knows about it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.metadata import version
from typing import Protocol, TypeVar

import structlog

from skerry.algorithm.fragments import BLOCK, LeafSpec, Plan, trainable
from skerry.algorithm.presets import state_vectors
from skerry.client.inner import RestoredState
from skerry.client.telemetry import LearnerIdentity
from skerry.data.source import with_tokenizer
from skerry.errors import ConfigError, Denied, RunMismatch
from skerry.log import ledger, place, run_records
from skerry.log.base import Bus
from skerry.log.client import both
from skerry.log.recovery import find_run
from skerry.log.streams import check_payload, specs
from skerry.models.adapters import digest_of
from skerry.models.machine import Machine
from skerry.models.presets import written_out
from skerry.protocol.codec import blocks_per_chunk
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import MemberRecord, Pulse, RunRecord, RunState
from skerry.protocol.parts import INITIAL_BYTES, MOST_WHOLE_CHUNKS, window_bytes
from skerry.protocol.subjects import Subjects
from skerry.service.shell import outlast
from skerry.settings import loading
from skerry.settings.checks import remark_on_rate
from skerry.settings.models import ModelConfig, RunConfig
from skerry.tasks import in_thread

log = structlog.get_logger()


class Prepared(Protocol):
    """What this machine makes of a config: at least a fragment plan."""

    @property
    def plan(self) -> Plan: ...


W = TypeVar("W", bound=Prepared)


@dataclass(frozen=True, slots=True)
class LearnerPlace:
    """A learner's place in a run: its identity, its data stream, and where it goes on.

    ``member`` is its record, to be published once its inner state is known. ``missing`` are the
    fragments that the log lacks and this learner can offer, ``recorded`` the newest versions in the
    ledger. ``seen`` is the cursor in the last pulse of an earlier incarnation.
    """

    learner: LearnerIdentity
    member: MemberRecord
    start: TrainingProgress
    missing: tuple[int, ...]
    recorded: Mapping[int, int] = field(default_factory=dict[int, int])
    seen: int = 0


async def find_or_create(
    bus: Bus,
    run: str,
    given: RunConfig,
    prepare: Callable[[RunConfig], W],
    model: ModelConfig | None = None,
    *,
    waits: bool = True,
) -> tuple[RunRecord, RunConfig, W]:
    """Return the run's record, its config and what ``prepare`` makes of the config.

    A run that does not exist is created from ``given``; else the config in the ledger counts. A
    client that may not create it ``waits`` until another one has, or raises Denied.
    ``model`` is the model that a new record names for a training loop that joins; such a loop may
    bring its own data, so the run's are checked only when they are read. Raises RunMismatch if this
    learner's tensors are cut differently, StateLost if the run's record is gone while the log still
    holds state of it.
    """
    record, work, chosen = await find_run(bus, run), None, given != RunConfig()
    if record is None and model is not None:
        given = given.for_model(model)
    if record is None:
        check_payload(bus, given.sync.chunk_bytes)
        work = await in_thread(prepare, given)
        created_ns = time.time_ns()
        try:
            record = await create(bus, run, given, work.plan, created_ns)
        except Denied as error:
            if not waits:
                raise
            log.info("waits_for_run", run=run, reason=str(error))
            record = await ledger.wait_run(bus, run)
        if record.created_ns == created_ns:
            _say_created(run, given, work.plan)
    if record.skerry_version != version("skerry"):
        hint = "all processes of a run should be of one release"
        log.warning(
            "other_release", created_by=record.skerry_version, here=version("skerry"), hint=hint
        )
    config = loading.run_config_from_json(record.config_json, record.skerry_version)
    config = loading.with_own_data(config, given, reads=model is None)
    # The tensors of a loop say what model it has: the defaults of its settings are that model's.
    given = given if model is None else given.for_model(config.model)
    wanted = await in_thread(_wanted, given, record, config)
    different = loading.differences(wanted, config)
    if different and chosen:
        log.warning("config_from_ledger", ignored=different)
    if work is None or wanted != config:
        check_payload(bus, config.sync.chunk_bytes)
        work = await in_thread(prepare, config)
        with suppress(Denied):  # only some clients may correct the streams
            await bus.declare(specs(run, shards=record.shards, **config.log.model_dump()))
    if (work.plan.digest, work.plan.shards) != (record.plan_digest, record.shards):
        raise _mismatch(record, work.plan.specs)
    return record, config, work


def _wanted(given: RunConfig, record: RunRecord, config: RunConfig) -> RunConfig:
    """Return the config as this client would have recorded it.

    Weights that it only offers count as the run's: they are compared when they are offered.
    """
    weights, own = given.model.weights, given.model.path
    if own:
        weights = digest_of(own) if given.model.lora_rank else config.model.weights
    return _recorded(given, sum(leaf.size for leaf in trainable(record.leaves)), weights)


def _say_created(run: str, config: RunConfig, cut: Plan) -> None:
    log.info("run_created", run=run, parameters=cut.parameters)
    if remark := remark_on_rate(config):
        log.warning("rate_not_measured", hint=remark)


def _mismatch(record: RunRecord, ours: tuple[LeafSpec, ...]) -> RunMismatch:
    """Name the first tensor in which a run and this learner differ."""
    theirs, mine = ({leaf.name: leaf for leaf in leaves} for leaves in (record.leaves, ours))
    for name in sorted({*theirs, *mine}):
        if theirs.get(name) != mine.get(name):
            about = (
                f"{_described(theirs.get(name))} in the run and {_described(mine.get(name))} here"
            )
            msg = (
                f"Run {record.run!r} has another model than this learner: {name} is {about}. Use"
                " the model that the run was created with, or another run id."
            )
            return RunMismatch(msg)
    msg = (
        f"Run {record.run!r} was created by skerry {record.skerry_version} with another fragment"
        " plan than this learner has: use the same release and the same model code."
    )
    return RunMismatch(msg)


def _described(leaf: LeafSpec | None) -> str:
    """Say what a tensor is to a plan."""
    if leaf is None:
        return "missing"
    more = ("embedding" if leaf.embedding else "", "" if leaf.trainable else "frozen")
    unit = f"in units of {leaf.unit}" if leaf.unit else ""
    return ", ".join(part for part in (str(list(leaf.shape)), *more, unit) if part)


def _recorded(config: RunConfig, parameters: int, weights: str) -> RunConfig:
    """Return the config as a run's record holds it, with no setting left open.

    An unset ``log.window_bytes`` becomes large enough for all contributions that a log should keep.
    """
    model = written_out(config.model).model_copy(update={"weights": weights})
    config = config.model_copy(update={"model": model, "data": with_tokenizer(config.data)})
    sync, log_config = config.sync, config.log
    scheme, every = sync.contribution_scheme, sync.snapshot_every
    room = log_config.bytes_for(window_bytes(parameters, sync.learners, scheme, every))
    log_config = log_config.model_copy(update={"window_bytes": room})
    return loading.decided(config.model_copy(update={"log": log_config}))


async def create(bus: Bus, run: str, given: RunConfig, cut: Plan, created_ns: int) -> RunRecord:
    """Declare a run's streams and create its record; return another client's if that came first."""
    folder = given.model.path
    weights = await asyncio.to_thread(digest_of, folder) if folder else ""
    config = _recorded(given, cut.parameters, weights)
    check_window(cut, config)
    check_manifests(cut, config)
    check_payload(bus, config.sync.chunk_bytes, max(len(f.slices) for f in cut.fragments))
    for difference in await bus.declare(
        specs(run, shards=config.sync.shards, **config.log.model_dump())
    ):
        log.info("stream_mended", difference=difference)
    wanted = RunRecord(
        run=run,
        config_json=loading.to_json(config),
        leaves=cut.specs,
        fragments=given.sync.fragments,
        shards=cut.shards,
        plan_digest=cut.digest,
        created_ns=created_ns,
        skerry_version=version("skerry"),
        state=RunState.OPEN,
    )
    return await ledger.create_run(bus, wanted)


def check_window(cut: Plan, config: RunConfig) -> None:
    """Raise ConfigError if the contribution window cannot hold the initial parameters, in f32.

    If they drop out of the window before a syncer reads them, they are lost.
    """
    # Shards have equal windows, and not quite as many parameters.
    largest = max(sum(f.size for f in cut.of_shard(shard)) for shard in range(cut.shards))
    needed = INITIAL_BYTES * largest * cut.shards
    if needed > config.log.window_bytes:
        msg = (
            f"log.window_bytes is {config.log.window_bytes}, but the {cut.parameters} initial"
            f" parameters are offered in {needed} bytes: set log.window_bytes={2 * needed}."
        )
        raise ConfigError(msg, path="log.window_bytes")


def check_manifests(cut: Plan, config: RunConfig) -> None:
    """Raise ConfigError if a fragment has so many chunks that no manifest could name all of them.

    No version of it could be committed.
    """
    sync, outer = config.sync, config.outer
    blocks = -(-cut.largest // BLOCK)
    vectors = 1 + state_vectors(outer.preset, sync.h_steps, outer.momentum)
    chunks = sum(
        -(-blocks // blocks_per_chunk(scheme, sync.chunk_bytes))
        for scheme in (sync.global_scheme, *["f32"] * vectors)
    )
    if chunks > MOST_WHOLE_CHUNKS:
        least = -(-sync.fragments * chunks // MOST_WHOLE_CHUNKS)
        msg = (
            f"sync.fragments is {sync.fragments}: a fragment of {cut.largest} parameters takes"
            f" {chunks} chunks of sync.chunk_bytes, and a manifest names {MOST_WHOLE_CHUNKS}: set"
            f" sync.fragments to at least {least}, or sync.chunk_bytes higher."
        )
        raise ConfigError(msg, path="sync.fragments")


def offers(model: ModelConfig, folder: str) -> bool:
    """Return True if a learner has the initial parameters of a run with this model.

    A run that begins with weights gets them from learners that have their ``folder``; others wait.
    Every learner can make initial adapters (``lora_rank``).
    """
    return bool(folder or model.lora_rank or not model.weights)


async def take_place(
    bus: Bus,
    record: RunRecord,
    cut: Plan,
    name: str,
    machine: Machine,
    wall_ns: Callable[[], int] = time.time_ns,
    *,
    data: str = "",
    able: bool = True,
) -> LearnerPlace:
    """Join the run, and read from the log how far the run and this learner's stream are.

    ``data`` is the digest of the text that it reads, for the record; ``able`` says whether it can
    offer the run's initial parameters.
    """
    run = record.run
    last, taken = await both(
        run_records.newest(bus, run, Pulse, Subjects(run).pulse(name)),
        place.take_place(bus, run, cut, name, host=machine.host, now_ns=wall_ns(), offers=able),
    )
    config = loading.run_config_from_json(record.config_json, record.skerry_version)
    member = replace(
        taken.member,
        data=data,
        mesh=machine.mesh,
        device=machine.device,
        peak_tokens_per_s=machine.peak_tokens_per_s(config),
    )
    missing = tuple(f.index for f in cut.fragments if f.index not in taken.manifests)
    if missing and not able:
        log.info("waits_for_weights")
    log.info(
        "joined",
        run=run,
        incarnation=member.incarnation,
        shard=member.shard,
        step=member.step,
        cursor=member.cursor,
    )
    return LearnerPlace(
        learner=LearnerIdentity(
            run, name, member.incarnation, record.created_ns, shards=record.shards
        ),
        member=member,
        start=TrainingProgress(step=member.step, steps=0, tokens=0, cursor=member.cursor),
        missing=missing if able else (),
        recorded=taken.recorded,
        seen=last.cursor if last is not None else 0,
    )


async def settle(bus: Bus, member: MemberRecord, restored: RestoredState) -> None:
    """Publish the record of where this incarnation goes on, waiting for a broker that is away.

    Raises Superseded when a newer incarnation has joined meanwhile.
    """
    settled = replace(member, inner=restored.inner, inner_age_steps=restored.age_steps)
    await outlast(partial(place.settle_in, bus, settled), event="member_record_unsent")
    log.info(
        "settled",
        inner=restored.inner,
        reason=restored.reason,
        inner_age_steps=restored.age_steps,
        step=settled.step,
        cursor=settled.cursor,
    )
