"""A learner's devices, and how fast they could train a model; without JAX."""

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
"""Dense bf16 FLOP/s from data sheets, by a part of the device's name; the first match counts."""


class Machine(NamedTuple):
    """A learner's host, its devices by mesh axis (``data=2,fsdp=4``; empty: one), and their name.

    ``device`` is the driver's name of one of them.
    """

    host: str
    mesh: str = ""
    device: str = ""

    @property
    def devices(self) -> int:
        return math.prod(int(size) for size in re.findall(r"=([0-9]{1,6})", self.mesh))

    def peak_tokens_per_s(self, config: RunConfig) -> float:
        """Return the tokens a second that its devices would train at their peak; 0: not known."""
        peak, model = peak_flops(self.device), config.model
        if peak is None or model.factory or model.preset == OWN:
            return 0.0
        return self.devices * peak / token_flops(model, arch_of(model), config.data.seq_len)


def peak_flops(device: str) -> float | None:
    """Return a device's peak FLOP/s by its name; None for an unknown one."""
    return next((1e12 * flops for name, flops in PEAK_TFLOPS.items() if name in device), None)
