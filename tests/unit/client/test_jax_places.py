"""Where the parameters of a JAX loop lie."""

from __future__ import annotations

from tests.support.devices import ran_on

MOVED = """
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from skerry.algorithm.fragments import LeafSpec, plan
from skerry.client.jax_fragments import JaxFragments
from skerry.errors import ModelError
from skerry.settings.models import SyncConfig

one, both = jax.devices()[0], Mesh(np.array(jax.devices()), ("data",))
held = jax.device_put({"w": np.zeros(512, np.float32)}, one)
fragments = JaxFragments(plan((LeafSpec("w", (512,)),), 1), SyncConfig(), held)
fragments.take(held)
try:
    fragments.take(jax.device_put(held, NamedSharding(both, PartitionSpec("data"))))
except ModelError as error:
    print(error)
"""


def test_a_step_that_moves_the_parameters_to_other_devices_is_refused_at_once() -> None:
    said = ran_on(2, "-c", MOVED)
    assert "[512] on cpu:0 in the run, and float32 [512] on cpu:0, cpu:1 in this step" in said
