"""Merging M contributions and taking the outer step: ``python tests/bench/bench_merge.py``.

Sizes count one f32 vector of the fragment, whatever M: a merge of four int4 contributions at 2.5
GB/s finishes 625 million parameters a second. Outputs go into vectors of an earlier
round (``spare``); one line shows what fresh memory costs.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from harness import Case, Result, compare, goals, memcpy, one_core, options, report
from numpy.typing import NDArray

from skerry.algorithm import backend, merge_numpy
from skerry.algorithm.fragments import Fragment, Slice
from skerry.algorithm.merge import direction, slice_norms
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import Outer, make_outer, merge_and_apply

SLICES = 8
GOAL_GB_S = 2.5


def contribution(fragment: Fragment, scheme: str, seed: int) -> OuterGradient:
    """Return a Gaussian contribution with the norms that its header carries."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(fragment.padded_size, np.float32)
    planes = backend.cpu().quantise(scheme, x)
    backend.cpu().dequantise(scheme, planes, x)
    return OuterGradient(scheme, planes, slice_norms(fragment, x))


class Round:
    """A round of ``count`` contributions to one fragment, merged and stepped again and again."""

    def __init__(self, fragment: Fragment, scheme: str, count: int, method: str) -> None:
        self.fragment = fragment
        self.items = [contribution(fragment, scheme, seed) for seed in range(count)]
        self.weights = [1 / count] * count
        self.method = method
        self.averaged = (False,) * len(fragment.slices)

    def step(
        self,
        outer: Outer,
        master: NDArray[np.float32],
        state: Any,
        spare: Sequence[NDArray[np.float32]] = (),
    ) -> None:
        """Merge and take one outer step, into ``spare`` if given."""
        contributed = self.items, self.weights, self.method, self.fragment, self.averaged
        merge_and_apply(outer, master, state, *contributed, spare)

    def reference(self, master: NDArray[np.float32], state: NDArray[np.float32]) -> None:
        """Do the same in numpy."""
        spans = merge_numpy.spans_of(self.fragment)
        out = np.empty_like(master)
        shares = np.full((len(self.items), len(self.averaged)), self.weights[0], np.float32)
        merge_numpy.accumulate(self.items, shares, spans, out)
        gains = np.ones(len(self.averaged), np.float32)
        merge_numpy.step(out, gains, spans, master, state, lr=0.7, decay=0.9)

    def direction(self) -> None:
        """Merge without a step."""
        direction(self.method, self.items, self.weights, self.fragment, self.averaged)


def cases(fragment: Fragment, master: NDArray[np.float32]) -> list[Case]:
    """Return the merges that a run makes."""
    nesterov = make_outer("nesterov", lr=None, momentum=None, h_steps=500)
    direct = make_outer("direct", lr=None, momentum=None, h_steps=1)
    state = nesterov.init(master)
    state.fill(0)  # zeros are mapped when they are first written
    spare = [np.ones_like(master), np.ones_like(master)]
    four = Round(fragment, "int4", 4, "rda")
    size = master.nbytes
    stepped = partial(four.step, nesterov, master, state, spare)
    found = [
        Case("4 x int4, RDA, Nesterov", stepped, size, goal_gb_s=GOAL_GB_S),
        Case("the same into fresh memory", partial(four.step, nesterov, master, state), size),
        Case("4 x int4, RDA, direct", partial(four.step, direct, master, None, spare), size),
        Case("4 x int4, RDA, fresh, direction only", four.direction, size),
        Case("4 x int4, numpy reference", partial(four.reference, master, state), size),
    ]
    for count, scheme in (
        (2, "int4"),
        (8, "int4"),
        (4, "int8"),
        (4, "bf16"),
        (4, "e3m0"),
        (4, "int2"),
    ):
        others = Round(fragment, scheme, count, "rda")
        run = partial(others.step, nesterov, master, state, spare)
        found.append(Case(f"{count} x {scheme}, RDA, Nesterov", run, size))
    return found


def peak(case: Case) -> Result:
    """Measure how much a case allocates at its peak, in vectors of the fragment."""
    tracemalloc.start()
    case.run()
    vectors = tracemalloc.get_traced_memory()[1] / case.size_bytes
    tracemalloc.stop()
    return Result("memory", 0.0, 0.0, note=f"{vectors:.2f} vectors allocated by {case.name}")


def main() -> None:
    """Run the bench on one core and print it."""
    chosen = options(__doc__ or "")
    one_core()
    size = chosen.mib * 1024 * 256
    each = size // SLICES
    fragment = Fragment(0, tuple(Slice(leaf, 0, each) for leaf in range(SLICES)))
    master = np.ones(fragment.padded_size, np.float32)
    merges = cases(fragment, master)
    results = compare([memcpy(master.nbytes), *merges], chosen.rounds)
    found = goals("merge", merges, results)
    title = "a fragment merged, and the outer step taken"
    report("merge", title, [*results, peak(merges[1])], found, chosen.json)


if __name__ == "__main__":
    main()
