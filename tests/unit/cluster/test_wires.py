"""Cables between namespaces: their addresses, and who cannot have any."""

from __future__ import annotations

import os
from ipaddress import ip_address, ip_network
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skerry.cli.cluster import wires
from skerry.errors import ConfigError

LONGEST_DEVICE = 15
"""Characters of an interface's name, as the kernel has it."""

TAGS = st.integers(0, 16**6 - 1).map("{:06x}".format)
BLOCKS = wires.NET.num_addresses // wires.BLOCK


@given(TAGS, st.integers(1, 200), st.lists(st.integers(0, BLOCKS - 1), max_size=60))
def test_every_cable_has_two_addresses_of_its_own_away_from_others(
    tag: str, count: int, blocks: list[int]
) -> None:
    taken = [str(wires.NET[block * wires.BLOCK + 1]) for block in blocks]
    laid = wires.lay(tag, [f"learner-{n}" for n in range(count)], ["127.0.0.1", *taken])
    nets = [ip_network(f"{wire.outer}/{wires.PAIR_BITS}", strict=False) for wire in laid.values()]
    assert len(set(nets)) == count
    for wire, net in zip(laid.values(), nets, strict=True):
        hosts = {str(address) for address in net.hosts()}
        assert hosts == {wire.outer, wire.inner}
        assert ip_address(wire.outer) in wires.NET
        begins = int(net.network_address) - int(wires.NET.network_address)
        assert begins // wires.BLOCK not in blocks
    devices = [wire.device for wire in laid.values()]
    assert len(set(devices)) == count
    assert max(map(len, devices)) <= LONGEST_DEVICE


def test_a_net_without_room_is_said() -> None:
    taken = [str(wires.NET[block * wires.BLOCK]) for block in range(BLOCKS)]
    with pytest.raises(ConfigError, match="has no room for 1 services"):
        wires.lay("000000", ["a"], taken)


def test_what_is_missing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(wires, "_capabilities", lambda: wires.NEEDED)
    monkeypatch.setattr(wires.shutil, "which", lambda tool: None if tool != "nsenter" else tool)
    assert wires.unable() == "it needs iproute2, not installed here"


@pytest.mark.parametrize(("user", "may"), [(1000, wires.NEEDED), (0, wires.NEEDED - 1)])
def test_who_may_not_is_told_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, user: int, may: int
) -> None:
    monkeypatch.setattr(wires.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(wires, "_capabilities", lambda: may)
    with (
        pytest.raises(ConfigError, match=r"only root, .* Create a run without it"),
        wires.wired(tmp_path, ["a"]),
    ):
        pass


def test_a_cluster_without_namespaces_has_no_cables(tmp_path: Path) -> None:
    assert wires.read(tmp_path) == {}
    (tmp_path / wires.WIRES).write_text("[1]")
    assert wires.read(tmp_path) == {}
