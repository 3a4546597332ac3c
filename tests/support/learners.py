"""Learners without a model: a fake one that trains by itself, and one that says what a test says.

``FakeLearner`` is the real learner (its place, training loop, session and network) with parameters
that move by a known random walk instead of a model. ``ScriptedLearner`` decides nothing: it sends
single messages. Both start in milliseconds, and what their run must commit can be computed from
the log alone, so that tests compare parameters exactly.
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import time
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from skerry.algorithm import adoption
from skerry.algorithm.backend import cpu
from skerry.algorithm.merge import slice_norms
from skerry.client.inner import RestoredState
from skerry.client.joining import settle, take_place
from skerry.client.meter import Meter
from skerry.client.network import Network, open_sync
from skerry.log import contributions, ledger, run_records, state
from skerry.log.memory import MemoryBroker
from skerry.log.streams import specs
from skerry.models.machine import Machine
from skerry.protocol.codec import pack, packed_bound
from skerry.protocol.messages import (
    ContributionHeader,
    ContributionKind,
    InnerState,
    LearnerPhase,
    Pulse,
)
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.tasks import TaskGroup
from skerry_learner.trainer.step import StepResult
from skerry_learner.training import TrainingLoop
from skerry_tools.lab.learner import drive

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.log.base import Bus, Record
    from skerry.protocol.codec import Chunk
    from skerry.protocol.messages import RunRecord

    Vector = NDArray[np.float32]

CHUNK_BYTES = 64 * 1024
TOKENS = 100
"""Tokens in a step; a step takes one sequence from the data."""
STEPS = 1_000_000
ONE: Any = np.float32(1)
TAKEN = StepResult(ONE, ONE, ONE)
"""The outcome of every step."""


def encode_vector(scheme: str, x: Vector, chunk_bytes: int) -> list[Chunk]:
    """Quantise and pack a padded vector."""
    return list(pack(scheme, cpu().quantise(scheme, x), chunk_bytes))


async def contributed(
    run: str, plan: Plan, *headers: ContributionHeader, scheme: str = "int4", apart_ns: int = 0
) -> list[Record]:
    """Send contributions, each so long after the one before; return what the log holds then."""
    now = [0]
    bus = MemoryBroker(clock_ns=lambda: now[0]).connect()
    await bus.declare(specs(run))
    for header in headers:
        vector = walk(plan.fragments[header.fragment], header.identity)
        chunks = encode_vector(scheme, vector, 2048)
        await contributions.Sender(bus, run, plan).send(header, chunks)
        now[0] += apart_ns
    stored = bus.broker.streams[Subjects(run).shard(0).stream("CONTRIB")].records
    return [stored[sequence] for sequence in sorted(stored)]


def walk(fragment: Fragment, *key: object) -> Vector:
    """Return f32 (padded,): a small random step that depends on ``key`` only; padding is zero."""
    seed = hashlib.blake2b(repr((fragment.index, *key)).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(seed))
    vector = np.zeros(fragment.padded_size, np.float32)
    for offset, part in zip(fragment.offsets, fragment.slices, strict=False):
        vector[offset : offset + part.size] = rng.normal(0, 1e-2, part.size)
    return vector


@dataclass(slots=True)
class RandomWalk:
    """Parameters that take a random step before each capture: what a trainer is to a learner.

    Captures for versions below ``poisoned_below`` are of a length that no training could make.
    """

    plan: Plan
    key: tuple[object, ...]
    method: adoption.Method
    share: np.float32
    poisoned_below: int = 0
    versions: dict[int, int] = field(default_factory=dict[int, int])
    local: dict[int, Vector] = field(default_factory=dict[int, "Vector"])
    anchors: dict[int, Vector] = field(default_factory=dict[int, "Vector"])
    captured: dict[int, Vector] = field(default_factory=dict[int, "Vector"])
    captures: dict[int, int] = field(default_factory=dict[int, int])
    routed: dict[str, Vector] = field(default_factory=dict[str, "Vector"])

    def genesis(self, fragment: int) -> Vector:
        """Return the outer gradient of the initial parameters relative to zero."""
        return -walk(self.plan.fragments[fragment], "init")

    def capture(self, fragment: int) -> Vector:
        """Take a step and return ``anchor - local``."""
        count = self.captures[fragment] = self.captures.get(fragment, 0) + 1
        self.local[fragment] = self.local[fragment] - walk(
            self.plan.fragments[fragment], *self.key, count
        )
        self.captured[fragment] = self.local[fragment]
        gradient = self.anchors[fragment] - self.local[fragment]
        poisoned = self.versions[fragment] + 1 < self.poisoned_below
        return gradient * np.float32(1e20) if poisoned else gradient

    def release(self, fragment: int) -> None:
        """Make what was captured local progress again."""
        self.captured.pop(fragment, None)

    def adopt(self, fragment: int, vector: Vector) -> None:
        """Take in a global fragment by the run's formula."""
        anchor = self.anchors.get(fragment)
        self.versions[fragment] = self.versions.get(fragment, 0) + 1
        if anchor is None:
            self.local[fragment] = vector
        else:
            base = self.captured.pop(fragment, anchor)
            local = self.local[fragment]
            self.local[fragment] = adoption.adopt(self.method, local, base, vector, self.share)
        self.anchors[fragment] = vector

    def reset(self) -> None:
        """Fall back to the anchors."""
        self.local = dict(self.anchors)
        self.captured = {fragment: self.anchors[fragment] for fragment in self.captured}

    # what a training loop asks for beside

    def warm(self, tick: Callable[[], None], example: object) -> None:
        """Compile nothing."""
        tick()

    def step(self, batch: object, done: float, share: float) -> StepResult:
        """Take one training step, which the next capture makes up for."""
        del batch, done, share
        return TAKEN


