"""Rebuilding the global parameters from the log: the syncer's own arithmetic, compared bit by bit.

One fragment at a time, each from genesis or from a checkpoint, with the contributions that the
window still holds, in the commits' own order and with their own weights. After each version the
digest must be the one that was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from skerry.algorithm import fragments
from skerry.algorithm.backend import cpu
from skerry.errors import Diverged, StateLost
from skerry.log.state import MASTER, read_manifest
from skerry.protocol.chunks import vector_digest
from skerry.protocol.messages import Commit, is_from_checkpoint
from skerry_tools.audit.log import newest, read
from skerry_tools.audit.moment import ReplayMoment, survey
from skerry_tools.audit.payloads import payloads
from skerry_tools.audit.whatif import OUTER, Branch, FragmentFold, Stored, WhatIfPolicy

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment
    from skerry_tools.audit.log import RunLog
    from skerry_tools.audit.moment import Survey
    from skerry_tools.audit.payloads import Arrived, Payloads
    from skerry_tools.audit.whatif import DriftCurve

    Vector = NDArray[np.float32]
    Sink = Callable[[Fragment, Vector], None]
    OnProgress = Callable[[str, int, int], None]


class Base(NamedTuple):
    """One fragment of a checkpoint: its version, its vectors by part name, and where it is from."""

    version: int
    vectors: Mapping[str, Vector]
    origin: str


Bases = Callable[[int], Base | None]
"""Gives the base of each fragment, asked for in their order; None: from genesis."""


def from_genesis(_fragment: int) -> Base | None:
    """Give no base: every fragment begins with its first version."""
    return None


@dataclass(frozen=True, slots=True)
class Difference:
    """A version whose replay is not what was committed."""

    fragment: int
    version: int
    sentence: str


@dataclass(frozen=True, slots=True)
class FragmentReplay:
    """One fragment: replayed from ``base`` (0: genesis) to ``reached``, of ``version`` wanted.

    ``stopped`` says why it did not get there, empty if it did. ``digest`` is that of the master.
    """

    fragment: int
    base: int
    version: int
    reached: int
    digest: int = 0
    stopped: str = ""
    curve: DriftCurve | None = None

    @property
    def whole(self) -> bool:
        return self.reached == self.version and not self.stopped


@dataclass(frozen=True, slots=True)
class Replayed:
    """What a replay did; ``sequence`` is the ledger's at the moment that was rebuilt."""

    run: str
    sequence: int
    survey: Survey
    fragments: tuple[FragmentReplay, ...]
    wrong: tuple[Difference, ...]

    @property
    def whole(self) -> bool:
        """Whether every fragment was rebuilt up to the moment asked for."""
        return all(f.whole for f in self.fragments)

    def require_whole(self) -> None:
        """Raise StateLost with the first reason why the replay could not reach its moment."""
        for result in self.fragments:
            if not result.whole:
                raise StateLost(result.stopped)


async def replay(
    log: RunLog,
    *,
    moment: ReplayMoment | None = None,
    bases: Bases = from_genesis,
    known: Survey | None = None,
    policy: WhatIfPolicy | None = None,
    sink: Sink | None = None,
    on_progress: OnProgress | None = None,
) -> Replayed:
    """Rebuild the parameters as they were at a moment, and compare every version on the way.

    Where the window has dropped what a fragment needs, its result says so.

    Args:
        log: the run's log.
        moment: None: the newest commits.
        bases: where each fragment begins.
        known: the survey for that moment, where the caller has made it already.
        policy: also fold the same contributions under another policy, and measure the drift.
        sink: takes each fragment that was rebuilt whole, or its what-if where there is a policy.
        on_progress: hears what is done, how much, and of how much.

    """
    found = known or await survey(log, moment or ReplayMoment())
    done: list[FragmentReplay] = []
    wrong: list[Difference] = []
    for fragment in log.plan.fragments:
        worker = _worker(log, fragment, found, policy, wrong)
        result = await worker.run(bases(fragment.index))
        done.append(result)
        if sink is not None and result.whole:
            fold = worker.branch.fold if worker.branch else worker.fold
            await asyncio.to_thread(sink, fragment, fold.master)
        if on_progress is not None:
            on_progress("fragments", len(done), len(log.plan.fragments))
    return Replayed(log.run, found.sequence, found, tuple(done), tuple(wrong))


def _worker(
    log: RunLog,
    fragment: Fragment,
    found: Survey,
    policy: WhatIfPolicy | None,
    wrong: list[Difference],
) -> _Worker:
    averaged = fragments.averaged(log.plan, fragment)

    def fold(under: WhatIfPolicy) -> FragmentFold:
        return FragmentFold(under.make_outer(log.config, log.plan), fragment, averaged)

    branch = Branch(policy, log.config, fold(policy)) if policy else None
    return _Worker(log, found, fold(WhatIfPolicy()), branch, wrong)


