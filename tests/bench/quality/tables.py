"""Tables of an experiment's results, in Markdown; what has not been run is said to be missing."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import TypeAlias

from skerry.algorithm.outer import make_outer

from .cells import Cell, Experiment
from .samples import Estimate, at, estimate, excess, excesses, first_below
from .store import Found

TARGET_AT = 0.75
"""Where in the run without helpers its loss is the target of those with helpers."""


@dataclass(frozen=True, slots=True)
class Findings:
    """An experiment with what has been run of it: ``runs[cell key][seed]``."""

    experiment: Experiment
    runs: Mapping[str, Mapping[int, Found]]

    def of(self, cell: Cell) -> Mapping[int, Found]:
        """Return the finished runs of a cell, by seed."""
        return self.runs.get(cell.key, {})

    def losses(self, key: str) -> dict[int, float]:
        """Return held-out losses of a cell, by seed."""
        return {seed: found.loss for seed, found in self.runs.get(key, {}).items()}

    def loss(self, key: str) -> Estimate | None:
        """Return the mean loss of a cell over its seeds, None if none has been run."""
        losses = self.losses(key)
        return estimate(list(losses.values())) if losses else None

    def pairs(self, cell: Cell) -> dict[int, tuple[Found, Found]]:
        """Return a cell's runs and those that they are compared with, by seed.

        Without those of which one was trained on, or judged by, other text.
        """
        theirs = self.runs.get(cell.against, {})
        found = {s: (run, theirs[s]) for s, run in self.of(cell).items() if s in theirs}
        return {seed: pair for seed, pair in found.items() if pair[0].like(pair[1])}

    def excesses(self, cell: Cell) -> list[float]:
        """Return by how many per cent a cell is worse than what it is compared with, by seed."""
        pairs = self.pairs(cell)
        ours = {seed: run.loss for seed, (run, _) in pairs.items()}
        return excesses(ours, {seed: run.loss for seed, (_, run) in pairs.items()})

    def excess(self, cell: Cell) -> Estimate | None:
        """Return the mean of that, None if there are no pairs."""
        more = self.excesses(cell)
        return estimate(more) if more else None

    def rungs(self, cell: Cell, seed: int) -> tuple[list[float], list[float]]:
        """Return log2 of steps, ascending, and losses of the ladder for one run of a cell.

        Nothing as long as one of them is missing, or of other text: the nearest one would pass for
        it.
        """
        run, ladder = self.of(cell)[seed], self.ladder(seed)
        if not all(rung and rung.like(run) for rung in ladder):
            return [], []
        pairs = sorted((math.log2(rung.number("steps")), rung.loss) for rung in ladder if rung)
        return [steps for steps, _ in pairs], [loss for _, loss in pairs]

    def ladder(self, seed: int) -> list[Found | None]:
        """Return one seed's runs of the ladder, None for what has not been run."""
        rungs = [cell for cell in self.experiment.cells if cell.key in self.experiment.ladder]
        return [self.of(cell).get(seed) for cell in rungs if seed in cell.seeds]

    def unlike(self) -> set[tuple[str, str]]:
        """Return the scenarios of pairs of runs that would be compared if they were of one text."""
        compared: set[tuple[str, str]] = set()
        for cell in self.experiment.cells:
            for seed, run in self.of(cell).items():
                on_ladder = cell.key in self.experiment.ladder
                others = [self.runs.get(cell.against, {}).get(seed)]
                others += [] if on_ladder else self.ladder(seed)
                compared |= {
                    (run.scenario.digest, other.scenario.digest)
                    for other in others
                    if other and not run.like(other)
                }
        return compared

    def alike(self) -> bool:
        """Tell whether all runs are of one text, so that any of them can be compared."""
        runs = self.all()
        return all(a.like(b) for a, b in combinations(runs, 2))

    def excess_at_equal_steps(self, cell: Cell) -> Estimate | None:
        """Return by how many per cent a cell is worse than the ladder with as many steps.

        Equal tokens in more steps are smaller batches, which is worth something by itself. Of what
        has more or fewer steps than all of the ladder nothing is said.
        """
        ours: dict[int, float] = {}
        theirs: dict[int, float] = {}
        for seed, run in self.of(cell).items():
            steps, losses = self.rungs(cell, seed)
            mine = math.log2(run.number("steps"))
            outside = not steps or not steps[0] <= mine <= steps[-1]
            if not outside and cell.key not in self.experiment.ladder:
                ours[seed] = run.loss
                theirs[seed] = at(steps, losses, mine)
        return excess(ours, theirs)

    def difference(self, cell: Cell) -> Estimate | None:
        """Return by how many per cent a cell is worse than what it is to be judged by.

        Where cells differ in steps beside what they are about, that is the ladder at equal steps.
        """
        if self.experiment.at_equal_steps:
            return self.excess_at_equal_steps(cell)
        return self.excess(cell)

    def same(self) -> list[list[Cell]]:
        """Return the groups of cells whose runs ended with the same parameters at every seed."""
        groups: dict[tuple[tuple[int, str], ...], list[Cell]] = {}
        for cell in self.experiment.cells:
            ends = tuple((seed, run.ended_as) for seed, run in sorted(self.of(cell).items()))
            if ends:
                groups.setdefault(ends, []).append(cell)
        return [cells for cells in groups.values() if len(cells) > 1]

    def choices(self) -> list[float]:
        """Return, for each learning rate that was chosen, what a choice by other text would cost.

        In per cent above the best loss. A choice is between cells that differ in ``lr`` alone, at
        their first common seed; the other text is that of the last evaluation on the way.
        """
        groups: dict[tuple[str, ...], list[Mapping[int, Found]]] = {}
        for cell in self.experiment.cells:
            labels = dict(cell.labels)
            if labels.pop("lr", "") and self.of(cell):
                groups.setdefault(tuple(labels.values()), []).append(self.of(cell))
        found: list[float] = []
        for tried in groups.values():
            common = set.intersection(*map(set, tried))
            if len(tried) > 1 and common:
                runs = [of[min(common)] for of in tried]
                chosen = min(runs, key=lambda run: run.curve("loss")[-1])
                found.append(100 * (chosen.loss / min(run.loss for run in runs) - 1))
        return found

    def missing(self) -> int:
        """Return how many runs have not been made."""
        return sum(
            1 for cell in self.experiment.cells for s in cell.seeds if s not in self.of(cell)
        )

    def all(self) -> list[Found]:
        """Return every finished run."""
        return [found for cell in self.runs.values() for found in cell.values()]


