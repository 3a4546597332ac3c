"""Each learner of a local cluster has accelerators of its own, or its share of one."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.cli.cluster import devices
from skerry.cli.cluster.devices import MEMORY, VISIBLE, refuse_missing, shared, shares, visible
from skerry.errors import ConfigError


def test_neighbours_stay_together_and_the_first_get_one_more() -> None:
    assert shares(["a", "b"], ["0", "1", "2", "3"]) == {
        "a": {VISIBLE: "0,1"},
        "b": {VISIBLE: "2,3"},
    }
    found = shares(["a", "b"], ["4", "GPU-x", "7"])
    assert found == {"a": {VISIBLE: "4,GPU-x"}, "b": {VISIBLE: "7"}}


@given(st.integers(1, 20), st.integers(1, 64))
def test_every_device_is_one_learners(learners: int, more: int) -> None:
    names, devices = [f"l{n}" for n in range(learners)], [str(n) for n in range(learners + more)]
    found = shares(names, devices)
    assert ",".join(found[name][VISIBLE] for name in names).split(",") == devices
    assert all(found[name].keys() == {VISIBLE} for name in names)
    assert not shared(learners, len(devices))


@given(st.integers(1, 20), st.integers(1, 44))
def test_learners_share_memory_of_devices_that_are_fewer(devices: int, more: int) -> None:
    names = [f"l{n}" for n in range(devices + more)]
    found = shares(names, [str(n) for n in range(devices)])
    for device in range(devices):
        parts = [float(of[MEMORY]) for of in found.values() if of[VISIBLE] == str(device)]
        assert parts
        assert sum(parts) < 1
    assert f"--learners {devices}" in shared(len(names), devices)


def test_a_machine_without_accelerators_splits_nothing() -> None:
    assert shares(["a", "b"], []) == {}
    assert not shared(2, 0)


def set_to(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    for name in ("JAX_PLATFORMS", "CUDA_VISIBLE_DEVICES"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)


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
def test_what_is_set_counts(
    monkeypatch: pytest.MonkeyPatch, environ: dict[str, str], found: list[str]
) -> None:
    set_to(monkeypatch, **environ)
    assert visible() == found


@pytest.mark.parametrize(
    ("platforms", "plugin", "fix"),
    [("cuda", False, r"\[cuda\]"), ("cuda", True, "nvidia-smi"), ("gpu,cpu", False, r"\[cuda\]")],
)
def test_a_gpu_that_is_asked_for_and_missing_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, platforms: str, plugin: bool, fix: str
) -> None:
    monkeypatch.setattr(devices, "find_spec", lambda _name: plugin or None)
    monkeypatch.setattr(devices, "DRIVERS", ())
    set_to(monkeypatch, JAX_PLATFORMS=platforms, CUDA_VISIBLE_DEVICES="")
    with pytest.raises(ConfigError, match=fix):
        refuse_missing()
    set_to(monkeypatch, JAX_PLATFORMS="cpu")
    refuse_missing()
