"""Where the parameters of a JAX loop lie."""

from __future__ import annotations

import os
import subprocess
import sys

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
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
        "JAX_PLATFORMS": "cpu",
    }
    ran = subprocess.run(
        [sys.executable, "-c", MOVED],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    assert "[512] on cpu:0 in the run, and float32 [512] on cpu:0, cpu:1 in this step" in ran.stdout
