"""From a closed round to its commit: the contributions it merges, their weights, and its record.

Source for the weights: Decoupled DiLoCo (arXiv 2604.21428), on dynamic token-weighted merging.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from skerry.algorithm import weighting
from skerry.algorithm.fragments import Fragment
from skerry.algorithm.merge import sound
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.protocol.containment import Comparison, Measured, repeats
from skerry.protocol.contribution import Contribution, ContributionId, id_of, refused_as
from skerry.protocol.door import saturated
from skerry.protocol.messages import (
    CloseReason,
    Commit,
    CommitOrigin,
    Consumed,
    LearnerProgress,
    RefusalCause,
    Unnamed,
    counted_tokens,
)
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.protocol.shard import PendingFragment, Refusals, Shard, judge


@dataclass(frozen=True, slots=True)
class Closing:
    """Why and when a round closed, and when each answer to it arrived; no reason: genesis.

    ``step`` is the global clock. ``quorum_s`` is from opening to the K-th contribution, ``grace_s``
    from there to closing.
    """

    reason: CloseReason | None
    step: int
    opened_ns: int
    closed_ns: int
    quorum_s: float = 0.0
    grace_s: float = 0.0
    final: bool = False
    arrived_ns: Mapping[str, int] = field(default_factory=dict[str, int])
    trace_id: str = ""

    def without_merge(self) -> Closing:
        """Return the closing of a round none of whose contributions counts.

        A round that never had its quorum keeps its reason.
        """
        if self.reason in WITHOUT_QUORUM:
            return self
        return replace(self, reason=CloseReason.NOTHING_COUNTS)


class Batch(NamedTuple):
    """All that waits for a fragment at one instant, and the floor once it is resolved.

    Taken at once: what arrives while the batch is merged belongs to the next round.
    """

    pending: tuple[Contribution, ...]
    floor: int

    @classmethod
    def take(cls, shard: Shard, state: PendingFragment) -> Batch:
        """Take what waits; contributions that are too stale to become whole are refused."""
        if state.version:
            shard.expire(state)
        floor = max(state.floor, shard.floor_of(state.fragment.index))
        return cls(tuple(state.pending.values()), floor)


class Weighed(NamedTuple):
    """A contribution with its share of the merge, and how many versions behind its base is.

    ``work`` is its weight before all are scaled, without the share ``uncounted``; ``cut`` is the
    share of its length that is left out.
    """

    contribution: Contribution
    staleness: int
    weight: float
    measured: Measured = Measured()
    work: float = 1.0
    uncounted: float = 0.0
    cut: float = 0.0

    @property
    def gradient(self) -> OuterGradient:
        """The outer gradient that the merge takes, with its ``cut``."""
        return replace(self.contribution.gradient, cut=self.cut)


class Writer(NamedTuple):
    """The run and plan of a commit, and the syncer that writes it, with its fence's token."""

    run: str
    plan_digest: int
    syncer: str
    fence: int


def first_parameters(batch: Batch, fragment: Fragment) -> Contribution | None:
    """Return the GENESIS contribution that becomes version 1: the first of the log that is finite.

    All learners compute the same initial parameters, so any would do.
    """
    offers = sorted(batch.pending, key=lambda c: c.sequence_last)
    return next((c for c in offers if sound(c.gradient, fragment, None)), None)


def refuse_others(batch: Batch, state: PendingFragment, first: Contribution | None) -> None:
    """Refuse all other GENESIS contributions: those before the first were not finite."""
    for item in batch.pending:
        early = first is None or item.sequence_last < first.sequence_last
        cause = RefusalCause.DIVERGED if early else RefusalCause.GENESIS
        if item is not first:
            state.refuse(refused_as(cause, item.header))
            del state.pending[item.id]


def weigh(
    shard: Shard,
    state: PendingFragment,
    batch: Batch,
    measured: Mapping[ContributionId, Measured],
) -> list[Weighed]:
    """Return the contributions that count, in an order that depends on nothing else.

    ``measured`` says what ``examine`` found in each. Refuses those that became too stale while they
    waited, cannot be merged, or are ruled out by ``shard.containment``.
    """
    kept = _acceptable(shard, state, batch, measured)
    rules, memory = shard.containment, state.memory
    compared = Comparison.of(rules, memory, ((c.header, measured[c.id]) for c, _ in kept))
    found: list[Weighed] = []
    for item, discount in kept:
        header, own = item.header, measured[item.id]
        cause = compared.refusal(header, own, shard.pulse_of(header.learner))
        if cause is not None:
            state.refuse(refused_as(cause, header))
            continue
        late = state.version - header.base_version
        left_out = compared.uncounted(header)
        bare = shard.staleness.bare
        work = weighting.weight(header.tokens, header.steps, bare=bare) * discount
        cut = compared.cut(header, own, left_out)
        found.append(Weighed(item, late, 0.0, own, work * (1.0 - left_out), left_out, cut))
    return _shared(found, rules.share)


