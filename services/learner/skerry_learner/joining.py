"""How a learner finds or creates its run, and what the log already knows about it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from importlib.metadata import version

import structlog

from skerry import settings
from skerry.bus import ledger, state
from skerry.bus.base import Bus, StreamSpec
from skerry.bus.streams import specs
from skerry.core.fragments import Plan, plan
from skerry.errors import BrokerUnfit, ConfigError, RunMismatch, RunNotFound
from skerry.settings import RunConfig
from skerry.wire.messages import RunRecord, RunState
from skerry_learner.data.corpus import Corpus, load_corpus
from skerry_learner.models.base import Model, specs_of
from skerry_learner.models.factory import build_model
from skerry_learner.sync.rules import Progress
from skerry_learner.sync.session import Learner

log = structlog.get_logger()

ENVELOPE_BYTES = 8192
"""Room for the header of a chunk; norms of a contribution are most of it."""


@dataclass(frozen=True, slots=True)
class Work:
    """What a config stands for on this machine."""

    config: RunConfig
    model: Model
    plan: Plan
    corpus: Corpus


@dataclass(frozen=True, slots=True)
class Place:
    """A learner's place in a run: who it is, which stream it reads, and where it goes on."""

    learner: Learner
    shard: int
    start: Progress
    missing: tuple[int, ...]


def prepare(config: RunConfig) -> Work:
    """Build the model, the plan and the corpus; the first thing that is wrong raises its error."""
    model = build_model(config.model, config.train)
    cut = plan(specs_of(model), config.sync.fragments)
    return Work(config, model, cut, load_corpus(config.data))


async def find_or_create(bus: Bus, run: str, given: RunConfig) -> tuple[RunRecord, Work]:
    """Return the run's record and its work; create the run from ``given`` where there is none.

    The config in the ledger counts; RunMismatch if this release cuts its model differently.
    """
    try:
        record = await ledger.read_run(bus, run)
    except RunNotFound:
        return await _create(bus, run, given)
    agreed = _agreed(record, given)
    check_payload(bus, agreed)
    work = await asyncio.to_thread(prepare, agreed)
    await bus.declare(_streams(run, work.config))
    return record, _checked(record, work)


async def _create(bus: Bus, run: str, given: RunConfig) -> tuple[RunRecord, Work]:
    check_payload(bus, given)
    work = await asyncio.to_thread(prepare, given)
    check_window(work.plan, given)
    for difference in await bus.declare(_streams(run, given)):
        log.info("stream_mended", difference=difference)
    wanted = RunRecord(
        run=run,
        config_json=settings.to_json(given),
        leaves=work.plan.leaves,
        fragments=given.sync.fragments,
        plan_digest=work.plan.digest,
        created_ns=time.time_ns(),
        skerry_version=version("skerry"),
    )
    record = await ledger.create_run(bus, wanted)
    if record == wanted:
        log.info("run_created", run=run, parameters=work.plan.parameters)
        return record, work
    config = _agreed(record, given)
    if config != given:
        work = await asyncio.to_thread(prepare, config)
    return record, _checked(record, work)


def check_payload(bus: Bus, config: RunConfig) -> None:
    """Raise BrokerUnfit if the broker's messages cannot hold a chunk, before anything compiles."""
    needed = config.sync.chunk_bytes + ENVELOPE_BYTES
    if needed > bus.max_payload_bytes:
        msg = (
            f"The broker takes messages of {bus.max_payload_bytes} bytes, a chunk needs {needed}:"
            f" put `max_payload: {needed}` into its config file, or lower sync.chunk_bytes before"
            " the run is created."
        )
        raise BrokerUnfit(msg)


def check_window(cut: Plan, config: RunConfig) -> None:
    """Raise ConfigError if the contribution window cannot hold every learner's first offer.

    Genesis travels in f32, and what drops out of the window before a syncer has come is lost.
    """
    needed = 4 * cut.parameters * config.sync.learners
    if needed > config.log.window_bytes:
        msg = (
            f"log.window_bytes is {config.log.window_bytes}, but {config.sync.learners} learners"
            f" offer {cut.parameters} initial parameters in {needed} bytes:"
            f" set log.window_bytes={2 * needed}."
        )
        raise ConfigError(msg, path="log.window_bytes")


def _streams(run: str, config: RunConfig) -> tuple[StreamSpec, ...]:
    return specs(
        run,
        replicas=config.log.replicas,
        window_bytes=config.log.window_bytes,
        window_s=config.log.window_s,
    )


def _agreed(record: RunRecord, given: RunConfig) -> RunConfig:
    """Return the run's own config, and warn where the given one says otherwise."""
    config = settings.run_config_from_json(record.config_json)
    different = settings.differences(given, config)
    if different and given != RunConfig():
        log.warning("config_from_ledger", ignored=list(different))
    return config


def _checked(record: RunRecord, work: Work) -> Work:
    if work.plan.digest == record.plan_digest:
        return work
    msg = (
        f"Run {record.run!r} was created by skerry {record.skerry_version} with another model or"
        " fragment plan than this learner has: use the same release and the same model code."
    )
    raise RunMismatch(msg)


async def take_place(bus: Bus, record: RunRecord, work: Work, name: str, host: str) -> Place:
    """Join the run, and read from the ledger how far it and this learner's stream are."""
    member = await ledger.join(bus, record.run, name, host, time.time_ns())
    commits = await ledger.last_commits(bus, record.run)
    manifests = await state.read_manifests(bus, record.run, work.plan)
    known = [*commits.values(), *(m.commit for m in manifests.values())]
    cursors = [row.cursor for c in known for row in c.progress if row.learner == name]
    start = Progress(
        step=max((c.step for c in known), default=0),
        steps=0,
        tokens=0,
        cursor=max(cursors, default=0),
    )
    missing = tuple(f.index for f in work.plan.fragments if f.index not in manifests)
    learner = Learner(record.run, name, member.incarnation)
    log.info(
        "joined",
        run=record.run,
        incarnation=member.incarnation,
        shard=member.shard,
        step=start.step,
        cursor=start.cursor,
    )
    return Place(learner, member.shard, start, missing)


def is_over(record: RunRecord) -> bool:
    """Tell whether the run has been finished."""
    return record.state is RunState.FINISHED
