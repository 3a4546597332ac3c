"""The vectors that a fragment's manifest names: which are stored when, where, and which to read.

A commit stores the difference from the version before (``delta``), every N-th version the global
fragment whole (``keyframe``), and every N-th what only a syncer needs (``master``,
``outer.<name>``: together a snapshot), from which it merges again what was contributed since. A
manifest names those of its own version and those of earlier ones that a reader may still need; each
lies in a slot that no reader of the manifest before uses.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.schemes import raw_bytes
from skerry.errors import Corrupt
from skerry.protocol.messages import is_round

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.protocol.messages import Commit, Manifest, Part

Kind = Literal["delta", "keyframe", "snapshot"]

DELTA = "delta"
KEYFRAME = "keyframe"
MASTER = "master"
OUTER = "outer."
"""The prefix of the names of an outer optimizer's parts."""
INITIAL_BYTES = 4
"""Bytes of an initial parameter, f32: the least that the window must have room for."""
MOST_DELTA_CHUNKS, MOST_WHOLE_CHUNKS = 16_384, 24_000
"""Chunks that a manifest names at most, of deltas, and of a keyframe and a snapshot together. Each
takes 20 bytes of the MiB that a record may have; the rest names learners."""
MOST_UNCOVERED = 0.85
"""The most of the window that contributions without a snapshot may fill by the next version."""


def kind_of(name: str) -> Kind:
    """Return the kind of a part: which readers want it, and which slots it takes turns in."""
    if name == DELTA:
        return "delta"
    return "keyframe" if name == KEYFRAME else "snapshot"


def newest(manifest: Manifest, name: str) -> Part | None:
    """Return the newest part of that name in the manifest; None if it has none."""
    found = (part for part in manifest.parts if part.name == name)
    return max(found, key=lambda part: part.version, default=None)


def snapshot_version(manifest: Manifest) -> int:
    """Return the version of the newest snapshot; 0 where there is none."""
    found = newest(manifest, MASTER)
    return found.version if found else 0


def is_due(fragment: int, version: int, previous: Manifest | None, name: str, every: int) -> bool:
    """Return True if a part that every N-th version has is to be stored with this one.

    Fragments take turns, those of one shard too: whole vectors are most of what a log stores, and
    no link or disk has to be wide enough for those of all fragments at once.
    """
    turn = fragment + fragment // every
    if (version + turn) % every == 0 or previous is None or newest(previous, name) is None:
        return True
    return name == KEYFRAME and _is_crowded(previous)


def _is_crowded(previous: Manifest) -> bool:
    """Return True if deltas since the newest keyframe leave no sure room for one more.

    It may be twice as long as the newest one, where ``delta_scheme`` is ``auto``.
    """
    frame = newest(previous, KEYFRAME)
    lengths = [len(p.chunks) for p in _deltas(previous) if frame and p.version > frame.version]
    return bool(lengths) and sum(lengths) + 2 * lengths[-1] > MOST_DELTA_CHUNKS


def _deltas(manifest: Manifest) -> list[Part]:
    """Return the deltas that a manifest names, the oldest first."""
    found = (part for part in manifest.parts if part.name == DELTA)
    return sorted(found, key=lambda part: part.version)


def is_snapshot_due(
    commit: Commit, previous: Manifest | None, every: int, uncovered: float
) -> bool:
    """Return True if a commit stores a snapshot of its fragment.

    It does at every N-th version, if no round made it, if it is the last, and if it goes on from
    another master than was committed. It also does if the contributions since the newest snapshot,
    which fill the share ``uncovered`` of the window, would fill too much of it with one version
    more: retention must not drop what a syncer would have to merge again.
    """
    begins = not is_round(commit) or commit.master_origin is not None
    since = max(1, commit.version - snapshot_version(previous)) if previous else 1
    needed = begins or commit.final or uncovered * (1 + 1 / since) > MOST_UNCOVERED
    return needed or is_due(commit.fragment, commit.version, previous, MASTER, every)


def window_bytes(parameters: int, learners: int, scheme: str, every: int) -> int:
    """Return the bytes of contributions that a log should keep.

    They hold N versions and one more, so that snapshots need not come sooner, and at least two
    copies of the initial parameters in f32: the learner that offers them may die half way.
    """
    contributed = raw_bytes(scheme, -(-parameters // BLOCK))
    return max(2 * INITIAL_BYTES * parameters, (every + 1) * learners * contributed)


def slot(name: str, version: int, previous: Manifest | None, every: int) -> int:
    """Return the slot that a new part is stored in.

    The last N deltas are readable, so they take turns in N + 1 slots; all else has two.
    """
    if name == DELTA:
        return version % (every + 1)
    before = newest(previous, name) if previous else None
    return 1 - before.slot if before else 0


def kept(previous: Manifest | None, fresh: Sequence[Part], every: int) -> tuple[Part, ...]:
    """Return the parts that a manifest names: the ``fresh`` ones, and earlier ones that stay.

    Those are the deltas of the last N versions up to the first gap, the newest keyframe and the
    newest snapshot. Without a new delta no earlier one can be followed any more. Deltas to the
    newest keyframe and before are fewer if there would be more than MOST_DELTA_CHUNKS.
    """
    if previous is None:
        return tuple(fresh)
    names = {part.name for part in fresh}
    first = max(_first_delta(previous, fresh), previous.commit.version + 2 - every)
    stay = [
        part
        for part in previous.parts
        if (part.name == DELTA and DELTA in names and part.version >= first)
        or (part.name == KEYFRAME and KEYFRAME not in names)
        or (kind_of(part.name) == "snapshot" and MASTER not in names)
    ]
    return (*stay, *fresh)


def _first_delta(previous: Manifest, fresh: Sequence[Part]) -> int:
    """Return the version of the first delta for which there is room, or which a keyframe needs."""
    frame = max((p.version for p in (*previous.parts, *fresh) if p.name == KEYFRAME), default=0)
    first = previous.commit.version + 1
    chunks = sum(len(part.chunks) for part in fresh if part.name == DELTA)
    for part in reversed(_deltas(previous)):
        chunks += len(part.chunks)
        if part.version <= frame and chunks > MOST_DELTA_CHUNKS:
            break
        first = part.version
    return first


def path(manifest: Manifest, held: int | None) -> tuple[Part, ...]:
    """Return the parts that a reader applies in order to get the manifest's global fragment.

    ``held`` is the version that the reader has, or None. The path begins there or at the newest
    keyframe, whichever takes fewer bytes. Raises Corrupt if neither leads to the version.
    """
    deltas = {part.version: part for part in manifest.parts if part.name == DELTA}
    frame, version = newest(manifest, KEYFRAME), manifest.commit.version

    def since(start: int) -> list[Part] | None:
        if not 0 <= version - start <= len(deltas):
            return None
        found = [deltas.get(number) for number in range(start + 1, version + 1)]
        return [part for part in found if part] if all(found) else None

    ways: list[list[Part]] = []
    if held is not None and (after := since(held)) is not None:
        ways.append(after)
    if frame is not None and (after := since(frame.version)) is not None:
        ways.append([frame, *after])
    if not ways:
        msg = (
            f"The manifest of fragment {manifest.commit.fragment} has no keyframe from which its"
            f" deltas lead to version {version}."
        )
        raise Corrupt(msg)
    return tuple(min(ways, key=lambda parts: sum(size_of(part) for part in parts)))


def size_of(part: Part) -> int:
    """Return the bytes of a part's messages."""
    return sum(chunk.size for chunk in part.chunks)
