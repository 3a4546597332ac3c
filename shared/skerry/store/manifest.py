"""A checkpoint's ``manifest.json``: all that a run needs to go on, and a digest over every byte.

Formats 1 and 2 are those of Skerry 0.1 and are still read (``skerry.store.earlier``). There is one
file of outer state per fragment, so that a fragment that is committed while the checkpoint is being
written is written again alone.

The file is JSON whose last line holds the SHA-256 of everything before it, so that one flipped bit
anywhere in it, white space included, is found.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import Any, cast

from pydantic import TypeAdapter

from skerry.algorithm.fragments import LeafSpec  # at run time: pydantic reads the annotations
from skerry.errors import CheckpointCorrupt, StoreError
from skerry.protocol.messages import Commit
from skerry.protocol.records import decode, encode
from skerry.protocol.subjects import TOKEN
from skerry.store import earlier
from skerry.store.base import MOST_MANIFEST_BYTES, NAME, StoredFile
from skerry.store.tensorfile import ITEM

FORMAT = 3
"""Commits have an origin, and enums for reasons and causes."""
READABLE = (*earlier.FORMATS, FORMAT)
PARAMS_FILE = "params.safetensors"
SHARED_OUTER_FILE = "outer.safetensors"
MOST = 2**64
MOST_NS = 2**63
"""Later instants have no date."""
VERSION = re.compile(r"[A-Za-z0-9.!+_-]{0,64}")


@dataclass(frozen=True, slots=True)
class SavedPart:
    """One vector of a fragment: its name and its xxh3-64, as in ``messages.Part``."""

    name: str
    digest: int


@dataclass(frozen=True, slots=True)
class SavedFragment:
    """A fragment's last commit (version, step, progress of every learner) and its vectors."""

    commit: Commit
    parts: tuple[SavedPart, ...]


@dataclass(frozen=True, slots=True)
class SavedLearner:
    """A learner that has been part of the run and the data shard its name owns."""

    learner: str
    shard: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What ``manifest.json`` says; ``index`` counts the run's checkpoints from 0.

    Name and creation time together tell a run from a later one of the same name. ``config`` is the
    run's RunConfig, ``tokens`` what all learners together have contributed, ``step`` the global
    clock. ``state`` holds the fragments in order: as they are after every commit that the run's
    ledger has at or below ``ledger_sequence``, and after no other (0: not known, format 1).
    """

    format: int
    run: str
    run_created_ns: int
    index: int
    step: int
    tokens: int
    created_ns: int
    skerry_version: str
    config: dict[str, Any]
    plan_digest: int
    fragments: int
    leaves: tuple[LeafSpec, ...]
    learners: tuple[SavedLearner, ...]
    state: tuple[SavedFragment, ...]
    files: tuple[StoredFile, ...]
    ledger_sequence: int = 0

    def outer_file(self, fragment: int) -> str:
        """Return the name of the file that holds a fragment's outer state."""
        return SHARED_OUTER_FILE if self.format == 1 else outer_file(fragment)

    @property
    def versions(self) -> tuple[int, ...]:
        """The version of each fragment, in order."""
        return tuple(saved.commit.version for saved in self.state)

    @property
    def age(self) -> tuple[int, int, int]:
        """What orders checkpoints, oldest first, whatever clocks their writers had: run and index.

        The ledger decides where two checkpointers wrote at once. It is no better than the index: a
        broker whose store was rolled back counts sequences again, and a checkpointer does not.
        """
        return self.run_created_ns, self.index, self.ledger_sequence

    @property
    def size_bytes(self) -> int:
        """Length of all files but the manifest."""
        return sum(file.size for file in self.files)

    @property
    def content(self) -> tuple[tuple[int, int], ...]:
        """What was saved: version and digest of each fragment."""
        return tuple((saved.commit.version, saved.commit.master_digest) for saved in self.state)


def outer_file(fragment: int) -> str:
    """Return the name of the file that holds a fragment's outer state in format 2."""
    return f"outer-{fragment:04d}.safetensors"


def step_of(commits: list[Commit]) -> int:
    """Return the global clock: the newest step that any fragment's last commit has seen."""
    return max((c.step for c in commits), default=0)


