"""Closed forms of goodput agree with the simulation, and with what is known of them."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry_tools.plan.goodput import TimeShares, hardware, time_shares, together
from skerry_tools.plan.simulation import simulate
from skerry_tools.plan.simulation_answer import setup_of
from skerry_tools.plan.tables import ScenarioTables

YEAR_S = 365.25 * 86400
TABLES = ScenarioTables.model_validate({"fleet": {"slice_chips": 1}})


@settings(max_examples=15, deadline=None)
@given(
    st.sampled_from([1, 2, 8, 100, 1000]),
    st.floats(0.05, 3.0),
    st.sampled_from([10.0, 60.0, 600.0]),
    st.sampled_from([0, 180]),
    st.sampled_from(["elastic", "data-parallel"]),
)
def test_a_learners_closed_form_is_what_is_simulated(
    slices: int, load: float, recovery_s: float, batch_s: int, layout: str
) -> None:
    """``load``: failures of the whole learner per pause of 100 s, up to three at once."""
    mtbi_s, end_s = 100.0 * slices / load, 100.0 * 3000 / load
    sets = [f"fleet.layout={layout}", f"fleet.chips={slices}", "fleet.slice_chips=1"]
    sets += [f"failures.chip_mtbi={mtbi_s} s", f"recovery.mean_s={recovery_s}"]
    sets += [f"pauses.batch_s={batch_s}", f"simulation.days={end_s / 86400}"]
    found = simulate(setup_of("goodput-table", sets))
    tables = found.setup.question.tables
    expected = time_shares(hardware(tables, slices, elastic=layout == "elastic"))
    assert expected.goodput == pytest.approx(found.goodput, abs=0.03)
    assert expected.running == pytest.approx(found.running, abs=0.08)


def test_without_recovery_and_upscales_a_pause_for_each_failure_is_all_that_is_lost() -> None:
    found = {"recovery": {"mean_s": 0}, "pauses": {"downscale_s": 20, "upscale_s": 0, "batch_s": 0}}
    tables = ScenarioTables.model_validate({**found, "failures": {"chip_mtbi": 1000}})
    share = time_shares(hardware(tables, 256.0))
    assert share.goodput == pytest.approx(1 / (1 + 256 * 20 / 1000))


@given(st.lists(st.tuples(st.floats(1e-6, 0.1), st.floats(0.5, 1)), min_size=1, max_size=6))
def test_short_rounds_stop_whenever_one_pauses_and_long_ones_wait_for_the_worst(
    drawn: list[tuple[float, float]],
) -> None:
    """Barlow and Proschan's series system, whose parts stand still while one is broken."""
    each = [TimeShares(1 / (1 + rate * 10), 1.0, rate, 10.0) for rate, _ in drawn]
    odds = math.fsum((1 - one.running) / one.running for one in each)
    assert together(each, 1e-6) == pytest.approx(1 / (1 + odds), rel=1e-3)
    worst = min(one.running for one in each)
    assert together(each, 1e9) == pytest.approx(worst, rel=0.01)
    goodputs = [together(each, 10.0**power) for power in range(-3, 7)]
    assert all(a <= b * 1.05 for a, b in itertools.pairwise(goodputs))


@pytest.mark.parametrize("fragments", [1, 4, 24])
@pytest.mark.parametrize("chips", [3e5, 2.4e6])
def test_learners_that_wait_for_each_other_keep_what_the_closed_form_says(
    fragments: int, chips: float
) -> None:
    sets = (f"sync.fragments={fragments}", f"fleet.chips={chips}", "sync.quorum=8")
    instant = ("sync.overlap_steps=0", "timing.upload_s=0", "timing.commit_s=0")
    found = simulate(setup_of(None, [*sets, *instant, "simulation.days=6"]))
    share = time_shares(hardware(found.setup.question.tables, chips / 8))
    expected = together([share] * 8, 24 * 2.0 / fragments)
    assert found.goodput == pytest.approx(expected, abs=0.025)


def test_a_blocking_runs_goodput_depends_on_no_number_of_rounds() -> None:
    asked = ("sync.overlap_steps=0", "sync.quorum=8", "simulation.days=4")
    few, many = (
        simulate(setup_of(None, [*asked, f"simulation.rounds={rounds}"])).goodput
        for rounds in (2000, 20_000)
    )
    assert few == pytest.approx(many, abs=0.01)


@given(st.floats(1, 1e7), st.floats(1e3, 1e11))
def test_more_failures_never_leave_more(chips: float, mtbi_s: float) -> None:
    failing, more = (
        TABLES.model_copy(update={"failures": TABLES.failures.model_copy(update={"chip_mtbi": at})})
        for at in (mtbi_s, mtbi_s / 2)
    )
    for elastic in (True, False):
        one, two = (
            time_shares(hardware(tables, chips, elastic=elastic)) for tables in (failing, more)
        )
        assert 0 <= two.goodput <= one.goodput * (1 + 1e-6) <= 1 + 1e-5
