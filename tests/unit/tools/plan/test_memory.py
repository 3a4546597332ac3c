"""What a plan says that a chip must hold is what a learner holds; on fake devices of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[4]


@pytest.mark.drill
@pytest.mark.timeout(600)
def test_planned_memory_is_within_a_tenth_of_what_eight_devices_hold() -> None:
    devices = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-m", "tests.unit.tools.plan.memory_on_eight"],
        env=os.environ | devices,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=590,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    found: dict[str, dict[str, list[float]]] = json.loads(ran.stdout.splitlines()[-1])
    assert len(found) == 6
    for name, parts in found.items():
        for part in ("all", "state"):
            planned, held = parts[part]
            assert planned == pytest.approx(held, rel=0.1), (name, part, parts)
