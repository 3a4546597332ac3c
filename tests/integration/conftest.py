"""What tests of loops that join a run share: a syncer beside them, in a thread."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog

from skerry.client.loop_thread import LoopThread
from skerry.log.nats.bus import NatsBus
from skerry_syncer.service import stand_by
from tests.support.nats_server import NatsServer


@pytest.fixture
def quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep join from configuring the log of the test process, and from writing beside it."""
    monkeypatch.setenv("SKERRY_LEARNER__PATH", str(tmp_path / "learners"))
    structlog.configure()
    yield
    structlog.reset_defaults()


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    made = LoopThread("syncer")
    yield made
    made.close()


@pytest.fixture
def syncer(shared_nats: NatsServer, run_id: str, thread: LoopThread) -> None:
    async def live() -> None:
        async with NatsBus(shared_nats.url, name="s") as bus:
            await stand_by(bus, run_id, "s")

    thread.begin(live())
