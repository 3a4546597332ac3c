"""What a learner needs on each device; ``unit/learner/on_eight_devices`` measures it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.algorithm.fragments import LeafSpec
from skerry.models import names
from skerry.models.axes import AXES, MeshSizes, held_elements, sizes_of
from skerry.models.memory import MemoryNeed, activation_bytes, learner_memory
from skerry.models.mesh import too_little
from skerry.models.presets import arch_of
from skerry.models.tensors import leaf_specs_of
from skerry.settings.models import ModelConfig, SyncConfig, TrainConfig

ARCH = arch_of(ModelConfig.model_validate({"preset": "1b"}))
LEAVES = leaf_specs_of(ARCH)
PARAMETERS = sum(leaf.size for leaf in LEAVES)


def need(setting: str, **train: object) -> MemoryNeed:
    sizes, wanted = sizes_of(setting, 64), TrainConfig.model_validate(train)
    held = held_elements(LEAVES, names.AXES, sizes)
    activations = activation_bytes(ARCH, sizes, wanted, 64, 4096)
    sync = SyncConfig(fragments=24)
    return learner_memory(PARAMETERS, sizes, wanted, sync, held=held, activations=activations)


def test_state_is_14_bytes_a_parameter_over_the_mesh() -> None:
    assert need("fsdp=1").state == 14 * PARAMETERS
    for setting in ("fsdp=8", "fsdp=4,tensor=2"):
        assert need(setting).state == pytest.approx(14 * PARAMETERS / 8, rel=0.001)
    copied = need("data=2,fsdp=4")
    assert copied.state == pytest.approx((12 / 4 + 2 / 8) * PARAMETERS, rel=0.001)


def test_muon_has_one_moment_and_bare_gradients_none() -> None:
    assert need("fsdp=1", inner="muon").moments == 4 * PARAMETERS
    assert need("fsdp=1", inner="gradient").moments == 0


def test_rematerialisation_parts_and_devices_lower_what_activations_take() -> None:
    plain = need("fsdp=8").activations
    assert need("fsdp=8", remat="blocks").activations < plain / 5
    assert need("fsdp=8", remat="attention,mlp").activations < plain / 2
    assert need("fsdp=8", accumulate=4).activations < plain / 3
    assert need("fsdp=16").activations < plain / 1.9


@given(st.builds(MeshSizes, **{axis: st.sampled_from([1, 2, 3, 4, 8]) for axis in AXES}))
def test_a_device_holds_at_least_its_even_share_and_at_most_all(sizes: MeshSizes) -> None:
    held = held_elements(LEAVES, names.AXES, sizes)
    assert PARAMETERS / (sizes.devices / sizes.data) <= held <= PARAMETERS


def test_frozen_leaves_are_no_part_of_what_is_split() -> None:
    leaves = (LeafSpec("a", (64, 64)), LeafSpec("b", (64, 64), trainable=False))
    assert held_elements(leaves, {}, MeshSizes(fsdp=8)) == 64 * 64 / 8


def test_what_does_not_fit_is_said_with_bytes_and_a_remedy() -> None:
    wanted = need("fsdp=8")
    said = too_little(wanted, 40 << 30, 8)
    assert f"{wanted.total:,.0f} bytes on each of 8 devices" in said
    assert f"{40 << 30:,}" in said
    assert "set train.remat=blocks" in said
    assert "larger fsdp" in too_little(wanted, 1 << 30, 8), "no remat makes room for the state"


def test_the_formula_needs_no_jax() -> None:
    code = "import sys, skerry.models.memory, skerry.models.axes; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
