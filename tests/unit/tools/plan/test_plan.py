"""A plan says whether a run works, what binds, and what mends it; and never NaN."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from asked import planned, request, site
from hypothesis import given as over
from hypothesis import settings
from hypothesis import strategies as st

from skerry_tools.plan import answer
from skerry_tools.plan.advice import advise
from skerry_tools.plan.costs import learner_bytes
from skerry_tools.plan.doubts import doubts
from skerry_tools.plan.figures import Kind
from skerry_tools.plan.plan import make, outer_vectors, step_s
from skerry_tools.plan.report import plan_page
from skerry_tools.plan.report.page import write
from skerry_tools.plan.verdict import constraints

FIXED = {"fragments": 24, "h_steps": 24, "shards": 4}


def test_the_first_line_says_what_binds_and_how_to_mend_it() -> None:
    sites = {"A": site(up="50 Gbit/s"), "B": site(up="2.6 Gbit/s", down="50 Gbit/s")}
    plan = planned(sites, sync={**FIXED, "contribution_scheme": "bf16"})
    first = answer.lines(plan)[0]
    assert first.startswith("Not feasible: site B up-link needs 2.68 Gbit/s, has 2.60 Gbit/s")
    assert "int8 contributions" in first
    assert "H >= 25" in first


def test_h_is_the_least_with_which_the_throughput_bound_holds() -> None:
    sites = {"A": site(up="1.7 Gbit/s", down="50 Gbit/s", step_time="20 s")}
    sync = {"contribution_scheme": "bf16", "h_steps": 3, "fragments": 3, "shards": 1}
    plan = planned(sites, sync=sync)
    binding = plan.binding
    assert binding is not None
    assert binding.why == "throughput bound"
    least = -(-3 * binding.need // binding.has)
    assert f"H >= {least:.0f}" in plan.fixes


def test_each_fix_mends_what_binds() -> None:
    sites = {"a": site(up="0.06 Gbit/s", down="50 Gbit/s", step_time="20 s")}
    sync = {**FIXED, "h_steps": 25}
    plan = planned(sites, sync=sync)
    broken = plan.binding
    assert broken is not None
    fields = {"H": "h_steps", "P": "fragments", "tau": "overlap_steps", "shards": "shards"}
    named = [re.fullmatch(r"(H|P|tau|shards) >= (\d+)", fix) for fix in plan.fixes]
    counts = {fields[found[1]]: int(found[2]) for found in named if found}
    assert counts
    for field, count in counts.items():
        after = planned(sites, sync={**sync, field: count})
        assert all(item.holds for item in after.judged if item.what == broken.what)


def test_what_is_left_open_is_chosen_so_that_all_holds_with_a_tenth_to_spare() -> None:
    plan = planned()
    assert plan.feasible
    assert plan.chosen
    assert all(item.ratio <= 0.9 for item in plan.judged)
    assert answer.lines(plan)[0].startswith("Feasible: 12.0 Gparam on 4 learners at 4 sites")


def test_an_infeasible_plan_names_settings_with_which_all_holds() -> None:
    plan = planned({"a": site(up="0.5 Gbit/s")}, sync=FIXED)
    assert not plan.feasible
    way = {path.removeprefix("sync."): value for path, value in plan.way_out.items()}
    assert planned({"a": site(up="0.5 Gbit/s")}, sync={**way}).feasible


def test_where_nothing_helps_the_answer_is_still_one() -> None:
    plan = planned({"a": site(up="1 kbit/s")})
    first, told = answer.verdict(plan), answer.as_json(plan)
    assert first.startswith("Not feasible: site a down-link")
    assert told["feasible"] is False
    json.dumps(told, allow_nan=False)


def test_a_log_window_below_one_round_is_a_constraint_where_it_was_set() -> None:
    plan = planned(sync=FIXED, log={"window_bytes": 2**29})
    found = next(item for item in plan.judged if item.what == "log window")
    assert not found.holds
    assert (
        f"log.window_bytes={found.need:.0f}"
        in make(request(sync={**FIXED, "overlap_steps": 20}, log={"window_bytes": 2**29})).fixes
    )


def test_chips_that_cannot_hold_the_learner_are_a_constraint() -> None:
    plan = planned({"a": site(chips=2, memory="80 GB")}, sync=FIXED)
    found = next(item for item in plan.judged if item.what == "site a chip memory")
    assert found.need == pytest.approx(4 * (4 * 12e9 + 2 * 8 * 5e8) / 2)
    assert not found.holds
    assert plan.fixes == ("1.40 x as many chips",)


def test_a_syncer_that_is_too_slow_gets_shards_cores_or_time() -> None:
    plan = planned(hub={"cores": 1}, sync={**FIXED, "shards": 1, "overlap_steps": 9})
    assert plan.binding is not None
    assert plan.binding.what == "syncer of a shard"
    assert [fix.partition(" ")[0] for fix in plan.fixes] == ["H", "shards", "hub.cores"]


def test_a_broker_that_cannot_store_as_much_is_judged_where_its_rate_is_given() -> None:
    plan = planned(hub={"write": "1 GB/s"}, sync={**FIXED, "overlap_steps": 20})
    assert plan.binding is not None
    assert plan.binding.what == "broker"
    assert plan.binding.need == pytest.approx((4 * 3.33 + 10.72 + 32) / 8 * 12e9 / 48)
    assert plan.fixes[-1].startswith("hub.write of 1.75 GB/s")


def test_learners_that_stop_are_judged_by_their_utilisation() -> None:
    plan = planned(mode="diloco")
    assert plan.binding is not None
    assert plan.binding.what == "utilisation"
    assert plan.fixes[0].startswith("H >= ")
    enough = int(plan.fixes[0].removeprefix("H >= "))
    assert planned(mode="diloco", sync={"h_steps": enough}).feasible


def test_a_step_from_flops_takes_six_operations_for_each_active_parameter_and_token() -> None:
    chips = {"chips": 8, "flops_per_chip": "1 PFLOP/s", "utilisation": 0.5}
    asked = request({"a": {"up": "1 Gbit/s", **chips}}, plan={"active_parameters": "6B"})
    seconds = step_s(asked, asked.scene.sites["a"], 6e9)
    assert seconds == pytest.approx(6 * 6e9 * 262144 / (8 * 1e15 * 0.5))


@pytest.mark.parametrize(
    ("outer", "h_steps", "vectors"),
    [
        ({"preset": "auto"}, 24, 0),
        ({"preset": "auto"}, 500, 1),
        ({"preset": "auto", "momentum": 0.5}, 24, 1),
        ({"preset": "direct"}, 500, 0),
        ({"preset": "nesterov"}, 24, 1),
        ({"preset": "nesterov", "momentum": 0.0}, 24, 0),
        ({"preset": "my_outer:make"}, 24, 1),
    ],
)
def test_outer_state_is_that_of_the_outer_optimizer(
    outer: dict[str, object], h_steps: int, vectors: int
) -> None:
    assert outer_vectors(request(outer=outer, sync={"h_steps": h_steps})) == vectors


def test_time_and_money_follow_from_tokens_and_prices() -> None:
    priced = site(chips=10, price_chip_hour=2.0, price_egress_gb=0.1)
    plan = planned({"a": priced, "b": priced}, plan={"tokens": "1B"}, sync=FIXED)
    bill = plan.bills[0]
    assert bill.wall_s == pytest.approx(1e9 / (2 * 262144 / 2.0))
    assert bill.chips == pytest.approx(bill.wall_s / 3600 * 2.0 * 20)
    rounds = bill.wall_s / 48.0
    assert bill.egress == pytest.approx(rounds * 2 * 12e9 * 3.33 / 8 / 1e9 * 0.1)
    assert bill.total == pytest.approx((bill.chips or 0) + (bill.egress or 0))


def test_without_prices_there_is_no_cost_and_the_reason_is_said() -> None:
    told: Any = answer.as_json(planned())
    cost = told["compared"]["this plan"]["cost"]
    assert cost["value"] is None
    assert "price_chip_hour" in cost["convention"]


def test_data_parallel_sends_a_ring_and_elastic_survives_failures_better() -> None:
    table = {"chip_mtbi": "1000 h", "recovery": "600 s"}
    plan = planned({n: site(chips=256) for n in "abcd"}, plan=table, sync=FIXED)
    mine, sync, elastic, diloco = plan.paces
    assert sync.bits == pytest.approx(24 * 2 * (1 - 1 / 4) * 16 * 12e9)
    assert mine.goodput > elastic.goodput > sync.goodput == diloco.goodput
    assert mine.goodput == pytest.approx(1 / (1 + 256 / 3.6e6 * 600))
    assert sync.goodput == pytest.approx(1 / (1 + 1024 / 3.6e6 * 600))


def test_one_learner_alone_needs_no_all_reduce() -> None:
    plan = planned(1, sync=FIXED)
    assert plan.paces[1].tokens_s == plan.paces[0].tokens_s


def test_what_lies_far_outside_the_checked_range_is_marked_and_says_why() -> None:
    near, far = planned(), planned(parameters="50T")
    assert not doubts(near).of_links
    assert doubts(far).links(1.0, "s", "").kind is Kind.EXTRAPOLATED
    assert "50.0 Tparam" in "\n".join(answer.lines(far))


def test_tokens_that_nobody_gave_are_not_in_the_first_line() -> None:
    tokens = {"plan": {"tokens_per_step": 262144}}
    assert "tokens/s" in answer.verdict(planned(**tokens))
    asked = request()
    bare = make(replace(asked, bare_tokens=True))
    assert "tokens/s" not in answer.verdict(bare)
    assert any("--step-tokens" in reason for reason in doubts(bare).reasons)


def test_advice_is_given_on_each_letter_with_its_reason() -> None:
    found = advise(planned(9, sync=FIXED))
    assert [one.letter for one in found] == ["M", "H", "K", "P"]
    assert all(one.say and one.why for one in found)
    assert "join" in found[0].say


def test_a_site_that_binds_and_brings_little_should_be_left_out() -> None:
    sites = {"big": site(), "tiny": site(up="0.1 Gbit/s", step_time="60 s")}
    assert "leave out site tiny" in [one.say for one in advise(planned(sites, sync=FIXED))]


def test_every_figure_says_its_kind_and_a_convention_or_a_unit() -> None:
    for part in answer.parts(planned()):
        told: Any = part.json()
        figures = [f for f in told.values() if "kind" in f] or [
            f for row in told.values() for f in row.values()
        ]
        assert all(f["kind"] in {"input", "derived", "extrapolated"} for f in figures)
        assert all(f["unit"] for f in figures)


def test_a_report_is_one_page_with_its_pictures_and_tables(tmp_path: Path) -> None:
    names = {path.name for path in write(plan_page.report(planned()), tmp_path)}
    assert {"report.html", "sensitivity.svg", "compared.csv"} <= names
    page = (tmp_path / "report.html").read_text()
    assert page.count("<svg") == 3
    assert "Feasible" in page


def test_the_same_request_gives_the_same_bytes() -> None:
    assert plan_page.report(planned()).html() == plan_page.report(planned()).html()


sites = st.fixed_dictionaries(
    {
        "up": st.floats(-3, 5).map(lambda x: f"{10**x:.6f} Gbit/s"),
        "down": st.floats(-3, 5).map(lambda x: f"{10**x:.6f} Gbit/s"),
        "step_time": st.floats(-3, 3).map(lambda x: 10**x),
        "rtt": st.floats(-4, 1).map(lambda x: 10**x),
        "learners": st.integers(1, 20),
        "chips": st.integers(1, 10**6),
    }
)


@settings(max_examples=15)
@over(
    st.lists(sites, min_size=1, max_size=4),
    st.floats(3, 14).map(lambda x: 10**x),
    st.fixed_dictionaries(
        {},
        optional={
            "h_steps": st.integers(3, 500),
            "fragments": st.integers(1, 200),
            "contribution_scheme": st.sampled_from(["f32", "bf16", "int8", "int4", "e3m0", "int2"]),
            "global_scheme": st.sampled_from(["f32", "bf16", "int8", "int4"]),
        },
    ),
    st.sampled_from(["decoupled", "diloco", "single"]),
)
def test_any_request_is_answered_without_nan(
    drawn: list[dict[str, Any]], parameters: float, sync: dict[str, Any], mode: str
) -> None:
    if mode == "single":
        drawn = [{**drawn[0], "learners": 1}]
    if mode == "diloco":
        sync = {key: value for key, value in sync.items() if key != "fragments"}
    named = {f"s{i}": one for i, one in enumerate(drawn)}
    plan = planned(named, parameters, mode=mode, sync=sync)
    first = answer.lines(plan)[0]
    assert first.startswith("Feasible" if plan.feasible else "Not feasible")
    json.dumps(answer.as_json(plan), allow_nan=False)
    assert plan_page.report(plan).html()


def test_blocking_diloco_stands_still_while_the_whole_model_passes() -> None:
    plan = planned(2, sync=FIXED)
    diloco = plan.paces[3]
    wire = 12e9 * (3.33 + 10.72) / 3e9
    stop = 48.0 / diloco.utilisation - 48.0
    assert wire < stop < wire + 15
    assert diloco.tokens_s == pytest.approx(2 * 262144 * 24 / (48.0 + stop))


@pytest.mark.parametrize("up", ["1 bit/s", "1e18 bit/s"])
@pytest.mark.parametrize("step_time", [1e-9, 1e11])
@pytest.mark.parametrize("parameters", [1, 1e20])
def test_the_widest_inputs_are_answered(up: str, step_time: float, parameters: float) -> None:
    far = site(up=up, step_time=step_time, rtt=1e11, chips=10**9, price_chip_hour=1e9)
    table = {"goodput": 1e-6, "chip_mtbi": 1e-9, "tokens": 1e20, "tokens_per_step": 1}
    plan = planned({"a": far, "b": site()}, parameters, plan=table, sync={"fragments": 1})
    json.dumps(answer.as_json(plan), allow_nan=False)
    assert plan_page.report(plan).html()


def test_rounds_within_tau_steps_are_chosen_before_those_that_hold_up_no_others() -> None:
    plan = planned({"a": site(up="3 Gbit/s"), "b": site(up="3 Gbit/s")}, hub={"cores": 16})
    chosen = replace(plan.rounds, within_tau=True)
    assert all(item.holds for item in constraints(chosen, plan.limits))
    fewer = replace(plan.rounds, load=replace(plan.rounds.load, fragments=8))
    assert all(item.holds for item in constraints(fewer, plan.limits))
    assert plan.rounds.load.fragments > 8


def test_where_no_round_is_over_within_tau_steps_room_is_enough() -> None:
    plan = planned({"a": site(rtt="2500 ms")}, hub={"cores": 16})
    late = replace(plan.rounds, within_tau=True)
    assert plan.feasible
    assert not all(item.holds for item in constraints(late, plan.limits))


def test_a_fix_does_not_break_what_held() -> None:
    chips = site(chips=3, memory="80 GB", up="1 Tbit/s")
    plan = planned({"a": chips}, hub={"cores": 1}, sync={**FIXED, "h_steps": 12, "shards": 1})
    assert plan.binding is not None
    assert plan.binding.what == "syncer of a shard"
    offered = [re.fullmatch(r"shards >= (\d+)", fix) for fix in plan.fixes]
    assert any(offered)
    for found in offered:
        if found:
            load = replace(plan.rounds.load, shards=int(found[1]))
            after = constraints(replace(plan.rounds, load=load), plan.limits)
            memory = next(item for item in after if item.what == "site a chip memory")
            assert memory.holds
    eight = replace(plan.rounds, load=replace(plan.rounds.load, shards=8))
    assert not all(item.holds for item in constraints(eight, plan.limits))


def test_chips_that_are_nearly_full_do_not_keep_settings_from_being_chosen() -> None:
    links = {"up": "3 Gbit/s", "down": "3 Gbit/s"}
    free = planned({"a": site(**links)}, hub={"cores": 16})
    need = learner_bytes(free.rounds.load)
    full = planned({"a": site(**links, chips=1, memory=f"{need / 0.95:.0f} B")}, hub={"cores": 16})
    over = planned({"a": site(**links, chips=1, memory=f"{need / 1.5:.0f} B")}, hub={"cores": 16})
    assert free.chosen
    assert full.chosen == over.chosen == free.chosen
    assert full.feasible
    assert not over.feasible
