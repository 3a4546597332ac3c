"""What a lab run is: a run's settings, and the islands, links and failures it meets.

Everything is plain data, so that an experiment is a file, and equal scenarios give equal results. A
scenario's file is a run's file with more tables: any run's settings are a scenario of equal islands
that never fail.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from pydantic import Field

from skerry.errors import ConfigError
from skerry.protocol.subjects import checked_token
from skerry.settings import loading
from skerry.settings.checks import check_run
from skerry.settings.local import LocalSettings
from skerry.settings.models import ModelConfig, RunConfig, Table
from skerry.settings.tree import Tree, leaves
from skerry_tools.lab.hostile import Attack

REFERENCE = ModelConfig(layers=2, d_model=64, heads=2, kv_heads=2, d_ff=176)
"""The small reference model: 117 056 parameters over bytes."""
DEFAULTS: dict[str, object] = {"data": {"seq_len": 64, "batch": 4}, "train": {"steps": 500}}
"""Defaults of a lab run, beside the small reference model."""


class IslandSettings(Table):
    """One learner's hardware."""

    name: str = Field(min_length=1)  # in the run
    step_s: float = Field(default=0.1, gt=0)  # mean of one training step, on the lab's clock
    jitter: float = Field(default=0.0, ge=0, lt=1)  # deviation of a step's time, share of its mean
    joins: float = Field(default=0.0, ge=0, lt=1)  # when, as a share of the global clock's steps
    leaves: float | None = Field(default=None, gt=0, le=1)  # when it is killed for good; or never
    hostile: Attack | None = None  # what it sends instead of what it has learnt


class LinkSettings(Table):
    """The way between every island and the broker."""

    latency_s: float = Field(default=0.0, ge=0)  # of a message, each way
    up_bytes_s: float | None = Field(default=None, gt=0)  # from an island; empty: no bound
    down_bytes_s: float | None = Field(default=None, gt=0)  # to an island; empty: no bound


class Failures(Table):
    """Islands that are killed and come back, each on its own at random moments."""

    islands: tuple[str, ...] = ()  # those that fail; the others never do
    every_s: float = Field(default=60.0, gt=0)  # mean from a start to the next kill, exponential
    down_s: float = Field(default=10.0, ge=0)  # mean until it is started again, exponential
    warm: bool = True  # whether the inner optimizer's state outlives the kill
    save_every_s: float = Field(default=30.0, gt=0)  # between two saves of it, as a real learner's


class Judging(Table):
    """When and how the global model is evaluated on held-out text."""

    points: int = Field(default=10, ge=1)  # evaluations over the run, beside the one at the end
    batches: int = Field(default=8, ge=1)  # of each of them
    final_batches: int = Field(default=64, ge=1)  # of the one at the end, whose loss is the run's
    batch: int = Field(default=32, ge=1)  # sequences per batch


class LabScenario(Table):
    """One lab run. ``run`` holds the settings that a real run of the same kind would have."""

    name: str = "lab"
    seed: int = 0  # of the initial parameters, of step times and of failures
    run: RunConfig = RunConfig()
    islands: tuple[IslandSettings, ...] = ()  # empty: sync.learners equal ones
    link: LinkSettings = LinkSettings()
    failures: Failures = Failures()
    judging: Judging = Judging()
    rho: bool = False  # measure the autocorrelation of merged outer gradients, which costs time

    @property
    def fleet(self) -> tuple[IslandSettings, ...]:
        """The islands, named and in order."""
        if self.islands:
            return self.islands
        return tuple(IslandSettings(name=f"learner-{n}") for n in range(self.run.sync.learners))

    @property
    def digest(self) -> str:
        """A digest of everything in the scenario: 16 hexadecimal digits."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def load(
    path: Path | None = None,
    sets: Sequence[str] = (),
    *,
    learners: int | None = None,
    seed: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> LabScenario:
    """Resolve defaults, the file, the environment and ``--set``; later ones win.

    Raises ConfigError with the path of what is wrong, and where it comes from.
    """
    tree = Tree()
    tree.merge(DEFAULTS, "")
    if path is not None:
        tree.put(("name",), path.stem, "")
        tree.merge(loading.read_toml(path), str(path))
    own = {keys: kind for keys, kind in leaves(LabScenario).items() if keys[0] != "run"}
    loading.overlay(tree, own | leaves(RunConfig, LocalSettings), sets, environ)
    if seed is not None:
        tree.put(("seed",), seed, "--seed")
    islands = tree.values.get("islands")
    if learners is not None and islands:
        msg = "--learners is for islands that are all alike: leave it out, or islands."
        raise ConfigError(msg, path="islands")
    if learners is not None:
        tree.put(("sync", "learners"), learners, "--learners")
    elif isinstance(islands, list) and ("sync", "learners") not in tree.origins:
        each = [one for one in cast("list[Any]", islands) if isinstance(one, dict)]  # or refused
        first = sum(not cast("dict[str, Any]", one).get("joins") for one in each)
        tree.put(("sync", "learners"), max(1, first), "islands")
    if not tree.values.get("model"):
        tree.merge({"model": REFERENCE.model_dump(mode="json", exclude_unset=True)}, "")
    run = loading.validated(RunConfig, tree)
    check_run(run)
    scenario = loading.validated(LabScenario, tree).model_copy(update={"run": run})
    check(scenario)
    return scenario


def check(scenario: LabScenario) -> None:
    """Raise ConfigError if the islands of a scenario contradict each other or its run."""
    for sentence in _contradictions(scenario):
        raise ConfigError(sentence, path=sentence.partition(" ")[0])


def _contradictions(scenario: LabScenario) -> Iterator[str]:
    fleet, names = scenario.fleet, [island.name for island in scenario.fleet]
    for name in names:
        checked_token(name, "islands.name")
        if names.count(name) > 1:
            yield f"islands has {name!r} {names.count(name)} times: give each a name of its own."
    for name in scenario.failures.islands:
        if name not in names:
            few = ", ".join(names[:8])
            yield f"failures.islands has {name!r}, which is no island: there are {few}."
    for island in fleet:
        if island.leaves is not None and island.leaves <= island.joins:
            yield (
                f"islands has {island.name!r} leave at {island.leaves:g} of the run, but join at"
                f" {island.joins:g}: let it leave later."
            )
    first, quorum = sum(not island.joins for island in fleet), scenario.run.sync.quorum
    if first < quorum:
        yield (
            f"islands has {first} that are there from the start, but sync.quorum is {quorum}:"
            f" set joins = 0 for at least {quorum}."
        )
