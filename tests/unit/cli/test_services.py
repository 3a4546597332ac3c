"""Which processes a local cluster consists of."""

from __future__ import annotations

from pathlib import Path

import pytest

from skerry.chaos import clock
from skerry.cli.place import Place
from skerry.cli.services import Team, stages


def test_services_of_which_there_are_several_are_numbered() -> None:
    assert Team(2, syncers=2).kinds() == {
        "learner-1": "learner",
        "learner-2": "learner",
        "syncer-1": "syncer",
        "syncer-2": "syncer",
        "checkpointer": "checkpointer",
        "evaluator": "evaluator",
        "health-monitor": "health-monitor",
    }


def test_each_service_uses_its_own_way_to_the_broker(tmp_path: Path) -> None:
    place = Place("r", tmp_path)
    (learner,), (syncer,), *_ = stages(place, Team(1), "nats://b:1", {"syncer": "nats://p:2"})
    assert "nats://b:1" in learner.argv
    assert "nats://p:2" in syncer.argv


def test_only_a_run_that_allows_chaos_has_clocks_that_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "library", lambda: Path("/lib/faketime.so"))
    place = Place("r", tmp_path)
    for chaos in (True, False):
        (learner,), *_ = stages(place, Team(1, chaos=chaos), "nats://b:1", {})
        assert ("LD_PRELOAD" in learner.env) == chaos
    assert float(clock.file_of(place.folder, "learner-1").read_text()) == 0.0


def test_who_only_looks_on_ends_no_cluster_and_may_be_left_out(tmp_path: Path) -> None:
    place = Place("r", tmp_path)
    started = {c.name: c for stage in stages(place, Team(1), "nats://b:1", {}) for c in stage}
    names = {name for name, command in started.items() if not command.essential}
    assert names == {"evaluator", "health-monitor"}
    assert started["evaluator"].argv[1:4] == ("-m", "skerry_learner", "evaluator")
    assert "evaluator" not in Team(1, evaluators=0).kinds()
