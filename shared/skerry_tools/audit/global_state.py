"""The global state against the ledger: the newest manifests, and every byte that they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm.fragments import BLOCK, Fragment
from skerry.algorithm.outer import outer_of
from skerry.errors import Overtaken, StateLost, WireError
from skerry.log.global_fragments import GlobalReader
from skerry.log.ledger import commit_of
from skerry.log.state import Meters, read_manifest, read_part
from skerry.protocol.messages import Manifest
from skerry.protocol.parts import DELTA, KEYFRAME, MASTER, OUTER, kind_of, newest
from skerry.protocol.records import encode, read
from skerry_tools.audit.accounts import Violation, What
from skerry_tools.audit.survey import Survey

if TYPE_CHECKING:
    from skerry_tools.audit.log import RunLog

    OnBytes = Callable[[int], None]

ATTEMPTS = 50


@dataclass(slots=True)
class Ends:
    """The manifests as they were before the ledger was read, and the ledger's records of them.

    A run may go on meanwhile: a manifest is compared with the commit of its own version, wherever
    in the ledger that lies.
    """

    before: dict[int, Manifest] = field(default_factory=dict[int, Manifest])
    unreadable: list[Violation] = field(default_factory=list[Violation])
    recorded: dict[int, bytes] = field(default_factory=dict[int, bytes])

    @classmethod
    async def read(cls, log: RunLog) -> Ends:
        """Read every fragment's manifest."""
        ends = cls()
        for index in range(len(log.plan.fragments)):
            record = await log.bus.last(log.shard_of(index).manifest(index))
            if record is None:
                continue
            try:
                manifest = read(Manifest, record, run=log.run, plan_digest=log.plan.digest)
            except WireError as error:
                text = f"the manifest cannot be read ({error})"
                ends.unreadable.append(_state(index, -1, text))
            else:
                ends.before[index] = manifest
        return ends

    def commit(self, fragment: int, version: int, payload: bytes) -> None:
        """Take a record of the ledger."""
        held = self.before.get(fragment)
        if held is not None and held.commit.version == version:
            self.recorded[fragment] = payload

    def compare(self, versions: dict[int, int]) -> tuple[list[Violation], list[str]]:
        """Return what is wrong with a ledger that ends at ``versions``, and what a syncer mends."""
        wrong, notes = list(self.unreadable), list[str]()
        for fragment, manifest in sorted(self.before.items()):
            version, end = manifest.commit.version, versions.get(fragment, 0)
            if fragment in self.recorded:
                if self.recorded[fragment] != encode(manifest.commit):
                    text = f"the ledger tells of version {version} otherwise than the manifest"
                    wrong.append(_state(fragment, version, text))
            elif version == end + 1:
                notes.append(
                    f"Fragment {fragment}, version {version} is committed and not in the ledger"
                    " yet: the next syncer appends it."
                )
            else:
                text = f"the manifest is of version {version}, the ledger ends at {end}"
                wrong.append(_state(fragment, version, text))
        return wrong, notes


async def check_parts(
    log: RunLog, known: Survey, on_bytes: OnBytes | None = None
) -> tuple[list[Violation], list[str]]:
    """Read all of the global state, part by part; it must be no older than the ledger.

    Its parts must be those that the run's settings need, and the vectors that its commits tell of.
    Returns also where what was contributed since a snapshot is not in the window any more: the next
    commit of the fragment repairs that with another snapshot.
    """
    found = [
        await _check_fragment(log, fragment, known, on_bytes) for fragment in log.plan.fragments
    ]
    wrong = [problem for problem in found if isinstance(problem, Violation)]
    return wrong, [note for note in found if isinstance(note, str)]


