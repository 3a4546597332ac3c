"""Questions for ``skerry plan`` in one line."""

from __future__ import annotations

from typing import Any

from skerry.settings.tree import Tree
from skerry_tools.plan.plan import RunPlan, make
from skerry_tools.plan.question import Question, check_plan, question


def site(**values: Any) -> dict[str, Any]:
    """Return a site of one learner with 3 Gbit/s and steps of 2 s, where nothing else is given."""
    return {"up": "3 Gbit/s", "step_time": "2 s", "cores": 16, **values}


def asked(
    sites: dict[str, dict[str, Any]] | int = 4, parameters: object = "12B", **tables: Any
) -> Question:
    """Return a question: of 12B and four equal sites; other tables by name."""
    if isinstance(sites, int):
        sites = {name: site() for name in "abcdefghijklmnop"[:sites]}
    tree = Tree()
    plan = {"parameters": parameters, "tokens_per_step": 262144, **tables.pop("plan", {})}
    hub = {"cores": 16, **tables.pop("hub", {})}
    tree.merge({"plan": plan, "sites": sites, "hub": hub, **tables}, "test")
    found = question(tree)
    check_plan(found)
    return found


def planned(*args: Any, **tables: Any) -> RunPlan:
    """Return the plan of such a question."""
    return make(asked(*args, **tables))