@contextmanager
def feed(batch: int, seq_len: int, cursor: int) -> Generator[Iterator[Any]]:
    """Yield what counts sequences and holds none."""
    yield ((None, at, batch * seq_len) for at in itertools.count(cursor + batch, batch))


@dataclass(slots=True)
class FakeLearner:
    """One learner: ``await learner.train()`` serves its run until it is cancelled.

    ``step_s`` is the time of a step; it calls itself finished after ``steps`` of them. ``scheme``,
    (empty: the run's), ``chunk_blocks`` (0: as many as 64 KiB hold) and ``pulse_s`` override the
    run's settings.
    """

    bus: Bus
    run: str
    plan: Plan
    name: str
    scheme: str = ""
    step_s: float = 0.02
    steps: int = STEPS
    poisoned_below: int = 0
    pulse_s: float = 0.05
    chunk_blocks: int = 0
    walk: type[RandomWalk] = RandomWalk
    wall_ns: Callable[[], int] = time.time_ns
    training: TrainingLoop | None = None
    network: Network | None = None

    @property
    def step(self) -> int:
        """The step of the global clock that it has come to."""
        return self.training.now.step if self.training else 0

    async def train(self) -> None:
        """Take a place in the run and train for ever."""
        record = await ledger.read_run(self.bus, self.run)
        config = self._config(record)
        place = await take_place(
            self.bus, record, self.plan, self.name, Machine("test"), self.wall_ns
        )
        sync, incarnation = config.sync, place.learner.incarnation
        parameters = self.walk(
            self.plan, (self.name, incarnation), sync.adoption, np.float32(sync.blend_alpha)
        )
        parameters.poisoned_below = self.poisoned_below
        news = asyncio.Event()
        session, network = open_sync(
            self.bus,
            place,
            self.plan,
            config,
            parameters,
            wake=news.set,
            wall_ns=self.wall_ns,
            clock=asyncio.get_running_loop().time,
        )
        self.network = network
        clock = asyncio.get_running_loop().time
        trainer: Any = parameters
        self.training = TrainingLoop(
            place,
            config,
            session,
            Meter(clock(), clock),
            trainer=trainer,
            feed=partial(feed, config.data.batch, config.data.seq_len),
        )
        self.training.report()
        async with TaskGroup() as group:
            group.create_task(network.run())
            group.create_task(settle(self.bus, place.member, RestoredState(InnerState.NEW, "")))
            await drive(self.training.life(), news, lambda: asyncio.sleep(self.step_s))

    def _config(self, record: RunRecord) -> RunConfig:
        """Return the run's settings with those of this learner."""
        config = RunConfig.model_validate_json(record.config_json)
        blocks, kind = self.chunk_blocks, self.scheme or config.sync.contribution_scheme
        chunk_bytes = packed_bound(kind, blocks) if blocks else CHUNK_BYTES
        chunk_bytes = max(chunk_bytes, packed_bound("f32", 1))  # initial parameters are f32
        scheme = {"contribution_scheme": kind, "chunk_bytes": chunk_bytes}
        changes: dict[str, dict[str, Any]] = {
            "sync": scheme,
            "train": {"steps": self.steps, "duration_s": None},
            "liveness": {"pulse_s": self.pulse_s},
        }
        tables = {
            name: getattr(config, name).model_copy(update=update)
            for name, update in changes.items()
        }
        return config.model_copy(update=tables)


