"""The page as somebody sees it, in a real browser."""

from __future__ import annotations

import re
import time
from datetime import datetime
from typing import Any, Final

import pytest
from browser.conftest import Show, Watch
from browser.stage import RUN, Stage
from playwright.sync_api import Page, expect

from skerry.log import ledger
from skerry.protocol.messages import Commit, CommitOrigin, LearnerPhase, RefusalCause
from skerry.settings.local import HealthSettings
from skerry.status.timeline import MOST_ROUNDS, WRITTEN_S
from tests.support.builders import checkpoint_record, commit

RESTORED: Final[dict[str, Any]] = {"origin": CommitOrigin.RESTORED, "reason": None}
"""What a commit says of itself that a checkpoint wrote."""

pytestmark = [pytest.mark.browser, pytest.mark.drill]

LOST = ("ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING")
"""What a browser says of a monitor that has ended."""
QUICK = {"liveness": {"pulse_s": 0.25}}
TRACES = HealthSettings(trace_url="http://traces.example/trace/{trace_id}")


def test_it_waits_for_a_run_shows_it_and_says_when_it_is_finished(show: Show, page: Page) -> None:
    theatre = show(Stage(learners=1))
    page.goto(theatre.url)
    page.wait_for_selector("#status:has-text('waiting for the run')")
    assert f"no run “{RUN}”" in page.inner_text("#steps")
    beats(page, 1)
    assert page.inner_text("#status") == "waiting for the run"
    theatre.run(theatre.stage.past(20, 1))
    page.wait_for_selector("#status:has-text('training')")
    assert page.inner_text("#run-name") == RUN
    theatre.run(theatre.stage.finish())
    page.wait_for_selector("#status:has-text('finished')")
    assert "took" in page.inner_text("#times")


def test_what_reads_alerts_aloud_is_there_before_the_first_one(watch: Watch, page: Page) -> None:
    watch(Stage(), past=(30, 1))
    page.wait_for_selector("#round-rows button")
    expect(page.locator("#alerts")).to_be_hidden()
    assert page.locator("#alerts-told").evaluate("e => e.checkVisibility()")


@pytest.mark.parametrize(
    ("quorum", "then", "worse"),
    [
        (2, {"phase": LearnerPhase.CATCHING_UP}, "critical: learner-2 is gone: 1 of the 2"),
        (1, {"silent": True}, "warning: learner-2, learner-3 are gone"),
    ],
    ids=["worse", "more"],
)
def test_an_alert_is_announced_again_when_it_gets_worse_or_names_more(
    watch: Watch, page: Page, quorum: int, then: dict[str, Any], worse: str
) -> None:
    config = {**QUICK, "sync": {"learners": 3, "fragments": 8, "quorum": quorum}}
    theatre = watch(Stage(learners=3, config=config), past=(30, 1), play=True)
    page.wait_for_selector("#lanes [data-state='training'] >> nth=2")
    told = page.locator("#alerts-told")
    theatre.stage.actors["learner-2"].silent = True
    expect(told).to_contain_text("warning: learner-2 is gone", timeout=20_000)
    for name, value in then.items():
        setattr(theatre.stage.actors["learner-3"], name, value)
    expect(told).to_contain_text(worse, timeout=20_000)
    state = "gone" if "silent" in then else "catching_up"
    page.wait_for_selector(f"#lanes [data-state='{state}']:has-text('learner-3')")


SAME = (
    ("No round has been committed for 59 s.", "No round has been committed for 1 min."),
    ("Goodput of the last 5 min is 41%.", "Goodput of the last 5 min is 8%."),
    ("Refused within 10 min: 9 too_stale.", "Refused within 10 min: 10 too_stale."),
    ("Held-out loss 2.105 is well above 1.9.", "Held-out loss 2.2 is well above 1.9."),
)
OTHER = (
    ("learner-2 is gone.", "learner-3 is gone."),
    ("a, b, c, d and 3 more are gone.", "a, b, c, d and 13 more are gone."),
    ("9 too_stale.", "9 too_stale, 1 unknown_base."),
    ("v1.5-a is gone.", "v1.6-a is gone."),
)


def test_what_only_grows_older_is_not_announced_again(show: Show, page: Page) -> None:
    page.goto(show(Stage()).url)
    differ = """async pairs => {
        const { gist } = await import("/static/format.js");
        return pairs.map(([before, now]) => gist(before) !== gist(now));
    }"""
    assert page.evaluate(differ, SAME) == [False] * len(SAME)
    assert page.evaluate(differ, OTHER) == [True] * len(OTHER)


