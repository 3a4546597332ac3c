"""What a simulation says of published tables, of rounds, and of hopeless runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.errors import ConfigError
from skerry_tools.plan.failures import TimeUse
from skerry_tools.plan.simulation import Setup, caveats, simulate
from skerry_tools.plan.simulation_answer import lead, setup_of
from tests.support.plans import with_fleet

DAY = 86400.0
QUIET = ("failures.chip_mtbi=1e11", "fleet.chips=8", "pauses.upscale_s=0")


def short(*sets: str) -> Setup:
    return setup_of("goodput-table", ["simulation.days=1", *sets])


def test_llama_3_reaches_its_published_goodput() -> None:
    found = simulate(setup_of("llama-3", []))
    assert found.goodput >= 0.9
    assert found.failures == pytest.approx(466, rel=0.2)


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    one, same, other = (simulate(short(f"simulation.seed={seed}")) for seed in (0, 0, 1))
    assert one.timelines[0].times.tobytes() == same.timelines[0].times.tobytes()
    assert one.goodput == same.goodput != other.goodput


def test_one_more_learner_changes_nothing_for_the_others() -> None:
    less = simulate(with_fleet(short(), chips=8e5, layout="decoupled", learners=8))
    more = simulate(with_fleet(short(), chips=9e5, layout="decoupled", learners=9))
    for before, after in zip(less.timelines, more.timelines, strict=False):
        assert before.times.tobytes() == after.times.tobytes()


@settings(max_examples=8)
@given(st.integers(2, 8), st.sampled_from([0, 180]), st.integers(0, 2**32))
def test_learners_are_as_good_as_one_of_their_size(learners: int, batch_s: int, seed: int) -> None:
    asked = short(f"pauses.batch_s={batch_s}", f"simulation.seed={seed}", "simulation.days=3")
    many = simulate(with_fleet(asked, chips=3e5 * learners, layout="decoupled", learners=learners))
    alone = simulate(with_fleet(asked, chips=3e5, layout="elastic", learners=1))
    assert many.goodput == pytest.approx(alone.goodput, abs=0.03)


def test_goodput_running_share_and_uptime_are_three_quantities() -> None:
    found = simulate(short())
    assert found.goodput < found.running < found.uptime[0]
    assert list(found.uptime) == sorted(found.uptime, reverse=True)
    assert math.fsum(found.split.values()) == pytest.approx(1.0)


@settings(max_examples=20)
@given(st.floats(0.0, 0.9), st.integers(2, 6), st.integers(1, 30))
def test_waiting_for_all_costs_mean_over_maximum_of_the_step_times(
    spread: float, learners: int, h_steps: int
) -> None:
    sets = (f"sync.learners={learners}", f"sync.quorum={learners}", f"sync.h_steps={h_steps}")
    stops = ("sync.overlap_steps=0", "sync.fragments=1", f"timing.spread={spread}")
    instant = ("timing.upload_s=0", "timing.commit_s=0")
    found = simulate(short(*QUIET, *sets, *stops, *instant, f"fleet.chips={learners}"))
    assert found.goodput == pytest.approx(1.0 / (1.0 + spread), abs=1e-6)
    assert found.split[TimeUse.WAIT] == pytest.approx(1.0 - found.goodput, abs=1e-6)


@pytest.mark.parametrize(
    ("gamma", "quorum", "least"), [(0.8, 1, 6.3), (0.8, 8, 8.0), (0.0, 1, 1.0)]
)
def test_by_grace_all_that_run_take_part_in_a_merge_and_k_at_least(
    gamma: float, quorum: int, least: float
) -> None:
    found = simulate(short(f"sync.grace_gamma={gamma}", f"sync.quorum={quorum}"))
    assert found.participants == pytest.approx(least, abs=0.2)
    assert found.split[TimeUse.WAIT] == 0.0


def test_an_outage_is_lost() -> None:
    away = 'outages=[{"learners": [0], "begin": "1 h", "lasts": "6 h"}]'
    lost = simulate(short(*QUIET, away))
    assert lost.goodput == pytest.approx(1.0 - 6 / 24 / 8)
    assert lost.split[TimeUse.OUTAGE] == pytest.approx(6 / 24 / 8)
    assert lost.uptime[7] == pytest.approx(1.0 - 6 / 24)


def test_time_to_tokens_counts_when_learners_came() -> None:
    """Half the fleet comes after ten days: 10 d at half speed, and 10 of 20 more at full speed."""
    away = 'outages=[{"learners": [0, 1, 2, 3], "lasts": "10 d"}]'
    speed = ("timing.tokens_per_step=2", "timing.step=2 s", "simulation.days=30")
    tokens = f"timing.tokens={8 * DAY * 15}"
    found = simulate(short(*QUIET, *speed, away, tokens))
    assert found.time_to_tokens_s == pytest.approx(20 * DAY, rel=1e-3)
    twice = simulate(short(*QUIET, *speed, away, f"timing.tokens={8 * DAY * 50}"))
    assert twice.time_to_tokens_s == pytest.approx(60 * DAY, rel=1e-3)


def test_a_run_in_which_nothing_failed_says_so_and_what_is_expected() -> None:
    quiet = lead(simulate(short("failures.chip_mtbi=1000 d", "fleet.chips=8")))
    assert "no failure was drawn, 0.008 are expected in that time: goodput 100.0 % without" in quiet
    never = lead(simulate(short("failures.chip_mtbi=never")))
    assert "goodput 100.0 %, without failures" in never
    assert "±" not in quiet + never
    assert "±" in lead(simulate(short()))


def test_an_outage_stops_all_that_stop_for_rounds() -> None:
    away = 'outages=[{"learners": [0], "begin": "1 h", "lasts": "6 h"}]'
    stops = ("sync.overlap_steps=0", "sync.quorum=8")
    instant = ("timing.upload_s=0", "timing.commit_s=0")
    lost = simulate(short(*QUIET, *stops, *instant, away))
    assert lost.goodput == pytest.approx(1.0 - 6 / 24, abs=1e-3)


def test_time_to_tokens_follows_the_goodput() -> None:
    asked = ("timing.tokens_per_step=4e6", "timing.tokens=1e12", "timing.step=2 s")
    found = simulate(short(*asked))
    assert found.tokens_s == pytest.approx(8 * 2e6 * found.goodput, rel=1e-6)
    assert found.time_to_tokens_s == pytest.approx(1e12 / (8 * 2e6 * found.goodput), rel=1e-3)


def test_what_was_never_checked_comes_with_a_caveat() -> None:
    assert not list(caveats(simulate(short())))
    far = simulate(short("fleet.chips=1e8", "simulation.days=0.001"))
    assert any("checked up to" in why for why in caveats(far))


@pytest.mark.parametrize(
    "sets",
    [
        ["failures.chip_mtbi=1 s"],
        ["failures.chip_mtbi=1e11 s"],
        ["recovery.mean_s=1e12"],
        ["fleet.layout=data-parallel", "recovery.mean_s=1e12"],
        ["recovery.law=exponential", "recovery.mean_s=1e5"],
        ['outages=[{"lasts": "30 d"}]'],
    ],
)
def test_a_hopeless_run_gets_finite_figures(sets: list[str]) -> None:
    hours = ["simulation.days=0.02", "fleet.chips=10000"]
    found = simulate(setup_of("goodput-table", [*hours, *sets]))
    assert all(map(math.isfinite, (found.goodput, found.half_width, *found.split.values())))
    assert 0.0 <= found.goodput <= 1.0


SITED = """
[plan]
parameters = "1B"
tokens = "20B"
tokens_per_step = 65536
[failures]
chip_mtbi = "100 d"
[sites.near]
learners = 2
chips = 64
step_time = "1 s"
up = "10 Gbit/s"
[sites.far]
chips = 32
step_time = "2 s"
up = "5 Gbit/s"
[[outages]]
site = "near"
lasts = "6 h"
[fleet]
slice_chips = 8
[simulation]
days = 1.0
"""


def test_a_plans_file_is_simulated_site_by_site(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(SITED, "utf-8")
    asked = setup_of(str(path), [])
    assert [(one.site, one.chips, one.step_s) for one in asked.learners] == [
        ("near", 64, 1.0), ("near", 64, 1.0), ("far", 32, 2.0),
    ]  # fmt: skip
    assert asked.question.tables.failures.chip_mtbi == 100 * DAY
    found = simulate(asked)
    assert found.split[TimeUse.OUTAGE] == pytest.approx(0.25 * 128 / 160, rel=0.01)
    assert 0 < (found.tokens_s or 0) < 65536 * (0.75 * 2 + 0.5)
    with pytest.raises(ConfigError, match=r"outages.0.site.*near"):
        setup_of(str(path), ['outages=[{"site": "neer", "lasts": "1 h"}]'])


def test_the_shipped_plan_can_be_simulated() -> None:
    found = simulate(setup_of("four-regions", []))
    assert len(found.timelines) == 4
    assert found.goodput > 0.99
    assert found.time_to_tokens_s is not None
