"""Namespaces and their cables: addresses, and where they are impossible."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.cli.cluster import namespaces
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.cluster.team import Team
from skerry.errors import ConfigError
from skerry.settings.models import LocalSettings

LONGEST_DEVICE = 15
"""Characters of an interface's name, as the kernel has it."""

TAGS = st.integers(0, 16**6 - 1).map("{:06x}".format)
BLOCKS = namespaces.NET.num_addresses // namespaces.BLOCK


@given(TAGS, st.integers(1, 200), st.lists(st.integers(0, BLOCKS - 1), max_size=60))
def test_every_cable_has_two_addresses_of_its_own_away_from_others(
    tag: str, count: int, blocks: list[int]
) -> None:
    taken = [str(namespaces.NET[block * namespaces.BLOCK + 1]) for block in blocks]
    laid = namespaces.lay(tag, [f"learner-{n}" for n in range(count)], ["127.0.0.1", *taken])
    nets = [ip_network(f"{wire.outer}/30", strict=False) for wire in laid.values()]
    assert len(set(nets)) == count
    for wire, net in zip(laid.values(), nets, strict=True):
        hosts = {str(address) for address in net.hosts()}
        assert hosts == {wire.outer, wire.inner}
        assert ip_address(wire.outer) in namespaces.NET
        begins = int(net.network_address) - int(namespaces.NET.network_address)
        assert begins // namespaces.BLOCK not in blocks
    devices = [wire.device for wire in laid.values()]
    assert len(set(devices)) == count
    assert max(map(len, devices)) <= LONGEST_DEVICE


def test_a_net_without_room_is_said() -> None:
    taken = [str(namespaces.NET[block * namespaces.BLOCK]) for block in range(BLOCKS)]
    with pytest.raises(ConfigError, match="has no room for 1 services"):
        namespaces.lay("000000", ["a"], taken)


@pytest.mark.parametrize(
    ("user", "may", "installed", "why"),
    [
        (1000, namespaces.NEEDED, True, "only root, with CAP_NET_ADMIN and CAP_SYS_ADMIN, may"),
        (0, namespaces.NEEDED - 1, True, "only root, with CAP_NET_ADMIN and CAP_SYS_ADMIN, may"),
        (0, namespaces.NEEDED, False, "it needs iproute2 and util-linux, not installed here"),
    ],
)
def test_a_machine_without_namespaces_says_why_and_what_to_do(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    user: int,
    may: int,
    installed: bool,
    why: str,
) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda tool: tool if installed else None)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(namespaces, "_capabilities", lambda: may)
    assert namespaces.unable().startswith(why)
    with (
        pytest.raises(ConfigError, match=f"{why}.* Create a run without it"),
        namespaces.wired(tmp_path, ["a"]),
    ):
        pass


def test_a_cluster_without_namespaces_has_no_cables(tmp_path: Path) -> None:
    assert namespaces.read(tmp_path) == {}
    (tmp_path / namespaces.WIRES).write_text("[1]")
    assert namespaces.read(tmp_path) == {}


def local(**tables: Mapping[str, object]) -> LocalSettings:
    return LocalSettings.model_validate(tables)


@pytest.mark.parametrize(
    "telemetry",
    [
        {"endpoint": "http://127.0.0.1:4318"},
        {"endpoint": "https://otel.example", "traces": False},
        {"metrics_endpoint": "https://otel.example/v1/metrics"},
    ],
)
def test_a_collector_cannot_be_reached_wherever_it_is(telemetry: Mapping[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"telemetry\.endpoint is .* nothing but their broker"):
        namespaces.refuse_elsewhere(local(telemetry=telemetry))


def test_a_bucket_cannot_be_reached_either() -> None:
    with pytest.raises(ConfigError, match=r"store\.url is s3://b"):
        namespaces.refuse_elsewhere(local(store={"url": "s3://b"}))


def test_addresses_that_are_not_used_are_no_reason() -> None:
    namespaces.refuse_elsewhere(LocalSettings())
    off = {"endpoint": "http://127.0.0.1:4318", "traces": False, "metrics": False}
    namespaces.refuse_elsewhere(local(telemetry=off, store={"endpoint": "http://127.0.0.1:8333"}))


def test_a_cluster_without_namespaces_forgets_those_of_one_that_was_killed(
    folder: RunFolder,
) -> None:
    row = {"space": "gone", "device": "d", "outer": "10.213.0.1", "inner": "10.213.0.2"}
    (folder.path / namespaces.WIRES).write_text(json.dumps({"learner-1": row}))
    assert namespaces.read(folder.path)
    with namespaces.namespaces(folder, Team(1), LocalSettings()) as held:
        assert held == namespaces.read(folder.path) == {}