Column: TypeAlias = Callable[[Findings, Cell, Sequence[Found]], str]


def gather(experiment: Experiment, have: Mapping[str, Found]) -> Findings:
    """Pick an experiment's results out of a store's."""
    runs: dict[str, dict[int, Found]] = {}
    for cell in experiment.cells:
        for seed in cell.seeds:
            found = have.get(cell.scenario(seed).digest)
            if found is not None:
                runs.setdefault(cell.key, {})[seed] = found
    return Findings(experiment, runs)


def effective_step(found: Found) -> float | None:
    """Return ``lr (1 + mu / (1 - mu rho))`` of a run whose rho was measured."""
    run, rho = found.scenario.run, found.result.get("rho")
    given = run.outer
    made = make_outer(
        given.preset, lr=given.lr, momentum=given.momentum, h_steps=run.sync.h_steps
    ).fused
    if made is None or rho is None:
        return None
    return made.lr * (1 + made.momentum / (1 - made.momentum * float(rho)))


def time_to_target(findings: Findings, cell: Cell, seed: int) -> tuple[float | None, float] | None:
    """Return the virtual seconds to the target, and those of the run without helpers.

    The first is None where the target is never reached; None where there is nothing to compare.
    """
    baseline = findings.runs.get(cell.against or cell.key, {}).get(seed)
    found = findings.of(cell).get(seed)
    if baseline is None or found is None or not found.like(baseline):
        return None
    times, losses = baseline.curve("at_s"), baseline.curve("loss")
    target = at(times, losses, TARGET_AT * times[-1])
    theirs = first_below(times, losses, target)
    ours = first_below(found.curve("at_s"), found.curve("loss"), target)
    return None if theirs is None else (ours, theirs)


def _of(text: str, entered: int, run: int) -> str:
    """Add how many of the runs a number is of, where these are not all."""
    return text if entered == run else f"{text} ({entered} of {run})"


def _mean(name: str, digits: int, scale: float = 1.0) -> Column:
    def column(_: Findings, __: Cell, runs: Sequence[Found]) -> str:
        return f"{estimate([scale * run.number(name) for run in runs]).mean:.{digits}f}"

    return column


def _rho(_: Findings, __: Cell, runs: Sequence[Found]) -> str:
    values = [float(run.result["rho"]) for run in runs if run.result.get("rho") is not None]
    return _of(f"{estimate(values).mean:.2f}", len(values), len(runs)) if values else "-"


