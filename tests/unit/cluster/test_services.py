"""Which processes a local cluster consists of."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from skerry.cli.cluster import clock
from skerry.cli.cluster.place import Place
from skerry.cli.cluster.services import Reach, Team, become, stages


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
    apart = Reach("nats://p:2", ("nsenter", "--net=x", "--"))
    (learner,), (syncer,), *_ = stages(place, Team(1), "nats://b:1", {"syncer": apart})
    assert "nats://b:1" in learner.argv
    assert "nats://p:2" in syncer.argv
    assert learner.argv[0] == sys.executable
    assert syncer.argv[:4] == (*apart.entering, sys.executable)


def test_only_a_run_that_asks_for_it_has_clocks_that_can_be_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(clock, "library", lambda: Path("/lib/faketime.so"))
    place = Place("r", tmp_path)
    for clocks in (True, False):
        (learner,), *_ = stages(place, Team(1, chaos=True, clocks=clocks), "nats://b:1", {})
        assert ("LD_PRELOAD" in learner.env) == clocks
    assert float(clock.file_of(place.folder, "learner-1").read_text()) == 0.0


def test_who_only_looks_on_ends_no_cluster_and_may_be_left_out(tmp_path: Path) -> None:
    place = Place("r", tmp_path)
    started = {c.name: c for stage in stages(place, Team(1), "nats://b:1", {}) for c in stage}
    names = {name for name, command in started.items() if not command.essential}
    assert names == {"evaluator", "health-monitor"}
    assert started["evaluator"].argv[1:4] == ("-m", "skerry_evaluator", "--nats")
    assert "evaluator" not in Team(1, evaluators=0).kinds()


def _become(monkeypatch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, str]:
    """Return the environment in which a learner's process would be."""
    seen: dict[str, str] = {}
    monkeypatch.chdir(folder)
    for name in ("JAX_COMPILATION_CACHE_DIR", "NUMBA_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "execv", lambda *_: seen.update(os.environ))
    become("learner", list(words))
    return seen


def test_a_learner_started_by_itself_keeps_what_it_compiles(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    environ = _become(monkeypatch, tmp_path, "--run", "r")
    assert environ["JAX_COMPILATION_CACHE_DIR"] == str(tmp_path / ".skerry/cache/jax")
    assert (tmp_path / ".skerry/cache/numba").is_dir()


def test_a_question_for_help_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    assert "JAX_COMPILATION_CACHE_DIR" not in _become(monkeypatch, tmp_path, "--help")
    assert not list(tmp_path.iterdir())


def test_a_learner_starts_where_nothing_can_be_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "environ", dict(os.environ))
    (tmp_path / ".skerry").write_text("in the way")
    assert "NUMBA_CACHE_DIR" not in _become(monkeypatch, tmp_path, "--run", "r")
