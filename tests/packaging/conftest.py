"""What packaging tests share: the checkout, its uv, and the five import packages."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from skerry.protocol.roles import Grant
from skerry.service.keyring import Keyring
from tests.support.keyed import KeyedBroker, mount_keys
from tests.support.nats_server import NatsServer

ROOT = Path(__file__).parents[2]

CERTS = "UV_SYSTEM_CERTS"
"""The one setting of ours that stays: behind a company's proxy uv fetches nothing without it."""


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def uv() -> str:
    """The uv that ``make setup`` put into the checkout, or one on PATH."""
    places = os.pathsep.join([str(ROOT / ".tools" / "bin"), os.environ.get("PATH", "")])
    found = shutil.which("uv", path=places)
    assert found is not None, "no uv: run `make setup` first"
    return found


@pytest.fixture(scope="session")
def plain_environ() -> dict[str, str]:
    """The environment of a user who has neither activated nor configured anything of ours."""
    ours = ("SKERRY_", "UV_", "VIRTUAL_ENV", "PYTHON", "PYTEST_")
    kept = {k: v for k, v in os.environ.items() if not k.startswith(ours) or k == CERTS}
    return {**kept, "UV_PYTHON_PREFERENCE": "only-system", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def compose_broker(root: Path, tmp_path: Path) -> Iterator[Callable[..., KeyedBroker]]:
    """Start the broker with the config that Compose mounts and keys for these.

    Only the store's folder and the monitoring port are moved, to ones that are free here.
    """
    started: list[NatsServer] = []

    def start(*grants: Grant) -> KeyedBroker:
        keyring = Keyring(tmp_path / "secrets")
        keyring.add(*grants)
        config = (root / "infra" / "nats" / "nats.conf").read_text()
        moved = config.replace('"/data"', f'"{tmp_path}/data"').replace(":8222", ":-1")
        server = NatsServer(tmp_path / "nats", settings=moved, jetstream=False)
        started.append(server)
        mount_keys(keyring, server.folder)
        server.start()
        return KeyedBroker(server, keyring)

    yield start
    for server in started:
        server.kill()
