"""The outer optimizer: presets, optax, storage of its state, the fused path."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax  # pyright: ignore[reportMissingTypeStubs]
import pytest
from numpy.typing import NDArray

from skerry.algorithm import merge, quantise_numpy
from skerry.algorithm.fragments import BLOCK, Fragment, Slice, gather
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import Outer, from_optax, make_outer, merge_and_apply
from skerry.algorithm.planes import exact
from skerry.errors import ConfigError, Diverged

FRAGMENT = Fragment(0, (Slice(0, 0, 3 * BLOCK), Slice(1, 0, BLOCK)))
AVERAGED = (False, True)
WEIGHTS = [0.1, 0.2, 0.3, 0.4]
RDA: tuple[str, Fragment, tuple[bool, ...]] = ("rda", FRAGMENT, AVERAGED)


def vector(seed: int) -> NDArray[np.float32]:
    return np.random.default_rng(seed).standard_normal(4 * BLOCK).astype(np.float32)


def contributions(seed: int) -> list[OuterGradient]:
    return [
        OuterGradient("int4", quantise_numpy.quantise("int4", vector(seed * 10 + i)))
        for i in range(4)
    ]


def preset(name: str, h_steps: int = 24) -> Outer:
    return make_outer(name, lr=None, momentum=None, h_steps=h_steps)


def adam(lr: float = 0.1) -> optax.GradientTransformation:
    return optax.adam(lr)


OUTERS = {
    "nesterov": preset("nesterov"),
    "direct": preset("direct"),
    "adam": from_optax("mine", adam()),
}


@pytest.fixture
def user_module(monkeypatch: pytest.MonkeyPatch, allow_code: Callable[..., None]) -> ModuleType:
    """A user's module that can be imported as ``my_outer``, and may be."""
    allow_code("my_outer", __name__)
    module = ModuleType("my_outer")
    monkeypatch.setitem(sys.modules, "my_outer", module)
    return module


@pytest.mark.parametrize(
    ("outer", "transformation"),
    [
        (preset("nesterov"), optax.sgd(0.7, 0.9, nesterov=True)),
        (preset("direct"), optax.sgd(1.0)),
        (
            make_outer("nesterov", lr=0.3, momentum=0.5, h_steps=1),
            optax.sgd(0.3, 0.5, nesterov=True),
        ),
    ],
    ids=["nesterov", "direct", "overridden"],
)
def test_presets_equal_optax_to_the_last_bit(
    outer: Outer, transformation: optax.GradientTransformation
) -> None:
    master, state = vector(0), outer.init(vector(0))
    params: Any = jnp.array(vector(0))
    reference = transformation.init(params)
    for seed in range(1, 5):
        master, state = outer.apply(master, vector(seed), state)
        updates, reference = transformation.update(jnp.array(vector(seed)), reference, params)
        params = optax.apply_updates(params, updates)
        assert np.array_equal(master, np.asarray(params))


@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
def test_the_fused_path_equals_merge_then_apply(outer: Outer) -> None:
    fused, state = vector(0), outer.init(vector(0))
    plain, plain_state = vector(0), outer.init(vector(0))
    for seed in range(3):
        items = contributions(seed)
        merged = merge.merge("rda", items, WEIGHTS, FRAGMENT, AVERAGED)
        plain, plain_state = outer.apply(plain, merged, plain_state)
        fused, state = merge_and_apply(
            outer, fused, state, items, WEIGHTS, "rda", FRAGMENT, AVERAGED
        )
        assert np.array_equal(fused, plain)


@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
def test_a_slice_that_nobody_trained_keeps_its_value(outer: Outer) -> None:
    master, state = merge_and_apply(
        outer, vector(0), outer.init(vector(0)), contributions(0), WEIGHTS, *RDA
    )
    idle = [replace(item, reach=(0.0, 0.5)) for item in contributions(1)]
    after, _ = merge_and_apply(outer, master, state, idle, WEIGHTS, *RDA)
    assert np.array_equal(after[: 3 * BLOCK], master[: 3 * BLOCK])
    assert not np.array_equal(after[3 * BLOCK :], master[3 * BLOCK :])


@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
def test_what_contributions_have_in_their_padding_is_left_out(outer: Outer) -> None:
    ragged = Fragment(0, (Slice(0, 0, 300), Slice(1, 0, 400)))
    kept = gather(ragged, [np.ones(part.size, np.float32) for part in ragged.slices]) > 0
    before, item = np.where(kept, vector(0), 0), OuterGradient("f32", exact(vector(1)))
    rest = [item], [1.0], "rda", ragged, AVERAGED
    after, _ = merge_and_apply(outer, before, outer.init(before), *rest)
    assert not after[~kept].any()
    assert (after[kept] != before[kept]).all()


@pytest.mark.parametrize("name", ["nesterov", "direct"])
@pytest.mark.parametrize("far", [3e38, -3e38])
def test_a_step_beyond_the_largest_float_is_refused(name: str, far: float) -> None:
    """Where merged contributions are finite, and what they make of the parameters is not."""
    outer, master, away = preset(name), vector(0), np.zeros_like(vector(0))
    master[1], away[1] = far, -far
    rest = [OuterGradient("f32", exact(away))], [1.0], *RDA
    with pytest.raises(Diverged, match=r"outer step of .* is not finite"):
        merge_and_apply(outer, master, outer.init(master), *rest)


def test_large_parameters_whose_sum_overflows_are_not_refused() -> None:
    outer, master = preset("direct"), np.full(4 * BLOCK, 2e38, np.float32)
    still = [OuterGradient("f32", exact(np.zeros_like(master)))], [1.0], *RDA
    moved, _ = merge_and_apply(outer, master, outer.init(master), *still)
    assert np.array_equal(moved, master)


