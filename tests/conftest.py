"""Fixtures that every kind of test may ask for."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from skerry.testing.nats_server import NatsServer


@pytest.fixture
def nats_server(tmp_path: Path) -> Iterator[NatsServer]:
    """A real nats-server of this test's own, with an empty store."""
    server = NatsServer(tmp_path / "nats")
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="session")
def shared_nats(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """One real nats-server for all tests that leave it running; tell runs apart by ``run_id``."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture
def run_id() -> str:
    """A run id that no other test uses."""
    return f"t{uuid.uuid4().hex[:12]}"
