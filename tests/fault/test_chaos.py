"""A short drill on real processes: every fault fires, and nothing that was promised is broken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skerry.testing.local_cluster import chaos, cluster

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.timeout(1200)]

PLAN = Path(__file__).parents[2] / "infra" / "chaos" / "short.json"


def test_a_cluster_survives_a_drill_with_everything_in_it(
    tmp_path: Path, tiny_config: Path, jax_cache: Path
) -> None:
    arguments = ("--syncers", "2")
    with cluster(tmp_path, "drill", tiny_config, jax_cache, *arguments):
        told, said = chaos(tmp_path, "drill", "--plan", str(PLAN), "--quiet-s", "2")
        up = (tmp_path / "up.log").read_text()
    story = f"{json.dumps(told, indent=1)}\n{said}\n{up}"
    planned = [fault["kind"] for fault in json.loads(PLAN.read_text())["faults"]]
    assert [fault["kind"] for fault in told["faults"]] == planned
    assert all(fault["fired"] for fault in told["faults"]), story
    assert all(check["ok"] for check in told["checks"]), story
    assert {check["name"] for check in told["checks"]} >= {
        "learner-1 contributes",
        "learner-2 contributes",
        "a syncer that runs commits",
        "a checkpoint verifies",
        "nothing acknowledged was lost",
        "the ledger verifies",
        "the window replays",
        "everything is healed",
        "every kind of fault fired",
    }
