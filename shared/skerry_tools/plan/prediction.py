"""A run that was, and the same run as a calibrated simulation tells it: where they differ."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from skerry_tools.plan import calibrate
from skerry_tools.plan.calibrate import NEVER_S, Calibration, Evidence
from skerry_tools.plan.figures import Figure, Grid, Json, Sheet, derived
from skerry_tools.plan.outcome import NAMES
from skerry_tools.plan.process import Use
from skerry_tools.plan.scenario import of_run
from skerry_tools.plan.simulate import Outcome, Struck, simulate

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.settings.models import RunConfig
    from skerry_tools.plan.calibrate import Actual
    from skerry_tools.plan.scenario import Request

POINTS = 100.0


@dataclass(frozen=True, slots=True)
class Prediction:
    """What a simulation says of a run, beside what became of it."""

    run: str
    learnt_from: str
    request: Request
    struck: Struck
    calibration: Calibration
    outcome: Outcome
    actual: Actual

    @property
    def off_points(self) -> float:
        """Predicted less actual goodput, in percentage points."""
        return POINTS * (self.outcome.goodput - self.actual.goodput)


def predict(
    learnt: Evidence, told: Evidence, config: RunConfig, sets: Sequence[str] = (),
    faults: Struck | None = None,
) -> Prediction:  # fmt: skip
    """Tell the run ``told`` with what ``learnt`` teaches; they may be one.

    How long its learners took to their first step is its own: that is no failure, and depends on
    what else the machine does. Its failures are those of ``faults``, where its first kill is laid
    upon the first restart that there was; without, those that the run itself has had. No others
    are drawn.
    """
    fitted = calibrate.fit(learnt)
    own = calibrate.fit(told)
    fitted = replace(fitted, learners=own.learners, start_s=own.start_s)
    happened = calibrate.tape(told)
    given = happened if faults is None else _laid(faults, happened, fitted)
    struck = calibrate.together(fitted.starting, given)
    exact = [f"failures.chip_mtbi={NEVER_S}", f"simulation.days={own.wall_s / 86400.0}"]
    request = of_run(config, fitted.learners, [*fitted.sets, *exact, *sets], f"run {told.run}")
    outcome = simulate(request, struck)
    return Prediction(
        told.run, learnt.run, request, struck, fitted, outcome, calibrate.actual(told)
    )


def scenario_of(learnt: Evidence, config: RunConfig, sets: Sequence[str] = ()) -> Request:
    """Return what a run teaches as a scenario, with its failure law, to ask anything of."""
    fitted = calibrate.fit(learnt)
    request = of_run(config, fitted.learners, [*fitted.sets, *sets], f"like {learnt.run}")
    paths = [text.partition("=")[0] for text in fitted.sets]
    status = dict.fromkeys(paths, f"fitted: to run {learnt.run}")
    return replace(request, source=f"Calibrated on run {learnt.run}", status=status)


def lead(told: Prediction) -> str:
    """Return how far off the prediction is, in a sentence."""
    return (
        f"Run {told.run}, from what {told.learnt_from} taught: goodput predicted"
        f" {POINTS * told.outcome.goodput:.1f} %, measured {POINTS * told.actual.goodput:.1f} %:"
        f" {told.off_points:+.1f} points."
    )


def parts(told: Prediction) -> list[Sheet | Grid]:
    """Return what was fitted, and the run's time by use, predicted and measured."""
    return [_fitted(told.calibration), _compared(told)]


def lines(told: Prediction) -> list[str]:
    """Return the prediction as text."""
    said = [lead(told), ""]
    for part in parts(told):
        said += [*part.lines(), ""]
    return said


def as_json(told: Prediction) -> dict[str, Json]:
    """Return the prediction for machines."""
    tables: dict[str, Json] = {part.name: part.json() for part in parts(told)}
    return {"answer": lead(told), "off_points": told.off_points, "figures": tables}


def _fitted(found: Calibration) -> Sheet:
    seen = found.seen
    figures: dict[str, Figure] = {
        "step": derived(found.step_s, "s", f"median of {seen['step_s']} learners"),
        "spread": derived(found.spread, "share", "of the slowest and the fastest around it"),
        "first_start": derived(found.start_s, "s", f"joined to training, {seen['start_s']} seen"),
        "restart": derived(found.restart_s, "s", f"process to training, {seen['restart_s']} seen"),
        "replay": derived(found.replay_s, "s", "done again after each restart"),
        "idle": derived(found.idle, "share", "of a training learner's time, between steps"),
        "upload": derived(found.upload_s, "s", f"boundary to syncer, {seen['upload_s']} answers"),
        "down": derived(found.down_s, "s", f"without a process, {seen['down_s']} seen"),
        "between_failures": derived(
            None if found.mtbi_s >= NEVER_S else found.mtbi_s, "s", "training of one learner"
        ),
    }
    return Sheet("calibration", "Fitted", figures)


def _compared(told: Prediction) -> Grid:
    ours, theirs = told.outcome.split, _merged(told.actual.split)
    mine = _merged(ours)
    rows: dict[str, dict[str, Figure]] = {}
    for name in dict.fromkeys([*theirs, *mine]):
        predicted, measured = mine.get(name, 0.0), theirs.get(name, 0.0)
        if predicted or measured:
            rows[name] = {
                "predicted": derived(predicted, "share", "by the simulation"),
                "measured": derived(measured, "share", "by the run's health monitor"),
                "points": derived(POINTS * (predicted - measured), "1", "predicted less measured"),
            }
    return Grid("compared", "What the time went into", rows)


def _merged(split: dict[Use, float]) -> dict[str, float]:
    """Return shares by name; being away is one thing, whoever's fault it was."""
    names = {**NAMES, Use.OUTAGE: "away", Use.RECOVER: "away", Use.UPSCALE: "starting"}
    found: dict[str, float] = {}
    for use, share in split.items():
        found[names[use]] = found.get(names[use], 0.0) + share
    return found


def _laid(faults: Struck, happened: Struck, fitted: Calibration) -> Struck:
    """Move a plan to where it was begun: its first kill upon the first restart of the run."""
    planned = [a.begin_s for own in faults.absences.values() for a in own if a.restart]
    real = [a.begin_s for own in happened.absences.values() for a in own]
    by_s = min(real) - min(planned) if planned and real else fitted.start_s
    return calibrate.shifted(faults, by_s)
