"""A run of a few steps for loops that join it, and what its log says afterwards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skerry.client.loop_thread import LoopThread
from skerry.log.nats.bus import NatsBus
from tests.support.history import read_history

BATCH, SEQ, STEPS = 2, 8, 40
CONFIG: Mapping[str, Any] = {
    "data": {"batch": BATCH, "seq_len": SEQ},
    "train": {"steps": STEPS},
    "sync": {"learners": 1, "fragments": 2, "h_steps": 10},
    "log": {"window_bytes": 64 * 1024**2},
    "liveness": {"pulse_s": 0.05},
}
ENDLESS = {**CONFIG, "train": {"steps": 10_000_000, "inner_max_age_steps": 10_000_000}}


def violations(thread: LoopThread, url: str, run: str) -> tuple[str, ...]:
    """Return what an audit of the run finds."""

    async def read() -> tuple[str, ...]:
        async with NatsBus(url, name="audit") as bus:
            return (await read_history(bus, run)).violations

    return thread.result(read())
