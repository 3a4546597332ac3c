"""A real nats-server for tests, with the ways in which one fails."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

from skerry.cli.cluster.broker import find_server, read_port
from skerry.cli.cluster.supervisor import launcher
from skerry.errors import BrokerUnavailable


class NatsServer:
    """One nats-server on a loopback port that can be paused, killed and restarted.

    The server picks its ports at its first start and keeps them, and its store, at later ones. It
    dies with the thread that started it, also when the test process is killed. ``settings`` is
    extra text in the server's own configuration language.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: str = "",
        binary: Path | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        jetstream: bool = True,
        monitored: bool = False,
    ) -> None:
        self.folder = folder
        self.store = folder / "jetstream"
        self.log = folder / "nats-server.log"
        self.host = host
        self.port = port
        self.monitor_port = 0
        self._binary = binary
        self._settings = settings
        self._jetstream = jetstream
        self._monitored = monitored
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"nats://{self.host}:{self.port}"

    @property
    def monitor_url(self) -> str:
        return f"http://{self.host}:{self.monitor_port}" if self.monitor_port else ""

    @property
    def pid(self) -> int | None:
        """The server's process id, or None when it does not run."""
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, timeout_s: float = 15.0) -> None:
        """Start the server and return once it takes connections; BrokerUnavailable if not."""
        if self.running:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        for stale in self.folder.glob("nats-server_*.ports"):
            stale.unlink()
        command = [*launcher(), *self.command()]
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
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
        """End the server at once, as a power cut would; what it acknowledged is in its store."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    kill9 = kill

    def signal_kill(self) -> None:
        """Send SIGKILL and return before the process has ended: several die in one instant."""
        self._signal(signal.SIGKILL)

    def restart(self, timeout_s: float = 15.0) -> None:
        """End the process if it runs, at once, and start it on the same port and store."""
        self.kill()
        self.start(timeout_s)

    def pause(self) -> None:
        """Stop the process without closing its connections (SIGSTOP): it hangs, silently.

        Returns once every thread has stopped, which takes a moment on a busy machine.
        """
        self._signal(signal.SIGSTOP)
        if self.pid is not None:
            os.waitid(os.P_PID, self.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Let a paused process go on."""
        self._signal(signal.SIGCONT)

    def reload(self) -> None:
        """Have it read its configuration again, and return once it has."""
        begun = self.log.stat().st_size
        self._signal(signal.SIGHUP)
        while b"Reloaded server configuration" not in self.log.read_bytes()[begun:]:
            time.sleep(0.01)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            msg = "the server does not run"
            raise RuntimeError(msg)
        os.kill(pid, number)

    def command(self) -> list[str]:
        """Write the server's configuration, and return the command line that starts it."""
        server = str((self._binary or find_server()).absolute())
        command = [server, "-a", self.host, "-p", str(self.port or -1)]
        command += ["--ports_file_dir", str(self.folder)]
        command += ["-m", str(self.monitor_port or -1)] if self._monitored else []
        command += ["-js", "-sd", str(self.store)] if self._jetstream else []
        if self._settings:
            config = self.folder / "nats.conf"
            config.write_text(self._settings)
            command += ["-c", str(config)]
        return command

    def _wait_ready(self, process: subprocess.Popen[bytes], deadline: float) -> None:
        ports = self.folder / f"nats-server_{process.pid}.ports"
        while time.monotonic() < deadline and process.poll() is None:
            port = read_port(ports)
            if port and _answers(self.host, port):
                self.port, self.monitor_port = port, read_port(ports, "monitoring")
                return
            time.sleep(0.01)
        words = self.log.read_text(errors="replace").strip().splitlines()[-1:]
        msg = f"nats-server did not start: {words}."
        raise BrokerUnavailable(msg, url=self.url)


def _answers(host: str, port: int) -> bool:
    try:
        with socket.create_connection((host, port), timeout=1.0) as connection:
            return connection.recv(5) == b"INFO "
    except OSError:
        return False
