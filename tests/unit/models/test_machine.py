"""What a learner says of its devices, and the speed that their peak would allow."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from skerry.models.machine import Machine
from skerry.models.mesh import machine_of, machine_of_arrays, make_mesh
from skerry.models.presets import arch_of
from skerry.models.tensors import flops_per_token
from skerry.settings.models import RunConfig

H100 = "NVIDIA H100 80GB HBM3"


def config_of(**model: Any) -> RunConfig:
    return RunConfig.model_validate({"model": {"preset": "0.3b"} | model})


def test_the_peak_of_a_known_device_is_that_of_all_in_the_mesh() -> None:
    config = config_of()
    each = flops_per_token(arch_of(config.model), config.data.seq_len)
    found = Machine("host", "data=2,fsdp=4", H100).peak_tokens_per_s(config)
    assert found == pytest.approx(8 * 989e12 / each)


def test_frozen_weights_need_a_third_fewer_operations() -> None:
    whole, adapters = (
        Machine("host", "", H100).peak_tokens_per_s(config_of(lora_rank=rank)) for rank in (0, 4)
    )
    assert adapters == pytest.approx(whole * 6 / 4)


@pytest.mark.parametrize(
    ("device", "model"),
    [("cpu", {}), ("Radeon", {}), (H100, {"factory": "mine:build"}), (H100, {"preset": "own"})],
)
def test_nothing_is_claimed_of_an_unknown_device_or_model(
    device: str, model: dict[str, Any]
) -> None:
    assert Machine("host", "", device).peak_tokens_per_s(config_of(**model)) == 0


def test_devices_are_counted_by_their_axes() -> None:
    assert [Machine("h", mesh).devices for mesh in ("", "fsdp=8", "data=2,fsdp=4")] == [1, 8, 8]


def test_a_learner_and_a_loop_say_what_they_compute_on() -> None:
    name = jax.devices()[0].device_kind
    mesh = make_mesh("auto")
    assert machine_of(mesh, "h") == Machine("h", "", name)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for leaf in (np.zeros(4), jax.numpy.zeros(4), jax.device_put(np.zeros(4), rows)):
        assert machine_of_arrays([leaf], "h") == Machine("h", "", name)
