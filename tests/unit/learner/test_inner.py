"""The inner optimizer's state on disk: what a restart goes on with, and what it refuses."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from skerry.client import inner_state
from skerry.client.inner import RestoredState
from skerry.client.inner_file import Origin, Saved, read_file, size_of, write_file
from skerry.client.inner_state import InnerStateSaver, portions_of, shapes_in
from skerry.client.jax_inner import flat, kind_of
from skerry.errors import CheckpointCorrupt
from skerry.protocol.learner import TrainingProgress
from skerry.settings.local import LearnerSettings
from tests.support.builders import wait_until

ORIGIN = Origin("run", 123, 2**63 + 5, 6, "a")
SAVED = Saved(ORIGIN, 3, 700, 40)
NOW = TrainingProgress(step=700, steps=40, tokens=0, cursor=0)


def moments(seed: int = 0) -> Any:
    mu, nu = np.random.default_rng(seed).normal(size=(2, 33, 5)).astype(np.float32)
    nothing = np.zeros(0, np.float32)
    return {"count": np.int32(7), "mu": {"w": mu, "b": nothing}, "nu": {"w": nu, "b": nothing}}


SHAPES = shapes_in(flat(moments()))


def tensors(seed: int = 0) -> dict[str, NDArray[Any]]:
    leaves = jax.tree.leaves(moments(seed))
    return dict(zip(SHAPES, (np.asarray(leaf) for leaf in leaves), strict=True))


def write(path: Path, saved: Saved = SAVED) -> None:
    write_file(path, saved, SHAPES, tensors().values(), "draft")


def test_what_is_written_reads_back_bit_by_bit(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "inner")
    saved, found = read_file(tmp_path / "deep" / "inner", SHAPES)
    assert saved == SAVED
    for name, tensor in tensors().items():
        np.testing.assert_array_equal(found[name], tensor)
        assert found[name].dtype == tensor.dtype
    assert [p.name for p in (tmp_path / "deep").iterdir()] == ["inner"]


def flipped(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


@pytest.mark.parametrize("at", [0, 7, 8, 30, 40, 60, 200, -700, -1])
def test_damage_anywhere_is_noticed(tmp_path: Path, at: int) -> None:
    path = tmp_path / "inner"
    write(path)
    data = path.read_bytes()
    path.write_bytes(flipped(data, at % len(data)))
    with pytest.raises(CheckpointCorrupt, match="cannot be used") as caught:
        read_file(path, SHAPES)
    assert str(caught.value).count("\n") == 0


@pytest.mark.parametrize("keep", [0, 5, 8, 100, -1])
def test_file_that_ends_early_is_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "inner"
    write(path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(CheckpointCorrupt, match="are not those of this model"):
        read_file(path, SHAPES)


def test_sizes_are_checked_before_anything_is_allocated(tmp_path: Path) -> None:
    path = tmp_path / "inner"
    path.write_bytes(struct.pack("<Q", 2**40))
    os.truncate(path, 2**40 + 16 + size_of(SHAPES))
    with pytest.raises(CheckpointCorrupt, match="are not those of this model"):
        read_file(path, SHAPES)


def test_another_model_of_the_same_size_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "inner")
    other = {name.replace("w", "v"): shape for name, shape in SHAPES.items()}
    with pytest.raises(CheckpointCorrupt, match="not those of this model"):
        read_file(tmp_path / "inner", other)


def test_write_that_fails_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "inner"
    write(path)

    def full() -> Iterator[NDArray[Any]]:
        yield next(iter(tensors().values()))
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        write_file(path, replace(SAVED, step=9), SHAPES, full(), "draft")
    assert read_file(path, SHAPES)[0] == SAVED
    assert [p.name for p in tmp_path.iterdir()] == ["inner"]


@dataclass(slots=True)
class Desk:
    """A saver, its clock, and a way to wait for its end."""

    folder: Path
    incarnation: int = 4
    now_s: float = 0.0
    ended: threading.Event = field(default_factory=threading.Event)

    def saver(self) -> InnerStateSaver:
        local, like = LearnerSettings(path=self.folder), kind_of(jax.eval_shape(moments))
        made = InnerStateSaver(local, ORIGIN, self.incarnation, like, clock=lambda: self.now_s)
        made.start(self.ended.set)
        return made

    def restored(self, saver: InnerStateSaver, step: int = 700) -> RestoredState:
        return saver.found.result(30).begin(self.incarnation, step, 100)

    def save(self, saver: InnerStateSaver, seed: int = 0) -> None:
        """Have a state saved as soon as a save is due."""
        self.now_s += LearnerSettings().save_every_s
        wait_until(saver.due)
        saver.save(moments(seed), NOW)

    def end(self, saver: InnerStateSaver) -> None:
        saver.close()
        assert self.ended.wait(30)


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def test_saved_state_is_what_the_next_start_begins_with(desk: Desk) -> None:
    first = desk.saver()
    assert desk.restored(first).inner == "cold"
    desk.save(first, seed=5)
    desk.end(first)
    again = Desk(desk.folder, incarnation=5)
    second = again.saver()
    restored = again.restored(second, step=720)
    assert (restored.inner, restored.age_steps) == ("warm", 20)
    np.testing.assert_array_equal(restored.tensors["nu.w"], tensors(5)["nu.w"])
    again.end(second)


@pytest.mark.parametrize(
    ("incarnation", "step", "inner"), [(1, 0, "new"), (1, 700, "cold"), (4, 0, "cold")]
)
def test_first_start_of_a_learner_is_new_where_the_run_is(
    desk: Desk, incarnation: int, step: int, inner: str
) -> None:
    desk.incarnation = incarnation
    saver = desk.saver()
    assert desk.restored(saver, step).inner == inner
    desk.end(saver)


@pytest.mark.parametrize(
    ("changes", "step", "expected"),
    [
        ({}, 750, ("warm", 50)),
        ({}, 800, ("warm", 100)),
        ({}, 801, ("cold", 0)),
        ({}, 690, ("warm", 0)),
        ({"created_ns": 9}, 700, ("cold", 0)),
        ({"learner": "b"}, 700, ("cold", 0)),
        ({"config_digest": 9}, 0, ("cold", 0)),
    ],
)
def test_saved_state_is_used_if_it_is_the_learners_own_and_young_enough(
    desk: Desk, changes: dict[str, Any], step: int, expected: tuple[str, int]
) -> None:
    path = desk.folder / "run" / "a" / "inner.state"
    write(path, replace(SAVED, origin=replace(ORIGIN, **changes)))
    saver = desk.saver()
    got = desk.restored(saver, step)
    assert (got.inner, got.age_steps) == expected
    desk.end(saver)


def test_save_is_due_only_so_often_and_never_while_one_is_in_flight(desk: Desk) -> None:
    saver = desk.saver()
    assert not saver.due()
    desk.save(saver)
    assert not saver.due(), "just begun"
    wait_until(lambda: saver._job is not None and saver._job.over)
    assert not saver.due()
    desk.now_s += LearnerSettings().save_every_s
    assert saver.due()
    desk.end(saver)


def test_state_saved_at_the_end_is_the_last_one(desk: Desk) -> None:
    saver = desk.saver()
    desk.save(saver, seed=1)
    saver.close(moments(2), replace(NOW, step=750))
    assert desk.ended.wait(30)
    saved, found = read_file(saver.path, SHAPES)
    assert saved.step == 750
    np.testing.assert_array_equal(found["mu.w"], tensors(2)["mu.w"])


def test_stacks_are_saved_at_the_end_as_the_tensors_that_they_hold(tmp_path: Path) -> None:
    """So are the moments of each model of many layers."""
    state, ended = {"mu": {"blocks": jnp.arange(6.0).reshape(2, 3)}}, threading.Event()
    kind = kind_of(state, {"blocks": ("first", "second")})
    saver = InnerStateSaver(LearnerSettings(path=tmp_path), ORIGIN, 4, kind)
    saver.start(ended.set)
    saver.close(state, NOW)
    assert ended.wait(30)
    _, found = read_file(saver.path, kind.shapes)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "mu.first": [0.0, 1.0, 2.0],
        "mu.second": [3.0, 4.0, 5.0],
    }


def test_copy_outlives_the_state_it_was_made_of(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next step is given the state's memory; what is saved is as it was at the boundary."""
    stepped, write = threading.Event(), write_file

    def slow_disk(*args: Any) -> None:
        assert stepped.wait(30)
        write(*args)

    monkeypatch.setattr(inner_state, "write_file", slow_disk)
    saver = desk.saver()
    state = jax.tree.map(jnp.copy, moments(3))
    desk.now_s += LearnerSettings().save_every_s
    wait_until(saver.due)
    saver.save(state, NOW)
    advance = jax.jit(lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0)
    after = advance(state)
    assert state["mu"]["w"].is_deleted(), "the copy must not keep the step from reusing memory"
    jax.block_until_ready(after)
    stepped.set()
    desk.end(saver)
    np.testing.assert_array_equal(read_file(saver.path, SHAPES)[1]["mu.w"], tensors(3)["mu.w"])


