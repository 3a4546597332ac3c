"""The quality benchmark: ``python -m tests.bench.quality [EXPERIMENT...]``.

Runs what has not been run yet, tells how long the rest takes, and writes the report.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from .cells import Experiment, Wanted, budget, distinct, wanted
from .experiments import all_experiments
from .pool import clock, run_all
from .store import Store

RATE = 73_000
"""Tokens of the small model a second, evaluations included, that two cores train in the lab."""


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Parse the command line."""
    names = ", ".join(experiment.name for experiment in all_experiments())
    made = argparse.ArgumentParser(
        prog="python -m tests.bench.quality",
        description="Run the experiments on learning quality that have not been run yet.",
    )
    made.add_argument("experiments", nargs="*", metavar="EXPERIMENT", help=f"any of {names}")
    made.add_argument("--cells", metavar="PATTERN", help='only cells whose key matches, as "H24-*"')
    made.add_argument("--seeds", type=int, nargs="+", help="these instead of each cell's own")
    made.add_argument(
        "--tokens", type=float, default=1.0, metavar="SHARE", help="of each run; to try things out"
    )
    made.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    made.add_argument("--results", type=Path, default=Path(__file__).parent, metavar="DIR")
    made.add_argument("--report", type=Path, metavar="PAGE", help="also write docs/quality.md")
    made.add_argument("--plan", action="store_true", help="say what would be run, run nothing")
    made.add_argument("--no-run", action="store_true", help="only write the report")
    made.add_argument(
        "--stamp-defaults",
        action="store_true",
        help="say in defaults.md that its figures, typed by hand, are those of the runs there are",
    )
    return made.parse_args(arguments)


def chosen(names: Sequence[str], pattern: str | None, share: float = 1.0) -> tuple[Experiment, ...]:
    """Return the named experiments in the order given (default: all), less other cells.

    ``share``: how much of its tokens each run is given.

    Raises ValueError for a name that there is not.
    """
    known = {experiment.name: experiment for experiment in all_experiments()}
    unknown = [name for name in names if name not in known]
    if unknown:
        msg = f"There is no experiment {', '.join(unknown)}; there are {', '.join(known)}."
        raise ValueError(msg)
    picked = [known[name] for name in names] if names else list(known.values())
    return tuple(
        replace(
            experiment,
            cells=tuple(
                replace(cell, tokens=round(share * cell.tokens))
                for cell in experiment.cells
                if fnmatch.fnmatch(cell.key, pattern or "*")
            ),
        )
        for experiment in picked
    )


def plan_text(experiments: Sequence[Experiment], runs: Sequence[Wanted], store: Store) -> str:
    """Return the plan as a table: cells, runs and tokens of each experiment, and the time left."""
    have = store.all()
    lines = [f"{'experiment':<14} {'cells':>5} {'runs':>5} {'new':>5} {'M tokens':>9}"]
    seen: set[str] = set()
    for experiment in experiments:
        own = distinct([run for run in runs if run.experiment == experiment.name])
        own = [run for run in own if run.scenario.digest not in seen]
        seen |= {run.scenario.digest for run in own}
        new = sum(1 for run in own if run.scenario.digest not in have)
        cells = len(experiment.cells)
        lines.append(
            f"{experiment.name:<14} {cells:>5} {len(own):>5} {new:>5} {budget(own) / 1e6:>9.1f}"
        )
    left = budget([run for run in runs if run.scenario.digest not in have])
    lines.append(
        f"{'all':<14} {'':>5} {len(distinct(runs)):>5} {'':>5} {budget(runs) / 1e6:>9.1f}  "
        f"{clock(budget(runs) / RATE)} at {RATE} tokens/s, {clock(left / RATE)} left"
    )
    return "\n".join(lines)


def _report(given: argparse.Namespace, store: Store) -> None:
    """Stamp the section that is written by hand and write the page, as far as was asked for."""
    if not (given.stamp_defaults or given.report):
        return
    from .report import DEFAULTS, stamp_defaults, write_report

    experiments, have = chosen([], None, given.tokens), store.all()
    if given.stamp_defaults:
        runs = stamp_defaults(experiments, have)
        print(f"{DEFAULTS} says that it was written from runs {runs}.")
    if given.report:
        write_report(given.report, experiments, have)
        print(f"Wrote {given.report}.")


def main() -> int:
    """Run, report; 1 if a run failed, 2 if there is no such experiment, 130 if interrupted."""
    given = options()
    try:
        experiments = chosen(given.experiments, given.cells, given.tokens)
    except ValueError as error:
        print(error)
        return 2
    store = Store(given.results)
    runs = list(wanted(experiments, given.seeds))
    if given.plan:
        print(plan_text(experiments, runs, store))
        return 0
    failed: list[str] = []
    if not given.no_run:
        try:
            failed = run_all(
                distinct(runs),
                store,
                workers=given.workers,
                tell=lambda text: print(text, flush=True),
            )
        except KeyboardInterrupt:
            print("Interrupted: the same command goes on.")
            return 130
    for sentence in failed:
        print(f"Failed: {sentence}")
    _report(given, store)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
