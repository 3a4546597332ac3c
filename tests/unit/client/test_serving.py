"""How the network of a loop of one's own ends with its run, and what the loop holds then."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import pytest
from structlog.testing import capture_logs

from skerry.client import membership
from skerry.client.inner import fresh
from skerry.client.loop_thread import LoopThread
from skerry.client.mailbox import Mailbox
from skerry.client.serving import Serving
from skerry.errors import BrokerUnavailable
from skerry.log import ledger
from skerry.protocol.messages import LearnerPhase
from skerry.service import shell
from tests.support.builders import commit, wait_until


class Held:
    """What a loop has adopted; ``looks`` has an item for each time that somebody looked."""

    def __init__(self) -> None:
        self.version = 1
        self.looks = SimpleQueue[None]()

    @property
    def versions(self) -> tuple[int, ...]:
        self.looks.put(None)
        return (self.version,)


class Scene:
    """A learner whose run is finished at version 2, and which is given no time for its goodbye."""

    def __init__(self, thread: LoopThread) -> None:
        self.held = Held()
        self.mailbox = Mailbox(1, lambda: None)
        self.meter = SimpleNamespace(phase=LearnerPhase.TRAINING)
        island: Any = SimpleNamespace(
            place=SimpleNamespace(member=None),
            session=self.held,
            meter=self.meter,
            now=SimpleNamespace(step=3),
            enter=lambda phase: setattr(self.meter, "phase", phase),
        )
        link = SimpleNamespace(bus=None, run="run", mailbox=self.mailbox)
        network: Any = SimpleNamespace(
            link=link, run=asyncio.Event().wait, finished=nothing, pulse=nothing
        )
        network.sender = SimpleNamespace(answered=nothing)
        self.serving = Serving(thread, network, island, 0.0)


async def nothing() -> None:
    pass


@pytest.fixture
def thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoopThread]:
    answers = iter([BrokerUnavailable("away"), {0: commit(2)}])

    async def last_commits(_bus: object, _run: str) -> Any:
        if isinstance(answer := next(answers), Exception):
            raise answer
        return answer

    monkeypatch.setattr(ledger, "last_commits", last_commits)
    monkeypatch.setattr(membership, "load_kernels", lambda: None)
    monkeypatch.setattr(shell, "RETRY_S", 0.0)
    made = LoopThread("test")
    yield made
    made.close()


def test_a_loop_that_stands_still_at_the_end_is_waited_for_until_it_has_the_last_state(
    thread: LoopThread,
) -> None:
    """As one that evaluates; the broker, too, may be away for a moment."""
    scene = Scene(thread)
    for _ in range(3):
        scene.held.looks.get(timeout=10)
    assert not scene.mailbox.stopping
    scene.held.version = 2
    wait_until(lambda: scene.mailbox.stopping)
    scene.serving.end(None)
    assert scene.meter.phase is LearnerPhase.FINISHED


def test_a_loop_that_leaves_without_the_last_state_says_so(thread: LoopThread) -> None:
    scene = Scene(thread)
    with capture_logs() as lines:
        scene.meter.phase = LearnerPhase.FINISHED
        wait_until(lambda: scene.mailbox.stopping)
    assert "last_state_missed" in [line["event"] for line in lines]
    scene.serving.end(None)


def test_how_an_optimizer_begins_can_be_said_after_the_run_is_over(thread: LoopThread) -> None:
    scene = Scene(thread)
    scene.held.version = 2
    wait_until(lambda: scene.mailbox.stopping)
    scene.serving.restored.set_result(fresh(1, 0, "it came late"))
    scene.serving.end(None)
