"""A session against a real trainer: what it captures, adopts, counts and refuses."""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm import adoption, fragments
from skerry.client.mailbox import Gone, OutgoingContribution
from skerry.models.base import build_model, leaves_by_name, specs_of
from skerry.protocol.learner import MissingCheck, TrainingProgress
from skerry.protocol.messages import ContributionKind
from skerry.settings.models import DataConfig, ModelConfig, RunConfig, SyncConfig, TrainConfig
from skerry_learner.trainer.trainer import Programs, Trainer
from tests.support.builders import pulse
from tests.unit.learner.played import PlayedLog

FRAGMENTS = 3
CONFIG = RunConfig(
    model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
    data=DataConfig(batch=2, seq_len=8),
    train=TrainConfig(steps=100, lr=1e-2, warmup=0.0),
    sync=SyncConfig(fragments=FRAGMENTS, h_steps=6, overlap_steps=2),
)


MODEL = build_model(CONFIG.model, CONFIG.train)


@cache
def compiled() -> Programs:
    return Programs.of(MODEL, CONFIG)


class Scene:
    """One learner whose log is played by the test; each step takes 2 sequences, 16 tokens."""

    def __init__(self) -> None:
        self.plan = fragments.plan(specs_of(MODEL), FRAGMENTS)
        self.trainer = Trainer(MODEL, CONFIG, self.plan, compiled())
        self.step = 0
        self.log = PlayedLog(self.plan, CONFIG.sync, self.trainer, self.now)
        self.session = self.log.session

    @property
    def now(self) -> TrainingProgress:
        return TrainingProgress(100 + self.step, self.step, 16 * self.step, 2 * self.step)

    def vector(self, fragment: int, seed: int) -> NDArray[np.float32]:
        """Return a global fragment, of values that bf16 holds."""
        draw = np.random.default_rng(seed)
        leaves = [0.02 * draw.normal(size=leaf.shape) for leaf in self.plan.leaves]
        vector = fragments.gather(self.plan.fragments[fragment], leaves)
        return (vector.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)

    def local(self, fragment: int) -> NDArray[np.float32]:
        leaves = [np.array(leaf) for leaf in leaves_by_name(self.trainer.state.params)]
        return fragments.gather(self.plan.fragments[fragment], leaves)

    def anchor(self, fragment: int) -> NDArray[np.float32]:
        return np.array(self.trainer.fragments.anchor(fragment))

    def publish(self, fragment: int, version: int) -> None:
        self.log.publish(fragment, version, self.vector(fragment, version), step=100)

    def open(self, fragment: int, version: int, **changes: Any) -> None:
        self.log.open(fragment, version, due_step=100, **changes)

    def boundary(self, *, steps: int = 0, idle: bool = False) -> OutgoingContribution | None:
        """Step, come to a boundary, and return what was contributed there."""
        for _ in range(steps):
            self.trainer.step({"tokens": jnp.ones((2, 9), jnp.int32)}, 0.1)
            self.step += 1
        self.session.boundary(self.now, 1.5, idle=idle)
        return self.log.offered()

    def answer(self, fragment: int, version: int, *, steps: int) -> OutgoingContribution:
        """Answer a round, and have the log take the answer."""
        self.open(fragment, version)
        made = self.boundary(steps=steps)
        assert made is not None
        self.log.mailbox.post(Gone(made.header, sent=True))
        return made


@pytest.fixture
def scene() -> Scene:
    """A learner that has adopted version 1 of everything."""
    made = Scene()
    for fragment in range(FRAGMENTS):
        made.publish(fragment, 1)
        made.boundary()
    assert made.session.versions == (1, 1, 1)
    return made


