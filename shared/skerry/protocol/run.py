"""What a run's own record says, checked against what this release makes of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.algorithm import fragments
from skerry.errors import RunMismatch

if TYPE_CHECKING:
    from skerry.algorithm.fragments import Plan
    from skerry.protocol.messages import RunRecord


def plan_of(record: RunRecord) -> Plan:
    """Return the fragment plan of a run.

    Raises RunMismatch if this release cuts the run's parameters differently.
    """
    plan = fragments.plan(record.leaves, record.fragments)
    if plan.digest != record.plan_digest:
        msg = (
            f"Run {record.run!r} was cut by another release of Skerry ({record.skerry_version}):"
            " use that release."
        )
        raise RunMismatch(msg)
    return plan
