"""What the page costs who looks at it: ``python tests/bench/bench_page.py``; needs a chromium.

A run in memory plays before the real monitor and a browser: when something is painted first, how
long a commit takes to be on the page, how long a learner's death does, and what the page holds
after an hour of updates, played as fast as they can be told. One death is a real one: a process on
a real broker, killed, before a monitor that is a process too.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import shutil
import statistics
import sys
import tempfile
import time
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator
from dataclasses import asdict, dataclass
from pathlib import Path

import structlog
from harness import Goal, parser, summary, write
from playwright.async_api import Browser, Page, async_playwright

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.stage import Stage, served

from skerry.log.nats.bus import NatsBus
from skerry.settings.models import RunConfig
from skerry_health_monitor.web import stream
from tests.support.nats_server import NatsServer
from tests.support.scripted_run import ScriptedRun

LEARNERS = 8
COMMITS = 20
TURN_S = 0.5
HOUR_S = 3600.0
PAUSE_S = 0.02
MEGABYTE = 1e6
RUN = "run"
KILLS = 5
VICTIM = """
import asyncio, sys
from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.algorithm.fragments import plan
from tests.support.learners import FakeLearner

async def main(url, run, name):
    async with NatsBus(url, name=name) as bus:
        record = await ledger.read_run(bus, run)
        cut = plan(record.leaves, record.fragments)
        await FakeLearner(bus, run, cut, name, pulse_s=0.5).train()

asyncio.run(main(*sys.argv[1:]))
"""
"""A learner to be killed; its pulses are as far apart as those of a real one."""
PAINTED = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime ?? null"


@dataclass(frozen=True, slots=True)
class Figures:
    """``heap_mb`` is what JavaScript holds after a collection, ``nodes`` are of the document."""

    first_paint_ms: float
    commit_shown_ms: float
    commit_shown_worst_ms: float
    suspect_shown_s: float
    gone_shown_s: float
    killed_shown_s: float
    messages: int
    heap_before_mb: float
    heap_mb: float
    nodes: int


async def opened(browser: Browser, url: str) -> Page:
    page = await browser.new_page(viewport={"width": 1440, "height": 900})
    await page.goto(url)
    await page.wait_for_selector("#round-rows button")
    return page


async def first_paint_ms(browser: Browser) -> float:
    """Return the median over some fresh pages."""
    stage, times = Stage(), list[float]()
    await stage.past(300, 0.5)
    async with served(stage) as (url, _):
        for _ in range(5):
            page = await opened(browser, url)
            times.append(float(await page.evaluate(PAINTED)))
            await page.close()
    return statistics.median(times)


async def commits_shown_ms(browser: Browser) -> list[float]:
    """Return for some commits how long each took from the log to the page."""
    stage, times = Stage(), list[float]()
    await stage.past(60, 0.5)
    async with served(stage) as (url, _):
        page = await opened(browser, url)
        for number in range(COMMITS):
            await asyncio.sleep(0.37)
            stage.now_s, fragment = time.time(), number % stage.fragments
            waiting = page.wait_for_selector(
                f"[data-round='{fragment}.{stage.versions[fragment] + 1}']"
            )
            shown = asyncio.ensure_future(waiting)
            await asyncio.sleep(0)
            began = time.monotonic()
            await stage.commit(fragment)
            await shown
            times.append(1000 * (time.monotonic() - began))
        await page.close()
    return times


async def death_shown_s(browser: Browser) -> tuple[float, float]:
    """Return the seconds from a learner's last pulse until it is shown suspect, and gone."""
    stage = Stage(learners=4, config={"liveness": {"pulse_s": 0.5}})
    await stage.past(30, 1)
    async with served(stage) as (url, _):
        playing = asyncio.create_task(stage.play(0.5))
        page = await opened(browser, url)
        await asyncio.sleep(10)
        stage.actors["learner-3"].silent = True
        began = time.monotonic()
        await page.wait_for_selector("#lanes [data-state='suspect']:has-text('learner-3')")
        suspect_s = time.monotonic() - began
        await page.wait_for_selector("#lanes [data-state='gone']:has-text('learner-3')")
        gone_s = time.monotonic() - began
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await page.close()
    return suspect_s, gone_s


