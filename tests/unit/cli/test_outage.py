"""What is counted while a learner is away."""

from __future__ import annotations

from skerry.cli.outage import Outage
from skerry.protocol.messages import Commit, Consumed, LearnerPhase, Pulse

VERSIONS = (3, 4)


def pulse(
    learner: str,
    steps: int,
    *,
    incarnation: int = 1,
    phase: LearnerPhase = LearnerPhase.TRAINING,
    alive_s: float = 0.0,
    versions: tuple[int, ...] = (),
) -> Pulse:
    return Pulse(
        run="t",
        learner=learner,
        incarnation=incarnation,
        phase=phase,
        sent_ns=0,
        step=steps,
        steps=steps,
        tokens=0,
        cursor=0,
        loss=0.0,
        step_time_s=0.0,
        busy_s=0.0,
        alive_s=alive_s,
        bytes_up=0,
        bytes_down=0,
        contributions=0,
        versions=versions,
    )


def commit(version: int, *who: tuple[str, int], reason: str = "quorum") -> Commit:
    consumed = tuple(
        Consumed(name, incarnation, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 1.0, 0.0)
        for name, incarnation in who
    )
    return Commit(
        run="t",
        plan_digest=0,
        fragment=0,
        version=version,
        step=0,
        reason=reason,
        syncer="s",
        fence=1,
        opened_ns=0,
        closed_ns=0,
        quorum_s=0.0,
        grace_s=0.0,
        consumed=consumed,
        refused=(),
        contrib_floor=0,
        progress=(),
        params_digest=0,
        master_digest=0,
    )


def outage() -> Outage:
    watched = Outage("b", 1, killed_s=100.0)
    watched.observe(pulse("a", 50), 100.1)
    watched.observe(commit(5, ("a", 1)), 101.0)
    watched.started_s = 103.0
    starting = LearnerPhase.STARTING
    watched.observe(pulse("b", 0, incarnation=2, phase=starting, alive_s=2.0), 105.0)
    watched.observe(pulse("b", 0, incarnation=2, phase=starting, alive_s=5.0), 108.0)
    catching = LearnerPhase.CATCHING_UP
    watched.observe(pulse("b", 0, incarnation=2, phase=catching, alive_s=6.0), 109.0)
    watched.observe(pulse("b", 1, incarnation=2, alive_s=7.0, versions=VERSIONS), 110.0)
    watched.observe(commit(6, ("a", 1)), 110.5)
    watched.observe(pulse("a", 90), 111.0)
    return watched


def test_not_back_before_a_contribution_counts() -> None:
    watched = outage()
    assert not watched.back
    assert watched.recovery_s is None


def test_recovery_ends_with_the_first_contribution_of_the_new_process() -> None:
    watched = outage()
    watched.observe(commit(7, ("a", 1), ("b", 1)), 111.5)
    assert not watched.back
    watched.observe(commit(8, ("a", 1), ("b", 2)), 112.0)
    assert watched.wall_s == 9.0


def test_compilation_is_what_it_said_it_was_starting() -> None:
    watched = outage()
    watched.observe(commit(8, ("b", 2)), 112.0)
    assert watched.compile_s == 4.0
    assert watched.recovery_s == 5.0


def test_the_log_knows_better_how_long_compiling_took() -> None:
    watched = outage()
    watched.observe(commit(8, ("b", 2)), 112.0)
    watched.log_compile_s = 1.5
    assert watched.recovery_s == 7.5


def test_what_the_others_did_meanwhile_is_counted() -> None:
    watched = outage()
    watched.observe(commit(8, ("b", 2)), 112.0)
    watched.observe(pulse("a", 500), 120.0)
    watched.observe(commit(9, ("a", 1)), 121.0)
    assert watched.steps_of_others == 40
    assert watched.rounds == 3


def test_the_versions_it_caught_up_with_are_kept() -> None:
    assert outage().versions == VERSIONS


def test_genesis_is_no_round() -> None:
    watched = Outage("b", 1, killed_s=0.0)
    watched.observe(commit(1, ("b", 2), reason="genesis"), 1.0)
    assert watched.rounds == 0
    assert not watched.back
