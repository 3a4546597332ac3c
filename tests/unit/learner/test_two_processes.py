"""Two processes of four devices each capture, quantise and adopt what one device does."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@pytest.mark.drill
@pytest.mark.timeout(400)
@pytest.mark.parametrize("layers", ["unrolled", "scanned"])
@pytest.mark.parametrize("setting", ["auto", "data=2,fsdp=2,tensor=2"])
def test_two_processes_hold_and_send_what_one_device_does_bit_by_bit(
    setting: str, layers: str
) -> None:
    devices = "--xla_force_host_platform_device_count=4"
    environment = os.environ | {"XLA_FLAGS": devices, "JAX_PLATFORMS": "cpu", "PYTHONPATH": "."}
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    script = Path(__file__).with_name("on_two_processes.py")
    started = [
        subprocess.Popen(
            [sys.executable, script, address, process, setting, layers],
            env=environment,
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for process in "01"
    ]
    try:
        said = [process.communicate(timeout=300)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [text.splitlines()[-1] for text in said] == ["equal", "equal"], "\n".join(said)
