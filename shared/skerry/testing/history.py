"""Reads a run's whole log and checks what must be true of it, whatever was killed on the way."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from skerry.bus import ledger, state
from skerry.bus.contributions import Contribution, Inbox
from skerry.bus.state import StateWriter
from skerry.core import fragments
from skerry.core.backend import cpu
from skerry.core.fold import Contribution as Merged
from skerry.core.outer import make_outer, merge_and_apply
from skerry.settings import RunConfig
from skerry.wire.codec import vector_digest
from skerry.wire.messages import Commit, ContributionKind
from skerry.wire.records import decode, encode
from skerry.wire.subjects import Subjects

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from skerry.bus.base import Bus, Record
    from skerry.core.fragments import Plan
    from skerry.core.merge import Method
    from skerry.core.outer import Outer

Key = tuple[int, str, int, int]


@dataclass(frozen=True, slots=True)
class History:
    """What the log holds: commits in ledger order and whole contributions by key."""

    commits: tuple[Commit, ...]
    contributions: dict[Key, Contribution]
    violations: tuple[str, ...]


async def _records(bus: Bus, stream: str) -> list[Record]:
    infos = {info.name: info for info in await bus.streams()}
    info = infos[stream]
    found = [await bus.get(stream, s) for s in range(info.first_seq, info.last_seq + 1)]
    return [record for record in found if record is not None]


async def settle(bus: Bus, run: str) -> History:
    """Read the history of a run whose syncer is dead, after doing what the next one would first.

    Takes the fence, so that nothing can be committed meanwhile, and mends the ledger.
    """
    record = await ledger.read_run(bus, run)
    config = RunConfig.model_validate_json(record.config_json)
    plan = fragments.plan(record.leaves, record.fragments)
    writer = await StateWriter.acquire(bus, run, plan, holder="settle", now_ns=time.time_ns())
    await writer.recover()
    given = config.outer
    outer = make_outer(
        given.preset, lr=given.lr, momentum=given.momentum, h_steps=config.sync.h_steps
    )
    return await read_history(bus, run, plan, outer, config.sync.merge)


async def read_history(
    bus: Bus, run: str, plan: Plan, outer: Outer, method: Method = "average"
) -> History:
    """Return the run's history with every violation found in it.

    Checked: versions are contiguous, nothing is consumed twice, whatever lies at or below a
    commit's floor was consumed or refused, the ledger agrees with the manifests, and replaying
    the contributions gives the digests that the commits name.
    """
    subjects = Subjects(run)
    ledger_records = await _records(bus, subjects.stream("LEDGER"))
    commits = tuple(
        decode(Commit, record.payload, run=run)
        for record in ledger_records
        if ".ledger.commit." in record.subject
    )
    inbox = Inbox(run, plan)
    fed = [inbox.feed(r) for r in await _records(bus, subjects.stream("CONTRIB"))]
    whole = {_key(c): c for c in fed if isinstance(c, Contribution)}
    violations = [
        *_contiguous(commits),
        *_once(commits),
        *_resolved(commits, whole),
        *await _manifests(bus, run, plan, commits),
        *_replay(commits, whole, plan, outer, method),
    ]
    return History(commits, whole, tuple(violations))


def _key(contribution: Contribution) -> Key:
    told = contribution.header
    return told.fragment, told.learner, told.incarnation, told.identity


def _consumed(commit: Commit) -> list[Key]:
    return [(commit.fragment, c.learner, c.incarnation, c.identity) for c in commit.consumed]


def _of(commits: tuple[Commit, ...], fragment: int) -> list[Commit]:
    return [commit for commit in commits if commit.fragment == fragment]


def _contiguous(commits: tuple[Commit, ...]) -> list[str]:
    found: list[str] = []
    for fragment in sorted({c.fragment for c in commits}):
        versions = [c.version for c in _of(commits, fragment)]
        if versions != list(range(1, len(versions) + 1)):
            found.append(f"fragment {fragment}: versions {versions} are not contiguous")
    return found


def _once(commits: tuple[Commit, ...]) -> list[str]:
    keys = [key for commit in commits for key in _consumed(commit)]
    return [
        f"{key} was consumed {keys.count(key)} times" for key in set(keys) if keys.count(key) > 1
    ]


def _resolved(commits: tuple[Commit, ...], whole: dict[Key, Contribution]) -> list[str]:
    """Check every floor against what had been consumed or refused by then, not only the last."""
    found: list[str] = []
    for fragment in sorted({c.fragment for c in commits}):
        gradients = {
            key: c.sequence_last
            for key, c in whole.items()
            if key[0] == fragment and c.header.kind is not ContributionKind.GENESIS
        }
        consumed: set[Key] = set()
        refused = 0
        for commit in _of(commits, fragment):
            consumed.update(_consumed(commit))
            refused += len(commit.refused)
            floor = commit.contrib_floor
            left = [k for k, last in gradients.items() if last <= floor and k not in consumed]
            if len(left) > refused:
                found.append(
                    f"fragment {fragment}, version {commit.version}: {left} lie below the floor"
                    f" {floor}, unresolved"
                )
    return found


async def _manifests(bus: Bus, run: str, plan: Plan, commits: tuple[Commit, ...]) -> list[str]:
    manifests = await state.read_manifests(bus, run, plan)
    found: list[str] = []
    for fragment, manifest in manifests.items():
        mine = _of(commits, fragment)
        # As bytes: a loss that is not a number equals nothing, itself included.
        if not mine or encode(mine[-1]) != encode(manifest.commit):
            ends = mine[-1:]
            found.append(f"fragment {fragment}: ledger {ends} ends not with {manifest.commit}")
        for part in manifest.parts:
            await state.read_part(bus, run, plan, manifest, part.name)
    return found


def _replay(
    commits: tuple[Commit, ...],
    whole: dict[Key, Contribution],
    plan: Plan,
    outer: Outer,
    method: Method,
) -> list[str]:
    masters: dict[int, NDArray[np.float32]] = {}
    states: dict[int, object] = {}
    for commit in commits:
        index = commit.fragment
        inputs = [whole[key] for key in _consumed(commit)]
        if commit.version == 1:
            negated = cpu().dequantise(inputs[0].scheme, inputs[0].planes)
            masters[index] = np.float32(0) - negated
            states[index] = outer.init(masters[index])
        elif inputs:
            fragment = plan.fragments[index]
            masters[index], states[index], _ = merge_and_apply(
                outer,
                masters[index],
                states[index],
                [Merged(c.scheme, c.planes, c.header.norms) for c in inputs],
                [c.weight for c in commit.consumed],
                method,
                fragment,
                fragments.averaged(plan, fragment),
            )
        if vector_digest(masters[index]) != commit.master_digest:
            return [f"fragment {index}: version {commit.version} does not replay to its digest"]
    return []
