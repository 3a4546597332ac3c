"""A real nats-server for tests, with the ways in which one fails."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from skerry.cli.cluster.broker import LocalBroker


class NatsServer(LocalBroker):
    """A LocalBroker that can be paused, killed and restarted on the same port and store.

    It dies with the test process even when that is killed. ``settings`` is extra text in the
    server's own configuration language.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: str = "",
        binary: Path | None = None,
        port: int = 0,
        jetstream: bool = True,
    ) -> None:
        config = None
        if settings:
            folder.mkdir(parents=True, exist_ok=True)
            config = folder / "nats.conf"
            config.write_text(settings)
        super().__init__(
            folder,
            binary=binary,
            port=port,
            config=config,
            jetstream=jetstream,
            death_signal=signal.SIGKILL,
        )

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

    def kill9(self) -> None:
        """End the process at once; what it had acknowledged is in its store."""
        self.kill()

    def signal_kill(self) -> None:
        """Send SIGKILL and return before the process has ended: several die in one instant."""
        self._signal(signal.SIGKILL)

    def restart(self, timeout_s: float = 15.0) -> None:
        """End the process if it runs, at once, and start it on the same port and store."""
        self.kill()
        self.start(timeout_s)

    def _signal(self, number: signal.Signals) -> None:
        pid = self.pid
        if pid is None:
            msg = "the server does not run"
            raise RuntimeError(msg)
        os.kill(pid, number)
