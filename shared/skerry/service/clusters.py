"""The clusters of ``skerry up`` that run on this machine, so that commands and loops find them."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skerry.settings.models import NatsSettings

ROOT = Path(".skerry")
"""Where commands keep runs, checkpoints and caches: below the working folder."""
ANNOUNCEMENT = "cluster.json"
"""In a run's folder while its cluster runs."""


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that runs on this machine; ``proxied``: its services reach it through a proxy."""

    run: str
    pid: int
    url: str
    user: str = ""
    password_file: str | None = None
    proxied: bool = False

    def reached_with(self, nats: NatsSettings) -> NatsSettings:
        """Return these settings with the cluster's broker in place of the one they name."""
        broker: dict[str, object] = {"url": self.url}
        if self.user:
            password = None if self.password_file is None else Path(self.password_file)
            broker |= {"user": self.user, "password_file": password, "credentials": None}
        return nats.model_copy(update=broker)


def running(root: Path = ROOT) -> list[RunningCluster]:
    """Return the clusters that were started in this folder and still run, newest first."""
    import psutil  # not for a command line that only wants a name

    found: list[tuple[float, RunningCluster]] = []
    for path in root.glob("*/cluster.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            cluster = RunningCluster(**json.loads(path.read_text("utf-8")))
            if psutil.pid_exists(cluster.pid):
                found.append((path.stat().st_mtime, cluster))
    return [cluster for _, cluster in sorted(found, key=lambda pair: -pair[0])]