@pytest.mark.parametrize("name", ["nesterov", "direct"])
@pytest.mark.parametrize("size", [4 * BLOCK, BLOCK], ids=["fitting", "too small"])
def test_dead_vectors_are_recycled_without_changing_the_result(name: str, size: int) -> None:
    outer = preset(name)
    master, state, items = vector(0), outer.init(vector(0)), contributions(1)
    spare = [np.full(size, np.nan, np.float32) for _ in range(2)]
    rest: tuple[str, Fragment, tuple[bool, ...]] = "rda", FRAGMENT, AVERAGED
    expected, fresh = merge_and_apply(outer, master, state, items, WEIGHTS, *rest)
    found, recycled = merge_and_apply(outer, master, state, items, WEIGHTS, *rest, spare)
    assert (found is spare[0]) == (size == 4 * BLOCK)
    assert np.array_equal(found, expected)
    leaves, others = outer.leaves(fresh), outer.leaves(recycled)
    assert all(np.array_equal(leaf, others[key]) for key, leaf in leaves.items())


@pytest.mark.parametrize("outer", OUTERS.values(), ids=OUTERS)
def test_a_stored_state_goes_on_as_if_nothing_had_happened(outer: Outer) -> None:
    master, state = vector(0), outer.init(vector(0))
    for seed in range(1, 4):
        before, gradient = master.copy(), vector(seed)
        after, state = outer.apply(master, gradient, state)
        assert np.array_equal(master, before)
        assert np.array_equal(gradient, vector(seed))
        master = after
    stored = outer.leaves(state)
    assert all(leaf.dtype == np.float32 and leaf.size % BLOCK == 0 for leaf in stored.values())
    restored = outer.restore(master, stored)
    expected, _ = outer.apply(master, vector(9), state)
    found, _ = outer.apply(master, vector(9), restored)
    assert np.array_equal(found, expected)


def test_counters_beyond_f32_are_stored_exactly() -> None:
    outer = from_optax("mine", adam())
    state = outer.init(vector(0))
    count = jnp.array(2**30 + 7, jnp.int32)
    state = jax.tree.map(lambda leaf: count if leaf.dtype == jnp.int32 else leaf, state)
    restored = outer.restore(vector(0), outer.leaves(state))
    assert int(restored[0].count) == 2**30 + 7


def test_the_state_of_another_optimizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="momentum"):
        preset("nesterov").restore(vector(0), {})


@pytest.mark.parametrize(
    ("h_steps", "name", "lr", "momentum"),
    [
        (1, "direct", 1.0, 0.0),
        (63, "direct", 1.0, 0.0),
        (64, "nesterov", 0.7, 0.5),
        (5000, "nesterov", 0.7, 0.5),
    ],
)
def test_auto_goes_by_h(h_steps: int, name: str, lr: float, momentum: float) -> None:
    outer = preset("auto", h_steps)
    assert outer.name == name
    assert outer.fused == pytest.approx((lr, momentum))


def test_a_typo_in_the_preset_names_the_nearest() -> None:
    with pytest.raises(ConfigError, match="'nesterov'") as caught:
        preset("nestrov")
    assert (caught.value.path, caught.value.nearest) == ("outer.preset", "nesterov")


@pytest.mark.parametrize(("lr", "momentum"), [(0.0, None), (-1.0, None), (None, 1.0), (None, -0.1)])
def test_numbers_out_of_bounds_are_refused(lr: float | None, momentum: float | None) -> None:
    with pytest.raises(ConfigError, match=r"outer\.(lr|momentum)"):
        make_outer("nesterov", lr=lr, momentum=momentum, h_steps=1)


def test_a_factory_of_ones_own_is_loaded(user_module: ModuleType) -> None:
    user_module.__dict__["make"] = adam
    outer = make_outer("my_outer:make", lr=0.01, momentum=None, h_steps=1)
    master, _ = outer.apply(vector(0), np.ones(4 * BLOCK, np.float32), outer.init(vector(0)))
    assert vector(0) - master == pytest.approx(0.01, rel=1e-3)


def test_an_update_of_ones_own_that_fails_is_one_sentence(user_module: ModuleType) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        return updates.medain(params), state

    made = optax.GradientTransformation(optax.identity().init, update)
    user_module.__dict__["make"] = lambda: made
    outer = make_outer("my_outer:make", lr=None, momentum=None, h_steps=1)
    with pytest.raises(ConfigError, match=r"failed \(.*medain; test_outer\.py, line \d+\)"):
        outer.apply(vector(0), vector(1), outer.init(vector(0)))


def test_an_update_of_another_shape_is_refused_before_it_is_applied(
    user_module: ModuleType,
) -> None:
    def update(updates: Any, state: Any, params: Any = None) -> Any:
        del params
        return updates[:1], state

    made = optax.GradientTransformation(optax.identity().init, update)
    user_module.__dict__["make"] = lambda: made
    outer = make_outer("my_outer:make", lr=None, momentum=None, h_steps=1)
    with pytest.raises(ConfigError, match=r"\(shape \(1,\) for a gradient of shape \(\d+,\)\)"):
        outer.apply(vector(0), vector(1), outer.init(vector(0)))


@pytest.mark.parametrize("path", ["no_such_module:make", "my_outer:missing", "my_outer:nothing"])
def test_a_factory_that_does_not_work_is_a_config_error(
    path: str, user_module: ModuleType, allow_code: Callable[..., None]
) -> None:
    allow_code("no_such_module")
    user_module.__dict__["nothing"] = lambda: 3
    with pytest.raises(ConfigError, match=path):
        make_outer(path, lr=None, momentum=None, h_steps=1)
