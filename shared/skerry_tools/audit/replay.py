"""Rebuilding the global parameters from the log: the syncer's own arithmetic, compared bit by bit.

One fragment at a time, each from genesis or from a checkpoint, with the contributions that the
window still holds, in the commits' own order and with their own weights. After each version the
digest must be the one that was committed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm import fragments
from skerry.algorithm.backend import cpu
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import merge_and_apply
from skerry.errors import Diverged
from skerry.log.state import read_manifest
from skerry.protocol.codec import vector_digest
from skerry.protocol.messages import Commit, is_from_checkpoint
from skerry_tools.audit.branch import Branch, Policy, Stored
from skerry_tools.audit.log import newest, read
from skerry_tools.audit.payloads import payloads
from skerry_tools.audit.replayed import (
    Base,
    Bases,
    Difference,
    FragmentReplay,
    Replayed,
    from_genesis,
    lost_sentence,
)
from skerry_tools.audit.survey import survey
from skerry_tools.audit.target import Target
from skerry_tools.audit.window import read_window

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment
    from skerry.algorithm.outer import Outer
    from skerry.protocol.messages import Manifest
    from skerry_tools.audit.log import Entry, Log
    from skerry_tools.audit.payloads import Arrived, Payloads
    from skerry_tools.audit.survey import Survey

    Vector = NDArray[np.float32]
    Sink = Callable[[Fragment, Vector], None]
    OnProgress = Callable[[str, int, int], None]

MASTER = "master"
OUTER = "outer."


@dataclass(slots=True)
class _Track:
    """The fold of one fragment, as far as it has come."""

    outer: Outer
    fragment: Fragment
    averaged: Sequence[bool]
    version: int = 0
    master: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    state: object = None

    def begin(self, master: Vector, leaves: Mapping[str, Vector] | None, version: int) -> None:
        self.master, self.version = master, version
        self.state = self.outer.restore(master, leaves) if leaves else self.outer.init(master)

    def merge(self, inputs: Sequence[Arrived], commit: Commit, log: Log) -> None:
        """Do what the syncer did; Diverged if this time it is not finite."""
        merged = [_merged(item) for item in inputs]
        shares = [item.weight for item in commit.consumed]
        method = log.config.sync.merge
        self.master, self.state, _ = merge_and_apply(
            self.outer,
            self.master,
            self.state,
            merged,
            shares,
            method,
            self.fragment,
            self.averaged,
        )


async def replay(
    log: Log,
    *,
    target: Target | None = None,
    bases: Bases = from_genesis,
    known: Survey | None = None,
    policy: Policy | None = None,
    sink: Sink | None = None,
    on_progress: OnProgress | None = None,
) -> Replayed:
    """Rebuild the parameters as they were at a moment, and compare every version on the way.

    What cannot be rebuilt because the window has dropped it is told per fragment; nothing is
    invented.

    Args:
        log: the run's log.
        target: the moment; None: the newest commits.
        bases: where each fragment begins.
        known: the survey for that target, where the caller has made it already.
        policy: also fold the same contributions under another policy, and measure the drift.
        sink: takes each fragment that was rebuilt whole, or its what-if where there is a policy.
        on_progress: hears what is done, how much, and of how much.

    """
    found = known or await survey(log, target or Target(), await read_window(log))
    done: list[FragmentReplay] = []
    wrong: list[Difference] = []
    for fragment in log.plan.fragments:
        worker = _Worker(log, fragment, found, policy, wrong)
        result, vector = await worker.run(bases(fragment.index))
        done.append(result)
        if sink is not None and result.whole and vector is not None:
            await asyncio.to_thread(sink, fragment, vector)
        if on_progress is not None:
            on_progress("fragments", len(done), len(log.plan.fragments))
    return Replayed(log.run, found.sequence, found, tuple(done), tuple(wrong))


@dataclass(slots=True)
class _Worker:
    """The replay of one fragment."""

    log: Log
    fragment: Fragment
    survey: Survey
    policy: Policy | None
    wrong: list[Difference]

    async def run(self, base: Base | None) -> tuple[FragmentReplay, Vector | None]:
        index = self.fragment.index
        wanted = self.survey.versions.get(index, 0)
        if not wanted:
            text = f"Fragment {index} had no version yet at that moment."
            return FragmentReplay(index, 0, 0, 0, 0, text), None
        begun = base.version if base else 0
        if problem := self._unfit(base, wanted):
            return FragmentReplay(index, begun, wanted, begun, 0, problem), None
        track = self._track(base)
        branch = self._branch(track, base)
        stopped = await self._fold(track, branch, wanted, begun)
        curve = branch.curve() if branch else None
        digest = vector_digest(track.master) if track.version else 0
        result = FragmentReplay(index, begun, wanted, track.version, digest, stopped, curve)
        if result.whole:
            await self._compare_outer(track)
        return result, branch.master if branch else track.master

    def _unfit(self, base: Base | None, wanted: int) -> str:
        index, begun = self.fragment.index, base.version if base else 0
        if begun < self.survey.reach[index].base:
            return lost_sentence(index, self.survey)
        if base is not None and begun > wanted:
            return (
                f"{base.origin} holds version {begun} of fragment {index}, and version {wanted} was"
                " asked for: name an older checkpoint."
            )
        return ""

    def _track(self, base: Base | None) -> _Track:
        outer = Policy().make_outer(self.log.config, self.log.plan)
        track = _Track(outer, self.fragment, fragments.averaged(self.log.plan, self.fragment))
        if base is not None:
            track.begin(base.vectors[MASTER], outer_leaves(base.vectors), base.version)
        return track

    def _branch(self, track: _Track, base: Base | None) -> Branch | None:
        if self.policy is None:
            return None
        branch = Branch(self.policy, self.log.config, self.log.plan, track.fragment, track.averaged)
        if base is not None:
            branch.begin(track.master, outer_leaves(base.vectors), base.version)
        return branch

    async def _fold(self, track: _Track, branch: Branch | None, wanted: int, begun: int) -> str:
        """Go through the commits; return why it stopped before the version that is wanted."""
        index = self.fragment.index
        commits = _commits(self.log, index, self.survey.sequence)
        async with payloads(self.log, index) as source, aclosing(commits):
            held: Stored | None = None
            async for stored in commits:
                if held is not None:
                    stop = await self._step(track, branch, held, stored, source, begun)
                    if stop:
                        return stop
                held = stored if stored.commit.version <= wanted else None
                if held is None:
                    break
            if held is not None:
                return await self._step(track, branch, held, None, source, begun)
        return ""

    async def _step(
        self,
        track: _Track,
        branch: Branch | None,
        stored: Stored,
        following: Stored | None,
        source: Payloads,
        begun: int,
    ) -> str:
        """Replay one commit and compare; ``following`` is the next one, where there is one."""
        commit = stored.commit
        if commit.version < begun:
            return ""
        if commit.version > begun and (
            stop := await self._redo(track, branch, stored, following, source)
        ):
            return stop
        if branch is None:
            source.forget(commit.contrib_floor)
        return await asyncio.to_thread(self._compare, track, commit, begun)

    async def _redo(
        self,
        track: _Track,
        branch: Branch | None,
        stored: Stored,
        following: Stored | None,
        source: Payloads,
    ) -> str:
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
            await asyncio.to_thread(_genesis, track, inputs[0])
            if branch is not None:
                branch.begin(track.master, None, 1)
            return ""
        if inputs:
            try:
                await asyncio.to_thread(track.merge, inputs, commit, self.log)
            except (Diverged, ValueError) as error:
                return f"Fragment {commit.fragment}, version {commit.version}: {error}."
        track.version = commit.version
        if branch is not None:
            await branch.round(stored, following, inputs, source, track.master)
        return ""

    def _compare(self, track: _Track, commit: Commit, begun: int) -> str:
        """Compare master and parameters with what was committed; return why not to go on."""
        index, version = commit.fragment, commit.version
        if vector_digest(track.master) != commit.master_digest:
            text = (
                f"Fragment {index}, version {version}: the checkpoint does not hold what this log"
                " committed: name one of this run."
                if version == begun
                else f"Fragment {index}, version {version} does not replay to its digest."
            )
            self.wrong.append(Difference(index, version, text))
            return text
        codec, scheme = cpu(), self.log.config.sync.global_scheme
        params = codec.dequantise(scheme, codec.quantise(scheme, track.master))
        if vector_digest(params) != commit.params_digest:
            text = f"Fragment {index}, version {version}: what learners read is not its master."
            self.wrong.append(Difference(index, version, text))
            return text
        return ""

    async def _compare_outer(self, track: _Track) -> None:
        """Compare the outer optimizer's state where the log still holds that of this version."""
        index = self.fragment.index
        manifest = await read_manifest(self.log.bus, self.log.run, self.log.plan, index)
        if manifest is None or manifest.commit.version != track.version:
            return
        for name in _outer_differences(track, manifest):
            text = f"Fragment {index}, version {track.version}: {name} does not replay."
            self.wrong.append(Difference(index, track.version, text))