async def _check_fragment(
    log: RunLog, fragment: Fragment, known: Survey, on_bytes: OnBytes | None
) -> Violation | str | None:
    index, seen, held = fragment.index, -1, 0
    wanted = known.versions.get(index, 0)
    blocks = _wanted_blocks(log, fragment)
    for _ in range(ATTEMPTS):
        try:
            manifest = await read_manifest(log.bus, log.run, log.plan, index)
            held = manifest.commit.version if manifest else 0
            if held < wanted:
                there = f"is at version {held}" if held else "is not there at all"
                return _state(index, wanted, f"the state {there}, the ledger at {wanted}")
            if manifest is None:
                break
            gone = "a chunk that its manifest names is gone" if held == seen else ""
            if text := gone or contradiction(manifest, blocks):
                return _state(index, held, text)
            where = log.bus, log.run, log.plan
            for part in manifest.parts:
                await read_part(*where, manifest, part, meters=Meters(on_bytes))
            await GlobalReader(*where).read(manifest, Meters(on_bytes))
        except Overtaken:
            seen = held
        except StateLost as error:
            return Violation(What.STATE, str(error), index, held)
        except WireError as error:
            return _state(index, wanted, f"the state cannot be read ({error})")
        else:
            return await _check_snapshot(log, manifest, known)
    return None


async def _check_snapshot(log: RunLog, manifest: Manifest, known: Survey) -> Violation | str | None:
    """Check that the newest snapshot is what the ledger says, and what came since can be merged."""
    master, commit = newest(manifest, MASTER), manifest.commit
    assert master is not None  # it has its blocks
    index, version, first = commit.fragment, commit.version, master.version + 1
    if {p.version for p in manifest.parts if kind_of(p.name) == "snapshot"} != {master.version}:
        return _state(index, version, "its snapshot is of several versions")
    if first <= version:
        earlier = await commit_of(log.bus, log.run, index, master.version)
        if earlier is None or earlier[1].master_digest != master.digest:
            text = f"its snapshot is not what the ledger says of version {master.version}"
            return _state(index, version, text)
    if first > (last := known.base.get(index, 0)):
        return None
    versions = f"version {last}" if first == last else f"versions {first} to {last}"
    return (
        f"Fragment {index}, {versions}: the window has dropped contributions that a syncer has to"
        f" merge again, for the newest snapshot is of version {master.version}: one that takes over"
        " goes on from what learners hold, and the next commit stores another snapshot. Raise"
        " log.window_bytes or log.window_s."
    )


def _wanted_blocks(log: RunLog, fragment: Fragment) -> dict[str, int]:
    """Return, by name, how many blocks each part must have by the run's settings.

    The parts of an outer optimizer that a person's own function builds are left to a replay: its
    code is not run for a mere look.
    """
    whole = fragment.padded_size // BLOCK
    parts: dict[str, int] = {KEYFRAME: whole, MASTER: whole}
    if ":" in log.config.outer.preset:
        return parts
    outer = outer_of(log.config, log.plan)
    leaves = outer.leaves(outer.init(np.zeros(fragment.padded_size, np.float32)))
    return parts | {OUTER + name: vector.size // BLOCK for name, vector in leaves.items()}


def contradiction(manifest: Manifest, blocks: Mapping[str, int]) -> str:
    """Return how a manifest's parts are not what its commit and the settings say; empty: they are.

    Without this the ledger could name any digest: bytes are compared with their part's alone.
    """
    commit, version = manifest.commit, manifest.commit.version
    if len({(part.name, part.version) for part in manifest.parts}) != len(manifest.parts):
        return "the manifest names a part twice"
    if any(part.version > version for part in manifest.parts):
        return "the manifest names a part of a later version"
    held = {name: newest(manifest, name) for name in sorted(blocks)}
    for name, part in held.items():
        if part is None or part.blocks != blocks[name]:
            has = f"{part.blocks} blocks and not {blocks[name]}" if part else "no blocks"
            return f"its part {name!r} has {has}"
    shared = {
        p.digest for p in manifest.parts if p.name in {DELTA, KEYFRAME} and p.version == version
    }
    if shared != {commit.params_digest}:
        return "its global fragment is another vector than the commit tells of"
    master = held.get(MASTER)
    if master and master.version == version and master.digest != commit.master_digest:
        return f"its part {MASTER!r} is another vector than the commit tells of"
    return ""


def _state(fragment: int, version: int, text: str) -> Violation:
    at = f", version {version}" if version >= 0 else ""
    sentence = (
        f"Fragment {fragment}{at}: {text}: restore the run from a checkpoint with"
        " `skerry checkpoints restore`."
    )
    return Violation(What.STATE, sentence, fragment, version)
