"""A plan says whether a run works, what binds, and what is enough; and never NaN."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.presets import MOMENTUM_FROM_H
from skerry.settings.tree import Tree
from skerry_tools.plan import measured
from skerry_tools.plan.memory import contributions_bytes, learner_need
from skerry_tools.plan.plan import Constraint, RunPlan, constraints, make
from skerry_tools.plan.plan_answer import answer
from skerry_tools.plan.question import CHOICES, question
from skerry_tools.plan.simulation import setup, simulate
from skerry_tools.plan.trained import deployment, trained
from tests.support.plans import asked, planned, site

ROOT = Path(__file__).parents[4]
LEAST = {"up": "3 Gbit/s", "step_time": "2 s"}
NEVER: dict[str, Any] = {"failures": {"chip_mtbi": "never"}}
MANY = {"a": site(chips=256), "b": site(chips=256)}
ONE = {"fragments": 1}
FIXED = {"fragments": 24, "h_steps": 24, "shards": 4, "snapshot_every": 16}


def binding(plan: RunPlan) -> Constraint:
    assert plan.judged
    return plan.judged[0]


def as_read(plan: RunPlan) -> Any:
    return json.loads(answer(plan).json())


def test_the_first_line_says_what_binds_and_what_is_enough() -> None:
    sites = {"A": site(up="50 Gbit/s"), "B": site(up="2.7 Gbit/s", down="50 Gbit/s")}
    first = answer(planned(sites, sync={**FIXED, "contribution_scheme": "bf16"})).first
    assert first.startswith("Not feasible: site B up-link needs 2.77 Gbit/s, has 2.70 Gbit/s")
    assert "contribution_scheme=int8" in first
    assert "h_steps=25" in first


def test_h_is_the_least_with_which_the_throughput_bound_holds() -> None:
    sites = {"A": site(up="1.7 Gbit/s", down="50 Gbit/s", step_time="20 s")}
    sync = {"contribution_scheme": "bf16", "h_steps": 3, "fragments": 3, "shards": 1}
    plan = planned(sites, sync=sync)
    assert binding(plan).why == "throughput bound"
    assert f"h_steps={-(-3 * binding(plan).need // binding(plan).has):.0f}" in plan.fixes


def test_what_is_left_open_is_chosen_so_that_all_holds_with_a_tenth_to_spare() -> None:
    plan = planned()
    assert plan.feasible
    assert plan.chosen
    assert all(item.ratio <= 0.9 for item in plan.judged)


def test_an_infeasible_plan_names_settings_with_which_all_holds() -> None:
    plan = planned({"a": site(up="0.5 Gbit/s")}, sync=FIXED)
    assert not plan.feasible
    assert planned({"a": site(up="0.5 Gbit/s")}, sync=plan.way_out).feasible


@pytest.mark.parametrize("sync", [{}, FIXED])
def test_no_settings_are_named_where_none_fit_the_chips(sync: dict[str, int]) -> None:
    plan = planned({"a": site(up="0.5 Gbit/s", memory="5 GB")}, sync=sync)
    assert not plan.feasible
    assert plan.way_out == {}
    assert "All holds" not in answer(plan).first


@pytest.mark.parametrize(
    ("sites", "tables", "what", "fixes"),
    [
        (
            4,
            {"sync": {**FIXED, "overlap_steps": 20}, "log": {"window_bytes": 2**30}},
            "log window",
            ("log.window_bytes=48000000000",),
        ),
        (
            {"a": site(chips=2, memory="80 GB")},
            {"sync": FIXED},
            "site a chip memory",
            ("1.57 x the memory, in larger chips or in more of them",),
        ),
        (
            4,
            {"hub": {"cores": 1}, "sync": {**FIXED, "shards": 1, "overlap_steps": 9}},
            "syncer CPU",
            ("h_steps=39", "shards=2", "hub.cores=2"),
        ),
        (
            4,
            {"hub": {"write": "0.5 GB/s"}, "sync": {**FIXED, "overlap_steps": 20}},
            "broker",
            ("h_steps=31", "hub.write of 647 MB/s"),
        ),
        (4, {"mode": "diloco"}, "utilisation", None),
    ],
)
def test_what_else_is_judged_comes_with_its_own_fixes(
    sites: Any, tables: dict[str, Any], what: str, fixes: tuple[str, ...] | None
) -> None:
    plan = planned(sites, **tables)
    assert next(item.what for item in plan.judged if not item.holds) == binding(plan).what == what
    if fixes is not None:
        assert plan.fixes == fixes


def test_needs_of_memory_broker_and_log_follow_from_their_formulas() -> None:
    memory = planned({"a": site(chips=2, memory="80 GB")}, sync=FIXED)
    assert binding(memory).need == pytest.approx((18 * 12e9 + 4 * 2 * 8 * 5e8) / 2)
    broker = planned(hub={"write": "0.5 GB/s"}, sync={**FIXED, "overlap_steps": 20})
    whole = (11.07 + 32) * 2 / 24  # of two fragments of 24 at most
    assert binding(broker).need == pytest.approx((4 * 3.33 + 3.6 + whole) / 8 * 12e9 / 48)
    window = planned(sync=FIXED, log={"window_bytes": 2**30})
    assert binding(window).need == 4 * 12e9


def test_a_step_from_flops_takes_six_operations_for_each_active_parameter_and_token() -> None:
    chips = {"chips": 8, "flops_per_chip": "1 PFLOP/s", "utilisation": 0.5}
    found = asked({"a": {"up": "1 Gbit/s", **chips}}, plan={"active_parameters": "6B"})
    assert deployment(found).sites["a"].step_s == pytest.approx(6 * 6e9 * 262144 / (8 * 1e15 * 0.5))


@pytest.mark.parametrize(
    ("outer", "h_steps", "vectors"),
    [
        ({"preset": "auto"}, 24, 0),
        ({"preset": "auto"}, 500, 1),
        ({"preset": "nesterov", "momentum": 0.0}, 24, 0),
        ({"preset": "my_outer:make"}, 24, 1),
    ],
)
def test_outer_state_is_that_of_the_outer_optimizer(
    outer: dict[str, object], h_steps: int, vectors: int
) -> None:
    load = trained(asked(outer=outer, sync={"h_steps": h_steps}))
    assert load.outer_vectors == vectors


BUSY = {"cores": 1, "write": "0.5 GB/s"}
SLOW = {name: site(up="8 Mbit/s", chips=8) for name in "ab"}
PRICED = {n: site(up="0.5 Gbit/s", price_chip_hour=2.0, price_egress_gb=0.1) for n in "abc"}


@pytest.mark.parametrize(
    ("sites", "tables"),
    [
        (4, {"hub": BUSY}),
        (4, {"hub": BUSY, "outer": {"preset": "nesterov"}}),
        (4, {"hub": BUSY, "sync": {"fragments": 96}}),
        (PRICED, {"hub": {**BUSY, "site": "a"}}),
        ({"a": site(rtt="2500 ms"), "b": site(memory="9 GB")}, {"hub": BUSY}),
        (4, {"hub": BUSY, "log": {"window_s": 300}}),
        (SLOW, {"parameters": None, "model": {"preset": "moe-0.3b"}}),
        (SLOW, {"parameters": None, "model": {"preset": "12b", "lora_rank": 64}}),
        (4, {"mode": "diloco"}),
    ],
)
def test_what_is_chosen_needs_what_it_needs_where_it_is_set(
    sites: dict[str, dict[str, Any]] | int, tables: dict[str, Any]
) -> None:
    """Every figure and sentence is the same, but for the choices themselves."""
    found = as_read(planned(sites, **tables))
    assert found["settings"]["h_steps"] >= MOMENTUM_FROM_H
    sync = tables.get("sync", {}) | {name: found["settings"][name] for name in CHOICES}
    fixed = as_read(planned(sites, **{**tables, "sync": sync}))
    for each in (found, fixed):
        del each["chosen"]
        each["figures"].pop("choices", None)
    assert found == fixed


def test_time_and_money_follow_from_tokens_and_prices() -> None:
    priced = site(chips=10, price_chip_hour=2.0, price_egress_gb=0.1)
    plan = planned({"a": priced, "b": priced}, plan={"tokens": "1B"}, sync=FIXED, **NEVER)
    wall_s = 1e9 / (2 * 262144 / 2.0)
    chips, egress = wall_s / 3600 * 2.0 * 20, wall_s / 48.0 * 2 * 12e9 * 3.33 / 8 / 1e9 * 0.1
    found = as_read(plan)["figures"]["compared"]["this plan"]
    costs = {"time": wall_s, "chips_cost": chips, "egress_cost": egress, "cost": chips + egress}
    assert {name: found[name]["value"] for name in costs} == pytest.approx(costs)
    cost = as_read(planned())["figures"]["compared"]["this plan"]["cost"]
    assert cost["value"] is None
    assert "price_chip_hour" in cost["convention"]


def test_what_leaves_the_hub_is_paid_at_its_site() -> None:
    sites = {"a": site(price_egress_gb=0.1), "b": site(), "c": site()}
    plan = planned(sites, plan={"tokens": "1B"}, sync=FIXED, hub={"site": "a"}, **NEVER)
    cycles = 1e9 / (3 * 262144 / 2.0) / 48.0
    paid = plan.methods[0].costs(plan.at, plan.tokens)["egress_cost"]
    assert paid == pytest.approx(cycles * 2 * 12e9 * 3.6 / 8 / 1e9 * 0.1)


def test_data_parallel_sends_a_ring_between_sites_and_keeps_less_than_the_plan() -> None:
    table = {"failures": {"chip_mtbi": "1000 h"}, "fleet": {"slice_chips": 8}}
    plan = planned({n: site(chips=256) for n in "abcd"}, sync=FIXED, **table)
    mine, ring, region = plan.methods
    assert ring.sent["a"] == pytest.approx(24 * 2 * (1 - 1 / 4) * 16 * 12e9)
    assert mine.goodput > ring.goodput == region.goodput
    several = planned({n: site(learners=2) for n in "abcd"}, sync=FIXED).methods[1]
    assert several.sent == ring.sent
    assert planned({"a": site(learners=3)}, sync=FIXED).speed_up(1) == pytest.approx(1, rel=1e-3)


def test_the_first_line_names_what_it_compares_with_and_that_nothing_fails() -> None:
    first = answer(planned(failures={"chip_mtbi": "never"})).first
    assert "without failures" in first
    assert re.search(r"; 1.00 x the same chips in one region, [\d.]+ x data-parallel over", first)
    assert re.search(r"\(computing [\d.]+ % of the time\)", first)
    assert re.match(r"Feasible, extrapolated: .*goodput 99\.9\d", answer(planned(MANY)).first)
    one = {"a": site(cores=1), "b": site(cores=1)}
    assert answer(planned(one, hub={"cores": 1})).first.startswith("Feasible: ")


def test_a_plan_reckons_with_the_goodput_that_is_simulated() -> None:
    sites = {name: site(chips=150_000) for name in "abcdefgh"}
    found = asked(sites, sync=FIXED, simulation={"days": 3.5})
    simulated = simulate(setup(found))
    assert 0.8 < simulated.goodput < 0.9
    assert make(found).methods[0].goodput == pytest.approx(simulated.goodput, abs=0.01)


def test_no_choice_is_better_than_another_in_all_and_each_holds() -> None:
    plan = planned({"a": site(), "b": site(up="1 Gbit/s", rtt="200 ms")})
    assert len(plan.choices) > 1
    for one in plan.choices:
        assert not any(other.beats(one) for other in plan.choices)
        load = plan.at.load.changed(**{name: getattr(one, name) for name in CHOICES})
        assert all(item.holds for item in constraints(replace(plan.at, load=load)))
    assert plan.chosen["h_steps"] >= min(one.h_steps for one in plan.choices)


def test_the_loss_by_own_runs_is_that_of_the_page_on_quality() -> None:
    page = (ROOT / "docs" / "quality.md").read_text("utf-8")
    found: dict[tuple[str, int, float], list[tuple[int, float, float]]] = {}
    sizes = {"small": 117e3, "large": 246e3, "largest": 1.03e6}
    for title in ("The inner optimizer", "The size of the model"):  # the later has more seeds
        rows = re.findall(
            r"^\| (\w+) \| (\d) \| (\w+) \| direct \| [\d.e-]+ \| (\d) of \d \| ([\d.]+)"
            r".*\| \+([\d.]+)[^|]*\|$",
            page.split(f"\n## {title}\n")[1].split("\n## ")[0],
            re.MULTILINE,
        )
        assert rows
        for model, m, inner, seeds, loss, gap in rows:
            lines = found.setdefault((inner, int(m), sizes[model]), [])
            lines.append((-int(seeds), float(loss), float(gap)))
    held = {
        (inner, m, size): gap
        for inner, by_m in measured.GAPS.items()
        for m, by_size in by_m.items()
        for size, gap in by_size.items()
    }
    assert held == {key: pytest.approx(min(lines)[2], abs=0.051) for key, lines in found.items()}
    by_h = re.search(r"from 8 to 24 to 64 the loss rises by ([\d.]+) and ([\d.]+) %", page)
    assert by_h
    assert list(map(float, by_h.groups())) == list(measured.LOSS_BY_H["adamw"].values())
    rhythm = r"^\| small \| 4 \| 2.4e-2 \| H = (8|24|64) \| 3 of 3 \| ([\d.]+) "
    losses = {int(h): float(loss) for h, loss in re.findall(rhythm, page, re.MULTILINE)}
    above = {h: 100 * (losses[h] / losses[8] - 1) for h in (24, 64)}
    assert measured.LOSS_BY_H["muon"] == pytest.approx(above, abs=0.051)


@pytest.mark.parametrize(
    ("size", "gaps"),
    [(35e6, (0.7, 2.0, 3.9)), (335e6, (0.1, 0.9, 2.0)), (2.4e9, (-0.1, 0.3, 1.1))],
)
def test_the_law_gives_about_what_was_published(size: float, gaps: tuple[float, ...]) -> None:
    found = [measured.gap_by_law(m, size) for m in (2, 4, 8)]
    assert found == pytest.approx(gaps, abs=0.25)
    assert measured.gap_by_law(3, size) == measured.gap_by_law(4, size)
    assert measured.gap_by_law(64, size) == measured.gap_by_law(8, size)


def test_own_runs_give_a_power_law_between_sizes_and_no_less_beyond_them() -> None:
    between = measured.gap_by_own_fit("muon", 4, math.sqrt(117e3 * 246e3))[0]
    assert between == pytest.approx(math.sqrt(6.6 * 3.9))
    largest = measured.gap_by_own_fit("muon", 4, 7e9)
    assert largest == (measured.GAPS["muon"][4][1.03e6], 1.03e6)
    assert measured.gap_by_own_fit("muon", 4, 1e3) == (6.6, 117e3)


def test_an_answer_has_the_loss_of_models_that_are_trained_from_scratch_alone() -> None:
    found = as_read(planned())
    assert {"published law", "own fit"} == set(found["figures"]["loss"])
    assert not any("from scratch only" in note for note in found["mind"])
    further = as_read(planned(parameters=None, model={"preset": "micro", "lora_rank": 4}))
    assert "loss" not in further["figures"]
    assert any("from scratch only" in note for note in further["mind"])
    assert "loss" not in as_read(planned({"a": site()}))["figures"]


def test_what_lies_far_outside_the_checked_range_is_marked_with_the_reason() -> None:
    one = {"a": site(cores=1), "b": site(cores=1)}
    near, far = (as_read(planned(one, size, hub={"cores": 1})) for size in ("12B", "50T"))
    kinds = [found["figures"]["rounds"]["fragment"]["kind"] for found in (near, far)]
    assert kinds == ["derived", "extrapolated"]
    assert any("extrapolated: the model is 50.0 Tparam" in why for why in far["mind"])


def test_tokens_that_are_not_given_are_not_in_the_first_line() -> None:
    found = asked()
    assert "tokens/s" in answer(make(found)).first
    bare = answer(make(replace(found, bare_tokens=True)))
    assert "tokens/s" not in bare.first
    assert any("--step-tokens" in note for note in bare.mind)


def test_what_nobody_gave_is_taken_and_named() -> None:
    plan = make(question(Tree({"plan": {"parameters": "1B"}, "sites": {"a": LEAST}})))
    has = {item.what: item.has for item in plan.judged}
    assert has["broker"] == measured.BROKER_WRITE_B_S
    assert has["site a chip memory"] == 80e9
    notes = as_read(plan)["mind"]
    assert any("hub.write is not given" in note for note in notes)
    assert any("memory is not given: chips of 80.0 GB were taken" in note for note in notes)
    assert any("of disk for each replica" in note for note in notes)


def test_the_log_keeps_what_a_window_brings_up_to_its_size_and_its_disk_is_judged() -> None:
    plan = planned(sync=FIXED, log={"window_s": 480}, hub={"disk": "1 TB"})
    assert contributions_bytes(plan.at) == pytest.approx(10 * 4 * 12e9 * 3.33 / 8)
    unlimited = planned(sync=FIXED, log={"window_s": 9e9})
    assert contributions_bytes(unlimited.at) == 17 * 4 * 12e9 * 130 / 256
    disk = next(item for item in plan.judged if item.what == "broker disk")
    state = 2.2 * 12e9 * (11.07 / 8 + 17 / 2 * 3.6 / 8 + 4)
    assert disk.need == pytest.approx(state + contributions_bytes(plan.at))
    assert as_read(unlimited)


def test_a_window_of_the_default_size_has_the_room_that_a_run_gives_it() -> None:
    unset = planned(sync=FIXED)
    given = planned(sync=FIXED, log={"window_bytes": unset.at.run.log.window_bytes})
    assert given.at.window_bytes == unset.at.window_bytes > 4 * 12e9
    assert given.feasible


def test_a_far_link_carries_no_more_than_what_is_on_its_way_in_a_round_trip() -> None:
    far, sync = site(up="10 Gbit/s", rtt="100 ms"), {**FIXED, "chunk_bytes": 2**18}
    plan = planned({"a": far}, sync=sync)
    up, down = (8 * ahead / 0.1 for ahead in (62 * 2**18 * 3.33 / 4.0625, 2**25))
    links = {item.what: item for item in plan.judged if "link" in item.what}
    assert links["site a up-link"].has == pytest.approx(up)
    assert links["site a down-link"].has == pytest.approx(down)
    assert binding(plan).why.endswith("by what is on its way in a round trip")
    short = planned({"a": far}, sync={**FIXED, "chunk_bytes": 2**20}, hub={"max_payload": "1 MiB"})
    assert "broker message" in {item.what for item in short.judged if not item.holds}


def test_learners_of_several_machines_are_said_to_be_several_processes() -> None:
    assert not any("process" in note for note in as_read(planned({"a": site(chips=8)}))["mind"])
    notes = as_read(planned({"a": site(chips=16)}))["mind"]
    assert any("at a, are a process on each machine" in note for note in notes)


def test_a_number_of_learners_that_does_no_good_is_named() -> None:
    assert any(note.startswith("9 learners: ") for note in as_read(planned(9, sync=FIXED))["mind"])
    assert any("mode=single" in note for note in as_read(planned(1, sync=FIXED))["mind"])


def test_rounds_within_tau_steps_are_chosen_first_and_else_room_is_enough() -> None:
    plan = planned(2)
    assert all(item.holds for item in constraints(replace(plan.at, within_tau=True)))
    fewer = replace(plan.at, load=plan.at.load.changed(fragments=8))
    assert all(item.holds for item in constraints(fewer))
    assert plan.at.load.sync.fragments > 8
    far = planned({"a": site(rtt="2500 ms")})
    assert far.feasible
    assert not all(item.holds for item in constraints(replace(far.at, within_tau=True)))


def test_a_fix_does_not_break_what_held() -> None:
    chips = site(chips=3, memory="80 GB", up="1 Tbit/s")
    plan = planned({"a": chips}, hub={"cores": 1}, sync={**FIXED, "h_steps": 12, "shards": 1})
    assert binding(plan).what == "syncer CPU"
    counts = [int(fix.removeprefix("shards=")) for fix in plan.fixes if "shards" in fix]
    assert counts
    for count, holds in [(counts[0], True), (8, False)]:
        after = constraints(replace(plan.at, load=plan.at.load.changed(shards=count)))
        memory = next(item for item in after if item.what == "site a chip memory")
        assert memory.holds is holds


def test_chips_that_are_nearly_full_do_not_keep_settings_from_being_chosen() -> None:
    free = planned({"a": site()})
    need = learner_need(free.at, free.at.sites["a"]).total
    full = planned({"a": site(memory=f"{need / 0.95:.0f} B")})
    over = planned({"a": site(memory=f"{need / 1.5:.0f} B")})
    assert full.chosen == over.chosen == free.chosen != {}
    assert (full.feasible, over.feasible) == (True, False)


sites = st.fixed_dictionaries({
    "up": st.floats(-3, 5).map(lambda x: f"{10**x:.6f} Gbit/s"),
    "down": st.floats(-3, 5).map(lambda x: f"{10**x:.6f} Gbit/s"),
    "step_time": st.floats(-3, 3).map(lambda x: 10**x),
    "rtt": st.floats(-4, 1).map(lambda x: 10**x),
    "learners": st.integers(1, 20),
    "chips": st.integers(1, 10**6),
})  # fmt: skip
syncs = st.fixed_dictionaries({}, optional={
    "h_steps": st.integers(3, 500),
    "fragments": st.integers(1, 200),
    "contribution_scheme": st.sampled_from(["f32", "bf16", "int8", "int4", "e3m0", "int2"]),
    "global_scheme": st.sampled_from(["f32", "bf16"]),
})  # fmt: skip


@settings(max_examples=8)
@given(
    st.lists(sites, min_size=1, max_size=4),
    st.floats(3, 14).map(lambda x: 10**x),
    syncs,
    st.sampled_from(["decoupled", "diloco", "single"]),
)
def test_any_question_is_answered_without_nan(
    drawn: list[dict[str, Any]], parameters: float, sync: dict[str, Any], mode: str
) -> None:
    if mode == "single":
        drawn = [{**drawn[0], "learners": 1}]
    if mode == "diloco":
        sync = {key: value for key, value in sync.items() if key != "fragments"}
    named = {f"s{i}": one for i, one in enumerate(drawn)}
    plan = planned(named, parameters, mode=mode, sync={"chunk_bytes": 2**19, **sync})
    assert answer(plan).first.startswith("Feasible" if plan.feasible else "Not feasible")
    assert as_read(plan)["feasible"] is plan.feasible


@pytest.mark.parametrize("up", ["1 bit/s", "1e18 bit/s"])
@pytest.mark.parametrize("step_time", [1e-9, 1e11])
@pytest.mark.parametrize("parameters", [1, 1e20])
def test_the_widest_inputs_are_answered(up: str, step_time: float, parameters: float) -> None:
    far = site(up=up, step_time=step_time, rtt=1e11, chips=10**9, price_chip_hour=1e9)
    table = {"tokens": 1e20, "tokens_per_step": 1}
    failing = {"chip_mtbi": 1e-9}
    plan = planned({"a": far, "b": site()}, parameters, plan=table, failures=failing, sync=ONE)
    assert as_read(plan)