def outer_leaves(vectors: Mapping[str, Vector]) -> dict[str, Vector]:
    """Return the outer optimizer's vectors by their own names."""
    return {k.removeprefix(OUTER): v for k, v in vectors.items() if k.startswith(OUTER)}


def _outer_differences(track: _Track, manifest: Manifest) -> list[str]:
    leaves = {OUTER + name: vector for name, vector in track.outer.leaves(track.state).items()}
    told = {part.name: part.digest for part in manifest.parts if part.name.startswith(OUTER)}
    found = {name: vector_digest(vector) for name, vector in leaves.items()}
    return sorted(name for name in {*told, *found} if told.get(name) != found.get(name))


def _merged(item: Arrived) -> OuterGradient:
    contribution = item.contribution
    return OuterGradient(contribution.scheme, contribution.planes, contribution.header.norms)


def _genesis(track: _Track, item: Arrived) -> None:
    negated = cpu().dequantise(item.contribution.scheme, item.contribution.planes)
    track.begin(np.float32(0) - negated, None, 1)


async def _commits(log: Log, fragment: int, through: int) -> AsyncGenerator[Stored]:
    """Yield the commits of one fragment, one more than ``through`` so that a next one is known."""
    pattern = log.subjects.commit(fragment)
    records = read(log.bus, pattern, await newest(log.bus, pattern))
    async with aclosing(records):
        async for record in records:
            entry: Entry = log.entry(record)
            if isinstance(entry.value, Commit):
                yield Stored(entry.value, record.time_ns)
            if record.sequence > through:
                return
