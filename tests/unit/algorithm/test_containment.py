"""What is measured of contributions, and how far one learner of several can get with any."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.algorithm import containment, merge_numpy, quantise_numpy
from skerry.algorithm.containment import Effort, compare, cut, uncounted, unit
from skerry.algorithm.fragments import BLOCK, Fragment, Slice
from skerry.algorithm.merge import decoded_norms, slice_norms
from skerry.algorithm.merge_numpy import OuterGradient, spans_of
from skerry.algorithm.schemes import SCHEMES

F32s = NDArray[np.float32]

FRAGMENT = Fragment(1, (Slice(0, 0, 1000), Slice(1, 0, 1), Slice(2, 5, 5 + 300 * BLOCK)))
STEPS = 24.0
PEERS = [Effort(1.0, STEPS), Effort(1.1, STEPS), Effort(0.9, STEPS)]
IN_TURN = [(number, number) for number in range(11)]
"""Where each contribution lies in the log: behind those before it."""
numbers = st.floats(0, 1e30)


def test_what_is_many_times_as_long_as_others_is_cut_to_a_multiple_of_their_median() -> None:
    assert cut(Effort(50.0, STEPS), PEERS, 2.0) == pytest.approx(1 - 2 / 50)
    assert cut(Effort(1.9, STEPS), PEERS, 2.0) == 0
    assert cut(Effort(50.0, STEPS), PEERS, 0) == 0


def test_more_steps_may_go_further() -> None:
    assert cut(Effort(3.9, 4 * STEPS), PEERS, 2.0) == 0
    assert cut(Effort(8.0, 4 * STEPS), PEERS, 2.0) == pytest.approx(0.5)


@given(own=numbers, other=numbers)
def test_of_two_learners_neither_is_held_to_anything(own: float, other: float) -> None:
    assert cut(Effort(own, own), [Effort(other, other)], 2.0) == 0
    assert uncounted(own, [other], 8.0) == 0
    rows = unit(np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32))
    assert compare(rows, ["a", "b"], IN_TURN, rows[0]) == (
        (0.0, 0.0),
        (False, False),
        (False, False),
    )


@given(liar=st.builds(Effort, numbers, numbers))
def test_no_liar_has_an_honest_learner_of_four_cut_or_uncounted(liar: Effort) -> None:
    own = Effort(1.0, STEPS)
    assert cut(own, [PEERS[1], PEERS[2], liar], 2.0) == 0
    assert uncounted(own.steps, [PEERS[1].steps, PEERS[2].steps, liar.steps], 8.0) == 0


def test_steps_count_up_to_a_multiple_of_the_others() -> None:
    assert uncounted(2.0**24, [24, 24, 20], 8.0) == pytest.approx(1 - 8 * 24 / 2**24)
    assert uncounted(190, [24, 24, 20], 8.0) == 0


def alike(learners: int, seed: int = 0) -> F32s:
    """Rows of cosine 0.5 with each other."""
    rng = np.random.default_rng(seed)
    common = rng.standard_normal(20 * BLOCK)
    return unit((common + rng.standard_normal((learners, 20 * BLOCK))).astype(np.float32))


def test_what_points_against_the_others_has_a_negative_cosine_with_them() -> None:
    rows = alike(4)
    rows[3] *= -1
    found = compare(rows, list("abcd"), IN_TURN, None)
    assert min(found.alignment[:3]) > 0.1
    assert found.alignment[3] < -0.5
    assert found.opposed == (False, False, False, True)
    assert not any(found.echo)


def test_who_does_not_agree_with_others_that_do_not_agree_either_is_not_opposed() -> None:
    rows = unit(np.random.default_rng(4).standard_normal((4, 5120)).astype(np.float32))
    rows[3] = unit(-rows[:3].sum(axis=0, keepdims=True))[0]
    found = compare(rows, list("abcd"), IN_TURN, None)
    assert found.alignment[3] < -0.9
    assert not any(found.opposed)


@pytest.mark.parametrize("learners", ["abc", "abcd", "abcdefghijk"])
def test_outer_gradients_that_are_all_alike_are_no_echo(learners: str) -> None:
    rows = unit(np.float32(0.1) + alike(len(learners)))
    assert (rows @ rows.T).min() > 0.98
    assert not any(compare(rows, list(learners), IN_TURN, rows[0]).echo)


@pytest.mark.parametrize("of", ["others", "moved"])
def test_what_the_others_send_or_what_was_changed_last_is_an_echo(of: str) -> None:
    rows, moved = alike(5), alike(1, seed=1)[0]
    rows[3] = unit((moved if of == "moved" else rows[:3].sum(axis=0))[None])[0]
    item = OuterGradient("int4", quantise_numpy.quantise("int4", rows[3]))
    fragment = Fragment(0, (Slice(0, 0, rows.shape[1]),))
    rows[3] = containment.sample([item], containment.sampled_blocks(fragment, 0))[0]
    found = compare(rows[:4], list("abcd"), IN_TURN, moved)
    assert found.echo == (False, False, False, True)


@pytest.mark.parametrize("cosine", [0.1, 0.3, 0.5])
@pytest.mark.parametrize("honest", [2, 3])
def test_who_sees_the_others_first_has_none_of_them_refused(cosine: float, honest: int) -> None:
    """It makes the mean of the others what one has sent, or has it point away from that."""
    draw = np.random.default_rng(5).standard_normal((honest + 1, 20 * BLOCK))
    rows = unit((cosine**0.5 * draw[-1] + (1 - cosine) ** 0.5 * draw[:-1]).astype(np.float32))
    victim, rest = rows[0], rows[1:].sum(axis=0)
    mirrored = 2 * (victim @ rest) * victim - rest
    away = [share * rest - victim for share in np.linspace(0, 1.5, 16)]
    for sent in (mirrored, *away):
        found = compare(
            np.vstack([rows, unit(sent[None])]), list("abcd"[: honest + 1]), IN_TURN, None
        )
        assert not any(found.echo[:-1])
        assert not any(found.opposed[:-1])
        assert min(found.alignment[:-1]) >= 0


def test_a_learner_with_many_contributions_has_one_vote() -> None:
    rows = alike(3)
    flood = np.concatenate([rows[:2], np.repeat(-rows[2:], 9, axis=0)])
    found = compare(flood, ["a", "b", *["c"] * 9], IN_TURN, None)
    assert min(found.alignment[:2]) > -0.2
    assert max(found.alignment[2:]) < -0.5


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_norms_are_those_of_what_is_decoded_and_lies_about_them_show(
    scheme: str, scale: float
) -> None:
    x = np.random.default_rng(2).standard_normal(FRAGMENT.padded_size).astype(np.float32)
    item = OuterGradient(scheme, quantise_numpy.quantise(scheme, x * np.float32(scale)))
    found = decoded_norms(item, FRAGMENT)
    assert found == pytest.approx(np.sqrt(merge_numpy.decoded_squares(item, spans_of(FRAGMENT))))
    true = slice_norms(FRAGMENT, quantise_numpy.dequantise(scheme, item.planes))
    assert found == pytest.approx(true, rel=1e-5)
    assert containment.states_truly(true, found)
    assert containment.states_truly((), found)
    for wrong in (0.5, 1.1):
        assert not containment.states_truly((true[0] * wrong, *true[1:]), found)


def test_moved_is_the_direction_of_a_change_where_the_next_merge_looks() -> None:
    rng = np.random.default_rng(3)
    before, change = rng.standard_normal((2, FRAGMENT.padded_size)).astype(np.float32)
    item = OuterGradient("f32", quantise_numpy.quantise("f32", change))
    (row,) = containment.sample([item], containment.sampled_blocks(FRAGMENT, 7))
    assert containment.moved(FRAGMENT, 7, before, before - change) @ row > 0.999
    assert not containment.moved(FRAGMENT, 7, before, before).any()