def test_alerts_of_a_restarted_monitor_are_announced(
    show: Show, page: Page, expected: list[str]
) -> None:
    stage = Stage()
    first = show(stage)
    first.call(first.monitor.link.on_event, "disconnected", {})  # its first alert
    first.run(stage.past(30, 1))
    expected.extend(LOST)
    page.add_init_script(HIDING)
    page.goto(first.url)
    told = page.locator("#alerts-told")
    expect(told).to_contain_text("critical: The broker")
    first.close()
    page.wait_for_selector("#link:not([data-state='live'])")
    page.evaluate("hide(true)")  # so that the page shows the one alert after the other
    title = page.title()
    told.evaluate("e => { e.textContent = e.said = ''; }")
    second = show(stage, port=first.port)
    second.call(second.monitor.link.on_event, "disconnected", {})
    second.play()
    expect(page).not_to_have_title(title, timeout=20_000)
    expect(page).to_have_title(re.compile(r"^\(1\) "))
    page.evaluate("hide(false)")
    expect(told).to_contain_text("critical: The broker")


def test_the_trace_and_the_record_of_a_round_are_one_click_away(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(), TRACES, past=(60, 1))
    version = theatre.stage.versions[3]
    page.click(f"[data-round='3.{version}']")
    page.wait_for_selector("#trace-id")
    trace = theatre.stage.trace(3, version)
    assert page.inner_text("#trace-id") == trace
    assert page.get_attribute("#trace-open", "href") == f"http://traces.example/trace/{trace}"
    record = page.request.get(theatre.url + str(page.get_attribute("#record-open", "href"))[1:])
    told = record.json()
    assert (told["fragment"], told["version"], told["trace_id"]) == (3, version, trace)
    assert page.inner_text("#ledger-sequence") == f"sequence {told['ledger_sequence']}"
    assert page.locator("#round tbody tr").count() == len(told["consumed"])


def test_the_record_is_shown_to_the_last_digit(show: Show, page: Page) -> None:
    theatre = show(Stage())
    theatre.run(theatre.stage.past(60, 1))
    exact = theatre.run(theatre.stage.commit(3, opened_ns=1_700_000_000_123_456_789))
    page.goto(f"{theatre.url}#round=3.{exact.version}")
    page.wait_for_selector("#trace-id")
    assert page.inner_text("#trace-hint") == "set health.trace_url to open it from here"
    page.click("#round summary")
    expect(page.locator("#round pre")).to_contain_text('"opened_ns": 1700000000123456789,')


def test_the_times_of_a_round_are_of_one_clock(show: Show, page: Page) -> None:
    """A syncer's clock that is an hour behind is set right for the list, and for the dialogue."""
    theatre = show(Stage())
    stage = theatre.stage
    theatre.run(stage.past(60, 1))
    behind_ns = stage.ns - 3600 * 10**9
    late = theatre.run(stage.commit(3, opened_ns=behind_ns - 10**9, closed_ns=behind_ns))
    page.goto(theatre.url)
    page.click(f"[data-round='3.{late.version}']")
    page.wait_for_selector("#trace-id")
    told = {
        name: page.inner_text(f"#round .pairs div:has(dt:text-is('{name}')) dd")
        for name in ("opened", "in the log", "age")
    }
    assert told["in the log"] == f"{WRITTEN_S:.0f} s after closing"
    assert " h " not in told["age"]
    opened_s = datetime.fromisoformat(told["opened"]).timestamp()
    assert abs(opened_s - (stage.now_s - WRITTEN_S - 1)) < 0.01


def test_the_newest_checkpoint_is_shown_though_an_older_one_is_read_after_it(
    show: Show, page: Page
) -> None:
    theatre = show(stage := Stage())
    theatre.run(stage.past(60, 1))
    theatre.run(stage.checkpoint())
    page.goto(theatre.url)
    told = f"#tile-checkpoint:has-text('step {max(a.step for a in stage.actors.values()):,}')"
    page.wait_for_selector(told)
    older = checkpoint_record("/older", run=RUN, written_ns=stage.ns - 10**9)
    theatre.run(ledger.record_checkpoint(stage.bus, older))
    page.wait_for_selector("#checkpoint-rows :has-text('/older')")
    assert page.query_selector(told) is not None


