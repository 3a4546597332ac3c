"""A question that cannot be asked is refused with the path and the reason."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from asked import request, site

from skerry.errors import ConfigError
from skerry_tools.plan.sites import from_tree, read


@pytest.mark.parametrize(
    ("sites", "tables", "path", "reason"),
    [
        ({}, {}, "sites", "sites is empty"),
        ({"a": site(up="0 Gbit/s")}, {}, "sites.a.up", "more than 0"),
        ({"a": site(up="-1 Gbit/s")}, {}, "sites.a.up", "more than 0"),
        ({"a": site(up="5 Gb/s")}, {}, "sites.a.up", "bits or bytes"),
        ({"a": site(up=5)}, {}, "sites.a.up", "with its unit"),
        ({"a": site(down="400 MB/s")}, {}, "sites.a.down", "write both in one unit"),
        ({"a": site(upp="1 Gbit/s")}, {}, "sites.a.upp", "did you mean up"),
        ({"a": {"up": "1 Gbit/s"}}, {}, "sites.a.step_time", "flops_per_chip"),
        ({"a": {"step_time": "1 s"}}, {}, "sites.a.up", "is missing"),
        ({"a": site(measured=True, derating=0.5)}, {}, "sites.a.derating", "measured"),
        ({"a": site(derating=1.5)}, {}, "sites.a.derating", "at most 1"),
        ({"a": site(chips=0)}, {}, "sites.a.chips", "at least 1"),
        ({"a": site(chips="many")}, {}, "sites.a.chips", "whole number"),
        (2, {"hub": {"site": "z"}}, "hub.site", "there are a, b"),
        (2, {"hub": {"write": "5 Gb/s"}}, "hub.write", "bits or bytes"),
        (2, {"sync": {"quorum": 3}}, "sync.quorum", "no round could ever close"),
        (2, {"sync": {"learners": 3}}, "sync.learners", "the sites have 2"),
        (2, {"sync": {"quorm": 1}}, "sync.quorm", "did you mean sync.quorum"),
        (2, {"sync": {"overlap_steps": 24}}, "sync.overlap_steps", "below h_steps"),
        (
            2,
            {"mode": "streaming", "sync": {"h_steps": 25, "fragments": 24}},
            "sync.fragments",
            "one divides the other",
        ),
        (2, {"plan": {"goodput": 0}}, "plan.goodput", "at least"),
        (2, {"sync": {"h_steps": 10**400}}, "sync.h_steps", "at most 1000000000"),
        ({"a": site(up="1e-300 bit/s")}, {}, "sites.a.up", "from 1 to 1e+18"),
        ({"a": site(step_time="1e300 s")}, {}, "sites.a.step_time", "from 1e-09"),
        (2, {"plan": {"tokens": "lots"}}, "plan.tokens", "must be"),
        (2, {"kind": "simulation"}, "kind", "skerry simulate"),
    ],
)
def test_what_contradicts_itself_is_refused_by_path(
    sites: dict[str, Any] | int, tables: dict[str, Any], path: str, reason: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(reason)) as refused:
        request(sites, **tables)
    assert refused.value.path == path
    assert str(refused.value).startswith(path)


def test_learners_are_those_of_the_sites_and_k_of_a_meeting_mode_follows() -> None:
    asked = request({"a": site(learners=2), "b": site()}, mode="streaming")
    assert (asked.learners, asked.run.sync.learners, asked.run.sync.quorum) == (3, 3, 3)


def test_what_the_user_set_is_not_open() -> None:
    assert request(2, sync={"h_steps": 30}).open == {"sync.fragments", "sync.shards"}
    assert request(2, mode="streaming").open == frozenset()


def test_a_file_of_sites_and_set_win_over_the_config(tmp_path: Path) -> None:
    config, sites = tmp_path / "run.toml", tmp_path / "sites.toml"
    config.write_text('[sync]\nh_steps = 30\n[nats]\nurl = "nats://b:1"\n[plan]\ntokens = "1B"\n')
    sites.write_text('[plan]\ntokens = "2B"\n[sites.a]\nup = "1 Gbit/s"\nstep_time = "1 s"\n')
    asked = from_tree(read(config, sites, ["sites.a.rtt=10 ms", "sync.fragments=4"]))
    assert (asked.run.sync.h_steps, asked.run.sync.fragments) == (30, 4)
    assert asked.scene.plan.tokens == 2e9
    assert asked.scene.sites["a"].rtt == pytest.approx(0.01)


def test_a_setting_of_a_site_that_is_in_no_file_is_refused(tmp_path: Path) -> None:
    sites = tmp_path / "sites.toml"
    sites.write_text('[sites.east]\nup = "1 Gbit/s"\nstep_time = "1 s"\n')
    with pytest.raises(ConfigError, match="did you mean east"):
        read(None, sites, ["sites.eest.up=1 Gbit/s"])


def test_a_derated_link_gives_its_share_and_a_measured_one_all() -> None:
    scene = request({"a": site(derating=0.5), "b": site(measured=True, down="1 Gbit/s")}).scene
    assert (scene.sites["a"].up_bits_s, scene.sites["a"].down_bits_s) == (1.5e9, 1.5e9)
    assert (scene.sites["b"].up_bits_s, scene.sites["b"].down_bits_s) == (3e9, 1e9)
