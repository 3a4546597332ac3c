"""What is counted while the learner that the demo kills is away."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from skerry.cli import demo
from skerry.cli.cluster.folder import RunFolder
from skerry.cli.demo import RUN, Outage, Recorder, run_demo
from skerry.cli.viewer import Screen
from skerry.errors import ConfigError
from skerry.protocol.messages import Commit, CommitOrigin
from skerry.status.report import RunRow
from tests.support.builders import commit, consumed, pulse


def merged(version: int, *who: tuple[str, int], **changes: Any) -> Commit:
    rows = tuple(consumed(name, incarnation=incarnation) for name, incarnation in who)
    return commit(version, consumed=rows, **changes)


def outage() -> Outage:
    """Return what was seen until just before the learner's contribution counts again."""
    watched = Outage("b", 1, killed_s=100.0, compile_s=4.0)
    watched.observe(pulse("a", 50), 100.1)
    watched.observe(merged(5, ("a", 1)), 101.0)
    watched.started_s = 103.0
    watched.observe(pulse("b", 0, incarnation=2, versions=(0, 0)), 105.0)
    watched.observe(pulse("b", 1, incarnation=2, versions=(3, 4)), 110.0)
    watched.observe(merged(6, ("a", 1)), 110.5)
    watched.observe(pulse("a", 90), 111.0)
    return watched


def test_recovery_ends_with_the_first_contribution_of_the_new_process() -> None:
    watched = outage()
    watched.observe(merged(7, ("a", 1), ("b", 1)), 111.5)
    assert (watched.back, watched.recovery_s, watched.versions) == (False, None, (3, 4))
    watched.observe(merged(8, ("a", 1), ("b", 2)), 112.0)
    assert (watched.back, watched.wall_s, watched.recovery_s) == (True, 9.0, 5.0)


def test_what_the_others_do_is_counted_until_it_is_back() -> None:
    watched = outage()
    watched.observe(merged(8, ("b", 2)), 112.0)
    watched.observe(pulse("a", 500), 120.0)
    watched.observe(merged(9, ("a", 1)), 121.0)
    assert (watched.steps_of_others, watched.rounds) == (40, 3)


def test_bits_per_parameter_are_those_of_training(tmp_path: Path) -> None:
    """Before the first step learners offer and read parameters whole."""
    seen = Recorder(Screen(Console(force_terminal=False)), 0.0, tmp_path / "log")
    for sent, f32 in ((0, 0), (900, 1000)):
        seen.message(pulse("a", 0, bytes_up=sent, f32_bytes_up=f32), 0.0)
    seen.message(pulse("a", 8, bytes_up=1900, f32_bytes_up=17_000), 1.0)
    run = cast("RunRow", SimpleNamespace(bytes_up=1900, f32_bytes_up=17_000))
    assert seen.bits_per_param(run, "up") == 2.0


def test_genesis_is_no_round() -> None:
    watched = Outage("b", 1, killed_s=0.0)
    watched.observe(merged(1, ("b", 2), origin=CommitOrigin.GENESIS), 1.0)
    assert (watched.rounds, watched.back) == (0, False)


def test_a_run_that_somebody_named_demo_is_not_discarded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    log = RunFolder(RUN).broker / "jetstream"
    log.mkdir(parents=True)
    checkpoint = tmp_path / ".skerry" / "checkpoints" / RUN / "step-1"
    checkpoint.mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no demo, which the demo would discard"):
        run_demo(summary=None, sets=[])
    assert log.exists()
    assert checkpoint.exists()


def test_a_demo_takes_the_place_of_the_last_one_and_not_of_a_run_begun_over_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder, ran = RunFolder(RUN), list[bool]()

    def run(main: Any, _say: object) -> None:
        main(None).close()
        (folder.broker / "jetstream").mkdir()
        ran.append(folder.has_log)

    monkeypatch.setattr(demo, "run_stoppable", run)
    run_demo(summary=None, sets=[])
    run_demo(summary=None, sets=[])
    assert ran == [True, True]
    folder.start_afresh()  # as ``skerry up --run demo --fresh``
    (folder.broker / "jetstream").mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no demo"):
        run_demo(summary=None, sets=[])
