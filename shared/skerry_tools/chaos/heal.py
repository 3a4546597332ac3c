"""``skerry chaos --heal``: undo what a drill that was killed has left in a cluster."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict
from typing import TYPE_CHECKING

from skerry.cli.cluster.folder import RunFolder
from skerry.errors import ConfigError, SkerryError
from skerry.service.control import CONTROL, ControlError, ask
from skerry_tools.chaos.healing import Healing, undo

if TYPE_CHECKING:
    from skerry.cli.cluster.folder import RunningCluster


def run_heal(cluster: RunningCluster, *, as_json: bool) -> None:
    """Undo every fault there is and print each; SkerryError with what could not be undone.

    Raises RunInUse while a drill is at work: it would take what it has done for still there.
    """
    with RunFolder(cluster.run).drilled():
        told = asyncio.run(_allowed(cluster.run))
    if as_json:
        undone = [asdict(one) for one in told.undone]
        print(json.dumps({"run": cluster.run, "healed": undone, "wrong": told.wrong}, indent=2))
    else:
        for one in told.undone:
            print(one.sentence)
        if not told.undone and not told.wrong:
            print(f"There is nothing to heal in run {cluster.run}.")
    if told.wrong:
        raise SkerryError(" ".join(told.wrong))


async def heal_first(run: str) -> list[str]:
    """Undo what an earlier drill left, and return a sentence for each.

    The broker may be among it, so its log is not asked whether the run allows faults: a cluster
    that obeys has read it there. Raises SkerryError with what could not be undone.
    """
    if not await _obeys(run):
        return []
    told = await undo(RunFolder(run).path)
    if told.wrong:
        raise SkerryError(" ".join(told.wrong))
    return [f"Left by an earlier drill: {one.sentence}" for one in told.undone]


async def _allowed(run: str) -> Healing:
    if not await _obeys(run):
        msg = (
            f"Run {run!r} does not allow faults, or has only just begun, and nothing was touched: "
            "there is nothing to heal."
        )
        raise ConfigError(msg, path="chaos.allow")
    return await undo(RunFolder(run).path)


async def _obeys(run: str) -> bool:
    """Say whether a cluster takes orders: only that of a run that allows faults does.

    Raises ControlError where one that does is only too slow to say so.
    """
    try:
        await ask(RunFolder(run).path / CONTROL, {"op": "show"})
    except ControlError as error:
        if isinstance(error.__cause__, FileNotFoundError | ConnectionRefusedError):
            return False
        raise
    return True