def test_a_version_from_a_checkpoint_says_why_it_has_no_trace(show: Show, page: Page) -> None:
    theatre = show(Stage())
    theatre.run(theatre.stage.past(60, 1))
    restored = theatre.run(
        theatre.stage.commit(3, **RESTORED, source="stage/step-00000300", trace_id="", consumed=())
    )
    page.goto(f"{theatre.url}#round=3.{restored.version}")
    page.wait_for_selector("#trace-id:has-text('none: this version came from a checkpoint')")


def test_an_open_round_shows_its_trace_and_becomes_its_record(show: Show, page: Page) -> None:
    theatre = show(Stage(), TRACES)
    theatre.run(theatre.stage.past(60, 1))
    opened = theatre.run(theatre.stage.open(3))
    page.goto(theatre.url)
    page.focus("#open-rows [data-air='3']")
    page.keyboard.press("Enter")
    page.wait_for_selector("#in-the-air")
    assert page.inner_text("#trace-id") == opened.trace_id
    assert str(page.get_attribute("#trace-open", "href")).endswith(opened.trace_id)
    theatre.run(theatre.stage.commit(3))
    page.wait_for_selector("#ledger-sequence")
    assert page.inner_text("#round-title") == f"Fragment 3, version {opened.version}"
    assert page.inner_text("#trace-id") == opened.trace_id


def test_a_monitor_that_says_nothing_is_away_and_found_again(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(), past=(60, 1))
    page.wait_for_selector("#link[data-state='live']")
    theatre.loop.call_soon_threadsafe(time.sleep, 9)  # hangs, its connections open
    page.wait_for_selector("#status:has-text('monitor away')")
    page.wait_for_selector("#link[data-state='live']")


def test_where_nothing_happens_for_long_the_page_stays_live(watch: Watch, page: Page) -> None:
    watch(Stage(), past=(60, 1))
    page.wait_for_selector("#link[data-state='live']")
    page.evaluate(
        "window.seen = []; new MutationObserver(() => window.seen.push(1))"
        ".observe(document.getElementById('link'), {attributes: true})"
    )
    beats(page, 4)  # longer than silence is borne
    assert page.evaluate("window.seen") == []


HIDING = """
    const later = [], frame = window.requestAnimationFrame;
    window.requestAnimationFrame = f => frame(at => document.hidden ? later.push(f) : f(at));
    window.hide = hidden => {
        Object.defineProperty(document, "hidden", {configurable: true, get: () => hidden});
        document.dispatchEvent(new Event("visibilitychange"));
        if (!hidden) for (const f of later.splice(0)) frame(f);
    };
"""
"""What a browser does to the page of a tab that another is shown before: headless, none ever is."""


def test_a_tab_in_the_background_shows_an_alert_in_its_title(watch: Watch, page: Page) -> None:
    page.add_init_script(HIDING)
    theatre = watch(Stage(learners=3, config=QUICK), past=(30, 1), play=True)
    page.wait_for_selector("#lanes [data-state='training'] >> nth=2")
    page.evaluate(  # a frame has been asked for, and does not come
        "document.getElementById('filter').dispatchEvent(new Event('input')), hide(true)"
    )
    theatre.stage.actors["learner-2"].silent = True
    expect(page).to_have_title(re.compile(r"^\(1\) "), timeout=20_000)
    assert page.locator("#alerts-now li").count() == 0
    page.evaluate("hide(false)")
    page.wait_for_selector("#alerts-now li:has-text('learner-2 is gone')")


TEXTS = """
    window.texts = new Map();
    const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
    CanvasRenderingContext2D.prototype.fillText = function (text, ...rest) {
        texts.get(this.canvas)?.push(text);
        return fillText.call(this, text, ...rest);
    };
    CanvasRenderingContext2D.prototype.clearRect = function (...rest) {
        texts.set(this.canvas, []);
        return clearRect.apply(this, rest);
    };
"""
"""Keeps what is written on each canvas since it was cleared."""


class LevelStage(Stage):
    """A run whose model is as good as it gets."""

    async def evaluate(self, **changes: Any) -> None:
        await super().evaluate(**changes, loss=2.0)


