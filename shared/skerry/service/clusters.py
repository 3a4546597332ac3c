"""The clusters of ``skerry up`` that run on this machine, so that commands and loops find them."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skerry.settings.local import NatsSettings

ROOT = Path(".skerry")
"""Where commands keep runs, checkpoints and caches: below the working folder."""
ANNOUNCEMENT = "cluster.json"
"""In a run's folder while its cluster runs."""


LOGIN = ("credentials", "user", "password_file", "inbox_prefix")
"""The settings that say who a client is."""


@dataclass(frozen=True, slots=True)
class RunningCluster:
    """A cluster that runs on this machine; ``proxied``: its services reach it through a proxy.

    ``login`` are its LOGIN settings, as text.
    """

    run: str
    pid: int
    url: str
    login: Mapping[str, str] = field(default_factory=dict[str, str])
    proxied: bool = False

    def reached_with(self, nats: NatsSettings) -> NatsSettings:
        """Return these settings with the cluster's broker in place of the one they name."""
        return reached(nats, self.url, self.login)


def reached(nats: NatsSettings, url: str, login: Mapping[str, str]) -> NatsSettings:
    """Return these settings for another broker; they keep their own login where there is none."""
    if not any(login.values()):
        return nats.model_copy(update={"url": url})
    given = {name: login[name] for name in LOGIN if login.get(name)}
    kept = nats.model_dump(exclude={*LOGIN}, exclude_unset=True)
    return type(nats).model_validate(kept | {"url": url} | given)


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
