"""Measuring a real link through the broker: what a learner's contributions and reads would get.

A stream in the broker's memory takes chunks of a contribution's size, and gives them back. It is
named after no run, holds at most ``KEEP_BYTES`` and forgets all within a minute.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import aclosing
from dataclasses import dataclass

from skerry.log.base import Bus, Retention, Storage, StreamSpec
from skerry.protocol.subjects import Subjects
from skerry.settings.tree import Tree
from skerry.tasks import TaskGroup
from skerry_tools.plan.figures import Answer, FigureKind, FigureTable, figures
from skerry_tools.plan.question import refuse

RUN = "link-probe"
WARM_UP, PINGS = 3, 15
CHUNK_BYTES = 512 * 1024
ENVELOPE_BYTES = 16 * 1024
KEEP_BYTES = 512 * 1024**2
KEEP_S = 60.0


@dataclass(frozen=True, slots=True)
class MeasuredLink:
    """A link as messages see it: payload bits a second each way, and a round trip."""

    up_bits_s: float
    down_bits_s: float
    rtt_s: float
    payload_bytes: int

    def settings(self) -> dict[str, object]:
        """Return it as a site's settings."""
        return {
            "measured": True,
            "up": f"{self.up_bits_s / 1e6:.3f} Mbit/s",
            "down": f"{self.down_bits_s / 1e6:.3f} Mbit/s",
            "rtt": f"{self.rtt_s * 1e3:.4f} ms",
        }


def answer(link: MeasuredLink, site: str) -> Answer:
    """Return a link as text, to paste into a sites file, and JSON."""
    from skerry.settings.tree import toml_text

    size = f"{link.payload_bytes / 1e6:.0f} MB in chunks of {CHUNK_BYTES // 1024} KiB"
    rows = (
        ("up", link.up_bits_s, "bit/s", f"measured: published {size}"),
        ("down", link.down_bits_s, "bit/s", f"measured: read {size}"),
        ("rtt", link.rtt_s, "s", f"measured: median of {PINGS} acknowledgements"),
    )
    title = "Link, measured through the broker"
    table = FigureTable("probe", title, figures(rows, FigureKind.INPUT))
    text = [*table.lines(), "", "As a site:", "", f"[sites.{site}]", toml_text(link.settings())]
    return Answer(text, {"probe": table.json()}, [table], list)


def use(tree: Tree, link: MeasuredLink, name: str | None) -> None:
    """Put a measured link into the site that is named, or the only one.

    ConfigError where there are several sites and none is named.
    """
    known = list(tree.values.get("sites", {}))
    site = name or (known[0] if len(known) == 1 else "")
    if site not in known:
        there = ", ".join(known) or "none"
        refuse("site", f"is missing: name the site of --probe by --site; there are {there}.")
    tree.values["sites"][site].pop("derating", None)
    for key, value in link.settings().items():
        tree.put(("sites", site, key), value, "--probe")


def measure_here(nats: str | None) -> MeasuredLink:
    """Measure the link to a broker, or the one of this machine's settings."""
    from skerry.service.connect import bus_from
    from skerry.settings import loading

    async def measured() -> MeasuredLink:
        local = loading.load(None, [f"nats.url={nats}"] if nats else []).local
        async with bus_from(local.nats, RUN) as bus:
            return await measure(bus, window=local.nats.publish_window)

    return asyncio.run(measured())


async def measure(
    bus: Bus,
    payload_bytes: int = 64 * 1024**2,
    *,
    window: int = 6,
    clock: Callable[[], float] = time.perf_counter,
) -> MeasuredLink:
    """Measure the link to the broker that ``bus`` is connected to.

    Raises BusError where the broker refuses or does not answer.
    """
    names = Subjects(RUN)
    chunk = min(CHUNK_BYTES, bus.max_payload_bytes - ENVELOPE_BYTES)
    count = max(window, min(payload_bytes, KEEP_BYTES // 2) // chunk)
    stream = StreamSpec(
        names.stream("CONTRIB"),
        names.of_stream("CONTRIB"),
        Retention.WINDOW,
        Storage.MEMORY,
        max_bytes=KEEP_BYTES,
        max_age_s=KEEP_S,
        duplicate_window_s=KEEP_S,
    )
    await bus.declare([stream])
    subject = names.contribution(0, "probe")
    trips: list[float] = []
    for _ in range(WARM_UP + PINGS):
        start = clock()
        await bus.publish(subject, b"")
        trips.append(clock() - start)
    rtt_s = statistics.median(trips[WARM_UP:])
    last = (await bus.publish(subject, b"")).sequence
    payload = os.urandom(chunk)  # nothing on the way can compress it
    start, numbers = clock(), iter(range(count))
    async with TaskGroup() as group:
        for _ in range(window):
            group.create_task(_publish(bus, subject, payload, numbers), name="probe")
    up_s = max(clock() - start - rtt_s, 1e-9)
    start = clock()
    read = await asyncio.wait_for(_read(bus, subject, last, count), KEEP_S)
    down_s = max(clock() - start - rtt_s, 1e-9)
    return MeasuredLink(8 * count * chunk / up_s, 8 * read / down_s, rtt_s, count * chunk)


async def _publish(bus: Bus, subject: str, payload: bytes, numbers: Iterator[int]) -> None:
    for _ in numbers:
        await bus.publish(subject, payload)


async def _read(bus: Bus, subject: str, after: int, count: int) -> int:
    """Read so many messages that came after ``after``; return their bytes."""
    async with aclosing(bus.follow(subject, after=after)) as records:
        return sum([len((await anext(records)).payload) for _ in range(count)])
