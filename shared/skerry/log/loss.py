"""What to say when the log lacks what its own records name: what is gone, and what still is.

Nothing here repairs anything. State that is gone is never made up again: a person restores it from
a checkpoint, which is the one other place that holds it whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.errors import StateLost
from skerry.log.ledger import last_checkpoint
from skerry.protocol.messages import begins_history

if TYPE_CHECKING:
    from collections.abc import Mapping

    from skerry.log.base import Bus
    from skerry.protocol.messages import Commit


def gaps(newest: Mapping[int, Commit], commits: Mapping[int, Commit]) -> dict[int, range]:
    """Return by fragment which versions the ledger lacks between its newest and the manifest's.

    Args:
        newest: the commits that the manifests hold.
        commits: the newest that the ledger holds; it may be one behind.
    """
    found: dict[int, range] = {}
    for fragment, commit in newest.items():
        held = commits.get(fragment)
        if held is None and begins_history(commit):
            continue
        missing = range(held.version + 1 if held else 1, commit.version)
        if missing:
            found[fragment] = missing
    return found


async def state_lost(bus: Bus, run: str, fragment: int, version: int, what: str) -> StateLost:
    """Return the error for a fragment whose newest version cannot be read any more.

    ``what`` is the sentence's subject and verb: what is missing or wrong, without a full stop.
    """
    lost = f"Run {run!r} has lost fragment {fragment} at version {version}: {what}."
    saved = await last_checkpoint(bus, run)
    if saved is None or fragment >= len(saved.versions):
        return StateLost(
            f"{lost} The ledger names no checkpoint of it, and what learners hold is no source: put"
            " the broker's own store back from a copy, or begin a new run."
        )
    return StateLost(
        f"{lost} Its newest checkpoint, {saved.path} at step {saved.step}, holds version"
        f" {saved.versions[fragment]}; what learners hold is no source: stop the run and put it"
        f" back with `skerry checkpoints restore {saved.path} --run {run} --replace`, begin another"
        f" one from it with `skerry up --from {saved.path} --run NEW`, or put the broker's own"
        " store back from a copy."
    )


async def history_lost(bus: Bus, run: str, what: str) -> StateLost:
    """Return the error for history that is gone, which no checkpoint holds.

    ``what`` are the sentences that say what is gone.
    """
    saved = await last_checkpoint(bus, run)
    if saved is None:
        path, known = "CHECKPOINT", "The ledger names no checkpoint; `skerry checkpoints list` may"
    else:
        path = saved.path
        known = f"Its newest checkpoint is {path} at step {saved.step}"
    return StateLost(
        f"{what} {known}: put the broker's own store back from a copy, or begin another run from"
        f" the checkpoint with `skerry up --from {path} --run NEW`."
    )


def listed(missing: Mapping[int, range]) -> str:
    """Return which versions of which fragments, for a sentence."""
    words: list[str] = []
    for fragment, versions in sorted(missing.items()):
        first, last = versions.start, versions.stop - 1
        span = f"version {last}" if first == last else f"versions {first} to {last}"
        if first == 1:  # where a restored run's history began is lost too
            span = f"every version before {versions.stop}"
        words.append(f"fragment {fragment}, {span}")
    return "; ".join(words)
