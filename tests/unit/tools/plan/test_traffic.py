"""What rounds take of links: the closed forms, and what must be monotonic."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from skerry.algorithm.fragments import BLOCK, LeafSpec, plan
from skerry.algorithm.schedule import Schedule, offset, room_steps
from skerry.algorithm.schemes import SCHEMES, raw_bytes
from skerry.protocol.chunks import seal_chunk
from skerry.protocol.messages import Manifest
from skerry.protocol.parts import KEYFRAME, MOST_UNCOVERED, is_due
from skerry.settings.models import OuterConfig, RunConfig, SyncConfig
from skerry_tools.plan.measured import DEFAULT, RAW_BITS, WIRE_BITS
from skerry_tools.plan.memory import recovery
from skerry_tools.plan.tables import HubTable, ScenarioTables, SiteTable
from skerry_tools.plan.traffic import Deployment, PlannedSite, SiteRound, SyncLoad, due_together
from tests.support.builders import commit, part
from tests.support.learners import encode_vector

SYNC = SyncConfig(
    fragments=24, h_steps=24, overlap_steps=2, quorum=1, shards=1, chunk_bytes=2**60,
    snapshot_every=16,
)  # fmt: skip
LOAD = SyncLoad(SYNC, 12e9, outer=OuterConfig(preset="nesterov"))
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
    "contribution_scheme": st.sampled_from(sorted(SCHEMES)),
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
    assert due_together(found.load.sync) == max(steps.count(step) for step in steps)


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
    assert held.hub_round.transfer_s == pytest.approx(2 * LOAD.fragment * (3.33 + 3.6) / 1e9)


@pytest.mark.parametrize(
    ("parameters", "delta_scheme", "trips"),
    [(12e9, "auto", 2.0), (1e6, "auto", 1.0), (1e6, "none", 2.0)],
)
def test_a_round_asks_for_all_but_the_deltas_of_small_fragments(
    parameters: float, delta_scheme: str, trips: float
) -> None:
    load = replace(LOAD.changed(delta_scheme=delta_scheme), parameters=parameters)
    near, far = (round_of(site_of(rtt=rtt), load).elsewhere_s for rtt in (1.0, 2.0))
    assert far - near == pytest.approx(trips)


def test_learners_that_stop_compute_for_h_steps_in_every_cycle() -> None:
    found = at(site_of(), site_of(), load=LOAD.changed(fragments=1, overlap_steps=0))
    assert found.cycle_s == pytest.approx(24 * 2.0 + found.site_rounds["s0"].round_s)
    assert found.utilisation == pytest.approx(48.0 / found.cycle_s)


def test_where_all_stop_and_rounds_are_free_utilisation_is_mean_over_maximum_of_steps() -> None:
    load = replace(LOAD.changed(fragments=1, overlap_steps=0), parameters=1e-6)
    found = at(site_of(step_s=1.0, rtt=1e-9), site_of(step_s=2.0, rtt=1e-9), load=load)
    assert found.utilisation == pytest.approx(1.5 / 2.0)


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
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
    whole = LOAD.changed(delta_scheme="none", snapshot_every=1)
    found = at(site_of(), load=whole)
    assert (found.snapshots, whole.down_bits) == (1, 11.07)
    assert whole.state_bytes(1, 1) == pytest.approx(11.07 / 8 + 8)
    rare = whole.changed(delta_scheme="int4", keyframe_every=8, snapshot_every=32)
    assert rare.down_bits == 3.33
    assert rare.catch_up_bits == pytest.approx(11.07 + 7 * 3.33)
    assert rare.state_bytes(1 / 8, 1 / 32) == pytest.approx((3.33 + 11.07 / 8) / 8 + 8 / 32)
    window = {"window_bytes": math.ceil(20 * 12e9 * 3.33 / 8)}  # a snapshot after 17 versions
    narrow = replace(at(site_of(), load=rare), run=RunConfig.model_validate({"log": window}))
    assert narrow.snapshots == 2 / 32


@given(st.integers(1, 64), st.integers(1, 100), st.integers(0, 200))
def test_no_pass_over_the_model_stores_more_fragments_whole_than_is_planned(
    every: int, fragments: int, version: int
) -> None:
    load = LOAD.changed(fragments=fragments)
    held = Manifest(commit(1), (part(KEYFRAME),))
    whole = sum(is_due(f, version, held, KEYFRAME, every) for f in range(fragments))
    assert whole / fragments <= load.at_once(every) / every * (1 + 1e-9)


@given(st.sampled_from([1, 16, 64]), st.floats(0.1, 300.0), st.floats(0.1, 300.0))
def test_snapshots_come_every_nth_version_or_before_the_window_is_full(
    every: int, by_bytes: float, by_age: float
) -> None:
    """``by_bytes`` and ``by_age``: versions whose contributions the window holds."""
    load = LOAD.changed(snapshot_every=every)
    window = math.ceil(by_bytes * 2 * 12e9 * 3.33 / 8)
    log = {"window_bytes": window, "window_s": by_age * 24 * 2.0}
    found = replace(at(site_of(), site_of(), load=load), run=RunConfig.model_validate({"log": log}))
    newest, stored, longest = 0, 0, 0
    for version in range(1, 10 * every + 1):
        since = version - newest
        if version % every == 0 or (since + 1) / min(by_bytes, by_age) > MOST_UNCOVERED:
            newest, stored, longest = version, stored + 1, max(longest, since)
    assert found.uncovered == longest
    assert found.snapshots == pytest.approx(stored / (10 * every))


def test_a_round_of_snapshots_is_judged_and_an_average_one_is_waited_for() -> None:
    hub = HUB.model_copy(update={"write": 1e9})
    found, free = (at(site_of(), site_of(), hub=one).hub_round for one in (hub, HUB))
    all_bytes, mean_bytes = (3.6 + 11.07) / 8 + 8, (3.6 + 11.07 / 16) / 8 + 8 / 16
    assert found.syncer_s - free.syncer_s == pytest.approx(5e8 * all_bytes / 1e9, rel=1e-3)
    assert found.spared_s == pytest.approx(5e8 * (all_bytes - mean_bytes) / 1e9)
    sent = 2 * 3.33 / 8
    assert found.broker_bytes_s == pytest.approx((sent + mean_bytes) * 12e9 / 48)
    twice = (3.6 + 11.07 * 2 / 24) / 8 + 8 * 2 / 24  # of 24 fragments two have their turn at once
    assert found.broker_most_bytes_s == pytest.approx((sent + twice) * 12e9 / 48)
    stops = {"fragments": 1, "overlap_steps": 0}
    stopped = at(site_of(), hub=hub, load=LOAD.changed(**stops))
    took_s = stopped.site_rounds["s0"].round_s - 12e9 * (all_bytes - mean_bytes) / 1e9
    assert stopped.cycle_s == pytest.approx(24 * 2.0 + took_s)


def test_recovery_reads_a_snapshot_and_merges_again_what_was_contributed_since() -> None:
    found = at(site_of(), site_of(), hub=HUB.model_copy(update={"cores": 1, "write": 1e9}))
    read, seconds = recovery(found)
    assert read == pytest.approx(12e9 * (8 + (11.07 + 15 * 3.6) / 8 + 15 * 2 * 3.33 / 8))
    slowest = 4 / (0.14 * 15.4e9)  # of a value in bf16, and in f32, which was not measured
    once_s = 2 * slowest + slowest + 15 * 4 / 5.1e9
    each_s = 2 * 4 / 6.5e9 + DEFAULT.merge_s("int4", 1.0, 2)
    assert seconds == pytest.approx(2.0 + read / 1e9 + 12e9 * (once_s + 15 * each_s))
    soon, soon_s = recovery(at(site_of(), site_of(), load=LOAD.changed(snapshot_every=1)))
    assert soon == pytest.approx(12e9 * (8 + (11.07 + 15 * 3.6) / 8))
    assert soon_s < seconds


@pytest.mark.parametrize("scheme", sorted(SCHEMES))
def test_bits_on_the_wire_are_what_the_codec_makes_of_gaussian_data(scheme: str) -> None:
    layout = plan([LeafSpec("w", (2**19,))], 1)
    x = np.random.default_rng(0).standard_normal(2**19, np.float32)
    x *= np.float32(0.02 if scheme in {"f32", "bf16"} else 1e-4)  # parameters, or Adam's steps
    messages = [
        seal_chunk(chunk, run="r", plan=layout, fragment=0, version=1, sender="ann", incarnation=1)
        for chunk in encode_vector(scheme, x, 524_288)
    ]
    assert 8 * sum(map(len, messages)) / x.size == pytest.approx(WIRE_BITS[scheme], rel=0.02)
