"""What a run's config stands for on this machine: its model, its plan, its data."""

from __future__ import annotations

from dataclasses import dataclass, replace

from skerry.algorithm.fragments import Plan, plan
from skerry.client import joining
from skerry.data.corpus import Corpus, load_corpus
from skerry.data.stream import check_readable
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


def prepare(config: RunConfig) -> Work:
    """Build the model, the plan and the corpus; the first thing that is wrong raises its error."""
    model = build_model(config.model, config.train)
    cut = plan(specs_of(model), config.sync.fragments)
    corpus = load_corpus(config.data)
    check_readable(corpus, model)
    return Work(config, model, cut, corpus)


async def find_or_create(bus: Bus, run: str, given: RunConfig) -> tuple[RunRecord, Work]:
    """Return the run's record and its work, created from ``given`` where there is none."""
    record, config, work = await joining.find_or_create(bus, run, given, prepare)
    return record, replace(work, config=config)
