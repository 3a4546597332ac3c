"""What to say when the log lacks what its own records name: what is gone, and what still is.

Nothing here repairs anything. State that is gone is never made up again: a person restores it from
a checkpoint, which is the one other place that holds it whole.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.errors import StateLost, WireError
from skerry.log.ledger import last_checkpoint, last_commits
from skerry.protocol.messages import begins_history

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from skerry.log.base import Bus
    from skerry.protocol.messages import CheckpointRecord, Commit, MemberRecord


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


def unknown(commits: Iterable[Commit], members: Mapping[str, MemberRecord]) -> dict[str, int]:
    """Return by learner the newest start that commits name and the members' records do not.

    A row of a restored run names no start: of a learner that its checkpoint has no data shard of,
    since its record was lost before, nothing more can be known, and it begins as a new name.
    """
    found: dict[str, int] = {}
    for row in (row for commit in commits for row in commit.progress):
        held = members.get(row.learner)
        if (held.incarnation if held else 0) < row.incarnation:
            found[row.learner] = max(row.incarnation, found.get(row.learner, 0))
    return found


async def state_lost(bus: Bus, run: str, fragment: int, version: int, what: str) -> StateLost:
    """Return the error for a fragment whose newest version cannot be read any more.

    ``what`` is the sentence's subject and verb: what is missing or wrong, without a full stop.
    """
    return StateLost(
        f"Run {run!r} has lost fragment {fragment} at version {version}: {what}. "
        f"{await _source(bus, run, fragment)}"
    )


async def ledger_lost(bus: Bus, run: str, missing: Mapping[int, range]) -> StateLost:
    """Return the error for a ledger that lacks commits before those that manifests hold."""
    return StateLost(
        f"The ledger of run {run!r} has lost commits that came before those of its manifests:"
        f" {_listed(missing)}. The newest state is still in the log, how it came about is not."
        f" {await _way_on(bus, run)}"
    )


async def ledger_ahead(bus: Bus, commit: Commit) -> StateLost:
    """Return the error for a ledger that names a version which no syncer has committed yet."""
    return StateLost(
        f"The ledger of run {commit.run!r} already names version {commit.version} of fragment"
        f" {commit.fragment} or a later one, which no syncer has committed: something else has"
        " written there, and what is committed now could not be recorded."
        f" {await _way_on(bus, commit.run)}"
    )


async def members_lost(bus: Bus, run: str, lost: Mapping[str, int]) -> StateLost:
    """Return the error for members that commits name and the ledger has no record of."""
    who = "; ".join(f"learner {name!r}, start {start}" for name, start in sorted(lost.items()))
    return StateLost(
        f"The ledger of run {run!r} has lost records of its members: {who}. Which data they read"
        " is not known without them, so they do not join, and no new name does."
        f" {await _way_on(bus, run)}"
    )


async def run_lost(bus: Bus, run: str, left: Sequence[Commit | None]) -> StateLost:
    """Return the error for a run whose record is gone; ``left``: the commits of its manifests."""
    newest = {commit.fragment: commit for commit in left if commit is not None}
    if newest and all(commit and begins_history(commit) for commit in left):
        origin = next(iter(newest.values())).source
        return StateLost(
            f"Run {run!r} has state but no record in the ledger: its restore from {origin} is under"
            " way, or was interrupted. Wait for it, or start it again with"
            f" `skerry checkpoints restore {origin} --run {run}`."
        )
    try:
        missing = gaps(newest, await last_commits(bus, run))
    except WireError:
        missing = {}
    lost = f", and commits: {_listed(missing)}" if missing else ""
    if not left:
        return StateLost(
            f"Run {run!r} has lost its record in the ledger, or its restore has only begun: the"
            " state holds a fence, and no fragment yet. Begin another one under another --run, or"
            " put the broker's own store back from a copy."
        )
    held = [f"fragment {f} at version {c.version}" for f, c in sorted(newest.items())]
    held += ["a manifest that cannot be read" for commit in left if commit is None]
    return StateLost(
        f"Run {run!r} has lost its record in the ledger{lost}. The state still holds"
        f" {', '.join(held)}, so this is no new run, and none is created over it."
        f" {await _way_on(bus, run)}"
    )


def run_gone(run: str) -> StateLost:
    """Return the error for a run of which the log held all, and holds nothing any more."""
    return StateLost(
        f"The log has lost run {run!r} whole: its streams were deleted, or the broker has begun"
        " with an empty store. Put the broker's own store back from a copy, or restore the run with"
        f" `skerry checkpoints restore CHECKPOINT --run {run}`, and start this process again."
    )


def gone_back(run: str, fragment: int, version: int, known: int) -> StateLost:
    """Return the error for a log that holds an older ``version`` than the one it held before."""
    return StateLost(
        f"The log of run {run!r} has gone back: fragment {fragment} was at version {known} and is"
        f" at {version}, so an older copy of the broker's store was put in its place, or a power"
        " cut took the end of it. Start this process again, and it goes on from there; or stop the"
        " run first and put back what a checkpoint has newer with `skerry checkpoints restore"
        f" CHECKPOINT --run {run} --replace`."
    )


def _listed(missing: Mapping[int, range]) -> str:
    """Return which versions of which fragments, for a sentence."""
    words: list[str] = []
    for fragment, versions in sorted(missing.items()):
        first, last = versions.start, versions.stop - 1
        span = f"version {last}" if first == last else f"versions {first} to {last}"
        if first == 1:  # where a restored run's history began is lost too
            span = f"every version before {versions.stop}"
        words.append(f"fragment {fragment}, {span}")
    return "; ".join(words)


async def _way_on(bus: Bus, run: str) -> str:
    """Return the sentence about what is left where history is gone, which no checkpoint holds."""
    saved = await _checkpoint(bus, run)
    if saved is None:
        path, known = "CHECKPOINT", "The ledger names no checkpoint; `skerry checkpoints list` may"
    else:
        path = saved.path
        known = f"Its newest checkpoint is {path} at step {saved.step}"
    return (
        f"{known}: put the broker's own store back from a copy, or begin another run from the"
        f" checkpoint with `skerry up --from {path} --run NEW`."
    )


async def _checkpoint(bus: Bus, run: str) -> CheckpointRecord | None:
    try:
        return await last_checkpoint(bus, run)
    except WireError:
        return None


async def _source(bus: Bus, run: str, fragment: int) -> str:
    """Return the sentence about where the fragment still is, and what to do."""
    saved = await _checkpoint(bus, run)
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