def _effective(_: Findings, __: Cell, runs: Sequence[Found]) -> str:
    values = [step for run in runs if (step := effective_step(run)) is not None]
    return _of(f"{estimate(values).mean:.2f}", len(values), len(runs)) if values else "-"


def _rounds(_: Findings, __: Cell, runs: Sequence[Found]) -> str:
    per_fragment = [
        run.number("commits") / run.scenario.run.sync.fragments - 1 for run in runs
    ]  # the first commit is genesis
    return f"{estimate(per_fragment).mean:.0f}"


def _target(findings: Findings, cell: Cell, runs: Sequence[Found]) -> str:
    compared = [t for seed in cell.seeds if (t := time_to_target(findings, cell, seed))]
    reached = [ours for ours, _ in compared if ours is not None]
    never = len(compared) - len(reached)
    said = [_of(estimate(reached).text(1) + " s", len(reached), len(runs))] if reached else []
    said += [f"never in {never} of {len(runs)}"] if never else []
    return ", ".join(said) or "-"


def _speed_up(findings: Findings, cell: Cell, runs: Sequence[Found]) -> str:
    compared = [t for seed in cell.seeds if (t := time_to_target(findings, cell, seed))]
    ratios = [theirs / ours for ours, theirs in compared if ours is not None]
    return _of(estimate(ratios).text(2), len(ratios), len(runs)) if ratios else "-"


def _equal_steps(findings: Findings, cell: Cell, runs: Sequence[Found]) -> str:
    return _more(findings.excess_at_equal_steps(cell), runs)


def _more(difference: Estimate | None, runs: Sequence[Found]) -> str:
    if difference is None:
        return "-"
    return _of(difference.text(2, sign=True), difference.n, len(runs))


def _equal_loss(findings: Findings, cell: Cell, runs: Sequence[Found]) -> str:
    """Return the steps that the ladder takes to a cell's loss, as a share of the cell's own."""
    shares: list[float] = []
    for seed, run in findings.of(cell).items():
        steps, losses = findings.rungs(cell, seed)
        reached = first_below(steps, losses, run.loss)
        if reached is not None and losses and run.loss <= losses[0]:
            shares.append(2**reached / run.number("steps"))
    if cell.key in findings.experiment.ladder or not shares:
        return "-"
    return _of(estimate(shares).text(2), len(shares), len(runs))


def _average(_: Findings, __: Cell, runs: Sequence[Found]) -> str:
    """Return by how many per cent a moving average is worse than its run's own end."""
    more = [100 * (run.number("average_loss") / run.loss - 1) for run in runs]
    return estimate(more).text(2, sign=True)


COLUMNS: dict[str, Column] = {
    "steps": _mean("steps", 0),
    "commits": _mean("commits", 0),
    "rounds": _rounds,
    "rho": _rho,
    "average": _average,
    "effective step": _effective,
    "staleness": _mean("staleness", 2),
    "kills": _mean("kills", 1),
    "tokens": _mean("tokens", 3, 1e-6),
    "time": _mean("virtual_s", 1),
    "time to target": _target,
    "speed-up": _speed_up,
    "equal steps": _equal_steps,
    "equal loss": _equal_loss,
}
UNITS = {
    "average": "moving average against that, %",
    "equal steps": "at equal steps, %",
    "equal loss": "steps of data-parallel to this loss, share",
    "tokens": "tokens merged, M",
    "time": "virtual s",
    "rounds": "rounds per fragment",
}


def table(findings: Findings) -> str:
    """Return the table of an experiment: labels, runs, loss, difference, further columns."""
    experiment = findings.experiment
    labels = [name for name, _ in experiment.cells[0].labels]
    further = [UNITS.get(name, name) for name in experiment.columns]
    rows = [
        [*labels, "runs", "loss, nats", "against", "difference, %", *further],
        ["---"] * (len(labels) + 4 + len(further)),
    ]
    named = {cell.key: cell for cell in experiment.cells}
    for cell in experiment.cells:
        values = [value for _, value in cell.labels]
        runs = list(findings.of(cell).values())
        loss, more = findings.loss(cell.key), findings.excess(cell)
        against = ", ".join(v for _, v in named[cell.against].labels) if cell.against else "-"
        rows.append(
            [
                *values,
                f"{len(runs)} of {len(cell.seeds)}",
                "not run" if loss is None else loss.text(4),
                against,
                _more(more, runs),
                *(COLUMNS[n](findings, cell, runs) if runs else "-" for n in experiment.columns),
            ]
        )
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
