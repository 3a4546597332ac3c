"""Results that are found again, and a runner that goes on where it was stopped."""

from __future__ import annotations

import gzip
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from bench.quality import pool
from bench.quality.cells import Cell, Wanted
from bench.quality.pool import Progress, run_all
from bench.quality.sources import SourcesEdited, check_sources, sources
from bench.quality.store import ARCHIVE, Store
from mortal import killed_once

from skerry.errors import LabError
from skerry_tools.lab.scenario import LabScenario


def wanted(*seeds: int) -> list[Wanted]:
    cell = Cell(key="a", labels=(), sets=(), learners=2, tokens=1 << 16, seeds=seeds)
    return [Wanted("test", cell, seed, cell.scenario(seed)) for seed in seeds]


def rewrite(folder: Path, text: str) -> None:
    (folder / ARCHIVE).write_bytes(gzip.compress(text.encode()))


def stored(folder: Path, scenario: LabScenario) -> dict[str, Any]:
    """Return what the archive holds of a scenario that has just been put into it."""
    Store(folder).put(scenario, {"loss": 1.5})
    line: dict[str, Any] = json.loads(Store(folder).lines()[0])
    return line


class Pretended(ThreadPoolExecutor):
    """Takes what a pool of processes takes, and runs it in threads."""

    def __init__(self, workers: int, **_: object) -> None:
        super().__init__(workers)


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The seeds of the runs that were made, in their order."""
    monkeypatch.setattr(pool, "ProcessPoolExecutor", Pretended)
    return []


def runner_into(ran: list[int], fails: tuple[int, ...] = ()) -> pool.Runner:
    def runner(text: str, folder: str, expected: str) -> float:
        assert expected == sources()
        scenario = LabScenario.model_validate_json(text)
        ran.append(scenario.seed)
        if scenario.seed in fails:
            msg = "The quorum has died."
            raise LabError(msg)
        Store(Path(folder)).put(scenario, {"loss": 2.0})
        return 2.0

    return runner


def test_what_was_stored_is_found_by_its_scenario(tmp_path: Path) -> None:
    scenario = wanted(3)[0].scenario
    Store(tmp_path).put(
        scenario, {"loss": 1.5, "curve": [{"loss": 2.0}, {"loss": 1.6}, {"loss": 1.5}]}
    )
    found = Store(tmp_path).all()[scenario.digest]
    assert found.scenario == scenario
    assert found.loss == 1.5
    assert found.curve("loss") == [2.0, 1.6]


def test_a_setting_that_did_not_exist_yet_invalidates_nothing(tmp_path: Path) -> None:
    scenario = wanted(0)[0].scenario
    old = stored(tmp_path, scenario)
    del old["scenario"]["run"]["data"]["partition"]
    rewrite(tmp_path, json.dumps({**old, "digest": "0123456789abcdef"}))
    assert scenario.digest in Store(tmp_path).all()


def test_a_run_from_before_deltas_read_whole_fragments_whatever_drills_were_set(
    tmp_path: Path,
) -> None:
    scenario = wanted(0)[0].scenario
    old = stored(tmp_path, scenario)
    del old["scenario"]["run"]["sync"]["delta_scheme"]
    old["scenario"]["run"]["chaos"]["a setting that is gone"] = True
    rewrite(tmp_path, json.dumps(old))
    (found,) = Store(tmp_path).all().values()
    assert found.scenario.run.sync.delta_scheme == "none"


def test_a_default_that_has_changed_invalidates_runs_that_used_it(tmp_path: Path) -> None:
    scenario = wanted(0)[0].scenario
    old = stored(tmp_path, scenario)
    old["scenario"]["run"]["sync"]["grace_gamma"] = 0.123
    rewrite(tmp_path, json.dumps(old))
    assert scenario.digest not in Store(tmp_path).all()


@pytest.mark.parametrize("text", ["", "{", "[]", '{"code": 1, "scenario": {}}', '{"code": 1}'])
def test_a_line_that_is_no_result_is_passed_over_and_kept(tmp_path: Path, text: str) -> None:
    rewrite(tmp_path, text)
    assert not Store(tmp_path).all()
    scenario = wanted(0)[0].scenario
    Store(tmp_path).put(scenario, {"loss": 1.5})
    assert Store(tmp_path).all().keys() == {scenario.digest}
    assert set(text.splitlines()) <= set(Store(tmp_path).lines())


def test_equal_results_are_equal_archives_in_any_order(tmp_path: Path) -> None:
    runs = [run.scenario for run in wanted(0, 1, 2)]
    for name, order in (("one", runs), ("other", runs[::-1])):
        for scenario in order:
            Store(tmp_path / name).put(scenario, {"loss": 1.5})
    one, other = ((tmp_path / name / ARCHIVE).read_bytes() for name in ("one", "other"))
    assert one == other


def test_results_put_at_once_are_all_kept(tmp_path: Path) -> None:
    runs = [run.scenario for run in wanted(*range(16))]
    with ThreadPoolExecutor(8) as threads:
        list(threads.map(lambda scenario: Store(tmp_path).put(scenario, {"loss": 1.5}), runs))
    assert len(Store(tmp_path).all()) == len(runs)


def test_a_write_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scenario = wanted(0)[0].scenario
    Store(tmp_path).put(scenario, {"loss": 1.5})

    def full(handle: int) -> None:
        msg = "No space left on device"
        raise OSError(28, msg)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        Store(tmp_path).put(scenario, {"loss": 9.9})
    assert Store(tmp_path).all()[scenario.digest].loss == 1.5


def test_a_stopped_runner_goes_on_with_what_is_missing(tmp_path: Path, ran: list[int]) -> None:
    six, store = wanted(0, 1, 2, 3, 4, 5), Store(tmp_path)
    told: list[str] = []

    def stop(text: str) -> None:
        told.append(text)
        if text.startswith("[2/"):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_all(six, store, workers=1, tell=stop, runner=runner_into(ran))
    made = {found.scenario.seed for found in store.all().values()}
    assert 2 <= len(made) < 6
    ran.clear()
    run_all(six, store, workers=1, tell=told.append, runner=runner_into(ran))
    assert set(ran) == {0, 1, 2, 3, 4, 5} - made
    assert len(store.all()) == 6


def test_a_run_that_fails_is_told_and_tried_again(tmp_path: Path, ran: list[int]) -> None:
    told: list[str] = []
    failing = runner_into(ran, fails=(1,))
    failed = run_all(wanted(0, 1, 2), Store(tmp_path), workers=2, tell=told.append, runner=failing)
    assert failed == ["test/a/seed 1: The quorum has died."]
    assert sorted(ran) == [0, 1, 2]
    ran.clear()
    mended = runner_into(ran)
    assert not run_all(wanted(0, 1, 2), Store(tmp_path), workers=2, tell=told.append, runner=mended)
    assert ran == [1]


def test_a_killed_worker_does_not_end_the_others_work(tmp_path: Path) -> None:
    told: list[str] = []
    store = Store(tmp_path)
    assert not run_all(wanted(0, 1, 2), store, workers=1, tell=told.append, runner=killed_once)
    assert {found.scenario.seed for found in store.all().values()} == {0, 1, 2}
    assert any("killed" in text for text in told)


def test_an_edit_anywhere_in_a_package_is_another_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "edited" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner.parent, inner):
        (folder / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    seen = [sources(["edited"])]
    (inner / "merge.py").write_text("RATE = 1\n")
    seen.append(sources(["edited"]))
    (inner / "merge.py").write_text("RATE = 2\n")
    seen.append(sources(["edited"]))
    (inner / "merge.py").rename(inner / "fold.py")
    seen.append(sources(["edited"]))
    assert len(set(seen)) == len(seen)
    (inner / "notes.txt").write_text("no code")
    assert sources(["edited"]) == seen[-1]


def test_a_worker_of_other_sources_refuses(tmp_path: Path) -> None:
    check_sources("0123", "0123")
    text = wanted(0)[0].scenario.model_dump_json()
    with pytest.raises(SourcesEdited, match="edited while the benchmark ran"):
        pool.lab_run(text, str(tmp_path), "4567")
    assert not Store(tmp_path).all()


def test_sources_that_are_edited_end_the_work_with_one_sentence(
    tmp_path: Path, ran: list[int]
) -> None:
    def edited(text: str, folder: str, expected: str) -> float:
        if len(ran) == 2:
            check_sources(expected, "4567")
        return runner_into(ran)(text, folder, expected)

    told: list[str] = []
    failed = run_all(
        wanted(0, 1, 2, 3, 4, 5), Store(tmp_path), workers=1, tell=told.append, runner=edited
    )
    assert len(failed) == 1
    assert "edited while the benchmark ran" in failed[0]
    assert len(Store(tmp_path).all()) == 2


def test_what_is_left_is_judged_by_the_tokens_not_by_the_number_of_runs() -> None:
    progress = Progress(total=2, cost=4.0, began_s=100.0)
    assert progress.left_s(101.0) is None
    progress.add(1.0)
    assert progress.left_s(110.0) == pytest.approx(30.0)
