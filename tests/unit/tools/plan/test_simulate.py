"""What a simulation says of published tables, of rounds, and of bad input."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.schedule import Schedule
from skerry.errors import ConfigError
from skerry.protocol.rounds import Policy
from skerry_tools.plan import closed, merges, scenario, sweep
from skerry_tools.plan.laws import Law
from skerry_tools.plan.merges import Pace, Plan
from skerry_tools.plan.process import Absence, Island, Use, walk
from skerry_tools.plan.simulate import NOTHING, Outcome, Struck, simulate, with_fleet

DAY = 86400.0
CALM = Island(1, 0.0, Law(0.0))
POLICY = Policy(1, 0.8, 2, 6.0, 60.0)


def short(*sets: str) -> scenario.Request:
    return scenario.read("goodput-table", ["simulation.days=1", *sets])


def plan(learners: int, quorum: int, tau: int, h_steps: int = 24) -> Plan:
    fragments = 1 if tau == 0 else min(24, h_steps)
    policy = replace(POLICY, quorum=quorum, overlap_steps=tau)
    return Plan(Schedule(fragments, h_steps, tau), policy)


def tracks(
    paces: list[float], absences: dict[int, list[Absence]] | None = None
) -> list[merges.Track]:
    chance = np.random.Generator(np.random.PCG64(0))
    away = absences or {}
    return [
        merges.track(walk(CALM, DAY, chance, away.get(n, ())), Pace(step_s), phase=n / len(paces))
        for n, step_s in enumerate(paces)
    ]


def test_the_published_goodput_table_is_met_within_two_points() -> None:
    cells = sweep.table(scenario.read("goodput-table", ["sweep.failures=5000"]))
    error = sweep.error_points(cells)
    assert len(cells) == 30
    assert sum(cell.published is not None for cell in cells) == 20
    assert error is not None
    assert error <= 2.0


@pytest.mark.parametrize("name", ["goodput-table", "llama-3"])
def test_a_shipped_scenario_says_of_every_value_where_it_is_from(name: str) -> None:
    import tomllib

    told = tomllib.loads(scenario.shipped()[name].read_text("utf-8"))
    given = {
        f"{table}.{key}"
        for table, values in told.items()
        if isinstance(values, dict) and table != "status"
        for key in values
        if key != "failures" or table != "sweep"
    }
    given = {"sweep.published" if path.startswith("sweep.published") else path for path in given}
    assert told["source"]
    assert given <= set(told["status"])


def test_llama_3_reaches_what_it_is_said_to_have_reached() -> None:
    request = scenario.read("llama-3")
    found = simulate(request)
    assert request.scene.published_goodput is not None
    assert found.goodput >= request.scene.published_goodput
    assert found.failures == pytest.approx(466, rel=0.2)


def test_the_same_seed_gives_the_same_bytes_and_another_one_others() -> None:
    one, same = (simulate(short()) for _ in range(2))
    other = simulate(short("simulation.seed=1"))
    assert one.timelines[0].times.tobytes() == same.timelines[0].times.tobytes()
    assert (one.goodput, one.merges) == (same.goodput, same.merges)
    assert one.goodput != other.goodput


def test_one_more_learner_changes_nothing_for_the_others() -> None:
    less = with_fleet(short(), chips=8e5, learners=8)
    more = with_fleet(short(), chips=9e5, learners=9)
    for before, after in zip(simulate(less).timelines, simulate(more).timelines, strict=False):
        assert before.times.tobytes() == after.times.tobytes()


def test_goodput_running_share_and_uptime_are_three_quantities() -> None:
    found = simulate(short())
    assert found.goodput < found.running < found.uptime[0]
    assert list(found.uptime) == sorted(found.uptime, reverse=True)
    expected = [closed.uptime(k, 8, found.running) for k in range(1, 9)]
    assert found.uptime == pytest.approx(expected, abs=0.02)


@settings(max_examples=20)
@given(st.lists(st.floats(0.5, 2.0), min_size=2, max_size=6), st.integers(1, 30))
def test_waiting_for_all_costs_mean_over_maximum(step_s: list[float], h_steps: int) -> None:
    asked = plan(len(step_s), len(step_s), 0, h_steps)
    found = merges.observe(asked, tracks(step_s), DAY, 40)
    assert 1.0 - found.waited == pytest.approx(closed.waiting_for_all(step_s), abs=1e-6)
    assert found.reasons == {"all_arrived": 40}


def test_without_overlap_nobody_waits_and_with_grace_nearly_all_take_part() -> None:
    equal = [2.0] * 8
    for quorum in (1, 8):
        found = merges.observe(plan(8, quorum, 2), tracks(equal), DAY, 120)
        assert found.waited == 0.0
        assert found.participants == 8.0
    none = plan(8, 1, 2)
    hasty = replace(none, policy=replace(none.policy, grace_gamma=0.0))
    alone = merges.observe(hasty, tracks(equal), DAY, 120).participants
    assert alone is not None
    assert alone < 2.0


def test_a_round_a_step_follows_from_as_many_fragments_as_steps() -> None:
    found = merges.observe(plan(4, 1, 2), tracks([2.0] * 4), DAY, 80)
    opened = [merge.opened_s for merge in found.seen if merge.opened_s < DAY / 80 * 2]
    assert np.diff(opened).mean() == pytest.approx(2.0, abs=0.3)


def test_who_is_away_takes_no_part_and_who_is_cut_off_neither() -> None:
    absent = {0: [Absence(0.0, DAY, Use.OUTAGE)]}
    found = merges.observe(plan(3, 1, 2), tracks([2.0] * 3, absent), DAY, 40)
    assert all(0 not in merge.by for merge in found.seen)
    cut = tracks([2.0] * 3)
    cut[2] = merges.track(walk(CALM, DAY, np.random.default_rng(0)), Pace(2.0), [(0.0, DAY)])
    found = merges.observe(plan(3, 1, 2), cut, DAY, 40)
    assert all(2 not in merge.by for merge in found.seen)


def test_a_dead_syncer_costs_rounds_and_no_goodput() -> None:
    stalled = Struck({}, {}, ((0.0, DAY / 2),))
    calm = short("failures.chip_mtbi=1e11", "fleet.chips=8")
    quiet, struck = simulate(calm, NOTHING), simulate(calm, stalled)
    assert quiet.goodput == struck.goodput == pytest.approx(1.0)
    assert len(struck.merges.seen) < len(quiet.merges.seen)


def test_an_outage_is_lost_and_a_preemption_is_not_paid_for() -> None:
    away = '[{"learners": [0], "begin": "1 h", "lasts": "6 h"}]'
    calm = ("failures.chip_mtbi=1e11", "fleet.chips=8", "pauses.upscale_s=0")
    lost = simulate(short(*calm, f"outages={away}"))
    lent = simulate(short(*calm, f"preemptions={away}"))
    assert lost.goodput == pytest.approx(1.0 - 6 / 24 / 8)
    assert lost.split[Use.OUTAGE] == pytest.approx(6 / 24 / 8)
    assert lent.goodput == pytest.approx(1.0)
    assert lent.uptime[7] == lost.uptime[7] == pytest.approx(1.0 - 6 / 24)


def test_time_to_tokens_follows_the_goodput() -> None:
    asked = ("timing.tokens_per_step=4e6", "timing.tokens=1e12", "timing.step=2 s")
    found = simulate(short(*asked))
    assert found.tokens_s == pytest.approx(8 * 2e6 * found.goodput, rel=1e-6)
    assert found.time_to_tokens_s == pytest.approx(1e12 / (8 * 2e6 * found.goodput), rel=1e-6)


def test_what_was_never_checked_says_so() -> None:
    assert not simulate(short()).doubts
    far = simulate(short("fleet.chips=1e8", "simulation.days=0.001"))
    assert any("checked up to" in doubt for doubt in far.doubts)


def finite(found: Outcome) -> bool:
    return all(map(math.isfinite, (found.goodput, found.half_width, *found.split.values())))


@pytest.mark.parametrize(
    "sets",
    [
        ["failures.chip_mtbi=1 s"],
        ["failures.chip_mtbi=1 s", "failures.clock=calendar"],
        ["failures.chip_mtbi=1e11 s"],
        ["recovery.mean_s=1e12"],
        ["fleet.layout=data-parallel", "recovery.mean_s=1e12", "failures.clock=calendar"],
        ["pauses.upscale=all-back", "recovery.law=exponential", "recovery.mean_s=1e5"],
        ['outages=[{"lasts": "30 d"}]'],
        ['preemptions=[{"lasts": "30 d"}]'],
    ],
)
def test_the_hopeless_is_an_answer(sets: list[str]) -> None:
    hours = ["simulation.days=0.02", "fleet.chips=10000", "simulation.rounds=20"]
    found = simulate(scenario.read("goodput-table", [*hours, *sets]))
    assert finite(found)
    assert 0.0 <= found.goodput <= 1.0


@pytest.mark.parametrize(
    ("sets", "path", "nearest"),
    [
        (["sync.quorum=9"], "sync.quorum", ""),
        (["fleet.chips=3"], "fleet.chips", ""),
        (["fleet.chips=-1"], "fleet.chips", ""),
        (["failures.chip_mtbi=5 Gbit/s"], "failures.chip_mtbi", ""),
        (["failures.chip_mtbf=5 d"], "failures.chip_mtbf", "chip_mtbi"),
        (["failure.chip_mtbi=5 d"], "failure.chip_mtbi", "failures.chip_mtbi"),
        (["sync.learner=3"], "sync.learner", "sync.learners"),
        (["pauses.upscale=lazy"], "pauses.upscale", ""),
        (["recovery.mean_s=NaN"], "recovery.mean_s", ""),
        (['outages=[{"learners": [8], "lasts": "1 h"}]'], "outages.0.learners", ""),
        (['outages=[{"lasts": "1 h", "every": "1 h"}]'], "outages.0.every", ""),
        (["sweep.chips=[1e6]"], "sweep.published.data-parallel", ""),
    ],
)
def test_bad_input_is_refused_by_its_path(sets: list[str], path: str, nearest: str) -> None:
    with pytest.raises(ConfigError) as caught:
        scenario.read("goodput-table", sets)
    assert caught.value.path == path
    assert caught.value.nearest == nearest
    assert path in str(caught.value)


def test_an_unknown_scenario_names_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="goodput-table"):
        scenario.read("goodput-tabel")
    with pytest.raises(ConfigError, match="cannot be read"):
        scenario.read(str(tmp_path / "none.toml"))


SITED = """
kind = "plan"
[plan]
parameters = "1B"
tokens = "20B"
tokens_per_step = 65536
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
rounds = 40
"""


def test_a_plans_file_is_simulated_site_by_site(tmp_path: Path) -> None:
    path = tmp_path / "plan.toml"
    path.write_text(SITED, "utf-8")
    request = scenario.read(str(path))
    assert [(seat.site, seat.chips, seat.step_s) for seat in request.seats] == [
        ("near", 64, 1.0), ("near", 64, 1.0), ("far", 32, 2.0),
    ]  # fmt: skip
    assert request.learners == 3
    assert request.scene.failures.chip_mtbi == 100 * DAY
    found = simulate(request)
    assert found.chips == (64, 64, 32)
    assert found.split[Use.OUTAGE] == pytest.approx(0.25 * 128 / 160, rel=0.01)
    assert found.tokens_s is not None
    assert found.tokens_s < 65536 * (0.75 * 2 + 0.5)
    with pytest.raises(ConfigError, match=r"outages.0.site.*near"):
        scenario.read(str(path), ['outages=[{"site": "neer", "lasts": "1 h"}]'])


def test_the_shipped_plan_can_be_simulated() -> None:
    found = simulate(scenario.read("four-regions", ["simulation.rounds=40"]))
    assert found.learners == 4
    assert found.goodput > 0.99
    assert found.time_to_tokens_s is not None


def test_more_failures_than_anybody_waits_for_are_refused() -> None:
    with pytest.raises(ConfigError, match="give fewer days") as caught:
        scenario.read("goodput-table", ["failures.chip_mtbi=1 s"])
    assert caught.value.path == "simulation.days"
