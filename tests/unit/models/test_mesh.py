"""A machine's mesh, and where tensors lie on it; on fake devices in a process of their own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry.models.axes import SHARDED, SMALL, sizes_of, split
from tests.support.devices import ran_on

LOGICAL = (None, "embed", "heads", "kv_heads", "mlp", "vocab", "experts", "layers")


def on(**sizes: int) -> dict[str, int]:
    return {"data": 1, "fsdp": 1, "tensor": 1, "expert": 1} | sizes


def test_auto_puts_every_device_on_fsdp() -> None:
    assert sizes_of("auto", 8) == (1, 8, 1, 1)
    assert sizes_of("data=2, fsdp=4", 8) == (2, 4, 1, 1)
    assert sizes_of("tensor=2", 8) == (1, 1, 2, 1)


@pytest.mark.parametrize(
    ("setting", "sentence"),
    [
        ("fsdp=16", "needs 16 devices and this learner has 8"),
        ("data=4,fsdp=4", "needs 16 devices"),
        ("rows=2", "is not a mesh"),
        ("fsdp=0", "is not a mesh"),
        ("fsdp=999999999999999999", "is not a mesh"),
        ("", "is not a mesh"),
    ],
)
def test_a_mesh_that_cannot_be_is_refused_in_a_sentence(setting: str, sentence: str) -> None:
    with pytest.raises(ConfigError, match=sentence) as caught:
        sizes_of(setting, 8)
    assert caught.value.path == "learner.mesh"


def test_logical_axes_decide_and_what_they_leave_splits_the_largest_dimension() -> None:
    assert split((512, 256), ("mlp", "embed"), on(fsdp=4, tensor=2)) == (("tensor",), ("fsdp",))
    assert split((512, 256), ("mlp", "embed"), on(fsdp=8)) == (None, ("fsdp",))
    assert split((512, 256), (None, None), on(fsdp=8)) == (("fsdp",), None)
    assert split((512, 9), ("mlp", "embed"), on(fsdp=8)) == (("fsdp",), None)
    assert split((8, 64, 256), ("experts", "embed", "mlp"), on(expert=4, fsdp=2)) == (
        ("expert",),
        ("fsdp",),
        None,
    )


def test_small_tensors_and_what_nothing_divides_are_copied() -> None:
    assert split((256,), ("embed",), on(fsdp=8)) == (None,)
    assert split((), (), on(fsdp=8)) == ()
    assert split((9999, 11), (None, None), on(fsdp=8)) == (None, None)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from(LOGICAL)), max_size=4),
    st.builds(on, **{axis: st.sampled_from([1, 2, 3, 4, 8]) for axis in ("data", *SHARDED)}),
)
def test_every_split_divides_and_no_axis_is_used_twice(
    dimensions: list[tuple[int, str | None]], sizes: dict[str, int]
) -> None:
    shape, logical = [d for d, _ in dimensions], [n for _, n in dimensions]
    splits = split(shape, logical, sizes)
    used = [axis for names in splits for axis in names or ()]
    assert len(used) == len(set(used))
    assert "data" not in used, "parameters are copied over data"
    for dimension, names in zip(shape, splits, strict=True):
        assert dimension % math.prod(sizes[axis] for axis in names or ()) == 0
    if math.prod(shape) < SMALL:
        assert not used


ON_EIGHT = """
import jax, numpy as np
from skerry.errors import ConfigError
from skerry.models import mesh
from skerry.models.axes import check_batch
from skerry.models.base import build_model, leaves_by_name, specs_of
from skerry.settings.models import ModelConfig, TrainConfig

model = build_model(ModelConfig(layers=2, d_model=64, heads=4, kv_heads=2, d_ff=128), TrainConfig())
specs = specs_of(model)
on = mesh.make_mesh("data=2,fsdp=4")
assert mesh.machine_of(on, "host")[:2] == ("host", "data=2,fsdp=4")
places = mesh.shardings(model, specs, on)
ordered = jax.jit(lambda key: leaves_by_name(model.init(key)), out_shardings=list(places))
spread = ordered(jax.random.key(0))
assert mesh.machine_of_arrays(spread[0], "host").devices == 8
alone = leaves_by_name(jax.jit(model.init)(jax.random.key(0)))
for mine, one in zip(spread, alone, strict=True):
    np.testing.assert_array_equal(np.asarray(mine), np.asarray(one))
held = sum(leaf.addressable_shards[0].data.size for leaf in spread)
whole = sum(leaf.size for leaf in alone)
assert held < whole / 4 * 1.05, (held, whole)
check_batch(mesh.sizes_on(on), 16)
try:
    check_batch(mesh.sizes_on(on), 12)
except ConfigError as error:
    assert "data.batch = 12" in str(error), error
else:
    raise AssertionError("a batch that does not divide was taken")
print("done")
"""


def test_parameters_are_the_same_on_eight_devices_and_each_holds_its_share() -> None:
    assert ran_on(8, "-c", ON_EIGHT) == "done\n"