@dataclass(slots=True)
class _Worker:
    """The replay of one fragment, and its what-if; ``version`` is how far it has come."""

    log: RunLog
    survey: Survey
    fold: FragmentFold
    branch: Branch | None
    wrong: list[Difference]
    version: int = 0
    begun: int = 0

    @property
    def index(self) -> int:
        return self.fold.fragment.index

    async def run(self, base: Base | None) -> FragmentReplay:
        wanted = self.survey.versions.get(self.index, 0)
        self.begun = base.version if base else 0
        if problem := self._unfit(base, wanted):
            return FragmentReplay(self.index, self.begun, wanted, self.begun, stopped=problem)
        if base is not None:
            leaves = {
                name.removeprefix(OUTER): vector
                for name, vector in base.vectors.items()
                if name.startswith(OUTER)
            }
            self._begin(base.vectors[MASTER], leaves, base.version)
        stopped = await self._fold(wanted)
        digest = vector_digest(self.fold.master) if self.version else 0
        curve = self.branch.curve() if self.branch else None
        result = FragmentReplay(
            self.index, self.begun, wanted, self.version, digest, stopped, curve
        )
        if result.whole:
            await self._compare_outer()
        return result

    def _unfit(self, base: Base | None, wanted: int) -> str:
        if not wanted:
            return f"Fragment {self.index} had no version yet at that moment."
        if self.begun < self.survey.reach[self.index].base:
            return self.survey.lost_sentence(self.index)
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

    async def _fold(self, wanted: int) -> str:
        """Go through the commits; return why it stopped before the version that is wanted."""
        commits = _commits(self.log, self.index, self.survey.sequence)
        async with payloads(self.log, self.index) as source, aclosing(commits):
            async for stored, following in commits:
                if stored.commit.version > wanted:
                    break
                if stopped := await self._step(stored, following, source):
                    return stopped
        return ""

    async def _step(self, stored: Stored, following: Stored | None, source: Payloads) -> str:
        """Replay one commit and compare; ``following`` is the next one, where there is one."""
        commit = stored.commit
        if commit.version < self.begun:
            return ""
        if commit.version > self.begun and (stopped := await self._redo(stored, following, source)):
            return stopped
        if self.branch is None:
            source.forget(commit.contrib_floor)
        if problem := await asyncio.to_thread(self._difference, commit):
            text = f"Fragment {self.index}, version {commit.version}{problem}"
            self.wrong.append(Difference(self.index, commit.version, text))
            return text
        return ""

    async def _redo(self, stored: Stored, following: Stored | None, source: Payloads) -> str:
        """Do what the syncer did; return why that is impossible, or nothing."""
        commit = stored.commit
        inputs: list[Arrived] = []
        for item in commit.consumed:
            key = (item.learner, item.incarnation, item.identity)
            found = await source.fetch(key, item.sequence_last)
            if found is None:
                return (
                    f"Contribution {item.identity} of learner {item.learner} (incarnation"
                    f" {item.incarnation}), which version {commit.version} of fragment"
                    f" {commit.fragment} consumed, is not in the window any more: name a checkpoint"
                    f" of version {commit.version} or newer with --from."
                )
            inputs.append(found)
        if commit.version == 1 and not is_from_checkpoint(commit):
            first = inputs[0].contribution
            negated = await asyncio.to_thread(cpu().dequantise, first.scheme, first.planes)
            self._begin(np.float32(0) - negated, None, 1)
            return ""
        if inputs:
            shares = [item.weight for item in commit.consumed]
            merged = [item.merged for item in inputs]
            method = self.log.config.sync.merge
            try:
                await asyncio.to_thread(self.fold.merge, merged, shares, method)
            except (Diverged, ValueError) as error:
                return f"Fragment {commit.fragment}, version {commit.version}: {error}."
        self.version = commit.version
        if self.branch is not None:
            await self.branch.round(stored, following, inputs, source, self.fold.master)
        return ""

    def _difference(self, commit: Commit) -> str:
        """Return how master and parameters differ from what was committed, or nothing."""
        if vector_digest(self.fold.master) != commit.master_digest:
            if commit.version == self.begun:
                return (
                    ": the checkpoint does not hold what this log committed: name one of this run."
                )
            return " does not replay to its digest."
        codec, scheme = cpu(), self.log.config.sync.global_scheme
        params = codec.dequantise(scheme, codec.quantise(scheme, self.fold.master))
        if vector_digest(params) != commit.params_digest:
            return ": what learners read is not its master."
        return ""

    async def _compare_outer(self) -> None:
        """Compare the outer optimizer's state where the log still holds that of this version."""
        manifest = await read_manifest(self.log.bus, self.log.run, self.log.plan, self.index)
        if manifest is None or manifest.commit.version != self.version:
            return
        leaves = self.fold.outer.leaves(self.fold.state).items()
        found = {OUTER + name: vector_digest(vector) for name, vector in leaves}
        held = {part.name: part.digest for part in manifest.parts if part.name.startswith(OUTER)}
        for name in sorted({*held, *found}):
            if held.get(name) != found.get(name):
                text = f"Fragment {self.index}, version {self.version}: {name} does not replay."
                self.wrong.append(Difference(self.index, self.version, text))


async def _commits(
    log: RunLog, fragment: int, through: int
) -> AsyncGenerator[tuple[Stored, Stored | None]]:
    """Yield each commit of one fragment up to ``through``, with the next one if there is one."""
    pattern = log.subjects.commit(fragment)
    records = read(log.bus, pattern, await newest(log.bus, pattern))
    held: Stored | None = None
    async with aclosing(records):
        async for record in records:
            value = log.entry(record).value
            stored = Stored(value, record.time_ns) if isinstance(value, Commit) else None
            if held is not None and stored is not None:
                yield held, stored
            if record.sequence > through:
                held = None if stored is not None else held
                break
            held = stored or held
    if held is not None:
        yield held, None