def test_an_answer_is_the_outer_gradient_since_the_anchor(scene: Scene) -> None:
    made = scene.answer(1, 2, steps=3)
    local = scene.local(1)
    np.testing.assert_array_equal(made.gradient, scene.anchor(1) - local)
    assert np.linalg.norm(local) > 0
    header = made.header
    versions = header.kind, header.base_version, header.round_version
    assert versions == (ContributionKind.OUTER_GRADIENT, 1, 2)
    assert (header.steps, header.tokens, header.cursor_from, header.cursor_to) == (3, 48, 0, 6)
    start = header.learner, header.incarnation, header.identity, header.step
    assert start == ("a", 7, 1, 103)


def test_a_republished_round_is_answered_once(scene: Scene) -> None:
    scene.answer(1, 2, steps=1)
    scene.open(1, 2)
    assert scene.boundary(steps=1) is None


def test_a_learner_behind_adopts_first_and_then_answers(scene: Scene) -> None:
    scene.open(0, 4)
    assert scene.boundary(steps=1) is None
    scene.session.report(pulse())
    (reported,) = scene.log.pulses()
    assert (reported.max_staleness, reported.versions) == (2, (1, 1, 1))
    scene.publish(0, 3)
    made = scene.boundary(steps=1)
    assert made is not None
    assert made.header.base_version == 3
    assert made.header.steps == 2, "rebase keeps what was never contributed"


def test_the_newest_of_several_versions_is_adopted_bit_by_bit(scene: Scene) -> None:
    scene.publish(2, 2)
    scene.publish(2, 5)
    scene.boundary()
    assert scene.session.versions == (1, 1, 5)
    np.testing.assert_array_equal(scene.anchor(2), scene.vector(2, 5))


def test_adoption_waits_for_the_overlap_and_steps_since_are_sent_next(scene: Scene) -> None:
    first = scene.answer(1, 2, steps=2)
    scene.publish(1, 2)
    scene.boundary(steps=1)
    assert scene.session.versions == (1, 1, 1)
    scene.boundary(steps=1)
    assert scene.session.versions == (1, 2, 1)
    second = scene.answer(1, 3, steps=1)
    assert (second.header.cursor_from, second.header.identity) == (first.header.cursor_to, 2)


def test_rounds_beyond_two_fragments_in_flight_wait_and_are_counted_if_they_lapse(
    scene: Scene,
) -> None:
    for fragment in range(FRAGMENTS):
        scene.open(fragment, 2)
    scene.session.boundary(scene.now, 1.5, idle=True)
    assert [o.header.fragment for o in scene.log.taken(OutgoingContribution)] == [0, 1]
    scene.publish(2, 2)
    scene.boundary(steps=1)
    scene.session.report(pulse())
    (reported,) = scene.log.pulses()
    assert (reported.syncs_skipped, reported.versions) == (1, (1, 1, 2))


def test_an_unsent_contribution_is_never_replaced(scene: Scene) -> None:
    scene.open(1, 2)
    assert scene.boundary(steps=1) is not None
    scene.publish(1, 2)
    scene.boundary(steps=3)
    scene.open(1, 3)
    assert scene.boundary(steps=1) is None
    assert scene.session.versions[1] == 2


def test_genesis_offers_the_negated_initial_parameters_of_two_fragments_at_a_time() -> None:
    scene = Scene()
    assert [scene.session.offer_genesis(f, scene.now) for f in range(3)] == [True, True, False]
    made, other = scene.log.taken(OutgoingContribution)
    assert (made.scheme, made.header.kind) == ("f32", ContributionKind.GENESIS)
    assert (made.header.base_version, made.header.steps) == (0, 0)
    np.testing.assert_array_equal(made.gradient, -scene.local(0))
    scene.log.mailbox.post(Gone(other.header, sent=True))
    assert scene.session.offer_genesis(2, scene.now)
    scene.publish(0, 1)
    scene.boundary()
    np.testing.assert_array_equal(scene.anchor(0), scene.vector(0, 1))


def test_nothing_is_answered_before_all_fragments_are_there() -> None:
    scene = Scene()
    scene.publish(0, 1)
    scene.open(0, 2)
    assert scene.boundary(steps=1) is None
    assert not scene.session.caught_up


