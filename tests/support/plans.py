"""Questions for ``skerry plan`` in one line, and the published table of goodputs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from skerry.settings.models import Table
from skerry.settings.tree import Tree
from skerry_tools.plan.plan import RunPlan, make
from skerry_tools.plan.question import Question, check_plan, question
from skerry_tools.plan.simulation import Setup, equal_learners, simulate
from skerry_tools.plan.simulation_answer import setup_of
from skerry_tools.plan.tables import DAY_S, Layout, SimulationTable

CHIPS = (150e3, 300e3, 600e3, 1.2e6, 2.4e6)
ROWS: dict[str, tuple[Layout, int]] = {
    "data-parallel": ("data-parallel", 1), "elastic": ("elastic", 1),
    **{f"M = {learners}": ("decoupled", learners) for learners in (2, 4, 8, 16)},
}  # fmt: skip
PUBLISHED: Mapping[str, Sequence[float]] = {
    "data-parallel": (72, 57, 38, 27, 18), "elastic": (88, 80, 69, 58, 40),
    "M = 8": (98, 96, 94, 88, 80), "M = 16": (99, 98, 96, 93, 86),
}  # fmt: skip
"""Goodput in per cent by chips: Decoupled DiLoCo, arXiv 2604.21428. M = 2 and 4 are predicted."""


def goodputs(failures: int, *sets: str) -> dict[str, list[float]]:
    """Return what is simulated for each row and number of chips, in per cent.

    Each cell ends after so many failures, after 30 days at most.
    """
    asked, found = setup_of(None, list(sets)), dict[str, list[float]]()
    for row, (layout, learners) in ROWS.items():
        for chips in CHIPS:
            end_s = failures * asked.question.tables.failures.chip_mtbi / chips
            days = SimulationTable(days=min(30.0, end_s / DAY_S))
            one = with_fleet(asked, chips=chips, layout=layout, learners=learners, simulation=days)
            found.setdefault(row, []).append(100 * simulate(one).goodput)
    return found


def with_fleet(
    asked: Setup, *, chips: float, layout: Layout, learners: int, **tables: Table
) -> Setup:
    """Return the same question about equal learners of another fleet, and with other tables."""
    fleet = asked.question.tables.fleet.model_copy(update={"chips": chips, "layout": layout})
    sync = {"learners": learners, "quorum": min(asked.question.run.sync.quorum, learners)}
    question = asked.question.changed(sync, fleet=fleet, sites={}, **tables)
    return Setup(question, equal_learners(question))


def error_points(found: Mapping[str, Sequence[float]]) -> float:
    """Return the root-mean-square error to what is published, in percentage points."""
    off = [a - b for row in PUBLISHED for a, b in zip(found[row], PUBLISHED[row], strict=True)]
    return math.sqrt(math.fsum(each**2 for each in off) / len(off))


def site(**values: Any) -> dict[str, Any]:
    """Return a site of one learner with 3 Gbit/s and steps of 2 s, where nothing else is given."""
    return {"up": "3 Gbit/s", "step_time": "2 s", "cores": 16, "memory": "1 TB", **values}


def asked(
    sites: dict[str, dict[str, Any]] | int = 4, parameters: object = "12B", **tables: Any
) -> Question:
    """Return a question: of 12B and four equal sites; other tables by name."""
    if isinstance(sites, int):
        sites = {name: site() for name in "abcdefghijklmnop"[:sites]}
    tree = Tree()
    plan = {"parameters": parameters, "tokens_per_step": 262144, **tables.pop("plan", {})}
    hub = {"cores": 16, "write": "9 GB/s", "max_payload": "64 MiB", **tables.pop("hub", {})}
    sync = {"chunk_bytes": 2**25, **tables.pop("sync", {})}
    tree.merge({"plan": plan, "sites": sites, "hub": hub, "sync": sync, **tables}, "test")
    found = question(tree)
    check_plan(found)
    return found


def planned(*args: Any, **tables: Any) -> RunPlan:
    """Return the plan of such a question."""
    return make(asked(*args, **tables))
