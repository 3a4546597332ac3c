"""When an operator is told of what, and when that is over."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from skerry.algorithm.fragments import LeafSpec, plan
from skerry.algorithm.liveness import Liveness, LivenessReason
from skerry.log.base import Room, Storage
from skerry.protocol.messages import (
    Commit,
    LearnerPhase,
    QuarantineReason,
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
    return tuple(EvaluationRow(1, 1, loss, None, None, None, 1, text, by, 1.0) for loss in losses)


GONE, DONE, STARTING = Liveness.GONE, LearnerPhase.FINISHED, LearnerPhase.STARTING
CATCHING_UP, STOPPED = LearnerPhase.CATCHING_UP, LearnerPhase.STOPPED
SILENT: dict[str, Any] = {"state": GONE, "reason": LivenessReason.SILENT}


def refusing(causes: tuple[RefusalCause, ...]) -> Commit:
    return commit(refused=tuple(refused(cause) for cause in causes))


@dataclass
class Scene:
    """A quiet run, changed by a test."""

    learners: tuple[LearnerRow, ...] = (learner("a"), learner("b"))
    run: dict[str, Any] = field(default_factory=dict[str, Any])
    more: dict[str, Any] = field(default_factory=dict[str, Any])
    round_timeout_s: float = 60.0
    quorum: int = 1
    started_s: tuple[float, ...] = ()
    refused: tuple[RefusalCause, ...] = ()
    rounds_every_s: float | None = None
    trained: float = 0.9
    watched_s: float = 1000.0
    mismatched_s_ago: float | None = None
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
            counted = int(self.mismatched_s_ago is not None and ago_s <= self.mismatched_s_ago)
            said = pulse(
                "a",
                busy_s=self.trained * alive_s,
                alive_s=alive_s,
                digest_mismatches=counted,
            )
            lately.pulsed(said, NOW_S - ago_s)
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
        sync = {"quorum": self.quorum, "h_steps": 24, "round_timeout_s": self.round_timeout_s}
        config = RunConfig.model_validate({"sync": sync, "checkpoint": {"every_s": 30.0}})
        seen = Situation(NOW_S, now, lately, self.rounds_every_s, config)
        return alerts(replace(seen, **self.more))


def silent(name: str, s_ago: float, joined_s_ago: float = DAYS_S) -> LearnerRow:
    return learner(name, **SILENT, seen_s_ago=s_ago, joined_s_ago=joined_s_ago)


def last(s_ago: float | None, **more: Any) -> dict[str, Any]:
    return {"last_round_s_ago": s_ago, **more}


done, hung = learner("a", phase=DONE), learner("b", phase=STARTING, worked_s=0.0)
left = learner("c", GONE, phase=DONE, reason=LivenessReason.STOPPED)
rested = {"last_round_s_ago": 12 * 3600.0, "checkpoint_s_ago": 12 * 3600.0}
never = last(None, wall_s=400.0, versions=(0,))
waiting = learner("a", phase=CATCHING_UP, waited_s=WAITED_S + 1)
patient = learner("a", phase=CATCHING_UP, waited_s=WAITED_S - 1)
compiling = learner("b", phase=STARTING)
chain = (silent("a", 900.0), silent("b", 600.0, 800.0), silent("c", 300.0, 500.0))
came = learner("z", joined_s_ago=100.0)
back = {"checkpoint_s_ago": 3600.0, "checkpoint_lacks_s": 1.0}
slow = {"checkpoint_s_ago": 501.0, "last_round_s_ago": 1.0}
both = (*read(2.0, 3.0, 3.0, 3.0), *read(*[9.0] * 31, by="f", text="u"))

CASES: dict[str, tuple[Scene, set[str]]] = {
    "all is well": (Scene(), set()),
    "a fragment that differed long ago": (Scene(mismatched_s_ago=900.0), set()),
    "a fragment that differed before anybody watched": (
        Scene(watched_s=300.0, mismatched_s_ago=2000.0),
        set(),
    ),
    "no commit while they train": (Scene(run=last(130.0)), {"no-commit"}),
    "no commit while they stand still": (
        Scene((learner("a", tokens_per_s=0.0),), last(130.0)),
        {"no-commit"},
    ),
    "no commit at the end": (Scene((done,), last(130.0)), {"no-commit"}),
    "finished": (Scene((done,), last(130.0, finished=True)), set()),
    "finished, and one is gone": (
        Scene((learner("b", **SILENT),), last(900.0, finished=True)),
        set(),
    ),
    "all have stopped": (Scene((learner("a", phase=STOPPED),), last(130.0)), set()),
    "first rounds take as long as compiling": (Scene(run=last(60.0)), set()),
    "long steps": (Scene((learner("a", step_time_s=30.0),), last(3600.0)), set()),
    "due by recent rounds": (Scene(run=last(30.0), rounds_every_s=1.0), {"no-commit"}),
    "not yet due by recent rounds": (Scene(run=last(15.0), rounds_every_s=1.0), set()),
    "not yet due by slow rounds": (Scene(run=last(30.0), rounds_every_s=5.0), set()),
    "one starts at the end": (Scene((done, hung), last(1700.0), rounds_every_s=1.0), set()),
    "one catches up at the end": (
        Scene((done, replace(patient, name="b")), last(1700.0), rounds_every_s=1.0),
        set(),
    ),
    "one hangs at the end": (Scene((done, hung), last(3600.0)), {"no-commit"}),
    "one hangs, and one has just come back": (
        Scene((replace(done, worked_s=60.0), hung, left), last(3600.0)),
        set(),
    ),
    "one hangs alone": (Scene((hung,), last(3600.0)), set()),
    "resumed after a rest": (
        Scene((learner("a", worked_s=40.0), hung), rested, rounds_every_s=5.0),
        set(),
    ),
    "no checkpoint is due before work": (
        Scene((replace(hung, name="a"),), {"checkpoint_s_ago": 12 * 3600.0}),
        set(),
    ),
    "a wait for the first commit": (Scene((waiting,), never), {"no-commit"}),
    "a wait for a commit": (Scene((waiting,), last(400.0)), {"no-commit"}),
    "catching up for a while": (Scene((patient, compiling), never), set()),
    "catching up after a rest": (Scene((patient, compiling), last(8 * 3600.0)), set()),
    "a goodbye": (
        Scene((learner("a"), learner("b", GONE, reason=LivenessReason.STOPPED, phase=STOPPED))),
        set(),
    ),
    "one of ten is gone": (
        Scene((silent("a", 600.0), *(learner(f"l{n}", joined_s_ago=DAYS_S) for n in range(9)))),
        {"gone"},
    ),
    "its own clock is a day behind": (
        Scene((silent("a", DAYS_S, 100.0), learner("b"))),
        {"gone"},
    ),
    "each has been replaced": (Scene((*chain, came)), set()),
    "suspect": (Scene((learner("a"), learner("b", Liveness.SUSPECT))), {"suspect"}),
    "three starts": (Scene(started_s=(NOW_S - 500, NOW_S - 100, NOW_S - 10)), {"flapping-a"}),
    "two starts": (Scene(started_s=(NOW_S - 900, NOW_S - 100, NOW_S - 10)), set()),
    "low goodput of the whole run": (Scene(run={"goodput": 0.1}, trained=0.9), set()),
    "low goodput not watched long": (Scene(trained=0.3, watched_s=200.0), set()),
    "low goodput": (Scene(trained=0.3, watched_s=400.0), {"goodput"}),
    "worse twice": (Scene(evaluations=read(2.0, 3.0, 3.0)), set()),
    "worse, but not in a row": (Scene(evaluations=read(2.0, 3.0, 2.1, 3.0)), set()),
    "worse, but little": (Scene(evaluations=read(2.0, 9.0, None, 2.1, 2.2)), set()),
    "worse, but unread": (
        Scene(evaluations=read(2.0, 2.5, 3.0, 3.1), more={"evaluating": True}),
        set(),
    ),
    "another text": (
        Scene(evaluations=(*read(2.0, 2.0), *read(5.0, 5.1, 5.2, 5.3, text="u"))),
        set(),
    ),
    "worse by another evaluator": (
        Scene(evaluations=(*read(2.0), *read(3.0, 3.0, 3.0, by="f"))),
        {"held-out"},
    ),
    "worse of two texts": (Scene(evaluations=both), {"held-out"}),
    "worse by one that has ended": (
        Scene(evaluations=(*both, *read(9.0, by="f", text="u"))),
        set(),
    ),
    "an old checkpoint": (Scene(run={"checkpoint_s_ago": 200.0}), {"checkpoint"}),
    "no checkpoint": (
        Scene(run={"checkpoint": None, "checkpoint_s_ago": None}),
        {"checkpoint"},
    ),
    "just lacking a commit": (Scene(run=back), set()),
    "lacking commits for long": (Scene(run=back | {"checkpoint_lacks_s": 160.0}), {"checkpoint"}),
    "an old checkpoint that holds all": (
        Scene(run={"checkpoint_s_ago": 9e5, "checkpoint_lacks": 0}),
        set(),
    ),
    "between slow rounds": (Scene(run=slow, rounds_every_s=500.0), set()),
    "between rounds of slow steps": (Scene((learner("a", step_time_s=5.0),), slow), set()),
    "what the monitor sees": (
        Scene(more={"malformed": 3, "broker_away_s": 12.0}),
        {"malformed", "broker"},
    ),
}


@pytest.mark.parametrize(("scene", "keys"), CASES.values(), ids=CASES)
def test_an_alert_holds(scene: Scene, keys: set[str]) -> None:
    assert scene.keys() == keys


@pytest.mark.parametrize(
    ("other", "ago_s", "timeout_s", "late"),
    [
        (learner("b", **SILENT), 119.0, 60.0, False),
        (learner("b", **SILENT), 121.0, 60.0, True),
        (learner("b", **SILENT), 590.0, 300.0, False),
        (learner("b", **SILENT), 610.0, 300.0, True),
        (hung, 1790.0, 60.0, False),
        (hung, 1810.0, 60.0, True),
        (hung, 1810.0, 1000.0, False),
    ],
)
def test_the_end_of_a_run_waits_as_long_as_a_round_may_take(
    other: LearnerRow, ago_s: float, timeout_s: float, late: bool
) -> None:
    """So does its syncer, for a learner that fell silent at work or is on its way."""
    scene = Scene((done, other), last(ago_s), rounds_every_s=1.0, round_timeout_s=timeout_s)
    assert bool(scene.keys() & {"no-commit"}) is late


@pytest.mark.parametrize("state", [Liveness.ALIVE, Liveness.SUSPECT])
@pytest.mark.parametrize("phase", LearnerPhase)
def test_one_that_was_replaced_under_another_name_is_not_missed(
    state: Liveness, phase: LearnerPhase
) -> None:
    replacing = learner("c", state, phase=phase, joined_s_ago=500.0)
    keys = Scene((silent("a", 600.0), learner("b"), replacing)).keys()
    assert not keys & {"gone"}


LATE = "No round has been committed for 60 min"
TEXTS: dict[str, tuple[Scene, Severity, str]] = {
    "late": (
        Scene((learner("a", worked_s=60.0), hung), rested, rounds_every_s=5.0),
        Severity.CRITICAL,
        "No round has been committed for 60 s, one is expected each 5 s.",
    ),
    "never": (
        Scene((waiting,), never),
        Severity.CRITICAL,
        "Nothing has been committed since the run was created 7 min ago.",
    ),
    "hangs": (
        Scene((done, hung), last(3600.0)),
        Severity.CRITICAL,
        f"{LATE}: all others have finished, and the run waits for b to start.",
    ),
    "gone": (Scene((learner("a"), learner("b", **SILENT))), Severity.WARNING, "b is gone."),
    "quorum lost": (
        Scene((learner("b", **SILENT),)),
        Severity.CRITICAL,
        "b is gone: 0 of the 1 that a round needs are left.",
    ),
    "many gone": (
        Scene((learner("a"), *(learner(f"l{n}", **SILENT) for n in range(40)))),
        Severity.WARNING,
        "l0, l1, l2, l3 and 36 more are gone.",
    ),
    "not replaced": (Scene((*chain, silent("d", 200.0), came)), Severity.WARNING, "d is gone."),
    "one of two replaced": (
        Scene((silent("a", 900.0), silent("b", 600.0), came)),
        Severity.WARNING,
        "b is gone.",
    ),
    "there before": (
        Scene((silent("a", 600.0), learner("b"), learner("c", joined_s_ago=601.0))),
        Severity.WARNING,
        "a is gone.",
    ),
    "refused": (
        Scene(refused=(RefusalCause.TOO_STALE, RefusalCause.TOO_STALE, RefusalCause.GENESIS)),
        Severity.WARNING,
        "Contributions were refused within 10 min: 2 too_stale.",
    ),
    "loss": (
        Scene((learner("a"), learner("b", loss=None), replace(patient, name="c", loss=None))),
        Severity.CRITICAL,
        "The loss of b is not finite.",
    ),
    "quarantine": (
        Scene((learner("a", quarantine=QuarantineReason.FREE_RIDES), learner("b"))),
        Severity.WARNING,
        "Nothing of a is merged: in quarantine (free rides).",
    ),
    "mismatch": (
        Scene(mismatched_s_ago=300.0),
        Severity.WARNING,
        "Within 10 min global fragments of a were not what was committed.",
    ),
    "goodput": (
        Scene(run={"goodput": 0.9}, trained=0.3),
        Severity.WARNING,
        "Goodput of the last 15 min is 30%.",
    ),
    "held-out": (
        Scene(evaluations=read(2.0, 2.5, 3.0, 3.1)),
        Severity.WARNING,
        "Held-out loss 3.100 is well above its best, 2.000.",
    ),
    "checkpoint": (
        Scene(run=slow | {"checkpoint_s_ago": 3e3}, rounds_every_s=500.0),
        Severity.WARNING,
        "The newest checkpoint is 50 min old, one is due each 8 min.",
    ),
}


@pytest.mark.parametrize(("scene", "severity", "text"), TEXTS.values(), ids=TEXTS)
def test_an_alert_says_what_is_wrong(scene: Scene, severity: Severity, text: str) -> None:
    (found,) = scene.alerts()
    assert (found.severity, found.text) == (severity, text)


@pytest.mark.parametrize(
    ("quorum", "said"), [(1, "rounds do not wait"), (2, "A round needs 2, and waits for them.")]
)
def test_a_silent_learner_is_waited_for_only_where_a_round_needs_it(quorum: int, said: str) -> None:
    learners = learner("a"), learner("b", Liveness.SUSPECT)
    (alert,) = Scene(learners, quorum=quorum).alerts()
    assert said in alert.fix


def test_a_store_that_is_nearly_full_is_named_with_what_to_raise() -> None:
    stores = [
        StreamStore(Room(Storage.FILE, 95, 100), "n1"),
        StreamStore(Room(Storage.MEMORY, 80, 100), "n1"),
        StreamStore(Room(Storage.FILE, 91, 100)),
        StreamStore(Room(Storage.MEMORY, 91)),  # no limit
    ]
    broker, account = Scene(more={"stores": stores}).alerts()
    assert (broker.key, account.key) == ("store-file-n1", "store-file-")
    assert broker.text == "The file store of broker n1 is 95% full."
    assert broker.fix.startswith("Raise max_file_store, or")
    assert account.text == "The file store of this NATS account is 91% full."
    assert account.fix.startswith("Raise the account's limit, or")


def test_the_worst_comes_first() -> None:
    scene = Scene(run=last(130.0), trained=0.3)
    assert [alert.key for alert in scene.alerts()] == ["no-commit", "goodput"]