def test_final_rounds_say_that_training_is_over(scene: Scene) -> None:
    scene.open(1, 2)
    assert not scene.session.ended()
    scene.open(1, 2, final=True)
    assert scene.session.ended()
    made = scene.boundary(idle=True)
    assert made is not None
    assert made.header.steps == 0


def test_after_a_reset_what_was_dropped_is_not_contributed(scene: Scene) -> None:
    scene.boundary(steps=4)
    scene.session.reset(scene.now)
    made = scene.answer(0, 2, steps=1)
    assert (made.header.steps, made.header.cursor_from) == (1, 8)


def test_round_that_is_opened_again_has_its_answer_looked_for_once_per_attempt(
    scene: Scene,
) -> None:
    made = scene.answer(1, 2, steps=3)
    asked: list[list[MissingCheck]] = []
    for attempt in (0, 1, 1, 2):
        scene.open(1, 2, attempt=attempt)
        scene.boundary(steps=1)
        asked.append(scene.log.taken(MissingCheck))
    check = MissingCheck("a", 7, 1, made.header.identity, 2)
    assert asked == [[], [check], [], [check]]


def test_answer_that_waits_to_be_sent_is_not_looked_for(scene: Scene) -> None:
    scene.open(1, 2)
    waiting = scene.boundary(steps=1)
    scene.open(1, 2, attempt=1)
    scene.boundary(steps=1)
    assert scene.log.taken(MissingCheck) == []
    assert waiting is not None
    scene.log.mailbox.post(Gone(waiting.header, sent=True))
    scene.boundary(steps=1)
    assert scene.log.taken(MissingCheck)


def test_contribution_that_left_the_log_is_in_the_next_one_bit_by_bit(scene: Scene) -> None:
    lost = scene.answer(1, 2, steps=3)
    scene.log.lose(lost)
    scene.open(1, 2, attempt=1)
    again = scene.boundary(steps=2)
    assert again is not None
    np.testing.assert_array_equal(again.gradient, scene.anchor(1) - scene.local(1))
    header = again.header
    assert (header.identity, header.steps, header.round_version) == (2, 5, 2)
    assert (header.cursor_from, header.cursor_to) == (lost.header.cursor_from, 10)


def test_progress_taken_back_outlives_an_adoption_before_the_next_capture(scene: Scene) -> None:
    lost = scene.answer(1, 2, steps=3)
    local, anchor = scene.local(1), scene.anchor(1)
    scene.log.lose(lost)
    scene.publish(1, 2)
    scene.boundary()
    expected = adoption.adopt("rebase", local, anchor, scene.vector(1, 2), np.float32(0))
    np.testing.assert_array_equal(scene.local(1), expected)


def test_loss_that_is_heard_of_after_the_adoption_changes_nothing(scene: Scene) -> None:
    lost = scene.answer(1, 2, steps=3)
    scene.publish(1, 2)
    scene.boundary(steps=2)
    assert scene.session.versions[1] == 2
    scene.log.lose(lost)
    assert scene.answer(1, 3, steps=1).header.cursor_from == lost.header.cursor_to


def test_a_contribution_that_diverged_is_replaced_by_one_of_new_work(scene: Scene) -> None:
    """Nobody will commit that round without an answer, so a learner alone would wait for ever."""
    scene.open(0, 2)
    lost = scene.boundary(steps=3)
    assert lost is not None
    scene.log.mailbox.post(Gone(lost.header, sent=False))
    assert scene.boundary(steps=1) is None, "what was given up is not contributed"
    again = scene.boundary(steps=2)
    assert again is not None
    assert (again.header.steps, again.header.round_version) == (2, 2)
    assert again.header.identity == lost.header.identity, "a gap would read as one dropped"
    assert again.header.cursor_from == lost.header.cursor_to + 2
