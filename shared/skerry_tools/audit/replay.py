"""Rebuilding the global parameters from the log: the syncer's own arithmetic, compared bit by bit.

One fragment at a time, each from genesis or from a checkpoint, with the contributions that the
window still holds, in the commits' own order and with their own weights. After each version the
digest must be the one that was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import closed_loop
from skerry.algorithm.planes import Planes
from skerry.errors import ContributionGone, Diverged, HistoryBroken, RunMismatch, StateLost
from skerry.log.reading import read_now
from skerry.log.replay import FragmentFold, Payloads, redo
from skerry.log.state import read_manifest
from skerry.protocol.chunks import VectorHash, vector_digest
from skerry.protocol.contribution import ContributionAssembler, id_of
from skerry.protocol.messages import Commit, RefusalCause
from skerry.protocol.parts import KEYFRAME, MASTER, OUTER
from skerry.protocol.parts import newest as newest_part
from skerry.settings.local import StoreSettings
from skerry.store import checkpoint
from skerry.store.checkpoint import SavedFragment
from skerry.store.finding import FROM_ENVIRONMENT, locate
from skerry_tools.audit.accounts import Violation, What
from skerry_tools.audit.log import OnProgress, RunLog
from skerry_tools.audit.survey import ReplayMoment, Survey, survey
from skerry_tools.audit.whatif import Branch, Drift, WhatIfPolicy, fold_of

Vector = NDArray[np.float32]
Sink = Callable[[FragmentFold, Commit], None]
T = TypeVar("T")


class Base(NamedTuple):
    """One fragment of a checkpoint: its snapshot's version, its vectors by part name, its origin.

    ``shared`` is the version of which its keyframe is what learners had.
    """

    version: int
    vectors: Mapping[str, Vector]
    origin: str
    shared: int


Bases = Callable[[int], Base | None]
"""Gives the base of each fragment, asked for in their order; None: from genesis."""


def from_genesis(_fragment: int) -> Base | None:
    """Give no base: every fragment begins with its first version."""
    return None


def bases_of(
    where: str | Path | None, log: RunLog, access: StoreSettings = FROM_ENVIRONMENT
) -> Bases:
    """Return the fragments of a checkpoint, or of the newest one of a run's folder, as bases.

    Each is read and verified when it is asked for. Without a checkpoint there is none: all begins
    at genesis. Raises StoreError where there is no checkpoint, RunMismatch for one of another
    model.
    """
    if where is None:
        return from_genesis
    store, name = locate(where, access)
    origin = store.where(name)
    if checkpoint.read_manifest(store, name).plan_digest != log.plan.digest:
        msg = (
            f"{origin} holds other parameters than run {log.run!r}: name a checkpoint of that run."
        )
        raise RunMismatch(msg)
    saved: Iterator[tuple[SavedFragment, Mapping[str, Vector]]]
    saved = iter(checkpoint.fragments(store, name))

    def base(fragment: int) -> Base | None:
        for held, vectors in saved:
            if held.commit.fragment == fragment and held.snapshot is not None:
                return Base(held.snapshot.commit.version, vectors, origin, held.commit.version)
        return None

    return base


@dataclass(frozen=True, slots=True)
class FragmentReplay:
    """One fragment: replayed from ``base`` (0: genesis) to ``reached``, of ``version`` wanted.

    ``stopped`` says why it did not get there, empty if it did. ``digest`` is that of the master.
    ``drift`` is that of a what-if, which began ``cold`` without the optimizer's state.
    """

    fragment: int
    base: int
    version: int
    reached: int
    digest: int = 0
    stopped: str = ""
    drift: Drift | None = None
    cold: bool = False

    @property
    def whole(self) -> bool:
        return self.reached == self.version and not self.stopped


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did; ``wrong`` are versions that are not what was committed."""

    run: str
    survey: Survey
    fragments: tuple[FragmentReplay, ...]
    wrong: tuple[Violation, ...]

    @property
    def whole(self) -> bool:
        """Whether every fragment was rebuilt up to the moment asked for."""
        return all(f.whole for f in self.fragments)

    def require_whole(self) -> None:
        """Raise HistoryBroken for the first version that is not what was committed.

        Raises StateLost with the first reason why the replay could not reach its moment.
        """
        if self.wrong:
            raise HistoryBroken(self.wrong[0].sentence)
        for result in self.fragments:
            if not result.whole:
                raise StateLost(result.stopped)


