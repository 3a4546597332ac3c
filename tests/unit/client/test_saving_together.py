"""The processes of one learner save at the same boundaries, and go on with one that all have."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.client.inner import Found
from skerry.client.inner_file import Origin, read_file
from skerry.client.inner_state import InnerStateSaver, StateKind, shapes_in
from skerry.client.peer import Deed
from skerry.client.processes import FollowingProcess
from skerry.protocol.learner import TrainingProgress
from skerry.settings.local import LearnerSettings
from tests.support.builders import wait_until
from tests.unit.client.test_processes import joined

ORIGIN = Origin("run", 1, 2, 3, "a", processes=2)
KIND = StateKind(dict, shapes_in, lambda: dict, dict)
LOCAL = LearnerSettings(save_every_s=0.001)


def state(value: int) -> dict[str, NDArray[Any]]:
    return {"mu": np.full((4, 2), value, np.float32), "nu": np.full((3,), value, np.float32)}


class Pair:
    """Two processes of a learner and their savers, for one incarnation."""

    def __init__(self, folder: Path, incarnation: int, opened: ExitStack) -> None:
        self.lead, self.follower, _, _ = opened.enter_context(joined())
        local = LOCAL.model_copy(update={"path": folder})
        processes = enumerate((self.lead, self.follower))
        self.savers = [
            InnerStateSaver(local, replace(ORIGIN, process=n), incarnation, KIND, process=process)
            for n, process in processes
        ]
        for saver in self.savers:
            saver.start()
        self.found = self.savers[0].found.result(10)

    def save(self, step: int, *, follows: bool = True) -> None:
        """Save at a boundary in the first process and, if it ``follows``, in the other one."""
        wait_until(self.savers[0].due)
        self.savers[0].save(state(step), TrainingProgress(step, step, 0, 0))
        if follows:
            obey(self.savers[1], self.follower, state(-step))
        wait_until(lambda: written(self.savers[0], step))


def obey(saver: InnerStateSaver, process: FollowingProcess, moments: Any) -> None:
    deed, (begins, step, steps) = process.orders.get(timeout=10)
    assert deed is Deed.SAVE
    saver.take(moments, TrainingProgress(step, steps, 0, 0), begins=begins)
    wait_until(lambda: written(saver, step))


def written(saver: InnerStateSaver, step: int) -> bool:
    return saver.path.exists() and read_file(saver.path, None)[0].step == step


@pytest.fixture
def opened() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_all_go_on_with_the_newest_boundary_that_all_have(
    tmp_path: Path, opened: ExitStack
) -> None:
    first = Pair(tmp_path, 1, opened)
    assert first.found == Found(reason="nothing is saved on this machine")
    first.save(10)
    first.save(20)
    first.save(30, follows=False)  # the other one is killed before it has written it
    again = Pair(tmp_path, 2, opened)
    assert list(again.found.saves) == [(1, 20)]
    np.testing.assert_array_equal(again.found.saves[1, 20]["mu"], state(20)["mu"])
    theirs = again.savers[1].found.result(10).saves[1, 20]
    np.testing.assert_array_equal(theirs["nu"], state(-20)["nu"])


def test_a_process_without_its_part_lets_all_begin_cold(tmp_path: Path, opened: ExitStack) -> None:
    first = Pair(tmp_path, 1, opened)
    first.save(10)
    first.savers[1].path.unlink()
    restored = Pair(tmp_path, 2, opened).found.begin(2, 10, 100)
    assert restored.inner == "cold"
    assert restored.reason == "its processes have saved no boundary that all of them have"


def test_no_save_begins_until_all_have_written_the_one_before(
    tmp_path: Path, opened: ExitStack
) -> None:
    pair = Pair(tmp_path, 1, opened)
    pair.save(10, follows=False)
    assert not pair.savers[0].due()
    obey(pair.savers[1], pair.follower, state(-10))
    wait_until(pair.savers[0].due)


def test_the_end_saves_every_part_as_it_is(tmp_path: Path, opened: ExitStack) -> None:
    pair = Pair(tmp_path, 1, opened)
    pair.savers[0].close(state(7), TrainingProgress(7, 7, 0, 0))
    deed, words = pair.follower.orders.get(timeout=10)
    assert (deed, words) == (Deed.KEEP, [7, 7])
    pair.savers[1].close(state(-7), TrainingProgress(7, 7, 0, 0))
    for saver in pair.savers:
        wait_until(lambda saver=saver: written(saver, 7))


def test_a_state_of_another_number_of_processes_is_not_gone_on_with(
    tmp_path: Path, opened: ExitStack
) -> None:
    pair = Pair(tmp_path, 1, opened)
    pair.save(10)
    local = LOCAL.model_copy(update={"path": tmp_path})
    alone = InnerStateSaver(local, replace(ORIGIN, processes=1), 2, KIND)
    alone.start()
    assert not alone.found.result(10).saves


POINTS = st.sets(st.tuples(st.integers(1, 3), st.integers(0, 4)), max_size=3)


@given(POINTS, st.lists(POINTS, max_size=3))
def test_what_is_common_is_had_by_all_and_nothing_else_is_left_out(
    own: set[tuple[int, int]], others: list[set[tuple[int, int]]]
) -> None:
    found = Found({point: {} for point in own}, "" if own else "nothing").common(others)
    assert set(found.saves) == own.intersection(*others)
    assert bool(found.reason) is not bool(found.saves) or not own
