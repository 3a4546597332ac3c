"""What deltas of ``auto`` take in training: ``python tests/bench/bench_deltas.py``.

The lab trains models of several widths with several learning rates and H, and counts the bits of
the scheme that each change of a fragment gets, weighted by its size. Beside the mean over a run
stands what ``skerry plan`` counts. Nothing is timed.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple
from unittest.mock import patch

from harness import parser, write

from skerry.algorithm import closed_loop
from skerry.algorithm.closed_loop import fewest_bits, relative_change
from skerry.algorithm.planes import Planes
from skerry.service.reporting import configure
from skerry_tools.lab.lab import Lab
from skerry_tools.lab.scenario import load
from skerry_tools.plan.measured import WIRE_BITS, auto_bits


class Case(NamedTuple):
    """A run of the lab; an empty ``preset`` is the reference model of 117 k parameters."""

    preset: str
    width: int
    inner: str
    lr: str
    h_steps: int
    steps: int
    schedule: str = "warmup-cosine"
    learners: int = 4


CASES = (
    Case("", 64, "adamw", "1e-3", 24, 480),
    Case("", 64, "muon", "3e-3", 8, 480),
    Case("", 64, "adamw", "3e-3", 24, 480),
    Case("", 64, "muon", "3e-3", 24, 480),
    Case("", 64, "muon", "3e-3", 24, 480, "constant"),
    Case("", 64, "adamw", "3e-3", 48, 720),
    Case("", 64, "muon", "1.2e-2", 24, 480),
    Case("", 64, "muon", "3e-3", 96, 960),
    Case("nano", 128, "muon", "1.5e-3", 24, 480, learners=2),
    Case("nano", 128, "muon", "6e-3", 24, 480, learners=2),
    Case("micro", 256, "muon", "6e-3", 24, 192, learners=2),
)


def bits_of(case: Case, learners: int, steps: int) -> float:
    """Return the mean bits a parameter of the deltas of a run."""
    sent: list[tuple[float, int]] = []

    def noted(scheme: str, held: Planes, master: closed_loop.Vector) -> float:
        changed = relative_change(scheme, held, master)
        sent.append((WIRE_BITS[fewest_bits(changed)], master.size))
        return changed

    sets = [
        f"train.steps={steps}",
        f"train.inner={case.inner}",
        f"train.lr={case.lr}",
        f"train.schedule={case.schedule}",
        f"sync.h_steps={case.h_steps}",
        f"sync.fragments={min(8, case.h_steps // 2)}",
        *([f"model.preset={case.preset}"] if case.preset else []),
    ]
    with patch.object(closed_loop, "relative_change", noted):
        Lab(load(None, sets, learners=learners, seed=0)).run()
    bits, sizes = zip(*sent, strict=True)
    return statistics.fmean(bits, sizes)


def main() -> None:
    made = parser(__doc__ or "")
    made.add_argument("--learners", type=int, help="of each run, in place of its own")
    made.add_argument("--cases", type=int, default=len(CASES), help="the first so many")
    made.add_argument("--steps", type=int, help="of each run, in place of its own")
    chosen = made.parse_args()
    configure("error", service="bench")
    rows: list[dict[str, object]] = []
    head = f"{'inner':<6} {'rate':>7} {'H':>3} {'steps':>5} {'bits':>6} {'planned':>8}"
    print(f"  {'model':<6} {'M':>2} {head}")
    for case in CASES[: chosen.cases]:
        steps = chosen.steps or case.steps
        learners = chosen.learners or case.learners
        found = bits_of(case, learners, steps)
        planned = auto_bits(float(case.lr) * case.h_steps * case.width**0.5)
        name, constant = case.preset or "117 k", "" if "cosine" in case.schedule else " constant"
        run = f"{case.inner:<6} {case.lr:>7} {case.h_steps:>3} {steps:>5}"
        print(f"  {name:<6} {learners:>2} {run} {found:6.2f} {planned:8.2f}{constant}", flush=True)
        given = case._replace(steps=steps, learners=learners)
        rows.append({**given._asdict(), "bits": found, "planned": planned})
    write("deltas", rows, [], chosen.json)


if __name__ == "__main__":
    main()
