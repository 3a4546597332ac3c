"""Half an hour of faults, and half of the learners killed once a minute: run by hand, -m soak.

``python -m pytest -s -m soak tests/fault/test_soak.py`` prints seed and verdict;
docs/results/soak.md has the same as commands, and what came of them.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.local_cluster import chaos, cluster

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.soak, pytest.mark.timeout(7200)]

INFRA = Path(__file__).parents[2] / "infra" / "chaos"
SEED = 20261123
SOAK_S = 1800
EVERY_S = 5
LEAST_GOODPUT = 0.88


def summary(told: dict[str, Any]) -> str:
    """Return the verdict without the story of each fault."""
    brief = {key: value for key, value in told.items() if key != "faults"}
    kinds: dict[str, list[int]] = {}
    for fault in told["faults"]:
        fired = kinds.setdefault(fault["kind"], [0, 0])
        fired[0] += fault["fired"]
        fired[1] += 1
    brief["fired_by_kind"] = {kind: f"{a} of {b}" for kind, (a, b) in sorted(kinds.items())}
    return json.dumps(brief, indent=1)


def test_half_an_hour_of_faults_breaks_no_promise(tmp_path: Path, jax_cache: Path) -> None:
    team = ("--learners", "2", "--syncers", "2", "--checkpointers", "2")
    with cluster(tmp_path, "soak", INFRA / "soak.toml", jax_cache, *team):
        drawn = ("--seed", str(SEED), "--every-s", str(EVERY_S), "--duration-s", str(SOAK_S))
        told, said = chaos(tmp_path, "soak", *drawn)
    print(summary(told))
    assert all(check["ok"] for check in told["checks"]), said[-20_000:]
    assert told["fired"] > 0.5 * len(told["faults"]), said[-20_000:]


def test_half_of_the_learners_restarted_once_a_minute_cost_no_more_than_their_time(
    tmp_path: Path, jax_cache: Path
) -> None:
    team = ("--learners", "4", "--set", "chaos.clocks=false")
    with cluster(tmp_path, "half", INFRA / "soak.toml", jax_cache, *team):
        drawn = ("--plan", str(INFRA / "half.json"), "--quiet-s", "60")
        told, said = chaos(tmp_path, "half", *drawn, "--goodput", str(LEAST_GOODPUT))
    print(summary(told))
    assert all(fault["fired"] for fault in told["faults"]), said[-20_000:]
    assert all(check["ok"] for check in told["checks"]), said[-20_000:]
    assert told["goodput"]["loss_last"] < told["goodput"]["loss_first"]
