"""What rounds ask of links: the closed forms, and what must be monotonic."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given as over
from hypothesis import strategies as st

from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.quantise import raw_bytes
from skerry.algorithm.schedule import Schedule, offset, room_steps
from skerry_tools.plan.fixes import first, least
from skerry_tools.plan.links import HubLimits, Link, Rounds, Workload
from skerry_tools.plan.measured import RAW_BITS, WIRE_BITS, merge_s
from skerry_tools.plan.models import Size
from skerry_tools.plan.utilisation import (
    Island,
    data_parallel_step_s,
    required_bits_s,
    utilisation,
)
from skerry_tools.plan.verdict import cycle_s
from skerry_tools.plan.verdict import utilisation as of_rounds

LOAD = Workload(
    size=Size(12e9, 48),
    fragments=24,
    h_steps=24,
    overlap_steps=2,
    quorum=1,
    shards=1,
    up_scheme="int4",
    down_scheme="bf16",
    outer_vectors=1,
)
LINK = Link("a", 1, 3e9, 3e9, 0.05, 2.0, 16)


def rounds_of(*links: Link, load: Workload = LOAD, hub: HubLimits | None = None) -> Rounds:
    named = {f"s{i}": replace(link, name=f"s{i}") for i, link in enumerate(links)}
    return Rounds(load, named, hub or HubLimits(cores=16))


loads = st.builds(
    replace,
    st.just(LOAD),
    fragments=st.integers(1, 64),
    h_steps=st.integers(1, 512),
    overlap_steps=st.integers(1, 4),
    shards=st.integers(1, 8),
    up_scheme=st.sampled_from(sorted(WIRE_BITS)),
    down_scheme=st.sampled_from(["f32", "bf16", "int8", "int4"]),
)
links = st.builds(
    replace,
    st.just(LINK),
    learners=st.integers(1, 4),
    up_bits_s=st.floats(1e6, 1e13),
    down_bits_s=st.floats(1e6, 1e13),
    rtt_s=st.floats(1e-4, 1.0),
    step_s=st.floats(0.01, 50),
)


@over(loads, links)
def test_throughput_is_what_a_site_sends_in_the_steps_after_which_a_fragment_returns(
    load: Workload, link: Link
) -> None:
    rounds = rounds_of(link, load=load)
    sent = link.learners * load.up_bits * load.parameters
    assert rounds.up_throughput(rounds.links["s0"]) == pytest.approx(
        sent / (load.h_steps * link.step_s)
    )


@over(loads, links)
def test_links_at_their_deadline_bound_end_a_round_exactly_within_its_room(
    load: Workload, link: Link
) -> None:
    rounds = rounds_of(link, load=load)
    factor = rounds.deadline_factor(rounds.links["s0"])
    if factor is None:
        return
    grown = replace(link, up_bits_s=link.up_bits_s * factor, down_bits_s=link.down_bits_s * factor)
    rounds = rounds_of(grown, load=load)
    assert rounds.round_s(rounds.links["s0"]) == pytest.approx(rounds.deadline_s)


@over(loads, links)
def test_the_tau_that_fits_is_the_least_whose_room_holds_a_round(
    load: Workload, link: Link
) -> None:
    def holds(tau: int) -> bool:
        after = rounds_of(link, load=replace(load, overlap_steps=tau))
        return after.slack_steps(link) >= -1e-6

    tau = rounds_of(link, load=load).tau_that_fits(link)
    if tau is None:
        assert not any(holds(tau) for tau in range(1, load.h_steps))
    else:
        assert holds(tau)
        assert tau == 1 or not holds(tau - 1)


@over(loads, links)
def test_rounds_of_a_shard_that_live_for_their_room_are_launched_in_time(
    load: Workload, link: Link
) -> None:
    """Of every shard: where P does not divide evenly, the one that owns least has least room."""
    rounds = rounds_of(link, load=load)
    for shard in range(load.shards):
        own = len(range(shard, load.fragments, load.shards))
        if own:
            assert rounds.room_steps <= room_steps(replace(load.schedule, own=own)) * (1 + 1e-9)


@over(loads, links, st.sampled_from(["h_steps", "overlap_steps", "shards", "fragments"]))
def test_room_grows_with_h_tau_and_shards_and_shrinks_with_fragments(
    load: Workload, link: Link, what: str
) -> None:
    more = replace(load, **{what: getattr(load, what) + 1})
    small, large = (more, load) if what == "fragments" else (load, more)
    rooms = [rounds_of(link, load=each).room_steps for each in (small, large)]
    assert rooms[0] <= rooms[1] * (1 + 1e-9)


@over(loads, links)
def test_a_round_has_room_for_tau_steps_or_more(load: Workload, link: Link) -> None:
    rounds = rounds_of(link, load=load)
    assert rounds.room_steps >= min(load.overlap_steps, load.h_steps) * (1 - 1e-9)


@over(loads, links, st.floats(1.0, 100.0))
def test_more_bandwidth_never_makes_a_round_longer(
    load: Workload, link: Link, factor: float
) -> None:
    more = replace(link, up_bits_s=link.up_bits_s * factor)
    assert rounds_of(more, load=load).round_s(more) <= rounds_of(link, load=load).round_s(link)


@over(st.integers(1, 64), st.integers(1, 64))
def test_fragments_due_together_are_those_that_the_schedule_puts_on_one_step(
    fragments: int, h_steps: int
) -> None:
    schedule = Schedule(fragments, h_steps, 1)
    steps = [offset(schedule, fragment) for fragment in range(fragments)]
    most = max(steps.count(step) for step in steps)
    rounds = rounds_of(LINK, load=replace(LOAD, fragments=fragments, h_steps=h_steps))
    assert rounds.together == most


def test_the_clock_is_that_of_the_kth_fastest_learner() -> None:
    fast, slow = replace(LINK, step_s=1.0), replace(LINK, step_s=3.0, learners=2)
    clocks = [
        rounds_of(fast, slow, load=replace(LOAD, quorum=quorum)).clock_s for quorum in (1, 2, 3)
    ]
    assert clocks == [1.0, 3.0, 3.0]


def test_a_site_at_the_hub_sends_nothing_over_a_wide_area_link() -> None:
    rounds = rounds_of(replace(LINK, local=True), LINK)
    here, there = rounds.links.values()
    assert (rounds.up_throughput(here), rounds.transfer_s(here)) == (0.0, 0.0)
    assert rounds.ingress == rounds.up_throughput(there)


def test_the_hubs_own_link_holds_a_round_up_where_it_is_the_narrower_one() -> None:
    free = rounds_of(LINK, LINK)
    held = rounds_of(LINK, LINK, hub=HubLimits(down_bits_s=1e9, up_bits_s=1e9, cores=16))
    assert held.round_s(LINK) > free.round_s(LINK)
    assert held.hub_transfer_s == pytest.approx(2 * LOAD.fragment * (3.33 + 10.72) / 1e9)


def test_learners_that_stop_compute_for_h_steps_in_every_cycle() -> None:
    load = replace(LOAD, fragments=1, overlap_steps=0)
    rounds = rounds_of(LINK, LINK, load=load)
    assert cycle_s(rounds) == pytest.approx(24 * 2.0 + rounds.round_s(LINK))
    assert of_rounds(rounds) == pytest.approx(48.0 / cycle_s(rounds))


def test_where_all_meet_and_rounds_cost_nothing_utilisation_is_mean_over_max_of_step_times() -> (
    None
):
    load = replace(LOAD, size=Size(1e-6, 1), fragments=1, overlap_steps=0)
    fast = replace(LINK, step_s=1.0, rtt_s=1e-9)
    rounds = rounds_of(fast, replace(fast, step_s=2.0), load=load)
    assert of_rounds(rounds) == pytest.approx(1.5 / 2.0)


@pytest.mark.parametrize("scheme", sorted(WIRE_BITS))
def test_raw_bits_are_the_codecs_and_measured_ones_are_not_above_them(scheme: str) -> None:
    assert RAW_BITS[scheme] == 8 * raw_bytes(scheme, 100) / (100 * BLOCK)
    assert WIRE_BITS[scheme] <= RAW_BITS[scheme] * 1.01


def test_the_merge_is_the_line_through_what_was_measured() -> None:
    assert 4 / merge_s("int4", 1.0, 4) == pytest.approx(3.87e9)
    assert 4 / merge_s("int4", 1.0, 8) == pytest.approx(2.15e9)
    assert 4 / merge_s("bf16", 1.0, 4) == pytest.approx(2.15e9)


islands = st.builds(
    Island,
    step_s=st.floats(0.01, 50),
    layers=st.integers(3, 120),
    layer_bits=st.floats(1e6, 1e12),
    h_steps=st.integers(1, 500),
    overlap_steps=st.integers(1, 4),
)
rates = st.floats(1e6, 1e14)


@over(islands, rates)
def test_overlap_beats_streaming_alone_and_diloco_beats_data_parallel(
    island: Island, rate: float
) -> None:
    assert utilisation("overlapped", island, rate) >= utilisation("streaming", island, rate)
    assert utilisation("diloco", island, rate) >= utilisation("data-parallel", island, rate) - 1e-12


@over(islands, st.floats(0.01, 0.99))
def test_an_island_reaches_its_target_at_the_bandwidth_that_it_needs_and_not_below(
    island: Island, target: float
) -> None:
    need = required_bits_s("overlapped", island, target)
    assert utilisation("overlapped", island, need) >= target
    if need > 10:
        assert utilisation("overlapped", island, need * 0.99) < target


@over(islands, rates)
def test_a_step_is_never_shorter_than_its_computation_or_its_transfer(
    island: Island, rate: float
) -> None:
    step_s = data_parallel_step_s(island, rate)
    assert step_s >= island.step_s
    assert step_s >= island.layers * island.layer_bits / rate
    slack = island.step_s + island.layers * island.layer_bits / rate
    assert step_s <= slack * (1 + 1e-9)
    assert math.isfinite(step_s)


@over(st.integers(0, 100), st.integers(1, 500), st.integers(1, 600))
def test_the_least_count_that_works_is_found(now: int, most: int, wanted: int) -> None:
    found = least(now, most, lambda n: n >= wanted, lambda n: n)
    if max(now + 1, wanted) > most:
        assert found is None
    else:
        assert found == max(now + 1, wanted)


@over(loads, links)
def test_rounds_are_on_schedule_as_far_as_the_slowest_link_carries_them(
    load: Workload, link: Link
) -> None:
    rounds = rounds_of(link, load=load)
    fits = rounds.up_throughput(link) <= link.up_bits_s
    fits = fits and rounds.down_throughput(link) <= link.down_bits_s
    assert (rounds.on_schedule == 1.0) == fits
    slower = rounds_of(
        link, load=replace(load, h_steps=math.ceil(load.h_steps / rounds.on_schedule))
    )
    assert slower.on_schedule == pytest.approx(1.0)


def test_a_count_that_works_only_in_between_is_found() -> None:
    def works(count: int) -> bool:
        return 5 <= count <= 7

    assert first(1, 64, works, int) == 5
    assert first(7, 64, works, int) is None