def test_ticks_beside_a_curve_that_hardly_falls_differ(
    watch: Watch, page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = LevelStage(config=QUICK)
    monkeypatch.setattr(stage.chance, "gauss", lambda mean, spread: mean + spread / 100)
    monkeypatch.setattr("browser.stage.loss_at", lambda step: 2.0 - 1e-6 * step)
    page.add_init_script(TEXTS)
    watch(stage, past=(30, 1))
    page.wait_for_selector("#loss-chart canvas")
    written = page.evaluate("texts.get(document.querySelector('#loss-chart canvas'))")
    drawn = [text for text in written if "." in text]
    assert len(drawn) > 2
    assert len(set(drawn)) == len(drawn)


def test_charts_show_what_came_while_the_tab_was_hidden(watch: Watch, page: Page) -> None:
    page.add_init_script(HIDING)
    theatre = watch(Stage(), past=(60, 1))
    page.wait_for_selector("#loss-chart canvas")
    drawn = "document.querySelector('#loss-chart canvas').toDataURL()"
    page.evaluate("hide(true)")
    before = page.evaluate(drawn)
    theatre.play()
    beats(page, 8, "change")
    theatre.rest()
    beats(page, 1)
    assert page.evaluate(drawn) == before
    page.evaluate("hide(false)")
    page.wait_for_function(f"before => {drawn} !== before", arg=before)


def beats(page: Page, count: int, kind: str = "beat") -> None:
    """Wait until the monitor has said so often that nothing has changed, or another kind."""
    page.evaluate(
        """([kind, count]) => new Promise(done => {
            const source = new EventSource("/api/stream");
            source.addEventListener(kind, () => { if (!--count) { source.close(); done(); } });
        })""",
        [kind, count],
    )


def knows(page: Page, fragment: int, version: int) -> None:
    """Wait until all parts of the page have seen a round, shown or not."""
    page.evaluate(
        """async round => {
            const { listen, store, touch } = await import("/static/store.js");
            await new Promise(done => {  // called after the page's own parts
                listen(["rounds"], () => store.rounds.has(round) && done(), true);
                touch("rounds");
            });
        }""",
        f"{fragment}.{version}",
    )


def test_the_focus_stays_on_a_learner_that_is_moved_up(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(learners=3, config=QUICK), past=(30, 1), play=True)
    page.wait_for_selector("#lanes [data-state='training'] >> nth=2")
    page.focus("#lanes button:has-text('learner-3')")
    theatre.stage.actors["learner-3"].silent = True
    page.wait_for_selector("#lanes li >> nth=0 >> text=learner-3")
    assert "learner-3" in focused(page)


def test_a_round_of_long_ago_is_found_by_its_version(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(fragments=2), past=(400, 0.5))
    page.wait_for_selector("#round-rows button")
    assert page.locator("[data-round='1.70']").count() == 0
    page.fill("#find-fragment", "1")
    page.fill("#find-version", "70")
    page.keyboard.press("Enter")
    page.wait_for_selector("#trace-id")
    assert page.inner_text("#trace-id") == theatre.stage.trace(1, 70)
    page.goto(theatre.url + "#round=0.3")
    page.reload()
    page.wait_for_selector("#trace-id")
    assert page.inner_text("#trace-id") == theatre.stage.trace(0, 3)


def test_rows_stay_where_they_are_while_somebody_points_at_them(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(), past=(60, 1))
    page.hover("#round-rows button >> nth=2")
    before, places = round_rows(page), page.evaluate(PLACES)
    theatre.run(theatre.stage.commit(4))
    page.wait_for_selector("#newer:has-text('1 newer')")
    page.hover("#rounds .legend")  # on the way there
    painted(page)
    assert (round_rows(page), page.evaluate(PLACES)) == (before, places)
    expect(page.locator("#newer")).to_be_visible()
    page.click("#newer")
    page.wait_for_selector(f"#round-rows [data-round='4.{theatre.stage.versions[4]}']")
    expect(page.locator("#newer")).to_be_hidden()
    assert page.evaluate(PLACES) == places


def test_rows_move_again_once_the_pointer_leaves(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(), past=(60, 1))
    page.hover("#round-rows button >> nth=2")
    theatre.run(theatre.stage.commit(4))
    page.wait_for_selector("#newer:has-text('1 newer')")
    page.hover("#log-title")
    page.wait_for_selector(f"#round-rows [data-round='4.{theatre.stage.versions[4]}']")
    expect(page.locator("#newer")).to_be_hidden()


def test_what_lets_rows_go_can_be_reached_from_them_by_keyboard(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(), past=(60, 1))
    page.focus("#round-rows button >> nth=2")
    theatre.run(theatre.stage.commit(4))
    page.wait_for_selector("#newer:has-text('1 newer')")
    while page.evaluate("document.activeElement.id") != "newer":
        page.keyboard.press("Shift+Tab")
        painted(page)
        assert page.evaluate("document.activeElement.closest('#rounds') !== null")
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#round-rows [data-round='4.{theatre.stage.versions[4]}']")


PLACES = """[...document.querySelectorAll("#rounds .head > *, #round-rows")].map(e => {
    const { left, top, width } = e.getBoundingClientRect();
    const above = document.querySelector("#rounds").getBoundingClientRect().top;
    return [left, top - above, width].map(Math.round);
})"""
"""Where the parts of the rounds' section lie in it, from left to right and from top to bottom."""


def painted(page: Page) -> None:
    """Wait until the page has shown what it had been told by now."""
    page.evaluate("() => new Promise(f => requestAnimationFrame(() => requestAnimationFrame(f)))")


def test_rows_outlast_the_rounds_that_the_page_receives(show: Show, page: Page) -> None:
    theatre = show(Stage())
    stage = theatre.stage
    theatre.run(stage.past(60, 1))
    page.goto(theatre.url)
    page.focus("#round-rows button >> nth=2")
    before = round_rows(page)
    page.keyboard.press("Enter")
    page.wait_for_selector("#round[open] #trace-id")
    many = MOST_ROUNDS + 10
    for number in range(many):
        theatre.run(stage.commit(number % stage.fragments, closed_ns=time.time_ns()))
    page.wait_for_selector(f"#newer:has-text('{MOST_ROUNDS}+ newer')", state="attached")
    assert round_rows(page) == before
    expect(page.locator("#rounds-none")).to_be_hidden()
    page.keyboard.press("Escape")
    page.wait_for_selector("#round:not([open])", state="attached")
    assert page.evaluate("document.activeElement.dataset.round") == before[2]
    page.click("#newer")
    page.hover("#log-title")  # there the pointer holds no rows, whatever came since the click
    last = (many - 1) % stage.fragments
    newest = (last, stage.versions[last])
    page.wait_for_selector("#round-rows [data-round='{}.{}']".format(*newest))
    assert not set(before) & set(round_rows(page))


def round_rows(page: Page) -> list[str]:
    """Return which rounds are listed, from top to bottom."""
    keys = "[...document.querySelectorAll('#round-rows [data-round]')].map(e => e.dataset.round)"
    return list(page.evaluate(keys))


def test_everything_can_be_reached_by_keyboard(watch: Watch, page: Page) -> None:
    watch(Stage(learners=3), past=(60, 1))
    page.wait_for_selector("#lanes button >> nth=2")
    page.keyboard.press("l")
    assert "learner-1" in focused(page)
    page.keyboard.press("ArrowDown")
    assert "learner-2" in focused(page)
    page.keyboard.press("Enter")
    page.wait_for_selector("#learner[open] >> text=tokens per second")
    page.keyboard.press("Escape")
    page.wait_for_selector("#learner:not([open])", state="attached")
    page.keyboard.press("r")
    row = page.evaluate("document.activeElement.dataset.round")
    page.keyboard.press("ArrowDown")
    assert page.evaluate("document.activeElement.dataset.round") != row
    page.keyboard.press("Enter")
    page.wait_for_selector("#round[open] #trace-id")
    page.keyboard.press("Escape")
    page.keyboard.press("f")
    assert page.evaluate("document.activeElement.id") == "fragment-rows"
    page.keyboard.press("/")
    page.keyboard.type("learner-3")
    expect(page.locator("#lanes li")).to_have_count(1)
    page.keyboard.press("Escape")
    page.keyboard.press("?")
    page.wait_for_selector("#help[open]")


def test_keys_go_to_parts_that_are_empty_yet(show: Show, page: Page) -> None:
    theatre = show(Stage(learners=1))
    theatre.run(theatre.stage.begin())
    page.goto(theatre.url)
    page.wait_for_selector("#lanes button")
    for key, part in (("w", "writes"), ("r", "rounds"), ("f", "fragment-rows"), ("w", "writes")):
        page.keyboard.press(key)
        assert page.evaluate("document.activeElement.id") == part
    theatre.run(theatre.stage.evaluate())
    page.wait_for_selector("#sample:not([hidden])")
    page.keyboard.press("w")
    assert page.evaluate("document.activeElement.id") == "sample"


def focused(page: Page) -> str:
    """Return the text of what has the focus; nothing where that is the page as a whole."""
    text = "document.activeElement === document.body ? '' : document.activeElement.textContent"
    return str(page.evaluate(text))


def test_it_fits_a_phone(show: Show, page: Page) -> None:
    theatre = show(Stage(learners=3))
    theatre.run(theatre.stage.past(60, 1))
    page.set_viewport_size({"width": 360, "height": 740})
    page.goto(theatre.url)
    page.wait_for_selector("#round-rows button")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    wide = page.evaluate(
        "[...document.querySelectorAll('main section, .lane, .tile, .round')]"
        ".filter(e => e.getBoundingClientRect().right > 361).map(e => e.id || e.className)"
    )
    assert wide == []
    page.click("#lanes button >> nth=0")
    page.wait_for_selector("#learner[open]")


class PausedStage(Stage):
    """A run in which nothing happened from two thirds to one third of the past hour ago."""

    @property
    def rests(self) -> bool:
        return 1200 < time.time() - self.now_s < 2400

    async def commit(self, fragment: int, **changes: Any) -> Commit:
        return commit(1) if self.rests else await super().commit(fragment, **changes)

    async def evaluate(self, **changes: Any) -> None:
        if not self.rests:
            await super().evaluate(**changes)


COLOURED = """([name, share]) => {
  const chart = document.querySelector("#loss-chart canvas"), c = chart.getContext("2d");
  const over = document.querySelector("#loss-chart .u-over").getBoundingClientRect();
  const at = over.left - chart.getBoundingClientRect().left + share * over.width;
  const probe = document.createElement("canvas").getContext("2d");
  probe.fillStyle = getComputedStyle(document.documentElement).getPropertyValue(`--${name}`);
  probe.fillRect(0, 0, 1, 1);
  const [r, g, b] = probe.getImageData(0, 0, 1, 1).data;
  const column = c.getImageData(Math.round(at * devicePixelRatio), 0, 1, chart.height).data;
  for (let i = 0; i < column.length; i += 4) {
    const far = Math.abs(column[i] - r) + Math.abs(column[i + 1] - g) + Math.abs(column[i + 2] - b);
    if (column[i + 3] > 128 && far < 60) return true;
  }
  return false;
}"""
"""Whether a colour is in the column of the loss chart at a share of its width."""


@pytest.mark.parametrize("curve", ["sea", "sand"])
def test_no_curve_of_the_loss_goes_on_where_nothing_was_merged(
    watch: Watch, page: Page, curve: str
) -> None:
    watch(PausedStage(), past=(3600, 10))
    page.click("[data-axis='at_s']")
    page.wait_for_selector("#loss-chart canvas")
    drawn = [page.evaluate(COLOURED, [curve, share]) for share in (0.2, 0.5, 0.8)]
    assert drawn == [True, False, True]


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_ends_where_its_last_part_does(watch: Watch, page: Page, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 800})
    watch(Stage(learners=3), past=(300, 1))
    page.wait_for_selector("#round-rows button >> nth=40")
    ends = "[document.documentElement.scrollHeight, document.body.getBoundingClientRect().bottom]"
    whole, last = page.evaluate(ends)
    assert whole <= last + 1


