"""Python in a process of its own, on fake devices: a process has as many as it began with."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def ran_on(devices: int, *arguments: str, flags: str = "", **environment: str) -> str:
    """Return what Python prints with these arguments and so many devices; it must not fail.

    ``flags`` are further ones of XLA.
    """
    count = f"--xla_force_host_platform_device_count={devices}"
    about = {"XLA_FLAGS": f"{count} {flags}", "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    ran = subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | about | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout
