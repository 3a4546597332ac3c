"""When an operator is told of what, and when that is over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.log.base import Room, Storage
from skerry.protocol.messages import (
    Commit,
    LearnerPhase,
    RefusalCause,
)
from skerry.settings.models import RunConfig
from skerry.status.alert_table import Alert, Severity
from skerry.status.alerts import WAITED_S, Situation, StreamStore, alerts
from skerry.status.model import RunModel
from skerry.status.report import EvaluationRow, LearnerRow, RunReport
from tests.support.builders import (
    commit,
    learner_row,
    member,
    ns,
    pulse,
    refused,
    run_record,
)

NOW_S = 1_000_000.0
DAYS_S = 864_000.0


def learner(name: str, state: Liveness = Liveness.ALIVE, **changes: Any) -> LearnerRow:
    return learner_row(name, liveness=state, **{"worked_s": DAYS_S, **changes})


def read(*losses: float | None, by: str = "e", text: str = "t") -> tuple[EvaluationRow, ...]:
    return tuple(EvaluationRow(1, 1, loss, None, None, 1, text, by, 1.0) for loss in losses)


def refusing(causes: tuple[RefusalCause, ...]) -> Commit:
    return commit(refused=tuple(refused(cause) for cause in causes))


@dataclass
class Scene:
    """A quiet run, changed by a test."""

    learners: tuple[LearnerRow, ...] = (learner("a"), learner("b"))
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    round_timeout_s: float = 60.0
    started_s: tuple[float, ...] = ()
    refused: tuple[RefusalCause, ...] = ()
    rounds_every_s: float | None = None
    trained: float = 0.9
    watched_s: float = 1000.0
    evaluations: tuple[EvaluationRow, ...] = ()

    def keys(self) -> set[str]:
        return {alert.key for alert in self.alerts()}

    def alerts(self) -> list[Alert]:
        record = run_record("run", plan((LeafSpec("w", (8, 8)),), 1), "{}")
        model = RunModel(record, RunConfig(), lambda: NOW_S)
        lately = model.history.lately
        for number, at_s in enumerate(self.started_s):
            lately.joined(member("a", number + 2, joined_ns=ns(at_s)), at_s)
        lately.committed(refusing(self.refused), NOW_S - 5)
        for ago_s in range(int(self.watched_s), -1, -5):
            alive_s = DAYS_S - ago_s
            lately.pulsed(pulse(busy_s=self.trained * alive_s, alive_s=alive_s), NOW_S - ago_s)
        quiet = {
            "wall_s": 1000.0,
            "learners": len(self.learners),
            "goodput": 0.9,
            "versions": (3,),
            "last_round_s_ago": 1.0,
            "checkpoint": "/there",
            "checkpoint_s_ago": 10.0,
            "checkpoint_lacks": 1,
            "checkpoint_lacks_s": DAYS_S,
        }
        run = replace(model.snapshot().report.run, **{**quiet, **self.run})
        now = RunReport(run, self.learners, self.evaluations)
        sync = {"quorum": 1, "h_steps": 24, "round_timeout_s": self.round_timeout_s}
        config = RunConfig.model_validate({"sync": sync, "checkpoint": {"every_s": 30.0}})
        seen = Situation(NOW_S, now, lately, self.rounds_every_s, config)
        return alerts(replace(seen, **self.more))


def test_a_run_that_goes_well_says_nothing() -> None:
    assert Scene().keys() == set()


def test_no_commit_for_long_is_told_only_while_somebody_trains_or_waits_for_the_end() -> None:
    assert Scene(run={"last_round_s_ago": 130.0}).keys() == {"no-commit"}
    done = (learner("a", tokens_per_s=0.0, phase=LearnerPhase.FINISHED),)
    assert Scene(done, run={"last_round_s_ago": 130.0}).keys() == {"no-commit"}
    assert Scene(done, run={"last_round_s_ago": 130.0, "finished": True}).keys() == set()
    idle = (learner("a", tokens_per_s=0.0, phase=LearnerPhase.STOPPED),)
    assert Scene(idle, run={"last_round_s_ago": 130.0}).keys() == set()
    still = (learner("a", tokens_per_s=0.0),)
    assert Scene(still, run={"last_round_s_ago": 130.0}).keys() == {"no-commit"}


def test_the_end_of_a_run_waits_for_whoever_is_not_done() -> None:
    """So does its syncer, and for as long as a round may take where one fell silent at work."""
    done = learner("a", phase=LearnerPhase.FINISHED)
    silent = learner("b", Liveness.GONE, reason=LivenessReason.SILENT)
    for ago_s, timeout_s, found in (
        (30.0, 60.0, False),
        (119.0, 60.0, False),
        (121.0, 60.0, True),
        (590.0, 300.0, False),
        (610.0, 300.0, True),
    ):
        late = {"last_round_s_ago": ago_s}
        scene = Scene((done, silent), late, rounds_every_s=1.0, round_timeout_s=timeout_s)
        assert bool(scene.keys() & {"no-commit"}) is found, ago_s
    for phase in (LearnerPhase.STARTING, LearnerPhase.CATCHING_UP):
        coming = learner("b", phase=phase, worked_s=0.0)
        late = {"last_round_s_ago": 1700.0}
        assert Scene((done, coming), late, rounds_every_s=1.0).keys() == set()


def test_one_that_hangs_while_it_starts_does_not_keep_a_run_from_its_end_unseen() -> None:
    done, coming = learner("a", phase=LearnerPhase.FINISHED), LearnerPhase.STARTING
    hung = learner("b", phase=coming, worked_s=0.0)
    for ago_s, timeout_s, told in ((1790, 60, False), (1810, 60, True), (1810, 1000.0, False)):
        late = {"last_round_s_ago": ago_s}
        scene = Scene((done, hung), late, rounds_every_s=1.0, round_timeout_s=timeout_s)
        assert bool(scene.keys() & {"no-commit"}) is told
    (found,) = Scene((done, hung), {"last_round_s_ago": 3600.0}).alerts()
    assert (found.key, found.severity) == ("no-commit", Severity.CRITICAL)
    assert found.text.endswith("and the run waits for b to start.")
    back = replace(done, worked_s=60.0)
    left = replace(done, name="c", liveness=Liveness.GONE, reason=LivenessReason.STOPPED)
    assert Scene((back, hung, left), {"last_round_s_ago": 3600.0}).keys() == set()
    assert Scene((hung,), {"last_round_s_ago": 3600.0}).keys() == set()


def test_a_run_that_rested_misses_rounds_and_checkpoints_from_when_it_was_resumed() -> None:
    rested = {"last_round_s_ago": 12 * 3600.0, "checkpoint_s_ago": 12 * 3600.0}

    def found(worked_s: float) -> list[Alert]:
        back = (learner("a", worked_s=worked_s), learner("b", worked_s=0.0))
        return Scene(back, run=rested, rounds_every_s=5.0).alerts()

    assert not found(40.0)
    assert [a.text for a in found(60.0)] == [
        "No round has been committed for 60 s, one is expected each 5 s."
    ]
    later = [a.text for a in found(151.0)]
    assert later[1:] == ["The newest checkpoint is 12 h old, one is due each 30 s."]


def test_no_checkpoint_is_due_before_somebody_is_at_work() -> None:
    starting = (learner("a", phase=LearnerPhase.STARTING, worked_s=0.0),)
    assert Scene(starting, run={"checkpoint_s_ago": 12 * 3600.0}).keys() == set()


def test_learners_that_wait_for_a_first_commit_are_told_of_with_the_syncer() -> None:
    waiting = learner("a", phase=LearnerPhase.CATCHING_UP, waited_s=WAITED_S + 1)
    none = {"last_round_s_ago": None, "wall_s": 400.0, "versions": (0,)}
    (found,) = Scene((waiting,), run=none).alerts()
    assert (found.key, found.severity) == ("no-commit", Severity.CRITICAL)
    assert found.text == "Nothing has been committed since the run was created 7 min ago."
    assert "syncer" in found.fix
    assert Scene((waiting,), run={"last_round_s_ago": 400.0}).keys() == {"no-commit"}


def test_catching_up_for_a_while_is_nobodys_trouble() -> None:
    short = learner("a", phase=LearnerPhase.CATCHING_UP, waited_s=WAITED_S - 1)
    compiling = learner("b", phase=LearnerPhase.STARTING)
    for last in (None, 8 * 3600.0):
        run = {"last_round_s_ago": last, "wall_s": 9 * 3600.0, "versions": (0,)}
        assert Scene((short, compiling), run=run).keys() == set()


def test_the_first_rounds_may_take_as_long_as_compiling_and_long_steps_do() -> None:
    assert Scene(run={"last_round_s_ago": 60.0}).keys() == set()
    slow = (learner("a", step_time_s=30.0),)
    assert Scene(slow, run={"last_round_s_ago": 3600.0}).keys() == set()


def test_rounds_of_late_say_when_the_next_one_is_due() -> None:
    assert Scene(run={"last_round_s_ago": 15.0}, rounds_every_s=1.0).keys() == set()
    assert Scene(run={"last_round_s_ago": 30.0}, rounds_every_s=1.0).keys() == {"no-commit"}
    assert Scene(run={"last_round_s_ago": 30.0}, rounds_every_s=5.0).keys() == set()


def test_the_loss_of_the_quorum_is_worse_than_that_of_one_learner() -> None:
    gone = learner("b", Liveness.GONE, reason=LivenessReason.SILENT)
    (one,) = Scene((learner("a"), gone)).alerts()
    (all_,) = Scene((gone,)).alerts()
    assert (one.severity, all_.severity) == (Severity.WARNING, Severity.CRITICAL)
    assert "b is gone" in one.text


def silent(name: str, s_ago: float, joined_s_ago: float = DAYS_S) -> LearnerRow:
    told = {"reason": "silent", "seen_s_ago": s_ago, "joined_s_ago": joined_s_ago}
    return learner(name, Liveness.GONE, **told)


def test_one_that_was_replaced_under_another_name_is_not_missed() -> None:
    gone = silent("a", 600.0)
    for state in (Liveness.ALIVE, Liveness.SUSPECT):
        for phase in LearnerPhase:
            came = learner("c", state, phase=phase, joined_s_ago=500.0)
            keys = Scene((gone, learner("b"), came)).keys()
            assert "gone" not in keys
    for joined_s_ago in (DAYS_S, 601.0, None):
        was_there = learner("c", joined_s_ago=joined_s_ago)
        (found,) = Scene((gone, learner("b"), was_there)).alerts()
        assert (found.severity, found.text) == (Severity.WARNING, "a is gone.")


def test_a_loss_is_missed_however_many_are_left() -> None:
    """``sync.learners`` is what a run is laid out for, and no cap."""
    rest = tuple(learner(f"l{n}", joined_s_ago=DAYS_S) for n in range(9))
    assert Scene((silent("a", 600.0), *rest)).keys() == {"gone"}


def test_each_that_came_stands_in_for_one_and_may_be_replaced_itself() -> None:
    came = learner("z", joined_s_ago=100.0)
    chain = (silent("a", 900.0), silent("b", 600.0, 800.0), silent("c", 300.0, 500.0))
    assert Scene((*chain, came)).keys() == set()
    (found,) = Scene((*chain, silent("d", 200.0), came)).alerts()
    assert found.text == "d is gone."
    (found,) = Scene((silent("a", 900.0), silent("b", 600.0), came)).alerts()
    assert found.text == "b is gone."


def test_one_whose_clock_is_a_day_behind_does_not_stand_in_for_itself() -> None:
    assert Scene((silent("a", DAYS_S, 100.0), learner("b"))).keys() == {"gone"}


def test_a_learner_that_said_goodbye_is_not_missed() -> None:
    gone = learner("b", Liveness.GONE, reason=LivenessReason.STOPPED, phase=LearnerPhase.STOPPED)
    assert Scene((learner("a"), gone)).keys() == set()


def test_many_that_are_gone_are_named_in_one_sentence() -> None:
    rows = tuple(learner(f"l{n}", Liveness.GONE, reason=LivenessReason.SILENT) for n in range(40))
    (alert,) = [a for a in Scene((learner("a"), *rows)).alerts() if a.key == "gone"]
    assert "l0, l1, l2, l3 and 36 more are gone" in alert.text


def test_three_starts_within_ten_minutes_are_flapping() -> None:
    assert Scene(started_s=(NOW_S - 500, NOW_S - 100, NOW_S - 10)).keys() == {"flapping-a"}
    assert Scene(started_s=(NOW_S - 900, NOW_S - 100, NOW_S - 10)).keys() == set()


def test_refusals_of_late_are_told_by_cause() -> None:
    (alert,) = Scene(
        refused=(RefusalCause.TOO_STALE, RefusalCause.TOO_STALE, RefusalCause.GENESIS)
    ).alerts()
    assert (alert.key, "2 too_stale" in alert.text) == ("refused", True)


def test_a_learner_whose_steps_are_skipped_is_named() -> None:
    away = learner("c", loss=None, phase=LearnerPhase.CATCHING_UP)
    (found,) = Scene((learner("a"), learner("b", loss=None), away)).alerts()
    assert (found.key, found.severity) == ("loss", Severity.CRITICAL)
    assert found.text == "The loss of b is not finite."


def test_low_goodput_of_late_is_told_whatever_that_of_the_whole_run_is() -> None:
    (found,) = Scene(run={"goodput": 0.9}, trained=0.3).alerts()
    assert (found.key, found.severity) == ("goodput", Severity.WARNING)
    assert found.text == "Goodput of the last 15 min is 30%."
    assert Scene(run={"goodput": 0.1}, trained=0.9).keys() == set()


def test_low_goodput_is_told_once_it_was_watched_for_some_minutes() -> None:
    assert Scene(trained=0.3, watched_s=200.0).keys() == set()
    assert Scene(trained=0.3, watched_s=400.0).keys() == {"goodput"}


def test_held_out_loss_goes_the_wrong_way_once_it_does_three_times_in_a_row() -> None:
    assert Scene(evaluations=read(2.0, 3.0, 3.0)).keys() == set()
    assert Scene(evaluations=read(2.0, 3.0, 2.1, 3.0)).keys() == set()
    assert Scene(evaluations=read(2.0, 9.0, None, 2.1, 2.2)).keys() == set()
    (found,) = Scene(evaluations=read(2.0, 2.5, 3.0, 3.1)).alerts()
    assert found.text == "Held-out loss 3.100 is well above its best, 2.000."
    reading = {"evaluating": True}
    assert Scene(evaluations=read(2.0, 2.5, 3.0, 3.1), more=reading).keys() == set()


def test_held_out_losses_are_compared_on_one_text_whoever_reads_it() -> None:
    another = read(5.0, 5.1, 5.2, 5.3, text="u")
    assert Scene(evaluations=(*read(2.0, 2.0, 2.0, 2.0), *another)).keys() == set()
    taken_over = (*read(2.0), *read(3.0, 3.0, 3.0, by="f"))
    assert Scene(evaluations=taken_over).keys() == {"held-out"}
    both = (*read(2.0, 3.0, 3.0, 3.0), *read(*[9.0] * 31, by="f", text="u"))
    assert Scene(evaluations=both).keys() == {"held-out"}
    over = (*both, *read(9.0, by="f", text="u"))
    assert Scene(evaluations=over).keys() == set()


def test_a_checkpoint_that_is_too_old_or_never_came() -> None:
    assert Scene(run={"checkpoint_s_ago": 200.0}).keys() == {"checkpoint"}
    assert Scene(run={"checkpoint": None, "checkpoint_s_ago": None}).keys() == {"checkpoint"}


def test_after_an_outage_of_the_syncer_a_checkpoint_is_late_by_what_it_lacks_since() -> None:
    back = {"checkpoint_s_ago": 3600.0, "checkpoint_lacks_s": 1.0}
    assert Scene(run=back).keys() == set()
    assert Scene(run={**back, "checkpoint_lacks_s": 160.0}).keys() == {"checkpoint"}


def test_a_checkpoint_is_not_too_old_between_two_slow_rounds_nor_while_it_holds_all() -> None:
    assert Scene(run={"checkpoint_s_ago": 9e5, "checkpoint_lacks": 0}).keys() == set()
    slow = {"checkpoint_s_ago": 501.0, "last_round_s_ago": 1.0}
    assert Scene(run=slow, rounds_every_s=500.0).keys() == set()
    assert Scene((learner("a", step_time_s=5.0),), run=slow).keys() == set()
    (found,) = Scene(run={**slow, "checkpoint_s_ago": 3e3}, rounds_every_s=500.0).alerts()
    assert found.text == "The newest checkpoint is 50 min old, one is due each 8 min."


def test_a_store_that_is_nearly_full_is_named_with_what_to_raise() -> None:
    stores = [
        StreamStore(Room(Storage.FILE, 95, 100), "n1"),
        StreamStore(Room(Storage.MEMORY, 80, 100), "n1"),
        StreamStore(Room(Storage.FILE, 91, 100)),
        StreamStore(Room(Storage.MEMORY, 91)),  # no limit
    ]
    broker, account = Scene(more={"stores": stores}).alerts()
    assert (broker.key, account.key) == ("store-file-n1", "store-file-")
    assert {broker.severity, account.severity} == {Severity.CRITICAL}
    assert broker.text == "The file store of broker n1 is 95% full."
    assert broker.fix.startswith("Raise max_file_store, or")
    assert account.text == "The file store of this NATS account is 91% full."
    assert account.fix.startswith("Raise the account's limit, or")


def test_what_the_monitor_itself_sees() -> None:
    assert Scene(more={"malformed": 3, "broker_away_s": 12.0}).keys() == {"malformed", "broker"}


def test_a_finished_run_misses_nobody() -> None:
    gone = (learner("b", Liveness.GONE, reason=LivenessReason.SILENT),)
    assert Scene(gone, run={"finished": True, "last_round_s_ago": 900.0}).keys() == set()


def test_the_worst_comes_first() -> None:
    scene = Scene(run={"last_round_s_ago": 130.0}, trained=0.3)
    assert [alert.key for alert in scene.alerts()] == ["no-commit", "goodput"]