def tokens_of(commits: list[Commit]) -> int:
    """Return the tokens that all learners have contributed.

    Fragments are committed one after another, so each counts a learner's tokens up to another
    instant: the fragment that is furthest along counts.
    """
    furthest: dict[str, int] = {}
    for commit in commits:
        for progress in commit.progress:
            furthest[progress.learner] = max(furthest.get(progress.learner, 0), progress.tokens)
    return min(sum(furthest.values()), MOST - 1)


def dump(checkpoint: Checkpoint) -> tuple[bytes, str]:
    """Return the file's bytes and its digest; StoreError if it would be too large to be read."""
    body = json.dumps(asdict(checkpoint), indent=1).removesuffix("\n}").encode()
    digest = hashlib.sha256(body).hexdigest()
    data = body + _trailer(digest)
    if len(data) > MOST_MANIFEST_BYTES:
        msg = (
            f"The manifest of a checkpoint would have {len(data)} bytes: use fewer sync.fragments."
        )
        raise StoreError(msg)
    return data, digest


def load(data: bytes, path: str) -> Checkpoint:
    """Return what the file says; CheckpointCorrupt naming ``path`` if a single bit is off.

    Raises StoreError for a format that this release does not read.
    """
    size = len(_trailer("0" * 64))
    body = data[:-size]
    if not size < len(data) <= MOST_MANIFEST_BYTES or data[-size:] != _trailer(
        hashlib.sha256(body).hexdigest()
    ):
        raise _corrupt(path)
    try:
        values = cast("dict[str, Any]", json.loads(data))
        if values.get("format") not in READABLE:
            raise _unknown_format(values, path)
        if values["format"] in earlier.FORMATS:
            values = earlier.upgraded(values)
        return _checked(TypeAdapter(Checkpoint).validate_python(values))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise _senseless(path) from error


def _checked(found: Checkpoint) -> Checkpoint:
    """Return what readers may rely on: a checkpoint is untrusted, whatever its digests say.

    Raises ValueError for what no release writes: names that are none, numbers out of bounds, or
    contents that contradict each other.
    """
    names = [file.name for file in found.files]
    leaves = [leaf.name for leaf in found.leaves]
    params = next((file.size for file in found.files if file.name == PARAMS_FILE), 0)
    counts = (found.run_created_ns, found.index, found.step, found.tokens, found.created_ns)
    sound = (
        all(0 <= count < MOST for count in (*counts, found.ledger_sequence))
        and found.created_ns < MOST_NS
        and all(TOKEN.fullmatch(name) for name in (found.run, *(m.learner for m in found.learners)))
        and VERSION.fullmatch(found.skerry_version)
        and all(NAME.fullmatch(name) for name in names)
        and len(set(names)) == len(names)
        and len(set(leaves)) == len(leaves)
        and all(dimension >= 0 for leaf in found.leaves for dimension in leaf.shape)
        and 1 <= found.fragments <= sum(leaf.size for leaf in found.leaves) <= params // ITEM
        and [saved.commit.fragment for saved in found.state] == list(range(found.fragments))
    )
    if not sound:
        raise ValueError(found.run)
    for saved in found.state:  # the log's own door: numbers and names that a commit may have
        decode(Commit, encode(saved.commit), run=found.run, plan_digest=found.plan_digest)
    return found


def _trailer(digest: str) -> bytes:
    return f',\n "digest": "{digest}"\n}}\n'.encode()


def _corrupt(path: str) -> CheckpointCorrupt:
    msg = f"{path} is damaged (its digest does not match): use another checkpoint."
    return CheckpointCorrupt(msg, path=path)


def _senseless(path: str) -> CheckpointCorrupt:
    msg = f"{path} contradicts itself, so it was made or changed by hand: use another checkpoint."
    return CheckpointCorrupt(msg, path=path)


def _unknown_format(values: dict[str, Any], path: str) -> StoreError:
    known = f"{', '.join(map(str, earlier.FORMATS))} and {FORMAT}"
    by = str(values.get("skerry_version"))
    msg = (
        f"{path} has checkpoint format {str(values.get('format'))[:8]!r}, this release reads"
        f" {known}: use skerry {by if VERSION.fullmatch(by) else 'of another release'}."
    )
    return StoreError(msg)
