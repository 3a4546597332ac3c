"""What a lab run is: a run's settings, and the islands, links and failures it meets.

Everything is plain data, so that an experiment is a file, and equal scenarios give equal results.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator

from pydantic import Field

from skerry.errors import ConfigError
from skerry.protocol.subjects import checked_token
from skerry.settings.models import ModelConfig, RunConfig, Table

REFERENCE = ModelConfig(layers=2, d_model=64, heads=2, kv_heads=2, d_ff=176)
"""The small reference model: 117 056 parameters over bytes."""


class Island(Table):
    """One learner's hardware."""

    name: str = Field(min_length=1)
    """Its name in the run."""
    step_s: float = Field(default=0.1, gt=0)
    """Mean seconds of one training step, on the lab's clock."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """Standard deviation of a step's time, as a share of its mean."""
    joins: float = Field(default=0.0, ge=0, lt=1)
    """When it joins, as a share of the run's steps on the global clock."""
    leaves: float | None = Field(default=None, gt=0, le=1)
    """When it is taken away, killed, for good; empty: never."""


class LinkSettings(Table):
    """The way between every island and the broker."""

    latency_s: float = Field(default=0.0, ge=0)
    """Seconds that a message is on its way, each way."""
    up_bytes_s: float | None = Field(default=None, gt=0)
    """Bytes a second from an island; empty: no bound."""
    down_bytes_s: float | None = Field(default=None, gt=0)
    """Bytes a second to an island; empty: no bound."""


class Failures(Table):
    """Islands that are killed and come back, each on its own at random moments."""

    islands: tuple[str, ...] = ()
    """Islands that fail; the others never do."""
    every_s: float = Field(default=60.0, gt=0)
    """Mean seconds from a start to the next kill, exponentially distributed."""
    down_s: float = Field(default=10.0, ge=0)
    """Mean seconds until it is started again, exponentially distributed."""
    warm: bool = True
    """Whether the inner optimizer's state outlives the kill."""
    save_every_s: float = Field(default=30.0, gt=0)
    """How old that state may be: seconds between two saves, a real learner's default."""


class Judging(Table):
    """When and how the global model is evaluated on held-out text."""

    points: int = Field(default=10, ge=1)
    """Evaluations, evenly spread over the run's steps, beside the one at the end."""
    batches: int = Field(default=8, ge=1)
    """Batches of each of them."""
    final_batches: int = Field(default=64, ge=1)
    """Batches of the one at the end, whose loss is the run's."""
    batch: int = Field(default=32, ge=1)
    """Sequences per batch."""


class LabScenario(Table):
    """One lab run. ``run`` holds the settings that a real run of the same kind would have."""

    name: str = "lab"
    seed: int = 0
    """Seed of the initial parameters, of step times and of failures."""
    run: RunConfig = RunConfig()
    islands: tuple[Island, ...] = ()
    """Empty: ``sync.learners`` equal ones."""
    link: LinkSettings = LinkSettings()
    failures: Failures = Failures()
    judging: Judging = Judging()
    rho: bool = False
    """Whether the autocorrelation of merged outer gradients is measured, which costs time."""

    @property
    def fleet(self) -> tuple[Island, ...]:
        """The islands, named and in order."""
        if self.islands:
            return self.islands
        return tuple(Island(name=f"learner-{n}") for n in range(self.run.sync.learners))

    @property
    def digest(self) -> str:
        """A digest of everything in the scenario: 16 hexadecimal digits."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


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
            yield f"failures.islands has {name!r}, which is no island: there are {_few(names)}."
    for island in fleet:
        if island.leaves is not None and island.leaves <= island.joins:
            yield (
                f"islands has {island.name!r} leave at {island.leaves:g} of the run, but join at"
                f" {island.joins:g}: let it leave later."
            )
    first = sum(not island.joins for island in fleet)
    quorum = scenario.run.sync.quorum
    if first < quorum:
        yield (
            f"islands has {first} that are there from the start, but sync.quorum is {quorum}:"
            f" set joins = 0 for at least {quorum}."
        )


def _few(names: list[str], most: int = 8) -> str:
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