async def replay(
    log: RunLog,
    *,
    known: Survey | None = None,
    bases: Bases = from_genesis,
    policy: WhatIfPolicy | None = None,
    sink: Sink | None = None,
    on_progress: OnProgress = lambda _what, _done, _of: None,
) -> Replayed:
    """Rebuild the parameters as they were at a moment, and compare every version on the way.

    Where the window has dropped what a fragment needs, its result says so.

    Args:
        log: the run's log.
        known: the survey for the moment; by default for the newest commits.
        bases: where each fragment begins.
        policy: also fold the same contributions under another policy, and measure the drift.
        sink: takes each fragment that was rebuilt whole, or its what-if where there is a policy,
            with its last commit.
        on_progress: hears of each fragment.

    """
    found = known or await survey(log, ReplayMoment())
    done: list[FragmentReplay] = []
    wrong: list[Violation] = []
    for fragment in log.plan.fragments:
        branch = None if policy is None else Branch.of(log, fragment, policy)
        worker = _Worker(log, found, fold_of(log.config, log.plan, fragment), branch)
        result = await worker.run(bases(fragment.index))
        done.append(result)
        wrong += worker.wrong
        if sink is not None and worker.last is not None and result.whole:
            fold = worker.branch.fold if worker.branch else worker.fold
            await asyncio.to_thread(sink, fold, worker.last)
        on_progress("fragments", len(done), len(log.plan.fragments))
    return Replayed(log.run, found, tuple(done), tuple(wrong))


