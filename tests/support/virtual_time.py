"""Coroutines on virtual time, and clients of a broker that is far away on it."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any

from skerry.log.memory import MemoryBroker, MemoryBus
from skerry_tools.lab.link import DistantLink
from skerry_tools.lab.scenario import LinkSettings
from skerry_tools.virtual import VirtualLoop


def simulate(main: Callable[[VirtualLoop], Coroutine[Any, Any, None]]) -> None:
    """Run a coroutine to its end on a loop of its own."""
    loop = VirtualLoop()
    task = loop.create_task(main(loop))
    assert loop.run_until(task, 1e6)
    task.result()
    loop.settle()
    loop.close()


def broker_of(loop: VirtualLoop) -> MemoryBroker:
    return MemoryBroker(clock_ns=lambda: round(loop.time() * 1e9))


def far_of(broker: MemoryBroker, latency_s: float) -> MemoryBus:
    """Return a client to which a message takes so long, and from it."""
    return broker.connect(DistantLink(LinkSettings(latency_s=latency_s), lambda ns: ns / 1e9))
