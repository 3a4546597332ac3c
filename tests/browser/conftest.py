"""A browser, and a run that plays on the page before it; lets these tests import each other."""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import threading
from collections.abc import Callable, Coroutine, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))

from browser.stage import Stage, served

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

    from skerry_health_monitor.service import Monitor

T = TypeVar("T")

CALM = ("--no-sandbox", "--disable-background-networking", "--disable-dev-shm-usage")


def chromium() -> str | None:
    """Return the browser that is here: SKERRY_CHROMIUM, or one on the PATH."""
    return os.environ.get("SKERRY_CHROMIUM") or shutil.which("chromium")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One chromium for a module's tests; each has a page with nothing in its memory.

    No longer than that: while it is there, Playwright's own event loop runs in this thread, and no
    asynchronous test of another module could.
    """
    path = chromium()
    if path is None:
        pytest.skip("no chromium: apt install chromium, or set SKERRY_CHROMIUM")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=40_000)
    with sync_playwright() as play:
        found = play.chromium.launch(executable_path=path, args=list(CALM))
        yield found
        found.close()


@dataclass
class Theatre:
    """A stage and its monitor on an event loop of their own, directed from the test's thread."""

    stage: Stage
    loop: asyncio.AbstractEventLoop
    url: str
    monitor: Monitor
    closing: Callable[[], Coroutine[Any, Any, object]]
    closed: bool = False
    _playing: list[asyncio.Task[None]] = field(default_factory=list[asyncio.Task[None]])

    def run(self, what: Coroutine[Any, Any, T]) -> T:
        """Do it on the stage's loop and return what came of it."""
        return asyncio.run_coroutine_threadsafe(what, self.loop).result(60)

    def call(self, what: Callable[..., None], *arguments: object) -> None:
        """Call something on the stage's loop."""

        async def calling() -> None:
            what(*arguments)

        self.run(calling())

    @property
    def port(self) -> int:
        return int(self.url.rstrip("/").rpartition(":")[2])

    def close(self) -> None:
        """Stop the monitor; the log stays."""
        if not self.closed:
            self.closed = True
            self.rest()
            self.run(self.closing())

    def play(self, every_s: float = 0.2) -> None:
        """Let the run go on until the test ends."""

        async def begin() -> None:
            self._playing.append(asyncio.create_task(self.stage.play(every_s)))

        self.run(begin())

    def rest(self) -> None:
        """Let nothing more happen by itself."""

        async def end() -> None:
            for task in self._playing:
                task.cancel()
            await asyncio.gather(*self._playing, return_exceptions=True)
            self._playing.clear()

        self.run(end())


@contextmanager
def _loop() -> Generator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="stage")
    thread.start()
    try:
        yield loop
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


Show = Callable[..., "Theatre"]


@pytest.fixture
def show(silent: None) -> Iterator[Show]:
    """Open a theatre: ``show(stage, health, target, port)``; several may play in one test."""
    theatres: list[Theatre] = []
    with _loop() as loop:

        def open_theatre(stage: Stage, *given: Any, **options: Any) -> Theatre:
            context = served(stage, *given, **options)

            async def begin() -> tuple[str, Monitor]:
                return await context.__aenter__()

            url, monitor = asyncio.run_coroutine_threadsafe(begin(), loop).result(60)
            theatre = Theatre(
                stage, loop, url, monitor, lambda: context.__aexit__(None, None, None)
            )
            theatres.append(theatre)
            return theatre

        yield open_theatre
        for theatre in reversed(theatres):
            theatre.close()


Watch = Callable[..., "Theatre"]


@pytest.fixture
def watch(show: Show, page: Page) -> Watch:
    """Open the page on a run: ``watch(stage, health, target, past=(age_s, every_s))``."""

    def opened(*given: Any, past: tuple[float, float], play: bool = False) -> Theatre:
        theatre = show(*given)
        theatre.run(theatre.stage.past(*past))
        if play:
            theatre.play()
        page.goto(theatre.url)
        return theatre

    return opened


@pytest.fixture
def expected() -> list[str]:
    """What a test lets the page complain of."""
    return []


@pytest.fixture
def page(browser: Browser, expected: list[str]) -> Iterator[Page]:
    """A page that may complain of nothing, and ask nobody but its own host for anything."""
    context = browser.new_context(viewport={"width": 1280, "height": 900}, color_scheme="dark")
    opened = context.new_page()
    opened.set_default_timeout(40_000)
    complaints: list[str] = []
    hosts: set[str] = set()
    opened.on("console", lambda m: complaints.append(m.text) if m.type == "error" else None)
    opened.on("pageerror", lambda error: complaints.append(str(error)))
    opened.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    yield opened
    own = {urlsplit(opened.url).netloc}
    context.close()
    assert [c for c in complaints if not any(words in c for words in expected)] == []
    assert {host for host in hosts if host} <= own
