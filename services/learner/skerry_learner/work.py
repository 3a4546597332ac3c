"""What a run's config stands for on this machine: its model, its plan, its data."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import NamedTuple

from skerry.algorithm.fragments import Plan, plan
from skerry.client import joining
from skerry.data.corpus import Corpus, load_corpus
from skerry.data.stream import check_readable
from skerry.errors import ConfigError
from skerry.log.base import Bus
from skerry.models.base import Model, build_model, specs_of
from skerry.protocol.messages import RunRecord
from skerry.settings.models import RunConfig


@dataclass(frozen=True, slots=True)
class Work:
    """What a config stands for on this machine."""

    config: RunConfig
    model: Model
    plan: Plan
    corpus: Corpus


class Planned(NamedTuple):
    """A config's model, and how it is cut into fragments."""

    model: Model
    plan: Plan


def planned(config: RunConfig) -> Planned:
    """Build the model and the plan; the first thing that is wrong raises its error."""
    model = build_model(config.model, config.train)
    specs = specs_of(model)
    if config.train.inner == "muon" and not any(leaf.is_matrix for leaf in specs):
        msg = (
            "train.inner is muon, which trains matrices, and this model has none: set"
            " train.inner=adamw."
        )
        raise ConfigError(msg, path="train.inner")
    return Planned(model, plan(specs, config.sync.fragments, config.sync.shards))


def prepare(config: RunConfig) -> Work:
    """Build the model, the plan and the corpus; the first thing that is wrong raises its error."""
    model, cut = planned(config)
    corpus = load_corpus(config.data)
    check_readable(corpus, model)
    return Work(config, model, cut, corpus)


async def find_or_create(bus: Bus, run: str, given: RunConfig) -> tuple[RunRecord, Work]:
    """Return the run's record and its work, created from ``given`` where there is none."""
    record, config, work = await joining.find_or_create(bus, run, given, prepare)
    return record, replace(work, config=config)


async def create_run(bus: Bus, run: str, given: RunConfig) -> None:
    """Create a run and say so; one that is there stays as it is."""
    began_ns = time.time_ns()
    async with bus:
        record, config, (_, cut) = await joining.find_or_create(
            bus, run, given, planned, waits=False
        )
    about = f"{cut.parameters:,} parameters in {config.sync.fragments} fragments"
    if record.created_ns >= began_ns:
        print(f"Run {run!r} is created: {about}. Learners join it by its id.")
    else:
        print(f"Run {run!r} is in this log already: {about}. Nothing was changed.")
