"""What a learner computes on, and how fast that could train a model; without JAX."""

from __future__ import annotations

import math
import re
from typing import NamedTuple

from skerry.models.presets import OWN, arch_of
from skerry.models.tensors import token_flops
from skerry.settings.models import RunConfig

PEAK_TFLOPS = {
    "H100 PCIe": 756.0,
    "H100": 989.0,
    "H200": 989.0,
    "B200": 2250.0,
    "A100": 312.0,
    "L40S": 362.0,
    "TPU v4": 275.0,
    "TPU v5 lite": 197.0,
    "TPU v5p": 459.0,
    "TPU v6 lite": 918.0,
}
"""Dense bf16 by a part of the device's name, as their makers say; the first that fits counts."""


class Machine(NamedTuple):
    """A learner's host, its devices by mesh axis (``data=2,fsdp=4``; empty: one), and their name.

    ``device`` is what its driver calls one of them.
    """

    host: str
    mesh: str = ""
    device: str = ""

    @property
    def devices(self) -> int:
        return math.prod(int(size) for size in re.findall(r"=([0-9]{1,6})", self.mesh))

    def peak_tokens_per_s(self, config: RunConfig) -> float:
        """Return how many tokens a second its devices' peak would train; 0 if that is not known."""
        peak, model = peak_flops(self.device), config.model
        if peak is None or model.factory or model.preset == OWN:
            return 0.0
        return self.devices * peak / token_flops(model, arch_of(model), config.data.seq_len)


def peak_flops(device: str) -> float | None:
    """Return the FLOP/s that a device has by its name; None where no table has it."""
    return next((1e12 * flops for name, flops in PEAK_TFLOPS.items() if name in device), None)