def _acceptable(
    shard: Shard,
    state: PendingFragment,
    batch: Batch,
    measured: Mapping[ContributionId, Measured],
) -> list[tuple[Contribution, float]]:
    """Return the contributions that are acceptable by themselves, in order of id; refuse the rest.

    Each comes with the factor that its staleness puts on its weight.
    """
    kept: list[tuple[Contribution, float]] = []
    pairs = [(item, measured[item.id]) for item in batch.pending]
    again = repeats(state.memory, pairs) if shard.containment.repeats else ()
    for item in sorted(batch.pending, key=lambda c: c.id):
        discount = judge(item, state.version, shard.staleness)
        cause = discount if isinstance(discount, RefusalCause) else measured[item.id].refusal
        if item.header.learner in shard.quarantined:
            cause = RefusalCause.QUARANTINED
        elif cause is None and item.id in again:
            cause = RefusalCause.REPEATED
        if cause is None and not isinstance(discount, RefusalCause):
            kept.append((item, discount))
        elif cause is not None:
            state.refuse(refused_as(cause, item.header))
    return kept


def without(
    shard: Shard, state: PendingFragment, weighed: Sequence[Weighed], worst: int
) -> list[Weighed]:
    """Refuse the contribution that is to blame for a merge that is not finite; return the rest."""
    state.refuse(refused_as(RefusalCause.DIVERGED, weighed[worst].contribution.header))
    rest = [w for number, w in enumerate(weighed) if number != worst]
    return _shared(rest, shard.containment.share)


def _shared(weighed: Sequence[Weighed], most: float) -> list[Weighed]:
    """Return contributions with the shares that their work gives them; see ``weighting.shares``."""
    learners = [w.contribution.header.learner for w in weighed]
    shares = weighting.shares([w.work for w in weighed], learners, most)
    return [w._replace(weight=share) for w, share in zip(weighed, shares, strict=True)]


def commit_record(
    state: PendingFragment,
    weighed: Sequence[Weighed],
    refused: Refusals,
    closing: Closing,
    writer: Writer,
    *,
    floor: int,
    merge_s: float,
) -> Commit:
    """Return the record of a fragment's next version; digests are filled in when it is written."""
    consumed = tuple(_consumed(w, closing) for w in weighed)
    progress = progress_after(state.progress, consumed, genesis=not state.version)
    return Commit(
        run=writer.run,
        plan_digest=writer.plan_digest,
        fragment=state.fragment.index,
        version=state.version + 1,
        step=closing.step,
        origin=CommitOrigin.ROUND if closing.reason else CommitOrigin.GENESIS,
        reason=closing.reason,
        syncer=writer.syncer,
        fence=writer.fence,
        opened_ns=closing.opened_ns,
        closed_ns=closing.closed_ns,
        quorum_s=closing.quorum_s,
        grace_s=closing.grace_s,
        consumed=consumed,
        refused=refused.named,
        unnamed=tuple(Unnamed(name, n) for name, n in sorted(refused.beyond.items())),
        contrib_floor=floor,
        progress=tuple(progress.values()),
        params_digest=0,
        master_digest=0,
        final=closing.final,
        trace_id=closing.trace_id,
        merge_s=merge_s,
    )


def _consumed(weighed: Weighed, closing: Closing) -> Consumed:
    """Return the record of a merged contribution; only one that answered this round is dated."""
    header, late = weighed.contribution.header, weighed.staleness > 0
    return Consumed(
        *weighed.contribution.id,
        sequence_first=weighed.contribution.sequence_first,
        sequence_last=weighed.contribution.sequence_last,
        base_version=header.base_version,
        staleness=weighed.staleness,
        step=header.step,
        steps=header.steps,
        tokens=header.tokens,
        cursor_from=header.cursor_from,
        cursor_to=header.cursor_to,
        weight=weighed.weight,
        loss=header.loss,
        arrived_ns=0 if late else closing.arrived_ns.get(header.learner, 0),
        norm=weighed.measured.norm,
        cut=weighed.cut,
        uncounted=weighed.uncounted,
        digest=weighed.measured.digest,
        alignment=weighed.measured.alignment,
    )


def progress_after(
    rows: Mapping[str, LearnerProgress],
    merged: Iterable[Consumed],
    *,
    genesis: bool,
) -> dict[str, LearnerProgress]:
    """Return what the log has accepted from each learner once a commit has merged these.

    Initial parameters are no work: a ``genesis`` commit counts no tokens.
    """
    after = dict(rows)
    for item in merged:
        before = after.get(item.learner)
        tokens, cursor = (before.tokens, before.cursor) if before else (0, 0)
        after[item.learner] = LearnerProgress(
            *id_of(item),
            tokens=saturated((tokens, 0 if genesis else counted_tokens(item))),
            cursor=max(cursor, item.cursor_to),
        )
    return dict(sorted(after.items()))


def tokens_of(commits: Sequence[Commit]) -> int:
    """Return the tokens that all learners have contributed.

    Fragments are committed one after another, so each counts a learner's tokens up to another
    instant: the fragment that is furthest along counts.
    """
    furthest: dict[str, int] = {}
    for row in (row for commit in commits for row in commit.progress):
        furthest[row.learner] = max(furthest.get(row.learner, 0), row.tokens)
    return saturated(furthest.values())
