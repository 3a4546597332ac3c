"""Every way out that a plan names is one: once it is set, what it is for holds."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry_tools.plan.question import CHOICES
from tests.support.plans import planned, site

Tables = dict[str, Any]
FIXED = {"fragments": 24, "shards": 4, "snapshot_every": 16}


def with_fix(tables: Tables, fix: str, what: str) -> Tables:
    """Return the tables with what a fix says; ``what`` is the constraint that it is for."""
    name = what.split()[1] if what.startswith("site ") else ""
    where: Tables = tables["sites"][name] if name else tables["hub"]
    if found := re.fullmatch(r"links ([\d,.]+) x as wide, up and down", fix):
        rates = {way: where[way] for way in ("up", "down") if way in where}
        times, rate = float(found[1].replace(",", "")), re.compile(r"[\d.]+")
        changed = {w: rate.sub(lambda n: f"{float(n[0]) * times}", r) for w, r in rates.items()}
    elif found := re.fullmatch(r"([\d,.]+) x the memory, .*", fix):
        size = float(where["memory"].split()[0]) * float(found[1].replace(",", ""))
        changed = {"memory": f"{size} GB"}
    elif fix == "mode=decoupled, in which no learner stops":
        return {**tables, "mode": "decoupled", "sync": {}}
    else:
        found = re.fullmatch(r"(?:(\w+)\.)?(\w+)(?:=| of )([^,]*)(, or less .*)?", fix)
        assert found, fix
        table, value = found[1] or "sync", found[3]
        return {
            **tables,
            table: {**tables[table], found[2]: int(value) if value.isdigit() else value},
        }
    if name:
        return {**tables, "sites": {**tables["sites"], name: {**where, **changed}}}
    return {**tables, "hub": {**where, **changed}}


def sampled(**values: list[Any]) -> dict[str, st.SearchStrategy[Any]]:
    return {name: st.sampled_from(some) for name, some in values.items()}


rates = st.floats(-2, 1.3).map(lambda x: f"{10**x:.6f} Gbit/s")
one_site = st.fixed_dictionaries(
    {"up": rates} | sampled(step_time=[0.5, 2, 20], memory=["20 GB", "80 GB", "800 GB"]),
    optional={"down": rates}
    | sampled(rtt=["1 ms", "100 ms", "2 s"], derating=[0.5], cores=[1], chips=[2, 4]),
)
one_sync = st.fixed_dictionaries(
    sampled(h_steps=[24, 48, 72, 96, 120], fragments=[4, 8, 12, 24], shards=[1, 2, 4])
    | sampled(overlap_steps=[2, 5, 12]),
    optional=sampled(contribution_scheme=["f32", "bf16", "int8"], delta_scheme=["none", "int8"])
    | sampled(snapshot_every=[5, 16], keyframe_every=[4, 16]),
)
one_hub = st.fixed_dictionaries(
    {},
    optional={"up": rates, "down": rates, "cores": st.integers(1, 4)}
    | {"write": st.floats(1, 4).map(lambda x: f"{10**x:.3f} MB/s")}
    | {"disk": st.floats(0, 3).map(lambda x: f"{10**x:.3f} GB")}
    | sampled(max_payload=["1 MiB"]),
)
questions = st.fixed_dictionaries(
    {
        "sites": st.lists(one_site, min_size=1, max_size=3).map(
            lambda some: {name: site(**one) for name, one in zip("abc", some, strict=False)}
        ),
        "sync": one_sync,
        "hub": one_hub,
        "log": st.fixed_dictionaries({}, optional=sampled(window_bytes=[2**30], window_s=[100])),
    }
    | sampled(mode=["decoupled", "decoupled", "decoupled", "streaming", "diloco"])
    | sampled(parameters=["1B", "12B"], outer=[{}, {"preset": "nesterov"}])
)  # fmt: skip


@settings(max_examples=15)
@given(questions)
def test_each_way_out_that_a_plan_names_is_enough_once_it_is_set(tables: Tables) -> None:
    if tables["mode"] == "diloco":
        tables = {**tables, "sync": {"h_steps": tables["sync"]["h_steps"]}}
    plan = planned(**tables)
    sync = {**tables["sync"], **{name: getattr(plan.at.load.sync, name) for name in CHOICES}}
    for fix in plan.fixes:
        after = planned(**with_fix({**tables, "sync": sync}, fix, plan.judged[0].what))
        assert all(c.holds for c in after.judged if c.what == plan.judged[0].what), fix
    if plan.way_out:
        assert planned(**{**tables, "sync": {**sync, **plan.way_out}}).feasible


@pytest.mark.parametrize(
    ("h_steps", "up", "fix"), [(24, "0.6", "h_steps=36"), (96, "3", "h_steps=63")]
)
def test_h_is_named_also_where_only_one_without_outer_momentum_fits(
    h_steps: int, up: str, fix: str
) -> None:
    log, hub = {"window_s": 100}, {"disk": "330 GB"}
    sites = {"a": site(up=f"{up} Gbit/s")}
    plan = planned(sites, sync={**FIXED, "h_steps": h_steps}, log=log, hub=hub)
    assert fix in plan.fixes
