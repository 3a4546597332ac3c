"""Steps whose loss is not finite: skipped, told of, and claimed by nobody."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray
from structlog.testing import capture_logs

from skerry.algorithm import fragments, weighting
from skerry.client.inner import RestoredState
from skerry.client.island import DIVERGED_IN_A_ROW, progress
from skerry.client.joining import LearnerPlace
from skerry.client.mailbox import OutgoingContribution
from skerry.client.meter import Meter
from skerry.data.stream import Prefetched
from skerry.models.base import Batch, leaves_by_name, specs_of
from skerry.protocol.learner import TrainingProgress
from skerry.protocol.messages import InnerState, Pulse
from skerry.settings.models import DataConfig, RunConfig, SyncConfig, TrainConfig
from skerry.telemetry import metrics
from skerry_learner.trainer.step import StepResult
from skerry_learner.trainer.trainer import Trainer
from skerry_learner.training import TrainingLoop
from tests.support.builders import member
from tests.support.telemetry import Collected
from tests.unit.learner.played import ME, PlayedLog

BATCH, SEQ = 2, 8
STEP_TOKENS = BATCH * SEQ
POISON = 13
CONFIG = RunConfig(
    data=DataConfig(batch=BATCH, seq_len=SEQ),
    train=TrainConfig(steps=1000, lr=1e-2, warmup=0.0),
    sync=SyncConfig(fragments=1, h_steps=24, overlap_steps=2),
)
H = 24


class Bowl:
    """A model with one minimum, whose loss is not a number for data that begins with POISON."""

    def init(self, key: jax.Array) -> Any:
        return {"w": jax.random.normal(key, (8, 40))}

    def loss(self, params: Any, tokens: jax.Array) -> jax.Array:
        poison = jnp.where(tokens[0, 0] == POISON, jnp.nan, 1.0)
        return poison * jnp.mean(jnp.square(params["w"] - 1.0))


@dataclass
class Scene:
    """One loop whose batches and rounds are played by the test, and the pulses it has posted.

    ``before`` is called with the number of each step before that is taken, from 1.
    """

    poisoned: Sequence[int]
    steps: int
    before: Callable[[int], None] = lambda _: None
    pulses: list[Pulse] = field(default_factory=list[Pulse])

    def __post_init__(self) -> None:
        model = Bowl()
        self.plan = fragments.plan(specs_of(model), 1)
        self.trainer = Trainer(model, CONFIG, self.plan)
        start, clock = TrainingProgress(0, 0, 0, 0), itertools.count()
        self.log = PlayedLog(self.plan, CONFIG.sync, self.trainer, start)
        meter = Meter(0.0, lambda: float(next(clock)))  # a pulse at every boundary
        place = LearnerPlace(ME, member(), start, ())
        self.loop = TrainingLoop(
            place, CONFIG, self.log.session, meter, trainer=self.trainer, feed=self.feed
        )
        self.adopt(1)

    def adopt(self, version: int) -> None:
        """Have the log announce a global state, and take it in."""
        vector = np.zeros(self.plan.fragments[0].padded_size, np.float32)
        self.log.publish(0, version, vector, step=0)
        self.log.session.boundary(self.loop.now, math.nan, idle=True)
        assert self.log.session.versions == (version,)

    def open(self, version: int) -> None:
        self.log.open(0, version, due_step=0)

    @contextmanager
    def feed(self, cursor: int) -> Generator[Iterator[Prefetched]]:
        def batches() -> Iterator[Prefetched]:
            for step in range(1, self.steps + 1):
                self.pulses += [pulse for pulse in self.log.pulses()[-1:] if step > 1]
                self.before(step)
                if step == self.steps:
                    self.log.mailbox.stop()
                first = POISON if step in self.poisoned else 1
                tokens = jnp.full((BATCH, SEQ + 1), first, jnp.int32)
                yield Prefetched({"tokens": tokens}, cursor + step * BATCH, BATCH * SEQ)

        yield batches()

    def train(self) -> None:
        """Take all steps; ``mailbox.stop`` ends the loop behind the last one."""
        for _ in self.loop._train():
            pass

    @property
    def losses(self) -> list[float]:
        """What the pulses behind each step said; the outcome of a step is read during the next."""
        return [pulse.loss for pulse in self.pulses if pulse.steps]

    @property
    def local(self) -> NDArray[np.float32]:
        leaves = [np.array(leaf) for leaf in leaves_by_name(self.trainer.state.params)]
        return fragments.gather(self.plan.fragments[0], leaves)


def test_a_contribution_claims_the_steps_that_were_taken_and_all_of_its_data() -> None:
    scene = Scene([3, 4, 11, 20], H)
    scene.before = lambda step: scene.open(2) if step == H else None
    scene.train()
    told = scene.log.answer().header
    assert (told.steps, told.tokens) == (20, 20 * STEP_TOKENS)
    assert (told.cursor_from, told.cursor_to) == (0, H * BATCH), "no data is used twice"
    assert math.isfinite(told.loss)
    assert weighting.weight(told.tokens, told.steps) == 20 * STEP_TOKENS**2
    assert (scene.loop.now.step, scene.loop.now.cursor) == (H, H * BATCH)


def test_a_step_that_is_found_out_after_its_capture_is_taken_off_the_next_claim() -> None:
    scene = Scene([6], 12)

    def before(step: int) -> None:
        if step in {6, 12}:
            scene.open(2 if step == 6 else 3)
        if step == 9:
            claims.append(scene.log.answer())
            scene.adopt(2)

    scene.before = before
    claims: list[OutgoingContribution] = []
    scene.train()
    claims.append(scene.log.answer())
    assert [told.header.steps for told in claims] == [6, 5]
    assert [told.header.cursor_to for told in claims] == [6 * BATCH, 12 * BATCH]


def test_pulses_tell_of_a_skipped_step_until_a_finite_one_follows() -> None:
    scene = Scene([4, 5], 9)
    scene.train()
    assert [math.isfinite(loss) for loss in scene.losses] == [
        *(False, True, True, True),  # what came of the first is read during the second
        *(False, True, True, True),  # behind a skipped step each outcome is read at once
    ]
    assert [pulse.cursor for pulse in scene.pulses] == [BATCH * n for n in range(1, 9)]


def test_a_learner_that_is_never_finite_weighs_nothing_and_is_told_of() -> None:
    scene = Scene(range(1, 100), 3 * H)
    claims: list[OutgoingContribution] = []

    def before(step: int) -> None:
        if step % H == 0:
            scene.open(1 + step // H)
        if step > H and step % H == 1:
            claims.append(scene.log.answer())
            scene.adopt(1 + step // H)

    scene.before = before
    scene.train()
    claims.append(scene.log.answer())
    assert [(c.header.steps, c.header.tokens) for c in claims] == [(0, 0)] * 3
    assert not any(np.any(np.array(claim.gradient)) for claim in claims)
    assert not any(map(math.isfinite, scene.losses))
    assert scene.pulses[-1].steps > 0, "it is at work"
    assert scene.pulses[-1].cursor == (3 * H - 1) * BATCH


def test_parameters_that_went_wrong_are_given_up_for_the_global_state() -> None:
    healthy, broken_at = 3, 4
    scene = Scene([], 12)

    def before(step: int) -> None:
        if step == broken_at:
            broken = jax.tree.map(lambda leaf: leaf.at[0].set(jnp.nan), scene.trainer.state.params)
            scene.trainer.state = scene.trainer.state._replace(params=broken)
        if step == 12:
            scene.open(2)

    scene.before = before
    with capture_logs() as lines:
        scene.train()
    skipped = [line["in_a_row"] for line in lines if line["event"] == "step_skipped"]
    assert skipped == list(range(1, 1 + DIVERGED_IN_A_ROW))
    (readopted,) = [line for line in lines if line["event"] == "global_state_readopted"]
    assert readopted["step"] == healthy + DIVERGED_IN_A_ROW
    told = scene.log.answer()
    left = 12 - healthy - DIVERGED_IN_A_ROW
    assert (told.header.steps, told.header.tokens) == (left, left * STEP_TOKENS)
    assert told.header.cursor_from == (healthy + DIVERGED_IN_A_ROW) * BATCH
    assert np.all(np.isfinite(scene.local))
    anchor = np.array(scene.trainer.fragments.anchor(0))
    np.testing.assert_array_equal(told.gradient, anchor - scene.local)
    assert math.isfinite(scene.losses[-1])


def test_fewer_skips_than_a_row_of_them_leave_the_learner_its_progress() -> None:
    scene = Scene(range(4, 4 + DIVERGED_IN_A_ROW - 1), 12)
    with capture_logs() as lines:
        scene.train()
    assert not [line for line in lines if line["event"] == "global_state_readopted"]
    assert scene.loop.now.skipped == DIVERGED_IN_A_ROW - 1


def test_skipped_steps_are_counted_from_nothing_on(collected: Collected) -> None:
    counted: list[list[float]] = []

    def count(_: object = None) -> None:
        counted.append([value for _, value in collected.values(metrics.STEPS_SKIPPED)])

    Scene([2, 7], 8, before=count).train()
    count()
    assert counted[:2] == [[], [0]]
    assert counted[-1] == [2]
    assert collected.values(metrics.STEPS_SKIPPED)[0][0] == {"run": "run", "learner": "a"}


def test_a_step_is_handed_to_the_device_before_the_outcome_of_the_last_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    take, read = Trainer.step, TrainingLoop._note

    def step(trainer: Trainer, batch: Batch, done: float, share: float = 1.0) -> StepResult:
        seen.append("step")
        return take(trainer, batch, done, share)

    def reading(loop: TrainingLoop, result: StepResult) -> None:
        seen.append("read")
        read(loop, result)

    monkeypatch.setattr(Trainer, "step", step)
    monkeypatch.setattr(TrainingLoop, "_note", reading)
    Scene([], 4).train()
    assert seen == ["step", *["step", "read"] * 3, "read"]


def test_how_far_the_run_is_depends_on_steps_and_on_the_monotonic_clock() -> None:
    scene, now_s = Scene([], 1), [50.0]
    scene.loop.config = CONFIG.model_copy(update={"train": TrainConfig(duration_s=60.0)})
    scene.loop.meter.clock = lambda: now_s[0]
    scene.log.mailbox.post_genesis(20.0)
    assert scene.loop.progress() == 0.5
    assert not scene.loop.done()
    now_s[0] = 80.0
    assert scene.loop.done()


@pytest.mark.parametrize(
    ("step", "elapsed_s", "tokens", "done"),
    [
        (10, 20.0, 0, 0.4),
        (90, 20.0, 0, 0.9),
        (90, 20.0, 950, 0.95),
        (0, 0.0, 2000, 1.0),
        (200, 1e9, 0, 1.0),
        (0, -5.0, 0, 0),
    ],
)
def test_progress_is_by_steps_time_or_tokens_whichever_is_further(
    step: int, elapsed_s: float, tokens: int, done: float
) -> None:
    train = TrainConfig(steps=100, duration_s=50.0, tokens=1000)
    assert progress(train, step, elapsed_s, tokens) == done


@pytest.mark.parametrize("inner", [InnerState.COLD, InnerState.NEW])
def test_cold_start_raises_the_rate_again_and_no_other_does(
    inner: InnerState, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene, restored, shares = Scene([], 4), Future[RestoredState](), list[float]()
    take = Trainer.step

    def step(trainer: Trainer, batch: Batch, done: float, share: float = 1.0) -> StepResult:
        shares.append(share)
        return take(trainer, batch, done, share)

    restored.set_result(RestoredState(inner, ""))
    scene.loop.config = CONFIG.model_copy(
        update={"train": CONFIG.train.model_copy(update={"rewarm_steps": 2})}
    )
    scene.loop.restored = restored
    scene.log.mailbox.post_genesis(0.0)
    for _ in scene.loop._prepare():
        pass
    monkeypatch.setattr(Trainer, "step", step)
    scene.train()
    assert shares == ([0.5, 1.0, 1.0, 1.0] if inner is InnerState.COLD else [1.0] * 4)


def test_every_step_records_the_norm_of_its_gradient(collected: Collected) -> None:
    Scene([], 3).train()
    ((_, total),) = collected.values(metrics.GRADIENT_NORM)
    assert total > 0