@dataclass(slots=True)
class _Worker:
    """The replay of one fragment, and its what-if; ``version`` is how far it has come.

    ``shared`` is the global fragment that learners had, in the run's global scheme; None where the
    replay begins in the middle of a run, up to the version of which its ``base`` holds it.
    """

    log: RunLog
    survey: Survey
    fold: FragmentFold
    branch: Branch | None
    wrong: list[Violation] = field(default_factory=list[Violation])
    version: int = 0
    begun: int = 0
    base: Base | None = None
    shared: Planes | None = None
    last: Commit | None = None

    @property
    def index(self) -> int:
        return self.fold.fragment.index

    async def run(self, base: Base | None) -> FragmentReplay:
        wanted = self.survey.versions.get(self.index, 0)
        self.base, self.begun = base, base.version if base else 0
        if problem := self._unfit(base, wanted):
            return FragmentReplay(self.index, self.begun, wanted, self.begun, stopped=problem)
        if base is not None:
            self._begin(base.vectors[MASTER], _leaves(base.vectors), base.version)
        stopped = await self._replay(wanted)
        if not stopped and self.version == wanted:
            await self._compare_outer()
        return FragmentReplay(
            self.index,
            self.begun,
            wanted,
            self.version,
            vector_digest(self.fold.master) if self.version else 0,
            stopped,
            self.branch.drift(self.fold.master) if self.branch and self.version else None,
            self.branch is not None and self.branch.cold,
        )

    def _unfit(self, base: Base | None, wanted: int) -> str:
        if not wanted:
            return f"Fragment {self.index} had no version yet at that moment."
        if self.begun < self.survey.base[self.index]:
            return self.survey.unreachable(self.index)
        if base is not None and self.begun > wanted:
            return (
                f"{base.origin} holds version {self.begun} of fragment {self.index}, and version"
                f" {wanted} was asked for: name an older checkpoint."
            )
        return ""

    def _begin(self, master: Vector, leaves: Mapping[str, Vector] | None, version: int) -> None:
        self.version = version
        self.fold.begin(master, leaves)
        if self.branch is not None:
            self.branch.begin(master, leaves)

    async def _replay(self, wanted: int) -> str:
        """Go through the commits; return why it stopped before the version that is wanted."""
        log, subjects = self.log, self.log.subjects
        pattern = log.shard_of(self.index).contribution(self.index)
        records = read_now(log.bus, pattern)
        entries = log.ledger(self.survey.sequence, subjects.commit(self.index))
        async with aclosing(records), aclosing(entries):
            source = Payloads(records, ContributionAssembler(log.run, log.plan))
            async for entry in entries:
                commit = entry.value
                if not isinstance(commit, Commit) or commit.version < self.begun:
                    continue
                if commit.version > wanted:
                    break
                if commit.version > self.begun and (stopped := await self._redo(commit, source)):
                    return stopped
                source.forget(commit.contrib_floor)
                self.last = commit
                if problem := await asyncio.to_thread(self._difference, commit):
                    return self._note(f"version {commit.version}{problem}")
        return ""

    def _note(self, text: str) -> str:
        """Note that a version is not what was committed, and return the sentence."""
        sentence = f"Fragment {self.index}, {text}"
        self.wrong.append(Violation(What.REPLAY, sentence, self.index, self.version))
        return sentence

    async def _redo(self, commit: Commit, source: Payloads) -> str:
        """Do what the syncer did; return why that is impossible, or nothing."""
        try:
            inputs = await redo(self.fold, commit, source)
        except ContributionGone as error:
            return f"{error}: name a checkpoint of version {commit.version} or newer with --from."
        except (Diverged, ValueError) as error:
            return f"Fragment {commit.fragment}, version {commit.version}: {error}."
        if commit.version == 1 and self.branch is not None:
            self.branch.begin(self.fold.master, None)
        self.version = commit.version
        if commit.version > 1 and self.branch is not None:
            stale = [id_of(r) for r in commit.refused if r.cause is RefusalCause.TOO_STALE]
            late = [await source.fetch(key, commit.contrib_floor) for key in stale]
            taken = [*inputs, *(c for c in late if c is not None)]
            await asyncio.to_thread(self.branch.round, commit, taken)
        return ""

    def _difference(self, commit: Commit) -> str:
        """Return how master and parameters differ from what was committed, or nothing."""
        other = ": the checkpoint does not hold what this log committed: name one of this run."
        if vector_digest(self.fold.master) != commit.master_digest:
            return other if commit.version == self.begun else " does not replay to its digest."
        sync, known = self.log.config.sync, self.shared
        if self.base is not None and commit.version == self.base.shared:
            vector = self.base.vectors[KEYFRAME]
            self.shared = closed_loop.begin(sync.global_scheme, vector)
            return "" if vector_digest(vector) == commit.params_digest else other
        # One that is no delta comes after a checkpoint, or where a syncer found no keyframe.
        for held in (known, None) if known is not None else (None,):
            schemes = sync.global_scheme, sync.delta_scheme
            new = closed_loop.follow(*schemes, held, self.fold.master, VectorHash)
            if new.digest == commit.params_digest:
                self.shared = new.held
                return ""
        if known is None and commit.version > 1 and sync.delta_scheme != "none":
            return ""
        return ": what learners read is not its master."

    async def _compare_outer(self) -> None:
        """Compare the outer optimizer's state where the log still holds that of this version."""
        manifest = await read_manifest(self.log.bus, self.log.run, self.log.plan, self.index)
        stored = newest_part(manifest, MASTER) if manifest else None
        if manifest is None or stored is None or stored.version != self.version:
            return
        leaves = self.fold.outer.leaves(self.fold.state)
        found = {name: vector_digest(vector) for name, vector in leaves.items()}
        held = _leaves({part.name: part.digest for part in manifest.parts})
        for name in sorted({*held, *found}):
            if held.get(name) != found.get(name):
                self._note(f"version {self.version}: {OUTER}{name} does not replay.")


def _leaves(parts: Mapping[str, T]) -> dict[str, T]:
    """Return the parts of the outer optimizer by its own names."""
    return {n.removeprefix(OUTER): part for n, part in parts.items() if n.startswith(OUTER)}
