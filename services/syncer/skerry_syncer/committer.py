"""From the contributions of a round to a commit: weigh, merge, step the outer optimizer, write."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import numpy as np
import structlog

from skerry.algorithm import fragments, weighting
from skerry.algorithm.backend import cpu
from skerry.algorithm.merge import largest, sound
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import merge_and_apply
from skerry.errors import Diverged
from skerry.log.contributions import refusal
from skerry.log.state import MASTER, PARAMS
from skerry.log.state_writer import NewPart
from skerry.protocol.messages import (
    CloseReason,
    Commit,
    CommitOrigin,
    Consumed,
    ContributionKind,
    LearnerProgress,
    RefusalCause,
)
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry_syncer.loading import OUTER
from skerry_syncer.shard import judge, mark_of
from skerry_syncer.telemetry import CommitTimes

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from skerry.algorithm.outer import Outer
    from skerry.log.contributions import Contribution
    from skerry.log.state_writer import StateWriter
    from skerry.protocol.messages import Manifest
    from skerry.settings.models import SyncConfig
    from skerry_syncer.shard import FragmentState, Shard

    Vector = NDArray[np.float32]

log = structlog.get_logger()


@dataclass(frozen=True, slots=True)
class Closing:
    """Why and when a round closed, and when each contribution to it arrived; no reason: genesis."""

    reason: CloseReason | None
    step: int
    opened_ns: int
    closed_ns: int
    quorum_s: float
    grace_s: float
    final: bool
    arrived_ns: Mapping[str, int] = field(default_factory=dict[str, int])
    trace_id: str = ""


@dataclass(frozen=True, slots=True)
class Batch:
    """All that waits for a fragment at one instant, and the floor once it is resolved.

    Taken in one go: what arrives while the batch is merged belongs to the next round.
    """

    pending: tuple[Contribution, ...]
    floor: int

    @classmethod
    def take(cls, shard: Shard, state: FragmentState) -> Batch:
        if state.version:
            shard.expire(state)
        floor = max(state.floor, shard.floor_of(state.fragment.index))
        return cls(tuple(state.pending), floor)


@dataclass(frozen=True, slots=True)
class Weighed:
    """A contribution with its part of the merge."""

    contribution: Contribution
    staleness: int
    weight: float


@dataclass(slots=True)
class Committer:
    """Merges and commits; one at a time, so that memory holds one fragment in hand.

    ``spare`` are the vectors that the newest commit replaced: the next merge of a fragment of that
    size writes into them, since the first touch of fresh memory costs as much as the merge.
    ``spent`` is what the newest commit's time went into.
    """

    writer: StateWriter
    config: SyncConfig
    outer: Outer
    spare: tuple[Vector, ...] = ()
    wall_ns: Callable[[], int] = time.time_ns
    spent: CommitTimes = field(default_factory=CommitTimes)

    async def genesis(self, shard: Shard, state: FragmentState, closing: Closing) -> Manifest:
        """Commit version 1: the negated gradient of the first GENESIS contribution, as it is."""
        self.spent.began_ns = self.wall_ns()
        batch = Batch.take(shard, state)
        first = min(batch.pending, key=lambda c: c.sequence_last)
        for late in (c.header for c in batch.pending if c is not first):
            state.refuse(refusal(RefusalCause.GENESIS, late.learner, late))
        negated = await asyncio.to_thread(cpu().dequantise, first.scheme, first.planes)
        # Not the negative: the padding must stay +0, which is what a checkpoint restores.
        master = np.float32(0) - negated
        weighed = [Weighed(first, 0, 1.0)]
        return await self._write(batch, state, weighed, master, self.outer.init(master), closing)

    async def merge(self, shard: Shard, state: FragmentState, closing: Closing) -> Manifest | None:
        """Commit the next version from all that is pending; None when nothing is.

        Where nothing of it counts the next version equals this one: those who answered learn that
        their round is over, and the ledger who was refused. So does a final version to which
        nobody came: whoever owns another shard sees that this fragment is done.
        """
        self.spent.began_ns = self.wall_ns()
        batch = Batch.take(shard, state)
        if state.master is None or not (batch.pending or closing.final):
            return None
        weighed = self._weigh(batch, state)
        while weighed:
            try:
                master, outer_state = await self._step(state, state.master, weighed)
            except Diverged:
                weighed = await self._without_largest(state, weighed)
                continue
            return await self._write(batch, state, weighed, master, outer_state, closing)
        if batch.pending and closing.reason not in WITHOUT_QUORUM:  # those must stay known as such
            closing = replace(closing, reason=CloseReason.NOTHING_COUNTS)
        return await self._write(batch, state, [], state.master, state.outer, closing)

    async def _step(
        self, state: FragmentState, master: Vector, weighed: Sequence[Weighed]
    ) -> tuple[Vector, object]:
        """Return the next master and outer state; Diverged when they would not be finite."""
        averaged = fragments.averaged(self.writer.plan, state.fragment)
        merged, outer_state, _ = await asyncio.to_thread(
            merge_and_apply,
            self.outer,
            master,
            state.outer,
            [_merged(w.contribution) for w in weighed],
            [w.weight for w in weighed],
            self.config.merge,
            state.fragment,
            averaged,
            self.spare,
        )
        return merged, outer_state

    async def _without_largest(
        self, state: FragmentState, weighed: Sequence[Weighed]
    ) -> list[Weighed]:
        """Refuse the contribution that is to blame for a merge that is not finite."""
        worst = await asyncio.to_thread(
            largest, [_merged(w.contribution) for w in weighed], state.fragment
        )
        told = weighed[worst].contribution.header
        state.refuse(refusal(RefusalCause.DIVERGED, told.learner, told))
        rest = [w for number, w in enumerate(weighed) if number != worst]
        shares = weighting.normalised([w.weight for w in rest])
        return [replace(w, weight=share) for w, share in zip(rest, shares, strict=True)]

    def _weigh(self, batch: Batch, state: FragmentState) -> list[Weighed]:
        """Return what counts, in an order that depends on nothing but the contributions.

        What became too stale while it waited and what has diverged is refused and named.
        """
        kept: list[tuple[Contribution, float]] = []
        for contribution in sorted(batch.pending, key=_order):
            told = contribution.header
            discount = judge(contribution, state.version, self.config)
            if isinstance(discount, RefusalCause):
                state.refuse(refusal(discount, told.learner, told))
            elif not self._sound(contribution, state):
                state.refuse(refusal(RefusalCause.DIVERGED, told.learner, told))
            else:
                kept.append((contribution, discount))
        shares = weighting.normalised(
            [weighting.weight(c.header.tokens, c.header.steps) * discount for c, discount in kept]
        )
        return [
            Weighed(c, state.version - c.header.base_version, share)
            for (c, _), share in zip(kept, shares, strict=True)
        ]

    def _sound(self, contribution: Contribution, state: FragmentState) -> bool:
        scale = None if self.outer.name == "adamw" else state.master
        return sound(_merged(contribution), state.fragment, scale)

    async def _write(
        self,
        batch: Batch,
        state: FragmentState,
        weighed: Sequence[Weighed],
        master: Vector,
        outer_state: object,
        closing: Closing,
    ) -> Manifest:
        self.spent.merged_ns = self.wall_ns()
        refused = state.refused.close()  # a commit that fails has the shard read anew from the log
        commit = Commit(
            run=self.writer.run,
            plan_digest=self.writer.plan.digest,
            fragment=state.fragment.index,
            version=state.version + 1,
            step=closing.step,
            origin=CommitOrigin.ROUND if closing.reason else CommitOrigin.GENESIS,
            reason=closing.reason,
            syncer=self.writer.holder,
            fence=self.writer.token,
            opened_ns=closing.opened_ns,
            closed_ns=closing.closed_ns,
            quorum_s=closing.quorum_s,
            grace_s=closing.grace_s,
            consumed=tuple(_consumed(w, closing) for w in weighed),
            refused=refused.named,
            contrib_floor=batch.floor,
            progress=_progress(state, weighed),
            params_digest=0,
            master_digest=0,
            final=closing.final,
            trace_id=closing.trace_id,
            merge_s=self.spent.merge_s,
        )
        leaves = self.outer.leaves(outer_state)
        parts = [
            NewPart(PARAMS, self.config.global_scheme, master),
            NewPart(MASTER, "f32", master),
            *(NewPart(OUTER + name, "f32", vector) for name, vector in sorted(leaves.items())),
        ]
        manifest = await self.writer.commit(commit, parts, state.manifest)
        self.spent.written_ns = self.wall_ns()
        replaced = [
            v for v in (state.master, state.outer) if v is not master and v is not outer_state
        ]
        state.manifest, state.master, state.outer = manifest, master, outer_state
        state.floor = batch.floor
        self.spare = tuple(cast("Vector", v) for v in replaced if isinstance(v, np.ndarray))
        state.drop(batch.pending)
        state.settle_all(manifest.commit)
        if refused.unnamed:
            _say_unnamed(manifest.commit, refused.unnamed)
        return manifest


def _say_unnamed(commit: Commit, unnamed: Mapping[RefusalCause, int]) -> None:
    log.warning(
        "refusals_unnamed",
        fragment=commit.fragment,
        version=commit.version,
        named=len(commit.refused),
        unnamed={cause.value: count for cause, count in unnamed.items()},
    )


def _order(contribution: Contribution) -> tuple[str, int, int]:
    return contribution.header.learner, *mark_of(contribution)


def _merged(contribution: Contribution) -> OuterGradient:
    return OuterGradient(contribution.scheme, contribution.planes, contribution.header.norms)


def _consumed(weighed: Weighed, closing: Closing) -> Consumed:
    """Return the record of a merged contribution; only one that answered this round is dated."""
    told = weighed.contribution.header
    late = weighed.staleness > 0
    return Consumed(
        learner=told.learner,
        incarnation=told.incarnation,
        identity=told.identity,
        sequence_first=weighed.contribution.sequence_first,
        sequence_last=weighed.contribution.sequence_last,
        base_version=told.base_version,
        staleness=weighed.staleness,
        step=told.step,
        steps=told.steps,
        tokens=told.tokens,
        cursor_from=told.cursor_from,
        cursor_to=told.cursor_to,
        weight=weighed.weight,
        loss=told.loss,
        arrived_ns=0 if late else closing.arrived_ns.get(told.learner, 0),
    )


def _progress(state: FragmentState, weighed: Sequence[Weighed]) -> tuple[LearnerProgress, ...]:
    """Return the table of what the log has accepted from each learner, this commit included."""
    rows = state.progress
    for item in weighed:
        told = item.contribution.header
        genesis = told.kind is ContributionKind.GENESIS
        before = rows.get(told.learner)
        rows[told.learner] = LearnerProgress(
            learner=told.learner,
            incarnation=told.incarnation,
            identity=told.identity,
            tokens=(before.tokens if before else 0) + (0 if genesis else told.tokens),
            cursor=max(before.cursor if before else 0, told.cursor_to),
        )
    return tuple(rows[name] for name in sorted(rows))
