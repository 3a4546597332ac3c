"""Measuring a real link through the broker: what a learner's contributions and reads would get.

A stream in the broker's memory takes chunks of a contribution's size, and gives them back. It is
named after no run, holds at most ``KEEP_BYTES`` and forgets all within a minute.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.log.base import Retention, Storage, StreamSpec
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup
from skerry_tools.plan.figures import Figure, Kind, Sheet

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from skerry.log.base import Bus

RUN = "link-probe"
WARM_UP, PINGS = 3, 15
CHUNK_BYTES = 512 * 1024
ENVELOPE_BYTES = 16 * 1024
KEEP_BYTES = 512 * 1024**2
KEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class Measured:
    """A link as messages see it: payload bits a second each way, and a round trip."""

    up_bits_s: float
    down_bits_s: float
    rtt_s: float
    payload_bytes: int

    def sheet(self) -> Sheet:
        """Return it for people and machines."""
        size = f"{self.payload_bytes / 1e6:.0f} MB in chunks of {CHUNK_BYTES // 1024} KiB"
        return Sheet(
            "probe",
            "Link, measured through the broker",
            {
                "up": Figure(self.up_bits_s, "bit/s", Kind.INPUT, f"measured: published {size}"),
                "down": Figure(self.down_bits_s, "bit/s", Kind.INPUT, f"measured: read {size}"),
                "rtt": Figure(
                    self.rtt_s, "s", Kind.INPUT, f"measured: median of {PINGS} acknowledgements"
                ),
            },
        )

    def toml(self, site: str) -> str:
        """Return what to paste into a sites file."""
        return (
            f'[sites.{site}]\nmeasured = true\nup = "{self.up_bits_s / 1e6:.1f} Mbit/s"\n'
            f'down = "{self.down_bits_s / 1e6:.1f} Mbit/s"\nrtt = "{self.rtt_s * 1e3:.2f} ms"\n'
        )


async def measure(
    bus: Bus,
    payload_bytes: int = 64 * 1024**2,
    *,
    window: int = 6,
    clock: Callable[[], float] = time.perf_counter,
) -> Measured:
    """Measure the link between here and the broker behind ``bus``, which is connected.

    Raises BusError where the broker refuses or does not answer.
    """
    names = Subjects(RUN)
    chunk = min(CHUNK_BYTES, bus.max_payload_bytes - ENVELOPE_BYTES)
    count = max(window, min(payload_bytes, KEEP_BYTES // 2) // chunk)
    stream = names.stream("CONTRIB")
    await bus.declare(
        [
            StreamSpec(
                stream,
                names.of_stream("CONTRIB"),
                Retention.WINDOW,
                Storage.MEMORY,
                max_bytes=KEEP_BYTES,
                max_age_s=KEEP_S,
                duplicate_window_s=KEEP_S,
            )
        ]
    )
    subject = names.contribution(0, "probe")
    trips = [await _ping(bus, subject, clock) for _ in range(WARM_UP + PINGS)][WARM_UP:]
    rtt_s = statistics.median(trips)
    last = (await bus.publish(subject, b"")).sequence
    payload = os.urandom(chunk)  # nothing on the way can compress it
    start = clock()
    numbers = iter(range(count))
    async with TaskGroup() as group:
        for worker in range(window):
            group.create_task(_publish(bus, subject, payload, numbers), name=f"probe_{worker}")
    up_s = max(clock() - start - rtt_s, 1e-9)
    start = clock()
    read = await asyncio.wait_for(_read(bus, subject, last, count), KEEP_S)
    down_s = max(clock() - start - rtt_s, 1e-9)
    return Measured(8 * count * chunk / up_s, 8 * read / down_s, rtt_s, count * chunk)


async def _ping(bus: Bus, subject: str, clock: Callable[[], float]) -> float:
    start = clock()
    await bus.publish(subject, b"")
    return clock() - start


async def _publish(bus: Bus, subject: str, payload: bytes, numbers: Iterator[int]) -> None:
    for _ in numbers:
        await bus.publish(subject, payload)


async def _read(bus: Bus, subject: str, after: int, count: int) -> int:
    """Read back so many messages behind ``after``; returns their bytes."""
    total = 0
    records = bus.follow(subject, after=after)
    async with aclosing(records):
        async for record in records:
            total += len(record.payload)
            count -= 1
            if not count:
                break
    return total
