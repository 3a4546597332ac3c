"""Each learner of a local cluster has accelerators of its own."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.cli.cluster.devices import shares, visible
from skerry.errors import ConfigError


def test_neighbours_stay_together_and_the_first_get_one_more() -> None:
    assert shares(["a", "b"], ["0", "1", "2", "3"]) == {"a": "0,1", "b": "2,3"}
    assert shares(["a", "b"], ["4", "GPU-x", "7"]) == {"a": "4,GPU-x", "b": "7"}


@given(st.integers(1, 20), st.integers(1, 64))
def test_every_device_is_one_learners(learners: int, devices: int) -> None:
    names, all_of_them = [f"l{n}" for n in range(learners)], [str(n) for n in range(devices)]
    if devices < learners:
        with pytest.raises(ConfigError, match=f"--learners {devices}"):
            shares(names, all_of_them)
        return
    found = shares(names, all_of_them)
    assert ",".join(found[name] for name in names).split(",") == all_of_them
    assert all(found.values())


def test_a_machine_without_accelerators_splits_nothing() -> None:
    assert shares(["a", "b"], []) == {}


@pytest.mark.parametrize(
    ("environ", "found"),
    [
        ({"CUDA_VISIBLE_DEVICES": "2, 3"}, ["2", "3"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cpu"}, []),
        ({"CUDA_VISIBLE_DEVICES": "0,1", "JAX_PLATFORMS": "cuda,cpu"}, ["0", "1"]),
        ({"JAX_PLATFORMS": "cpu"}, []),
    ],
)
def test_what_is_set_counts(environ: dict[str, str], found: list[str]) -> None:
    assert visible(environ) == found