def test_two_hundred_learners_are_sorted_by_trouble_and_filtered(show: Show, page: Page) -> None:
    theatre = show(Stage(learners=200, config={"liveness": {"pulse_s": 1.0}}))
    theatre.run(theatre.stage.past(20, 2))
    for number in (77, 150):
        theatre.stage.actors[f"learner-{number}"].silent = True
    theatre.play(0.5)
    page.goto(theatre.url)
    expect(page.locator("#lanes li")).to_have_count(200)
    page.wait_for_selector("#states button:has-text('2 gone')")
    first = page.locator("#lanes li b").all_inner_texts()[:2]
    assert first == ["learner-77", "learner-150"]
    page.click("#states button:has-text('2 gone')")
    expect(page.locator("#lanes li")).to_have_count(2)


def test_light_and_dark_follow_the_system_and_the_choice_is_kept(watch: Watch, page: Page) -> None:
    watch(Stage(), past=(20, 1))
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(color_scheme="light")
    light = page.evaluate(ground)
    assert light != dark
    page.keyboard.press("t")
    assert page.evaluate(ground) == dark
    page.reload()
    assert page.evaluate(ground) == dark


def test_text_that_others_chose_is_shown_and_never_run(show: Show, page: Page) -> None:
    evil = "<img src=x onerror='window.pwned=1'><script>window.pwned=1</script>"
    stage = Stage(learners=2)
    theatre = show(stage)
    theatre.run(stage.past(30, 1))
    theatre.run(stage.commit(1, **RESTORED, source=evil, syncer=evil, trace_id=evil))
    theatre.run(stage.refuse(2, RefusalCause.CORRUPT, evil))
    theatre.run(stage.evaluate(sample=evil, evaluator=evil, evaluated_ns=stage.ns + 1))
    theatre.run(stage.pulse(stage.actors["learner-1"], learner=evil))
    page.goto(theatre.url)
    page.wait_for_selector("#round-rows .reason:has-text('<img src=x')")
    page.click(f"[data-round='1.{stage.versions[1]}']")
    page.wait_for_selector("#round dd:has-text('<script>')")
    assert page.inner_text("#sample") == evil
    page.wait_for_selector(
        "#alerts-now p:has-text('messages of the last 10 min could not be read')"
    )
    assert page.locator("#lanes li").count() == 2
    assert page.evaluate("window.pwned") is None
    assert page.locator("main img, dialog img, main script, dialog script").count() == 0


