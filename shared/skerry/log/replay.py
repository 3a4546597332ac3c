"""Merging a fragment's contributions again, from the log and by the syncer's own arithmetic."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import fragments
from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import Fragment, Plan
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import Outer, merge_and_apply
from skerry.errors import ContributionGone
from skerry.log.base import Record
from skerry.protocol.contribution import (
    Contribution,
    ContributionAssembler,
    ContributionId,
    id_of,
)
from skerry.protocol.messages import Commit, Consumed, is_from_checkpoint
from skerry.tasks import computed

Vector = NDArray[np.float32]


def first_master(genesis: Contribution, fragment: Fragment) -> Vector:
    """Return version 1 of a fragment f32 (padded_size,): the negated GENESIS contribution."""
    negated = cpu().dequantise(genesis.scheme, genesis.planes)
    master = np.float32(0) - negated  # not the negative: a zero must stay +0
    fragments.clear_padding(fragment, master)
    return master


def vectors_of(master: Vector, state: object) -> tuple[Vector, ...]:
    """Return the plain vectors of a master and its outer state: later merges may overwrite them."""
    return (master, cast("Vector", state)) if isinstance(state, np.ndarray) else (master,)


@dataclass(slots=True)
class FragmentFold:
    """One fragment, folded commit by commit: its master and the outer optimizer's state.

    With ``recycles`` a merge overwrites the vectors that were held two merges ago.
    """

    outer: Outer
    fragment: Fragment
    averaged: Sequence[bool]
    method: str
    master: Vector = field(default_factory=lambda: np.zeros(0, np.float32))
    state: object = None
    recycles: bool = False
    spare: tuple[Vector, ...] = ()

    @classmethod
    def of(cls, outer: Outer, plan: Plan, fragment: Fragment, method: str) -> FragmentFold:
        """Return a fold that has not begun."""
        return cls(outer, fragment, fragments.averaged(plan, fragment), method)

    def begin(self, master: Vector, leaves: Mapping[str, Vector] | None) -> None:
        """Begin with a master, and the outer optimizer's leaves where they are stored."""
        self.master = master
        self.state = self.outer.restore(master, leaves) if leaves else self.outer.init(master)

    def merge(self, gradients: Sequence[OuterGradient], shares: Sequence[float]) -> None:
        """Do what the syncer does in a round; Diverged if the result is not finite."""
        before = self.master, self.state
        self.master, self.state = merge_and_apply(
            self.outer,
            self.master,
            self.state,
            gradients,
            shares,
            self.method,
            self.fragment,
            self.averaged,
            self.spare,
        )
        if self.recycles:
            self.spare = vectors_of(*before)


@dataclass(slots=True)
class Payloads:
    """One fragment's contributions, read no further than asked; ``held`` are still to be used."""

    records: AsyncGenerator[Record]
    assembler: ContributionAssembler
    on_bytes: Callable[[int], None] | None = None
    held: dict[ContributionId, Contribution] = field(
        default_factory=dict["ContributionId", "Contribution"]
    )
    position: int = 0

    async def fetch(self, key: ContributionId, through: int) -> Contribution | None:
        """Return a contribution that was whole by a sequence of CONTRIB; None if it is gone."""
        while key not in self.held and self.position < through:
            record = await anext(self.records, None)
            if record is None:
                break
            if self.on_bytes is not None:
                self.on_bytes(len(record.payload))
            self.position = record.sequence
            got = self.assembler.feed(record)
            if isinstance(got, Contribution):
                self.held.setdefault(got.id, got)
        return self.held.get(key)

    def forget(self, floor: int) -> None:
        """Drop what lies at or below a floor: no later commit can name it."""
        self.held = {k: c for k, c in self.held.items() if c.sequence_last > floor}


async def redo(fold: FragmentFold, commit: Commit, source: Payloads) -> list[Contribution]:
    """Take a fold on to a commit's version as its syncer did, and return what was merged.

    Raises ContributionGone if the window does not hold a contribution, Diverged or ValueError if
    they cannot be merged; then the fold is where it was.
    """
    merged: list[Contribution] = []
    for item in commit.consumed:
        found = await source.fetch(id_of(item), item.sequence_last)
        if found is None:
            raise _gone(item, commit)
        merged.append(found)
    if commit.version == 1 and not is_from_checkpoint(commit):
        fold.begin(await computed(first_master, merged[0], fold.fragment), None)
    elif merged:
        pairs = zip(merged, commit.consumed, strict=True)
        gradients = [replace(found.gradient, cut=item.cut) for found, item in pairs]
        shares = [item.weight for item in commit.consumed]
        await computed(fold.merge, gradients, shares)
    return merged


def _gone(item: Consumed, commit: Commit) -> ContributionGone:
    return ContributionGone(
        f"Contribution {item.identity} of learner {item.learner} (incarnation {item.incarnation}),"
        f" which version {commit.version} of fragment {commit.fragment} consumed, is not in the"
        " window any more"
    )