def test_damaged_file_is_said_once_begins_cold_and_is_replaced(desk: Desk) -> None:
    saver = desk.saver()
    desk.save(saver)
    desk.end(saver)
    saver.path.write_bytes(flipped(saver.path.read_bytes(), -1 % saver.path.stat().st_size))
    again = Desk(desk.folder, incarnation=5)
    with structlog.testing.capture_logs() as lines:
        second = again.saver()
        assert again.restored(second).inner == "cold"
        again.save(second)
        again.end(second)
    said = [line for line in lines if line["event"] == "inner_state_unreadable"]
    assert len(said) == 1
    assert read_file(second.path, SHAPES)[0].incarnation == 5


def test_disk_that_refuses_is_said_once_and_stops_nothing(desk: Desk) -> None:
    (desk.folder / "run").write_text("a file where a folder should be")
    with structlog.testing.capture_logs() as lines:
        saver = desk.saver()
        desk.save(saver)
        desk.save(saver)
        wait_until(lambda: saver._job is not None and saver._job.over)
        desk.end(saver)
    said = [line for line in lines if line["event"] == "inner_state_unsaved"]
    assert len(said) == 1
    assert "learner.path" in said[0]["error"]


def test_draft_of_a_killed_incarnation_is_swept_away(desk: Desk) -> None:
    draft = desk.folder / "run" / "a" / "inner-3.draft"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(b"half")
    saver = desk.saver()
    wait_until(lambda: saver._copy is not None)
    desk.end(saver)
    assert not draft.exists()


