"""A session against a real trainer: what it captures, adopts, counts and refuses."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.typing import NDArray

from skerry.algorithm import adoption, fragments
from skerry.algorithm.fragments import Plan
from skerry.models.base import specs_of
from skerry.models.factory import build_model
from skerry.protocol.learner import MissingCheck, TrainingProgress
from skerry.protocol.messages import ContributionKind, Round
from skerry.settings.models import DataConfig, ModelConfig, RunConfig, SyncConfig, TrainConfig
from skerry_learner.sync.identity import LearnerIdentity
from skerry_learner.sync.mailbox import Fresh, Mailbox, OutgoingContribution
from skerry_learner.sync.session import Session
from skerry_learner.sync.telemetry import LearnerTelemetry
from skerry_learner.trainer.trainer import Trainer
from tests.support.builders import manifest, round_

FRAGMENTS = 3
CONFIG = RunConfig(
    model=ModelConfig(layers=1, d_model=16, heads=2, kv_heads=1, d_ff=24),
    data=DataConfig(batch=2, seq_len=8),
    train=TrainConfig(steps=100, lr=1e-2, warmup=0.0),
    sync=SyncConfig(fragments=FRAGMENTS, h_steps=6, overlap_steps=2),
)


class Scene:
    """One learner whose log is played by the test."""

    def __init__(self) -> None:
        model = build_model(CONFIG.model, CONFIG.train)
        self.plan: Plan = fragments.plan(specs_of(model), FRAGMENTS)
        self.trainer = Trainer(model, CONFIG, self.plan)
        self.wakes = 0
        self.rounds = dict[int, Round]()
        self.mailbox = Mailbox(2, self._wake)
        self.step = 0
        self.session = Session(
            LearnerTelemetry(LearnerIdentity("run", "a", 7)),
            self.plan,
            CONFIG.sync,
            self.trainer,
            self.mailbox,
            start=self.now,
            wall_ns=lambda: 5,
        )

    def _wake(self) -> None:
        self.wakes += 1

    @property
    def now(self) -> TrainingProgress:
        return TrainingProgress(100 + self.step, self.step, 16 * self.step, 2 * self.step)

    def vector(self, fragment: int, seed: int) -> NDArray[np.float32]:
        draw = np.random.default_rng(seed)
        leaves = [0.02 * draw.normal(size=leaf.shape) for leaf in self.plan.leaves]
        return fragments.gather(self.plan.fragments[fragment], leaves)

    def publish(self, fragment: int, version: int) -> None:
        """Post a global fragment as the network does."""
        held = manifest(version, fragment, plan_digest=self.plan.digest, step=100)
        vector = self.vector(fragment, version)
        self.mailbox.post_fresh(Fresh(held, vector))

    def open(self, fragment: int, version: int, *, final: bool = False, attempt: int = 0) -> None:
        options = {"due_step": 100, "final": final, "attempt": attempt}
        record = round_(version, fragment, plan_digest=self.plan.digest, **options)
        self.rounds[fragment] = record
        self.mailbox.post_rounds(tuple(self.rounds[f] for f in sorted(self.rounds)))

    def boundary(self, *, steps: int = 0, idle: bool = False) -> None:
        for _ in range(steps):
            self.trainer.step(jnp.ones((2, 9), jnp.int32), 0.1)
            self.step += 1
        self.session.boundary(self.now, 1.5, idle=idle)


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
    scene.open(1, 2)
    scene.boundary(steps=3)
    outgoing = scene.mailbox.next_outgoing()
    assert outgoing is not None
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(scene.trainer.state.params)]
    local = fragments.gather(scene.plan.fragments[1], leaves)
    np.testing.assert_array_equal(outgoing.gradient, scene.trainer.anchor(1) - local)
    assert np.linalg.norm(local) > 0
    told = outgoing.header
    assert (told.kind, told.base_version, told.round_version) == (
        ContributionKind.OUTER_GRADIENT,
        1,
        2,
    )
    assert (told.steps, told.tokens, told.cursor_from, told.cursor_to) == (3, 48, 0, 6)
    assert (told.learner, told.incarnation, told.identity, told.step) == ("a", 7, 1, 103)


def test_a_republished_round_is_answered_once(scene: Scene) -> None:
    scene.open(1, 2)
    scene.boundary(steps=1)
    first = scene.mailbox.next_outgoing()
    assert first is not None
    scene.mailbox.sent(first)
    scene.open(1, 2)
    scene.boundary(steps=1)
    assert scene.mailbox.next_outgoing() is None


def test_a_learner_behind_adopts_first_and_then_answers(scene: Scene) -> None:
    scene.open(0, 4)
    scene.boundary(steps=1)
    assert scene.mailbox.next_outgoing() is None
    assert scene.session.staleness() == 2
    scene.publish(0, 3)
    scene.boundary(steps=1)
    outgoing = scene.mailbox.next_outgoing()
    assert outgoing is not None
    assert outgoing.header.base_version == 3
    assert outgoing.header.steps == 2, "rebase keeps what was never contributed"


def test_the_newest_of_several_versions_is_adopted_bit_by_bit(scene: Scene) -> None:
    scene.publish(2, 2)
    scene.publish(2, 5)
    scene.boundary()
    assert scene.session.versions == (1, 1, 5)
    np.testing.assert_array_equal(scene.trainer.anchor(2), scene.vector(2, 5))


def test_adoption_waits_for_the_overlap_and_steps_since_are_sent_next(scene: Scene) -> None:
    scene.open(1, 2)
    scene.boundary(steps=2)
    scene.publish(1, 2)
    scene.boundary(steps=1)
    assert scene.session.versions == (1, 1, 1)
    scene.boundary(steps=1)
    assert scene.session.versions == (1, 2, 1)
    first = scene.mailbox.next_outgoing()
    assert first is not None
    scene.mailbox.sent(first)
    scene.open(1, 3)
    scene.boundary(steps=1)
    second = scene.mailbox.next_outgoing()
    assert second is not None
    assert (second.header.cursor_from, second.header.identity) == (first.header.cursor_to, 2)


def test_rounds_beyond_two_fragments_in_flight_wait_and_are_counted_if_they_lapse(
    scene: Scene,
) -> None:
    for fragment in range(FRAGMENTS):
        scene.open(fragment, 2)
    scene.boundary(steps=1)
    assert scene.session.syncs_skipped == 0
    scene.publish(2, 2)
    scene.boundary(steps=1)
    assert scene.session.syncs_skipped == 1
    assert scene.session.versions == (1, 1, 2)


def test_an_unsent_contribution_is_never_replaced(scene: Scene) -> None:
    scene.open(1, 2)
    scene.boundary(steps=1)
    stuck = scene.mailbox.next_outgoing()
    scene.publish(1, 2)
    scene.boundary(steps=3)
    scene.open(1, 3)
    scene.boundary(steps=1)
    assert scene.session.versions[1] == 2
    assert scene.mailbox.next_outgoing() is stuck


def test_genesis_offers_the_negated_initial_parameters() -> None:
    scene = Scene()
    scene.session.offer_genesis(0, scene.now)
    outgoing = scene.mailbox.next_outgoing()
    assert outgoing is not None
    assert (outgoing.scheme, outgoing.header.kind) == ("f32", ContributionKind.GENESIS)
    assert (outgoing.header.base_version, outgoing.header.steps) == (0, 0)
    scene.publish(0, 1)
    scene.boundary()
    np.testing.assert_array_equal(scene.trainer.anchor(0), scene.vector(0, 1))


def test_nothing_is_answered_before_all_fragments_are_there() -> None:
    scene = Scene()
    scene.publish(0, 1)
    scene.open(0, 2)
    scene.boundary(steps=1)
    assert scene.mailbox.next_outgoing() is None
    assert not scene.session.caught_up


def test_final_rounds_say_that_training_is_over(scene: Scene) -> None:
    scene.open(1, 2)
    assert not scene.session.ended()
    scene.open(1, 2, final=True)
    assert scene.session.ended()
    scene.boundary(idle=True)
    outgoing = scene.mailbox.next_outgoing()
    assert outgoing is not None
    assert outgoing.header.steps == 0


def test_after_a_reset_what_was_dropped_is_not_contributed(scene: Scene) -> None:
    scene.boundary(steps=4)
    scene.session.reset(scene.now)
    scene.open(0, 2)
    scene.boundary(steps=1)
    outgoing = scene.mailbox.next_outgoing()
    assert outgoing is not None
    assert (outgoing.header.steps, outgoing.header.cursor_from) == (1, 8)


def sent(scene: Scene, fragment: int) -> OutgoingContribution:
    """Answer round 2 of a fragment after three steps, and have the log take the answer."""
    scene.open(fragment, 2)
    scene.boundary(steps=3)
    outgoing = scene.mailbox.next_outgoing()
    assert outgoing is not None
    scene.mailbox.sent(outgoing)
    return outgoing


def test_round_that_is_opened_again_has_its_answer_looked_for_once_per_attempt(
    scene: Scene,
) -> None:
    outgoing = sent(scene, 1)
    asked: list[list[MissingCheck]] = []
    for attempt in (0, 1, 1, 2):
        scene.open(1, 2, attempt=attempt)
        scene.boundary(steps=1)
        asked.append(scene.mailbox.take_checks())
    check = MissingCheck("a", 7, 1, outgoing.header.identity, 2)
    assert asked == [[], [check], [], [check]]


def test_answer_that_waits_to_be_sent_is_not_looked_for(scene: Scene) -> None:
    scene.open(1, 2)
    scene.boundary(steps=1)
    scene.open(1, 2, attempt=1)
    scene.boundary(steps=1)
    assert scene.mailbox.take_checks() == []
    waiting = scene.mailbox.next_outgoing()
    assert waiting is not None
    scene.mailbox.sent(waiting)
    scene.boundary(steps=1)
    assert scene.mailbox.take_checks()


def test_contribution_that_left_the_log_is_in_the_next_one_bit_by_bit(scene: Scene) -> None:
    lost = sent(scene, 1)
    scene.mailbox.post_lost(MissingCheck("a", 7, 1, lost.header.identity, 2))
    scene.open(1, 2, attempt=1)
    scene.boundary(steps=2)
    again = scene.mailbox.next_outgoing()
    assert again is not None
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(scene.trainer.state.params)]
    local = fragments.gather(scene.plan.fragments[1], leaves)
    np.testing.assert_array_equal(again.gradient, scene.trainer.anchor(1) - local)
    told = again.header
    assert (told.identity, told.steps, told.round_version) == (2, 5, 2)
    assert (told.cursor_from, told.cursor_to) == (lost.header.cursor_from, 10)


def test_progress_taken_back_outlives_an_adoption_before_the_next_capture(scene: Scene) -> None:
    lost = sent(scene, 1)
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(scene.trainer.state.params)]
    local, anchor = fragments.gather(scene.plan.fragments[1], leaves), scene.trainer.anchor(1)
    scene.mailbox.post_lost(MissingCheck("a", 7, 1, lost.header.identity, 2))
    scene.publish(1, 2)
    scene.boundary()
    leaves = [np.array(leaf) for leaf in jax.tree.leaves(scene.trainer.state.params)]
    after = fragments.gather(scene.plan.fragments[1], leaves)
    np.testing.assert_array_equal(after, adoption.rebase(local, anchor, scene.vector(1, 2)))


def test_loss_that_is_heard_of_after_the_adoption_changes_nothing(scene: Scene) -> None:
    lost = sent(scene, 1)
    scene.publish(1, 2)
    scene.boundary(steps=2)
    assert scene.session.versions[1] == 2
    scene.mailbox.post_lost(MissingCheck("a", 7, 1, lost.header.identity, 2))
    scene.open(1, 3)
    scene.boundary(steps=1)
    following = scene.mailbox.next_outgoing()
    assert following is not None
    assert following.header.cursor_from == lost.header.cursor_to


def test_a_contribution_that_diverged_is_replaced_by_one_of_new_work(scene: Scene) -> None:
    """Nobody will commit that round without an answer, so a learner alone would wait for ever."""
    scene.open(0, 2)
    scene.boundary(steps=3)
    lost = scene.mailbox.next_outgoing()
    assert lost is not None
    scene.mailbox.diverged(lost)
    scene.boundary(steps=1)
    assert scene.mailbox.next_outgoing() is None, "what was given up is not contributed"
    scene.boundary(steps=2)
    again = scene.mailbox.next_outgoing()
    assert again is not None
    assert (again.header.steps, again.header.round_version) == (2, 2)
    assert again.header.identity == lost.header.identity, "a gap would read as one dropped"
    assert again.header.cursor_from == lost.header.cursor_to + 2
