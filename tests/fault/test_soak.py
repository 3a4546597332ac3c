"""Half an hour of faults, and half of the learners killed once a minute: run by hand, -m soak.

``python -m pytest -s -m soak tests/fault/test_soak.py`` prints seed and verdict;
docs/results/soak.md has the same as commands, and what came of them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.local_cluster import chaos, cluster, summary

pytestmark = [pytest.mark.nats, pytest.mark.fault, pytest.mark.soak, pytest.mark.timeout(7200)]

INFRA = Path(__file__).parents[2] / "infra" / "chaos"
SEED = 20261123
SOAK_S = 1800
EVERY_S = 5
LEAST_GOODPUT = 0.88


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
