"""A real broker that knows keys and nothing else."""

from __future__ import annotations

import os
import signal
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skerry.cli.cluster.broker import LOG
from skerry.log.nats.bus import NatsBus
from skerry.log.nats.login import NatsOptions
from skerry.protocol.roles import Grant
from skerry.service.keyring import ACCOUNTS, Keyring
from tests.support.nats_server import NatsServer


@dataclass(frozen=True, slots=True)
class KeyedBroker:
    """A server and its keys."""

    server: NatsServer
    keyring: Keyring

    def bus(self, name: str, **given: Any) -> NatsBus:
        """Return a bus that logs in as ``name``."""
        options = NatsOptions(credentials=self.keyring.seed(name), **given)
        return NatsBus(self.server.url, name=name, options=options)

    def reload(self) -> None:
        """Have it read its keys again."""
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGHUP)


@contextmanager
def keyed_broker(folder: Path, *grants: Grant, days: int | None = None) -> Generator[KeyedBroker]:
    """Run a server that knows these keys."""
    keyring = Keyring.begun(folder / "keys", days)
    keyring.add(*grants)
    include = f'include "../keys/{ACCOUNTS}"\n'
    server = NatsServer(folder / "nats", settings=include, monitored=True)
    server.start()
    try:
        yield KeyedBroker(server, keyring)
    finally:
        server.kill()


def mount_keys(keyring: Keyring, config: Path) -> None:
    """Have keys beside a broker's config, as a container has them."""
    config.mkdir(parents=True, exist_ok=True)
    (config / "keys").symlink_to((keyring.folder / ACCOUNTS).parent)


def refusals(broker: Path) -> list[str]:
    """Return what a local cluster's broker has refused, line by line."""
    lines = (broker / LOG).read_text(errors="replace").splitlines()
    return [line for line in lines if "[ERR]" in line]
