"""What rounds take of links: the closed forms, and what must be monotonic."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skerry.algorithm.fragments import BLOCK, LeafSpec, plan
from skerry.algorithm.schedule import Schedule, offset, room_steps
from skerry.algorithm.schemes import raw_bytes
from skerry.protocol.chunks import seal_chunk
from skerry.settings.models import SyncConfig
from skerry_tools.plan.measured import DEFAULT, RAW_BITS, WIRE_BITS
from skerry_tools.plan.tables import HubTable, ScenarioTables, SiteTable
from skerry_tools.plan.traffic import Deployment, PlannedSite, SiteRound, SyncLoad
from tests.support.learners import encode_vector

SYNC = SyncConfig(fragments=24, h_steps=24, overlap_steps=2, quorum=1, shards=1, chunk_bytes=2**60)
LOAD = SyncLoad(SYNC, 12e9, outer_vectors=1)
HUB = HubTable.model_validate({"cores": 16, "write": "100 PB/s"})


def site_of(*, step_s: float = 2.0, local: bool = False, **table: Any) -> PlannedSite:
    rates = {"up": 3e9, "down": 3e9, "rtt": 0.05, "cores": 16, **table}
    site = SiteTable(up="1 bit/s").model_copy(update=rates)  # type: ignore[arg-type] # read as text
    return PlannedSite("s", site, step_s, local=local)


def at(*sites: PlannedSite, load: SyncLoad = LOAD, hub: HubTable = HUB) -> Deployment:
    named = {f"s{i}": replace(one, name=f"s{i}") for i, one in enumerate(sites)}
    return Deployment(load, named, hub, ScenarioTables())


def round_of(site: PlannedSite, load: SyncLoad = LOAD) -> SiteRound:
    return at(site, load=load).site_rounds["s0"]


def _site_of(drawn: dict[str, Any]) -> PlannedSite:
    return site_of(**drawn)


loads = st.fixed_dictionaries({
    "fragments": st.integers(1, 64), "h_steps": st.integers(1, 512),
    "overlap_steps": st.integers(1, 4), "shards": st.integers(1, 8),
    "contribution_scheme": st.sampled_from(sorted(WIRE_BITS)),
    "global_scheme": st.sampled_from(["f32", "bf16"]),
}).map(lambda sync: LOAD.changed(**sync))  # fmt: skip
sites = st.fixed_dictionaries({
    "learners": st.integers(1, 4), "up": st.floats(1e6, 1e13), "down": st.floats(1e6, 1e13),
    "rtt": st.floats(1e-4, 1.0), "step_s": st.floats(0.01, 50),
}).map(_site_of)  # fmt: skip


def with_rates(site: PlannedSite, factor: float) -> PlannedSite:
    rates = {"up": site.rates[0] * factor, "down": site.rates[1] * factor}
    return replace(site, table=site.table.model_copy(update=rates))


@given(loads, sites)
def test_throughput_is_what_a_site_sends_in_the_steps_after_which_a_fragment_returns(
    load: SyncLoad, site: PlannedSite
) -> None:
    sent = site.table.learners * load.up_bits * load.parameters
    assert round_of(site, load).up_bits_s == pytest.approx(sent / (load.sync.h_steps * site.step_s))


@given(loads, sites)
def test_links_at_their_deadline_bound_end_a_round_exactly_within_its_room(
    load: SyncLoad, site: PlannedSite
) -> None:
    factor = round_of(site, load).factor
    if factor is not None:
        grown = at(with_rates(site, factor), load=load)
        for one in (site, grown.sites["s0"]):
            assume(grown.link(one) == one.rates)
        assert grown.site_rounds["s0"].round_s == pytest.approx(grown.deadline_s)


@given(loads)
def test_rounds_of_a_shard_that_last_for_their_room_are_launched_in_time(load: SyncLoad) -> None:
    """Of every shard: where P does not divide evenly, the one that owns least has least room."""
    sync = load.sync
    assert load.room_steps >= min(sync.overlap_steps, sync.h_steps) * (1 - 1e-9)
    for shard in range(sync.shards):
        if own := len(range(shard, sync.fragments, sync.shards)):
            schedule = Schedule(sync.fragments, sync.h_steps, sync.overlap_steps, own)
            assert load.room_steps <= room_steps(schedule) * (1 + 1e-9)


@given(loads, st.sampled_from(["h_steps", "overlap_steps", "shards", "fragments"]))
def test_room_grows_with_h_tau_and_shards_and_shrinks_with_fragments(
    load: SyncLoad, what: str
) -> None:
    more = load.changed(**{what: getattr(load.sync, what) + 1})
    small, large = (more, load) if what == "fragments" else (load, more)
    assert small.room_steps <= large.room_steps * (1 + 1e-9)


@given(loads, sites, st.floats(1.0, 100.0))
def test_more_bandwidth_never_makes_a_round_longer(
    load: SyncLoad, site: PlannedSite, factor: float
) -> None:
    assert round_of(with_rates(site, factor), load).round_s <= round_of(site, load).round_s


@given(st.integers(1, 64), st.integers(1, 64))
def test_fragments_due_together_are_those_that_the_schedule_puts_on_one_step(
    fragments: int, h_steps: int
) -> None:
    schedule = Schedule(fragments, h_steps, 1)
    steps = [offset(schedule, fragment) for fragment in range(fragments)]
    found = at(site_of(), load=LOAD.changed(fragments=fragments, h_steps=h_steps))
    assert found.due_together == max(steps.count(step) for step in steps)


def test_the_clock_is_that_of_the_kth_fastest_learner() -> None:
    fast, slow = site_of(step_s=1.0), site_of(step_s=3.0, learners=2)
    clocks = [at(fast, slow, load=LOAD.changed(quorum=k)).clock_s for k in (1, 2, 3)]
    assert clocks == [1.0, 3.0, 3.0]


def test_a_site_at_the_hub_sends_nothing_over_a_wide_area_link() -> None:
    found = at(site_of(local=True), site_of())
    here, there = found.site_rounds.values()
    assert (here.up_bits_s, here.factor) == (0.0, 0.0)
    assert found.hub_round.ingress_bits_s == there.up_bits_s


def test_the_hubs_own_link_holds_a_round_up_where_it_is_the_narrower_one() -> None:
    narrow = HUB.model_copy(update={"down": 1e9, "up": 1e9})
    free, held = at(site_of(), site_of()), at(site_of(), site_of(), hub=narrow)
    assert held.site_rounds["s0"].round_s > free.site_rounds["s0"].round_s
    assert held.hub_round.transfer_s == pytest.approx(2 * LOAD.fragment * (3.33 + 7.5) / 1e9)


def test_learners_that_stop_compute_for_h_steps_in_every_cycle() -> None:
    found = at(site_of(), site_of(), load=LOAD.changed(fragments=1, overlap_steps=0))
    assert found.cycle_s == pytest.approx(24 * 2.0 + found.site_rounds["s0"].round_s)
    assert found.utilisation == pytest.approx(48.0 / found.cycle_s)


def test_where_all_stop_and_rounds_are_free_utilisation_is_mean_over_maximum_of_steps() -> None:
    load = replace(LOAD.changed(fragments=1, overlap_steps=0), parameters=1e-6)
    found = at(site_of(step_s=1.0, rtt=1e-9), site_of(step_s=2.0, rtt=1e-9), load=load)
    assert found.utilisation == pytest.approx(1.5 / 2.0)


@pytest.mark.parametrize("scheme", sorted(WIRE_BITS))
def test_raw_bits_are_the_codecs_and_measured_ones_are_not_above_them(scheme: str) -> None:
    assert RAW_BITS[scheme] == 8 * raw_bytes(scheme, 100) / (100 * BLOCK)
    assert WIRE_BITS[scheme] <= RAW_BITS[scheme] * 1.01


@pytest.mark.parametrize(
    ("scheme", "count", "rate"), [("int4", 4, 3.87e9), ("int4", 8, 2.15e9), ("bf16", 4, 2.15e9)]
)
def test_the_merge_is_the_line_through_what_was_measured(
    scheme: str, count: int, rate: float
) -> None:
    assert 4 / DEFAULT.merge_s(scheme, 1.0, count) == pytest.approx(rate)


def test_deltas_keyframes_and_snapshots_are_counted_as_often_as_they_are_stored() -> None:
    whole = replace(LOAD, outer_vectors=1).changed(delta_scheme="none")
    assert (whole.down_bits, whole.state_bytes) == (11.07, pytest.approx(11.07 / 8 + 8))
    rare = whole.changed(delta_scheme="int4", keyframe_every=8)
    assert rare.down_bits == 3.33
    assert rare.state_bytes == pytest.approx((3.33 + 11.07 / 8) / 8 + 8)


@pytest.mark.parametrize("scheme", sorted(WIRE_BITS))
def test_bits_on_the_wire_are_what_the_codec_makes_of_gaussian_data(scheme: str) -> None:
    layout = plan([LeafSpec("w", (2**19,))], 1)
    x = np.random.default_rng(0).standard_normal(2**19, np.float32)
    x *= np.float32(0.02 if scheme in {"f32", "bf16"} else 1e-4)  # parameters, or Adam's steps
    messages = [
        seal_chunk(chunk, run="r", plan=layout, fragment=0, version=1, sender="ann", incarnation=1)
        for chunk in encode_vector(scheme, x, 524_288)
    ]
    assert 8 * sum(map(len, messages)) / x.size == pytest.approx(WIRE_BITS[scheme], rel=0.02)
