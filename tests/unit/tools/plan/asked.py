"""Requests for plans, in one line."""

from __future__ import annotations

from typing import Any

from skerry.settings.tree import Tree
from skerry_tools.plan.plan import Plan, make
from skerry_tools.plan.sites import Request, from_tree


def site(**values: Any) -> dict[str, Any]:
    """Return a site of one learner with 3 Gbit/s and steps of 2 s, unless told otherwise."""
    return {"up": "3 Gbit/s", "step_time": "2 s", "cores": 16, **values}


def request(
    sites: dict[str, dict[str, Any]] | int = 4, parameters: object = "12B", **tables: Any
) -> Request:
    """Return a request: of 12B and four equal sites unless told otherwise; other tables by name."""
    if isinstance(sites, int):
        sites = {name: site() for name in "abcdefghijklmnop"[:sites]}
    tree = Tree()
    plan = {"parameters": parameters, "tokens_per_step": 262144, **tables.pop("plan", {})}
    hub = {"cores": 16, **tables.pop("hub", {})}
    tree.merge({"plan": plan, "sites": sites, "hub": hub, **tables}, "test")
    return from_tree(tree)


def planned(*args: Any, **tables: Any) -> Plan:
    """Return the plan of such a request."""
    return make(request(*args, **tables))