def test_what_the_model_wrote_earlier_can_be_looked_up(show: Show, page: Page) -> None:
    stage = Stage()
    theatre = show(stage)
    theatre.run(stage.begin())
    for number, text in enumerate(("aaa", "bbb", "ccc")):
        stage.versions = dict.fromkeys(stage.versions, number + 1)
        stage.actors["learner-1"].step = 10 * number
        theatre.run(stage.evaluate(sample=text, evaluated_ns=stage.ns + number))
    page.goto(theatre.url)
    page.wait_for_selector("#sample:has-text('ccc')")
    page.focus("#sample-range")
    page.keyboard.press("Home")
    page.wait_for_selector("#sample:has-text('aaa')")


def test_a_broker_that_is_away_is_shown_and_no_learner_is_blamed(watch: Watch, page: Page) -> None:
    theatre = watch(Stage(), past=(30, 1), play=True)
    page.wait_for_selector("#status:has-text('training')")
    theatre.call(theatre.monitor.link.on_event, "disconnected", {})
    page.wait_for_selector("#status:has-text('broker away')")
    page.wait_for_selector("#alerts-now li[data-severity='critical']:has-text('learners go on')")
    theatre.call(theatre.monitor.link.on_event, "reconnected", {})
    page.wait_for_selector("#status:has-text('training')")


