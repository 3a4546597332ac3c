"""Faults from the page: hidden, refused, and done."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from browser.conftest import Show, Watch
from browser.stage import Stage

from skerry.settings.local import HealthSettings

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytestmark = [pytest.mark.browser, pytest.mark.drill]

TOKEN = "not-easily-guessed-token"  # noqa: S105 - of a test
ALLOWED = {"chaos": {"allow": True}}


@dataclass
class Noted:
    """Injects no fault, and remembers what it was asked for."""

    done: list[tuple[str, str, float]] = field(default_factory=list[tuple[str, str, float]])

    async def inject(self, name: str, action: str, duration_s: float) -> str:
        self.done.append((name, action, duration_s))
        return f"{action} of {name} has begun"


@pytest.fixture
def health(tmp_path: Path) -> HealthSettings:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    return HealthSettings(token_file=file)


def open_learner(page: Page) -> None:
    page.click("#lanes button:has-text('learner-2')")
    page.wait_for_selector("#learner[open] dl")


def test_a_run_that_allows_no_faults_offers_none(
    watch: Watch, page: Page, health: HealthSettings
) -> None:
    watch(Stage(), health, Noted(), past=(20, 1))
    open_learner(page)
    assert page.locator("#fault").count() == 0


def test_with_the_token_of_the_address_a_fault_is_injected(
    show: Show, page: Page, health: HealthSettings
) -> None:
    noted = Noted()
    theatre = show(Stage(config=ALLOWED), health, noted.inject)
    theatre.run(theatre.stage.past(20, 1))
    page.goto(f"{theatre.url}#token={TOKEN}")
    open_learner(page)
    assert TOKEN not in page.url
    page.fill("#fault-s", "7.5")
    page.click("#fault [data-action='pause']")
    page.wait_for_selector("#fault .said:has-text('pause of learner-2 has begun')")
    assert noted.done == [("learner-2", "pause", 7.5)]


def test_without_the_token_nothing_is_done(
    show: Show, page: Page, expected: list[str], health: HealthSettings
) -> None:
    noted = Noted()
    theatre = show(Stage(config=ALLOWED), health, noted.inject)
    theatre.run(theatre.stage.past(20, 1))
    expected.append("401")
    page.goto(theatre.url)
    open_learner(page)
    page.fill("#token", "guessed")
    page.click("#fault [data-action='kill']")
    page.wait_for_selector("#fault .said[data-tone='bad']:has-text('token')")
    assert noted.done == []
