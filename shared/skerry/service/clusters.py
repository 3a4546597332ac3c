"""The clusters of ``skerry up`` that run on this machine, so that commands and loops find them."""

from __future__ import annotations

import contextlib
import fcntl
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
"""The file in a run's folder that says where its cluster is, while it runs."""
LOCK = "lock"
"""The file beside that one, which a running cluster keeps locked."""
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
    """Return these settings for the broker at ``url``; an empty ``login`` leaves theirs."""
    if not any(login.values()):
        return nats.model_copy(update={"url": url})
    given = {name: login[name] for name in LOGIN if login.get(name)}
    kept = nats.model_dump(exclude={*LOGIN}, exclude_unset=True)
    return type(nats).model_validate(kept | {"url": url} | given)


def running(root: Path = ROOT) -> list[RunningCluster]:
    """Return the clusters that were started in this folder and still run, newest first.

    An announcement may have come with the folder, and name any broker and any file as a password
    for it, so it counts only if a running process holds the lock beside it.
    """
    found: list[tuple[float, RunningCluster]] = []
    for path in root.glob(f"*/{ANNOUNCEMENT}"):
        with contextlib.suppress(OSError, ValueError, TypeError):
            cluster = RunningCluster(**json.loads(path.read_text("utf-8")))
            if _is_held(path.with_name(LOCK)):
                found.append((path.stat().st_mtime, cluster))
    return [cluster for _, cluster in sorted(found, key=lambda pair: -pair[0])]


def _is_held(lock: Path) -> bool:
    """Return True if a process has locked a file; OSError where there is none."""
    with lock.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False
