"""What is compiled for a run, kept for the next run of this process that needs the same.

An experiment runs one configuration with many seeds and scenarios; compiling takes longer than some
of them.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from dataclasses import dataclass

import jax

from skerry_learner.joining import Work
from skerry_learner.trainer.trainer import Programs
from skerry_tools.lab.evaluation import Loss

MOST = 8
"""Configurations whose programs are kept."""

_kept: OrderedDict[str, Compiled] = OrderedDict()


@dataclass(frozen=True, slots=True)
class Compiled:
    """The programs of trainers, and the loss that is evaluated."""

    programs: Programs
    loss: Loss


def compiled(work: Work) -> Compiled:
    """Return what this work needs, traced when it is first called; shapes may differ."""
    key = _key(work)
    found = _kept.get(key)
    if found is None:
        programs = Programs.of(work.model, work.config, work.plan)
        found = _kept[key] = Compiled(programs, jax.jit(work.model.loss))
        while len(_kept) > MOST:
            _kept.popitem(last=False)
    _kept.move_to_end(key)
    return found


def _key(work: Work) -> str:
    """Return what ``Programs.of`` depends on: no seed, no text, no policy of the syncer."""
    config = work.config
    train = config.train.model_dump(mode="json", exclude={"seed", "steps", "duration_s"})
    parts = (
        config.model.model_dump(mode="json"),
        train,
        config.sync.adoption,
        work.plan.digest,
    )
    return json.dumps(parts, sort_keys=True)