@dataclass(slots=True)
class ScriptedLearner:
    """A learner whose every message is the test's: it follows nothing and decides nothing.

    ``versions`` are what its contributions are based on, ``identity`` counts them by fragment.
    """

    bus: Bus
    run: str
    plan: Plan
    name: str
    incarnation: int = 1
    scheme: str = "f32"
    step_s: float = 0.02
    steps: int = STEPS
    chunk_blocks: int = 0
    versions: dict[int, int] = field(default_factory=dict[int, int])
    identity: dict[int, int] = field(default_factory=dict[int, int])

    async def offer_genesis(self, poison: float = 0.0) -> None:
        """Offer every fragment that the log has no version of; ``poison`` is its first value."""
        have = await state.read_manifests(self.bus, self.run, self.plan)
        for fragment in self.plan.fragments:
            if fragment.index not in have:
                header = self._header(fragment, ContributionKind.GENESIS, 0, 1)
                await self._send(header, -walk(fragment, "init"), "f32", poison)

    async def send_gradient(
        self, index: int, version: int, *, steps: int = 1, poison: float = 0.0
    ) -> None:
        """Contribute a step of the walk towards ``version``; ``poison`` is its first value."""
        fragment, base = self.plan.fragments[index], self.versions[index]
        header = self._header(fragment, ContributionKind.OUTER_GRADIENT, base, version, steps)
        vector = walk(fragment, self.name, self.incarnation, header.identity)
        await self._send(header, vector, self.scheme, poison)

    async def pulse(self, step: int) -> None:
        """Publish one pulse of this step; it is that of a finished learner after the last one."""
        pulse = Pulse(
            run=self.run,
            learner=self.name,
            incarnation=self.incarnation,
            phase=LearnerPhase.FINISHED if step >= self.steps else LearnerPhase.TRAINING,
            sent_ns=time.time_ns(),
            step=step,
            steps=step,
            tokens=step * TOKENS,
            cursor=step,
            loss=1.0,
            step_time_s=self.step_s,
            busy_s=step * self.step_s,
            alive_s=step * self.step_s,
            bytes_up=0,
            bytes_down=0,
            contributions=0,
            versions=(),
        )
        await run_records.publish(self.bus, pulse)

    def _header(
        self, fragment: Fragment, kind: ContributionKind, base: int, version: int, steps: int = 0
    ) -> ContributionHeader:
        identity = self.identity[fragment.index] = self.identity.get(fragment.index, 0) + 1
        return ContributionHeader(
            kind=kind,
            learner=self.name,
            incarnation=self.incarnation,
            identity=identity,
            fragment=fragment.index,
            base_version=base,
            round_version=version,
            step=steps,
            steps=steps,
            tokens=steps * TOKENS,
            cursor_from=0,
            cursor_to=steps,
            loss=1.0,
            captured_ns=time.time_ns(),
        )

    async def _send(
        self, header: ContributionHeader, vector: Vector, scheme: str, poison: float = 0.0
    ) -> None:
        planes = cpu().quantise(scheme, vector)
        if poison:
            planes.codes[0, :4] = np.array([poison], "<f4").view(np.uint8)
        blocks = self.chunk_blocks
        chunks = pack(scheme, planes, packed_bound(scheme, blocks) if blocks else CHUNK_BYTES)
        norms = slice_norms(self.plan.fragments[header.fragment], vector)
        sender = contributions.Sender(self.bus, self.run, self.plan)
        await sender.send(replace(header, norms=norms), chunks)
