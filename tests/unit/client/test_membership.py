"""What a learner says when it leaves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from skerry.client.membership import Membership
from skerry.protocol.messages import LearnerPhase


async def test_a_goodbye_is_said_where_threads_take_no_more_work() -> None:
    said = list[LearnerPhase]()

    async def flush() -> None:
        msg = "cannot schedule new futures after shutdown"
        raise RuntimeError(msg)

    async def pulse() -> None:
        said.append(island.meter.phase)

    def enter(phase: LearnerPhase) -> None:
        island.meter.phase = phase

    meter = SimpleNamespace(phase=LearnerPhase.TRAINING)
    island: Any = SimpleNamespace(enter=enter, meter=meter, now=SimpleNamespace(step=3))
    network: Any = SimpleNamespace(flush=flush, pulse=pulse)
    await Membership(network, island).leave()
    assert said == [LearnerPhase.STOPPED]