def test_a_monitor_that_is_started_again_is_found_again(
    show: Show, page: Page, expected: list[str]
) -> None:
    stage = Stage()
    first = show(stage)
    first.run(stage.past(30, 1))
    expected.extend(LOST)
    page.goto(first.url)
    page.wait_for_selector("#link[data-state='live']")
    first.close()
    page.wait_for_selector("#link:not([data-state='live'])")
    assert page.locator("#round-rows button").count() > 5
    second = show(stage, port=first.port)
    page.wait_for_selector("#link[data-state='live']")
    version = stage.versions[2] + 1
    second.run(stage.commit(2))
    page.wait_for_selector(f"[data-round='2.{version}']")


def test_of_a_log_without_the_run_nothing_is_shown_as_if_it_went_on(
    show: Show, page: Page, expected: list[str]
) -> None:
    first = show(Stage())
    first.call(first.monitor.link.on_event, "disconnected", {})
    first.run(first.stage.past(30, 1))
    expected.extend(LOST)
    page.goto(first.url)
    expect(page).to_have_title(re.compile(r"^\(1\) "))
    first.close()
    page.wait_for_selector("#link:not([data-state='live'])")
    second = show(Stage(), port=first.port)
    page.wait_for_selector("#status:has-text('waiting for the run')")
    assert f"no run “{RUN}”" in page.inner_text("#steps")
    assert page.inner_text("#times") == ""
    assert page.get_attribute("#progress", "aria-valuenow") == "0"
    expect(page.locator("main")).to_have_css("opacity", "0.6")
    expect(page).to_have_title(RUN)
    second.run(second.stage.past(20, 1))
    page.wait_for_selector("#status:has-text('training')")
    expect(page.locator("main")).to_have_css("opacity", "1")
    assert page.inner_text("#steps").startswith("step ")


