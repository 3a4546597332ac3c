"""What to say when the log lacks what its own records name: what is gone, and what still is.

Nothing here repairs anything. State that is gone is never made up again: a person restores it from
a checkpoint, which is the one other place that holds it whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.bus.ledger import last_checkpoint
from skerry.errors import StateLost, WireError

if TYPE_CHECKING:
    from skerry.bus.base import Bus


async def state_lost(bus: Bus, run: str, fragment: int, version: int, what: str) -> StateLost:
    """Return the error for a fragment whose newest version cannot be read any more.

    ``what`` is the sentence's subject and verb: what is missing or wrong, without a full stop.
    """
    return StateLost(
        f"Run {run!r} has lost fragment {fragment} at version {version}: {what}. "
        f"{await _source(bus, run, fragment)}"
    )


async def _source(bus: Bus, run: str, fragment: int) -> str:
    """Return the sentence about where the fragment still is, and what to do."""
    try:
        saved = await last_checkpoint(bus, run)
    except WireError:
        saved = None
    if saved is None or fragment >= len(saved.versions):
        return (
            "The ledger names no checkpoint of it, and what learners hold is no source: put the"
            " broker's own store back from a copy, or begin a new run."
        )
    return (
        f"Its newest checkpoint, {saved.path} at step {saved.step}, holds version"
        f" {saved.versions[fragment]}; what learners hold is no source: stop the run and put it"
        f" back with `skerry checkpoints restore {saved.path} --run {run} --replace`, begin another"
        f" one from it with `skerry up --from {saved.path} --run NEW`, or put the broker's own"
        " store back from a copy."
    )