def test_a_large_state_is_copied_in_portions_and_never_as_a_whole(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_state, "LEAST_PORTION", 1)
    saver = desk.saver()
    desk.save(saver, seed=3)
    states = [moments(3)]
    while saver._job is not None and saver._job.left:
        wait_until(saver.due)
        states.append(jax.tree.map(lambda leaf: leaf + 1, states[-1]))
        saver.save(states[-1], NOW)
    desk.end(saver)
    assert len(states) > 2
    _, found = read_file(saver.path, SHAPES)
    kept = [
        [np.array_equal(found[name], leaf) for leaf in leaves]
        for name, *leaves in zip(SHAPES, *map(jax.tree.leaves, states), strict=True)
    ]
    assert all(map(any, kept)), "each tensor is one of a boundary, whole"


def test_a_save_that_the_end_overtakes_leaves_the_last_state(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inner_state, "LEAST_PORTION", 1)
    saver = desk.saver()
    desk.save(saver, seed=1)
    assert saver._job is not None
    assert saver._job.left, "the rest is still to come"
    saver.close(moments(2), replace(NOW, step=750))
    assert desk.ended.wait(30)
    saved, found = read_file(saver.path, SHAPES)
    assert saved.step == 750
    np.testing.assert_array_equal(found["mu.w"], tensors(2)["mu.w"])
    assert [path.name for path in saver.path.parent.iterdir()] == ["inner.state"]


@given(st.lists(st.integers(0, 1 << 30), max_size=200))
def test_portions_hold_every_tensor_once_and_little_more_than_their_share(
    sizes: list[int],
) -> None:
    like = {str(n): jax.ShapeDtypeStruct((size,), np.uint8) for n, size in enumerate(sizes)}
    portions = portions_of(like)
    assert [name for names in portions for name in names] == list(like)
    most = max(inner_state.LEAST_PORTION, sum(sizes) // inner_state.PORTIONS)
    for names in portions:
        inside = [sizes[int(name)] for name in names]
        assert sum(inside) <= most or len([size for size in inside if size]) == 1
