"""What is counted while a learner is away."""

from __future__ import annotations

from typing import Any

from skerry.cli.outage import Outage
from skerry.protocol.messages import Commit, LearnerPhase
from tests.support.builders import commit, consumed, pulse

VERSIONS = (3, 4)


def merged(version: int, *who: tuple[str, int], **changes: Any) -> Commit:
    rows = tuple(consumed(name, incarnation=incarnation) for name, incarnation in who)
    return commit(version, consumed=rows, **changes)


def outage() -> Outage:
    watched = Outage("b", 1, killed_s=100.0)
    watched.observe(pulse("a", 50), 100.1)
    watched.observe(merged(5, ("a", 1)), 101.0)
    watched.started_s = 103.0
    starting = LearnerPhase.STARTING
    watched.observe(pulse("b", 0, incarnation=2, phase=starting, alive_s=2.0), 105.0)
    watched.observe(pulse("b", 0, incarnation=2, phase=starting, alive_s=5.0), 108.0)
    catching = LearnerPhase.CATCHING_UP
    watched.observe(pulse("b", 0, incarnation=2, phase=catching, alive_s=6.0), 109.0)
    watched.observe(pulse("b", 1, incarnation=2, alive_s=7.0, versions=VERSIONS), 110.0)
    watched.observe(merged(6, ("a", 1)), 110.5)
    watched.observe(pulse("a", 90), 111.0)
    return watched


def test_not_back_before_a_contribution_counts() -> None:
    watched = outage()
    assert not watched.back
    assert watched.recovery_s is None


def test_recovery_ends_with_the_first_contribution_of_the_new_process() -> None:
    watched = outage()
    watched.observe(merged(7, ("a", 1), ("b", 1)), 111.5)
    assert not watched.back
    watched.observe(merged(8, ("a", 1), ("b", 2)), 112.0)
    assert watched.wall_s == 9.0


def test_compilation_is_what_it_said_it_was_starting() -> None:
    watched = outage()
    watched.observe(merged(8, ("b", 2)), 112.0)
    assert watched.compile_s == 4.0
    assert watched.recovery_s == 5.0


def test_the_log_knows_better_how_long_compiling_took() -> None:
    watched = outage()
    watched.observe(merged(8, ("b", 2)), 112.0)
    watched.log_compile_s = 1.5
    assert watched.recovery_s == 7.5


def test_what_the_others_did_meanwhile_is_counted() -> None:
    watched = outage()
    watched.observe(merged(8, ("b", 2)), 112.0)
    watched.observe(pulse("a", 500), 120.0)
    watched.observe(merged(9, ("a", 1)), 121.0)
    assert watched.steps_of_others == 40
    assert watched.rounds == 3


def test_the_versions_it_caught_up_with_are_kept() -> None:
    assert outage().versions == VERSIONS


def test_genesis_is_no_round() -> None:
    watched = Outage("b", 1, killed_s=0.0)
    watched.observe(merged(1, ("b", 2)), 1.0)
    assert watched.rounds == 0
    assert not watched.back