PLOTS = """
    window.plots = [];
    let found;
    Object.defineProperty(window, "uPlot", {get: () => found, set: made => {
        found = new Proxy(made, {construct: (of, given) => {
            plots.push(new of(...given));
            return plots.at(-1);
        }});
    }});
    window.shown = () => {
        const plot = plots.findLast(plot => plot.root.closest("#loss-chart"));
        if (!plot) return {};
        const {min, max} = plot.scales.x, xs = plot.data[0];
        return {whole: min <= xs[0] && max >= xs.at(-1), last: xs.at(-1)};
    };
"""
"""Lets a test see which stretch of its data the loss chart shows."""


def test_a_run_after_another_keeps_nothing_of_it(
    show: Show, page: Page, expected: list[str]
) -> None:
    first = show(Stage(fragments=2))
    first.run(first.stage.past(200, 1))
    expected.extend(LOST)
    page.add_init_script(PLOTS)
    page.goto(first.url)
    page.wait_for_function("() => plots.length > 1 && shown().whole")
    page.wait_for_function(f"() => ({BARRED})(0) > 50")
    zoom(page)
    page.wait_for_function("() => !shown().whole")
    page.click("#round-rows button >> nth=2")
    page.wait_for_selector("#round[open] #trace-id")
    first.close()
    page.wait_for_selector("#link:not([data-state='live'])")
    second = show(Stage(fragments=2), port=first.port)
    second.run(second.stage.past(20, 5))
    page.wait_for_function("() => shown().last < 100 && shown().whole")
    assert 0 < page.evaluate(f"({BARRED})(0)") < 10
    expect(page.locator("#round-rows [data-round]")).to_have_count(6)


BARRED = """fragment => {
    const strip = document.querySelectorAll("#fragment-rows canvas")[fragment];
    if (!strip) return 0;  // before the first picture
    const { data } = strip.getContext("2d").getImageData(0, strip.height * 0.2, strip.width, 1);
    return data.filter((value, i) => i % 4 === 3 && value > 0).length;
}"""
"""How many pixels of a fragment's strip are within a round."""


def test_strips_show_the_rounds_that_came_while_the_tab_was_hidden(show: Show, page: Page) -> None:
    theatre = show(Stage(fragments=2))
    stage = theatre.stage
    theatre.run(stage.past(200, 10))
    page.add_init_script(HIDING)
    page.goto(theatre.url)
    page.wait_for_function(f"() => ({BARRED})(1) > 0")
    before = page.evaluate(f"({BARRED})(1)")
    page.evaluate("hide(true)")
    for number in range(20):
        moment_ns = stage.ns - (200 - 10 * number) * 10**9
        theatre.run(stage.commit(1, opened_ns=moment_ns, closed_ns=moment_ns + 3 * 10**9))
    knows(page, 1, stage.versions[1])
    for _ in range(MOST_ROUNDS):
        theatre.run(stage.commit(0))
    knows(page, 0, stage.versions[0])
    page.evaluate("hide(false)")
    page.wait_for_function(f"before => ({BARRED})(1) > before + 20", arg=before)


def zoom(page: Page) -> None:
    """Draw a frame around the middle of the loss chart."""
    page.locator("#loss-chart").scroll_into_view_if_needed()
    box = page.locator("#loss-chart .u-over").bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + 0.4 * box["width"], box["y"] + 50)
    page.mouse.down()
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 60)
    page.mouse.up()


def test_every_chart_is_saved_as_a_picture_and_as_numbers(watch: Watch, page: Page) -> None:
    watch(Stage(learners=2), past=(30, 1))
    page.wait_for_selector("#loss-chart canvas")
    page.wait_for_selector("#speed-chart canvas")
    page.wait_for_selector("#round-rows button")
    saved = dict[str, bytes]()
    for button in page.locator(".save button").all():
        with page.expect_download() as download:
            button.click()
        file = download.value
        saved[file.suggested_filename] = file.path().read_bytes()
    names = ("loss", "throughput", "time", "lanes", "rounds")
    assert {*saved} == {f"{RUN}-{name}.{kind}" for name in names for kind in ("png", "csv")}
    assert all(data[:4] == b"\x89PNG" for name, data in saved.items() if name.endswith("png"))
    heads = {name: saved[f"{RUN}-{name}.csv"].decode().splitlines() for name in names}
    assert heads["loss"][0] == "step,training loss,held-out loss"
    assert heads["time"][:1] == ["use,share"]
    assert len(heads["loss"]) > 10 < len(heads["rounds"])
    assert any(",merged" in line for line in heads["lanes"])
