"""The page's main path in a real browser; test_page.py and test_faults.py are drills."""

from __future__ import annotations

import re

import pytest
from browser.conftest import Watch
from browser.stage import Stage
from playwright.sync_api import Page, expect

pytestmark = pytest.mark.browser

QUICK = {"liveness": {"pulse_s": 0.25}}


def test_a_commit_appears_without_a_reload(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(), past=(60, 1))
    page.wait_for_selector("#round-rows button")
    version = theatre.stage.versions[5] + 1
    assert page.locator(f"[data-round='5.{version}']").count() == 0
    theatre.run(theatre.stage.commit(5))
    page.wait_for_selector(f"[data-round='5.{version}']")


def test_the_run_shows_at_a_glance(watch: Watch, page: Page) -> None:
    watch(Stage(learners=3), past=(300, 1), play=True)
    page.wait_for_selector("#loss-chart canvas")
    page.wait_for_selector("#speed-chart canvas")
    told = {
        name: page.inner_text(f"#tile-{name} dd >> nth=0")
        for name in ("loss", "held", "goodput", "alive", "sent")
    }
    assert re.fullmatch(r"\d\.\d{3} nats", told["loss"])
    assert re.fullmatch(r"\d\.\d{3} nats", told["held"])
    assert told["goodput"] == "86 %"
    assert told["alive"] == "3 of 3"
    assert "below data-parallel" in page.inner_text("#tile-sent .more")
    assert "left" in page.inner_text("#times")
    split = re.match(r"training ([\d.]+) %", str(page.get_attribute("#split", "aria-label")))
    assert split
    assert round(float(split[1])) == 86, "to a tenth it depends on when the newest pulses came"


def test_a_learner_that_dies_is_shown_gone_and_alerted(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(learners=3, config=QUICK), past=(30, 1), play=True)
    page.wait_for_selector("#lanes [data-state='training'] >> nth=2")
    told = page.locator("#alerts-told")
    theatre.stage.actors["learner-2"].silent = True
    page.wait_for_selector("#lanes [data-state='gone']:has-text('learner-2')")
    page.wait_for_selector("#alerts-now li:has-text('learner-2 is gone')")
    expect(told).to_contain_text("learner-2 is gone")
    assert page.title().startswith("(1) ")
    theatre.stage.actors["learner-2"].silent = False
    page.wait_for_selector("#alerts-past summary:has-text('1 earlier alert')")
    expect(page.locator("#alerts-now li")).to_have_count(0)
    expect(told).to_have_text(re.compile("over: .*learner-2 is gone"))