async def killed_shown_s(browser: Browser) -> float:
    """Return the median of the seconds from a learner's SIGKILL until it is shown gone."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        broker = NatsServer(Path(folder) / "broker", monitored=True)
        broker.start()
        try:
            async with NatsBus(broker.url) as bus, monitoring(broker) as url:
                scripted = await ScriptedRun.begin(bus, RUN, config=RunConfig())
                await scripted.commit_all()
                page = await browser.new_page(viewport={"width": 1440, "height": 900})
                await page.goto(url)
                for number in range(KILLS):
                    name = f"victim-{number}"
                    victim = await process("-c", VICTIM, broker.url, RUN, name)
                    row = "#lanes [data-state='{}']:has-text('" + name + "')"
                    await page.wait_for_selector(row.format("training"))
                    await asyncio.sleep(10)
                    victim.kill()
                    began = time.monotonic()
                    await page.wait_for_selector(row.format("gone"))
                    times.append(time.monotonic() - began)
                    await victim.wait()
                await page.close()
        finally:
            broker.stop()
    return statistics.median(times)


@contextlib.asynccontextmanager
async def monitoring(broker: NatsServer) -> AsyncGenerator[str]:
    """Yield the address of a health monitor that is a process of its own."""
    told = ("--set", "health.port=0", "--set", f'metrics.broker="{broker.monitor_url}"')
    where = ("--nats", broker.url, "--run", RUN)
    running = await process("-m", "skerry_health_monitor", *where, *told, stderr=PIPE)
    assert running.stderr is not None
    reading: asyncio.Task[None] | None = None
    try:
        async with asyncio.timeout(60):
            line = {"event": ""}
            while line["event"] != "health_listening":
                line = json.loads(await running.stderr.readline())
        reading = asyncio.create_task(_read_on(running.stderr))
        yield f"http://127.0.0.1:{line['port']}/"
    finally:
        running.kill()
        await running.wait()
        if reading is not None:
            await reading


async def _read_on(lines: asyncio.StreamReader) -> None:
    while await lines.readline():
        pass


async def process(*words: str, stderr: int | None = None) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(sys.executable, *words, stderr=stderr)


async def heap(page: Page) -> tuple[float, int]:
    """Return what JavaScript holds in MB after a collection, and how many nodes there are."""
    session = await page.context.new_cdp_session(page)
    await session.send("HeapProfiler.collectGarbage")
    await session.send("Performance.enable")
    told = {
        m["name"]: m["value"] for m in (await session.send("Performance.getMetrics"))["metrics"]
    }
    await session.detach()
    return told["JSHeapUsedSize"] / MEGABYTE, int(told["Nodes"])


async def hour(browser: Browser) -> tuple[int, float, float, int]:
    """Return messages, megabytes before and after, and nodes after an hour of updates."""
    stage = Stage(learners=LEARNERS)
    await stage.past(300, 1)
    pause, stream.pause_s = stream.pause_s, lambda _: PAUSE_S
    async with served(stage, clock_s=lambda: stage.now_s) as (url, monitor):
        page = await opened(browser, url)
        before, _ = await heap(page)
        turns = int(HOUR_S / TURN_S)
        for number in range(turns):
            stage.now_s += TURN_S
            for actor in stage.actors.values():
                actor.steps += 1
                actor.step = actor.steps
                await stage.pulse(actor)
            if number % 3 == 0:
                await stage.commit(number // 3 % stage.fragments)
            if number % 100 == 0:
                await stage.evaluate()
            monitor.feed.changed.set()
            # One message a turn, and the browser keeps up with them.
            await asyncio.sleep(PAUSE_S)
        await page.wait_for_selector(f"#tile-rounds dd:has-text('{stage.rounds:,}')")
        after, nodes = await heap(page)
        await page.close()
    stream.pause_s = pause
    return turns, before, after, nodes


async def measured() -> Figures:
    path = os.environ.get("SKERRY_CHROMIUM") or shutil.which("chromium")
    async with async_playwright() as play:
        browser = await play.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-background-networking"]
        )
        paint_ms = await first_paint_ms(browser)
        shown = await commits_shown_ms(browser)
        suspect_s, gone_s = await death_shown_s(browser)
        killed_s = await killed_shown_s(browser)
        messages, before, after, nodes = await hour(browser)
        await browser.close()
    return Figures(
        *(paint_ms, statistics.median(shown), max(shown), suspect_s, gone_s),
        *(killed_s, messages, before, after, nodes),
    )


def main() -> None:
    wanted = parser(__doc__ or "").parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    found = asyncio.run(measured())
    for name, value in asdict(found).items():
        print(f"{name:24} {value:10,.1f}")
    goals = [
        Goal("first paint on the loopback", 1000.0, found.first_paint_ms, "ms", at_most=True),
        Goal("commit on the page, worst", 1000.0, found.commit_shown_worst_ms, "ms", at_most=True),
        Goal("killed learner, shown gone", 3.0, found.killed_shown_s, "s", at_most=True),
        Goal("cut off learner, shown suspect", 3.0, found.suspect_shown_s, "s", at_most=True),
        Goal("held after an hour", 50.0, found.heap_mb, "MB", at_most=True),
    ]
    print(summary(goals))
    write("page", [asdict(found)], goals, wanted.json)


if __name__ == "__main__":
    main()
