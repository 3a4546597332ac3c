"""A round's commit: weigh, merge, step the outer optimizer, write."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import structlog
from numpy.typing import NDArray

from skerry.algorithm import closed_loop, containment, fragments
from skerry.algorithm.fragments import Fragment
from skerry.algorithm.merge import largest
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.outer import Outer, merge_and_apply
from skerry.errors import Diverged
from skerry.log.replay import first_master, vectors_of
from skerry.log.state_writer import NewPart, StateWriter
from skerry.log.window import Uncovered
from skerry.protocol.chunks import VectorHash, vector_digest
from skerry.protocol.commit import (
    Batch,
    Closing,
    Weighed,
    Writer,
    commit_record,
    first_parameters,
    refuse_others,
    weigh,
    without,
)
from skerry.protocol.containment import examine
from skerry.protocol.messages import Commit, Manifest
from skerry.protocol.parts import DELTA, KEYFRAME, MASTER, OUTER, is_due, is_snapshot_due
from skerry.protocol.shard import PendingFragment, Shard
from skerry.protocol.subjects import Subjects
from skerry.tasks import computed
from skerry_syncer.restoring import FragmentVectors
from skerry_syncer.telemetry import CommitTimes

if TYPE_CHECKING:
    from skerry.settings.models import SyncConfig

    Vector = NDArray[np.float32]

log = structlog.get_logger()


@dataclass(slots=True)
class Committer:
    """Merges and commits one fragment at a time, so that memory holds only one in hand.

    ``vectors`` are those of each fragment's newest version. ``spare`` are what the newest commit
    replaced: the next merge of a fragment of that size writes into them, since the first touch of
    fresh memory costs as much as the merge. ``spent`` is what the newest commit's time went into.
    """

    writer: StateWriter
    config: SyncConfig
    outer: Outer
    vectors: dict[int, FragmentVectors] = field(default_factory=dict[int, FragmentVectors])
    spare: tuple[Vector, ...] = ()
    wall_ns: Callable[[], int] = time.time_ns
    spent: CommitTimes = field(default_factory=CommitTimes)

    async def genesis(
        self, shard: Shard, state: PendingFragment, closing: Closing
    ) -> Manifest | None:
        """Commit version 1: the negated gradient of the first GENESIS contribution, as it is.

        None where no initial parameters that wait are finite.
        """
        self.spent.began_ns = self.wall_ns()
        batch = Batch.take(shard, state)
        first = await computed(first_parameters, batch, state.fragment)
        refuse_others(batch, state, first)
        if first is None:
            return None
        master = await computed(first_master, first, state.fragment)
        vectors = FragmentVectors(1, master, self.outer.init(master))
        return await self._write(state, batch, [Weighed(first, 0, 1.0)], vectors, closing)

    async def merge(
        self, shard: Shard, state: PendingFragment, closing: Closing
    ) -> Manifest | None:
        """Commit the next version from all that is pending; None when nothing is.

        If nothing of it counts, the next version equals this one: learners that answered see that
        their round is over, and the ledger names those refused. So does a final version without any
        contribution: the owner of another shard sees that this fragment is done.
        """
        self.spent.began_ns = self.wall_ns()
        batch, held = Batch.take(shard, state), self.vectors.get(state.fragment.index)
        if held is None or not (batch.pending or closing.final):
            return None
        scale = None if self.outer.bare_gradients else held.master
        measured = await computed(
            examine,
            batch.pending,
            state.fragment,
            state.version + 1,
            shard.containment,
            scale=scale,
            moved=held.moved,
        )
        weighed = weigh(shard, state, batch, measured)
        while weighed:
            inputs = [w.gradient for w in weighed]
            try:
                vectors = await self._step(state.fragment, held, inputs, weighed)
            except Diverged:
                worst = await computed(largest, inputs, state.fragment)
                weighed = without(shard, state, weighed, worst)
                continue
            return await self._write(state, batch, weighed, vectors, closing)
        if batch.pending:
            closing = closing.without_merge()
        # The blocks that ``moved`` is of are those that the next version would have compared.
        return await self._write(state, batch, [], replace(held, moved=None), closing)

    async def _step(
        self,
        fragment: Fragment,
        held: FragmentVectors,
        inputs: Sequence[OuterGradient],
        weighed: Sequence[Weighed],
    ) -> FragmentVectors:
        """Return the next master and outer state; Diverged when they would not be finite."""
        merged, outer_state = await computed(
            merge_and_apply,
            self.outer,
            held.master,
            held.outer,
            inputs,
            [w.weight for w in weighed],
            self.config.merge,
            fragment,
            fragments.averaged(self.writer.plan, fragment),
            self.spare,
        )
        moved = containment.moved(fragment, held.version + 2, held.master, merged)
        return replace(held, master=merged, outer=outer_state, moved=moved)

    async def _write(
        self,
        state: PendingFragment,
        batch: Batch,
        weighed: Sequence[Weighed],
        vectors: FragmentVectors,
        closing: Closing,
    ) -> Manifest:
        self.spent.merged_ns = self.wall_ns()
        refused = state.refused.close()  # a commit that fails has the shard read from the log again
        writer = self.writer
        commit = commit_record(
            state,
            weighed,
            refused,
            closing,
            Writer(writer.run, writer.plan.digest, writer.holder, writer.token),
            floor=batch.floor,
            merge_s=self.spent.merge_s,
        )
        vectors.uncovered = Uncovered.oldest(vectors.uncovered, (w.contribution for w in weighed))
        if (lapse := vectors.lapse) is not None:
            commit = replace(commit, master_origin=lapse.origin, outer_version=lapse.outer_version)
        whole = await self._is_snapshot(commit, state.manifest, vectors.uncovered)
        if not whole:
            digest = await computed(vector_digest, vectors.master)
            commit = replace(commit, master_digest=digest)
        parts = self._parts(commit, vectors, state.manifest, whole=whole)
        manifest = await writer.commit(commit, parts, state.manifest)
        self.spent.written_ns = self.wall_ns()
        held = self.vectors.get(state.fragment.index)
        before = vectors_of(held.master, held.outer) if held else ()
        self.spare = tuple(v for v in before if v is not vectors.master and v is not vectors.outer)
        vectors.version, vectors.lapse = commit.version, None
        if whole:
            vectors.uncovered = None
        self.vectors[state.fragment.index] = vectors
        state.commit(manifest, [c.id for c in batch.pending], batch.floor)
        if refused.unnamed:
            log.warning(
                "refusals_unnamed",
                fragment=commit.fragment,
                version=commit.version,
                named=len(commit.refused),
                unnamed={cause.value: count for cause, count in refused.unnamed.items()},
            )
        return manifest

    async def _is_snapshot(
        self, commit: Commit, previous: Manifest | None, uncovered: Uncovered | None
    ) -> bool:
        """Return True if a commit stores master and outer state, too.

        Asks the broker how full the window is if nothing else decides. A broker that does not say,
        as a cluster that elects the stream's leader, may drop anything.
        """
        every = self.config.snapshot_every
        due = is_snapshot_due(commit, previous, every, 0.0)
        if due or uncovered is None:
            return due
        name = Subjects(self.writer.run).shard(self.writer.shard).stream("CONTRIB")
        found = [info for info in await self.writer.bus.streams() if info.name == name]
        share = max((uncovered.share(info, self.wall_ns()) for info in found), default=1.0)
        return is_snapshot_due(commit, previous, every, share)

    def _parts(
        self, commit: Commit, vectors: FragmentVectors, previous: Manifest | None, *, whole: bool
    ) -> Iterator[NewPart]:
        """Yield what is stored of a version, and take ``vectors.shared`` on to it."""
        sync, master = self.config, vectors.master
        schemes = sync.global_scheme, sync.delta_scheme
        held, digest, delta = closed_loop.follow(*schemes, vectors.shared, master, VectorHash)
        vectors.shared = held
        if delta is not None:
            yield NewPart(DELTA, *delta, digest)
        at, every = (commit.fragment, commit.version), sync.keyframe_every
        if delta is None or is_due(*at, previous, KEYFRAME, every):
            yield NewPart(KEYFRAME, sync.global_scheme, held, digest)
        if not whole:
            return
        yield NewPart.of(MASTER, "f32", master)
        for name, vector in sorted(self.outer.leaves(vectors.outer).items()):
            yield NewPart.of(OUTER + name, "f32", vector)
