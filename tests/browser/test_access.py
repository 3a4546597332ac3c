"""The page by the rules of axe-core: nothing serious, wide and narrow, dark and light."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine
from typing import Any, Final, Literal

import pytest
from browser.conftest import Show
from browser.stage import RUN, Stage
from playwright.sync_api import Page

from skerry.log import run_records
from skerry.protocol.messages import LearnerPhase, Quarantine, QuarantineReason, RefusalCause

pytestmark = [pytest.mark.browser, pytest.mark.drill, pytest.mark.timeout(900)]

LOOKS: Final[list[tuple[int, Literal["dark", "light"]]]] = [
    (1440, "dark"),
    (1440, "light"),
    (390, "dark"),
    (390, "light"),
]
TAGS = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice", "experimental"]
GRAVE = ("serious", "critical")


async def waiting(_: Stage) -> None:
    pass


async def empty(stage: Stage) -> None:
    await stage.begin()


async def full(stage: Stage) -> None:
    """Every state at once: regions, quarantine, a refusal, a round in the air, alerts."""
    await stage.past(10, 0.5)
    one, two, three = stage.actors.values()
    told = Quarantine(RUN, two.name, QuarantineReason.BY_HAND, "host", int(time.time() * 1e9))
    await run_records.publish(stage.bus, told)
    await stage.refuse(0, RefusalCause.TOO_STALE, one.name)
    three.phase = LearnerPhase.CATCHING_UP
    for actor in (one, two, three):
        await stage.pulse(actor, region="" if actor is one else "eu-west", cached_bytes=90_000)
    await stage.open(1)


def graves(page: Page, within: str | None = None) -> list[str]:
    """Return what axe finds serious or worse, one line for each place."""
    axe = pytest.importorskip("axe_playwright_python.sync_playwright").Axe()
    options = {"runOnly": TAGS, "resultTypes": ["violations"]}
    found = axe.run(page, context=within, options=options).response["violations"]
    return [
        f"{v['id']} at {node['target']}: {node['failureSummary']}"
        for v in found
        if v["impact"] in GRAVE
        for node in v["nodes"]
    ]


@pytest.mark.parametrize(
    ("setting", "shows"),
    [
        (waiting, "#next:has-text('appears here with its first learner')"),
        (empty, "#next:has-text('skerry syncer')"),
        (full, "#round-rows button >> nth=10"),
    ],
)
def test_axe_finds_nothing_serious(
    show: Show,
    page: Page,
    setting: Callable[[Stage], Coroutine[Any, Any, None]],
    shows: str,
) -> None:
    theatre = show(Stage(learners=3))
    theatre.run(setting(theatre.stage))
    page.goto(theatre.url)
    page.wait_for_selector(shows)
    found = dict[tuple[int | str, ...], list[str]]()
    for width, theme in LOOKS:
        page.set_viewport_size({"width": width, "height": 900})
        page.emulate_media(color_scheme=theme, reduced_motion="reduce")
        found[width, theme] = graves(page)
    if setting is full:
        for opens in ("#help-open", "#lanes button", "#round-rows button"):
            page.click(f"{opens} >> nth=0")
            page.wait_for_selector("dialog[open]")
            found[(opens,)] = graves(page, "dialog[open]")
            page.keyboard.press("Escape")
    assert {where: broken for where, broken in found.items() if broken} == {}
