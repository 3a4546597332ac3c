"""What a syncer holds in memory: its fragments as last committed, and what waits to be merged."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.bus.contributions import Contribution, Inbox, Refusal
from skerry.bus.state import MASTER, StateWriter, read_part
from skerry.core import staleness
from skerry.wire.messages import ContributionKind, LearnerProgress, Refused
from skerry.wire.subjects import Subjects, contributor

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from skerry.bus.base import Bus, Record
    from skerry.core.fragments import Fragment, Plan
    from skerry.core.outer import Outer
    from skerry.settings import SyncConfig
    from skerry.wire.messages import ContributionHeader, Manifest

OUTER = "outer."
MOST_REFUSED = 1000
"""Refusals that one commit names; a flood of bad bytes beyond that is in the syncer's log alone."""


@dataclass(slots=True)
class FragmentState:
    """One fragment: its committed state and the contributions that wait for its next round.

    ``floor`` is the CONTRIB sequence up to which its contributions are resolved.
    """

    fragment: Fragment
    manifest: Manifest | None = None
    master: NDArray[np.float32] | None = None
    outer: object = None
    pending: list[Contribution] = field(default_factory=list[Contribution])
    arrived_s: dict[str, float] = field(default_factory=dict[str, float])
    refused: list[Refused] = field(default_factory=list[Refused])
    launched_step: int = 0
    floor: int = 0

    @property
    def version(self) -> int:
        return self.manifest.commit.version if self.manifest else 0

    @property
    def step(self) -> int:
        """The global clock at the newest commit."""
        return self.manifest.commit.step if self.manifest else 0

    @property
    def last_due_step(self) -> int:
        """The step that the newest round was for."""
        return max(self.step, self.launched_step)

    @property
    def progress(self) -> dict[str, LearnerProgress]:
        rows = self.manifest.commit.progress if self.manifest else ()
        return {row.learner: row for row in rows}

    def drop(self, done: Sequence[Contribution]) -> None:
        """Forget the oldest waiting contributions: ``done``, which a batch took.

        What came meanwhile was made for the round that has closed: it will be merged as a late
        one and says nothing about who has answered the next round.
        """
        self.pending = self.pending[len(done) :]
        self.arrived_s = {}

    def refuse(self, cause: str, learner: str, told: ContributionHeader | None = None) -> None:
        """Have the next commit name a refusal; ``told`` is its header where it was readable."""
        if len(self.refused) < MOST_REFUSED:
            self.refused.append(refusal(cause, learner, told))

    def waits(self, contribution: Contribution) -> bool:
        """Tell whether this contribution waits already.

        Its learner sends it again when an acknowledgement was lost, and a broker that was away for
        longer than it remembers message ids stores it again.
        """
        return mark(contribution) in map(mark, self.pending)

    def resolved(self, contribution: Contribution) -> bool:
        """Tell whether a commit has consumed or refused this contribution already."""
        told = contribution.header
        row = self.progress.get(told.learner)
        counted = row is not None and (told.incarnation, told.identity) <= (
            row.incarnation,
            row.identity,
        )
        return counted or contribution.sequence_last <= self.floor


@dataclass(slots=True)
class Shard:
    """All fragments of a shard; the log can rebuild it at any instant."""

    run: str
    plan: Plan
    config: SyncConfig
    fragments: dict[int, FragmentState]
    inbox: Inbox
    seen_sequence: int = 0

    @classmethod
    async def load(
        cls, bus: Bus, writer: StateWriter, plan: Plan, config: SyncConfig, outer: Outer
    ) -> Shard:
        """Rebuild the shard from manifests and slots, mending the ledger on the way."""
        manifests = await writer.recover()
        floors = await _floors(bus, writer.run, manifests)
        fragments: dict[int, FragmentState] = {}
        for fragment in plan.fragments:
            index = fragment.index
            state = FragmentState(fragment, manifests.get(index), floor=floors.get(index, 0))
            if state.manifest is not None:
                await _restore(bus, writer.run, plan, state, outer)
            fragments[fragment.index] = state
        return cls(writer.run, plan, config, fragments, Inbox(writer.run, plan))

    @property
    def resume_after(self) -> int:
        """The CONTRIB sequence up to which every fragment's contributions are resolved."""
        return min(state.floor for state in self.fragments.values())

    def take(self, record: Record, now_s: float) -> Refusal | Contribution | None:
        """Feed one record; a contribution that is new waits in its fragment afterwards."""
        self.seen_sequence = max(self.seen_sequence, record.sequence)
        got = self.inbox.feed(record)
        if isinstance(got, Refusal):
            fragment, learner = contributor(got.subject)
            if fragment in self.fragments:
                self.fragments[fragment].refuse(got.cause, learner)
        if not isinstance(got, Contribution):
            return got
        state = self.fragments[got.header.fragment]
        if state.resolved(got) or state.waits(got):
            return None
        discount, cause = judge(got, state.version, self.config)
        if discount is None:
            state.refuse(cause, got.header.learner, got.header)
            return Refusal(cause, f"from {got.header.learner}", record.sequence, record.subject)
        state.pending.append(got)
        if got.header.round_version == state.version + 1:
            state.arrived_s.setdefault(got.header.learner, now_s)
        return got

    def floor_of(self, fragment: int) -> int:
        """Return up to where this fragment's contributions are resolved once all pending are."""
        unfinished = self.inbox.unfinished_from(fragment)
        return self.seen_sequence if unfinished is None else unfinished - 1


def judge(contribution: Contribution, version: int, config: SyncConfig) -> tuple[float | None, str]:
    """Return the factor on a contribution's weight and why; None if it can never be merged.

    Genesis makes version 1 and nothing else: it is no gradient of anything.
    """
    told = contribution.header
    genesis = told.kind is ContributionKind.GENESIS
    if genesis or version == 0:
        fits = genesis and version == 0 and contribution.scheme == "f32"
        return (1.0 if fits else None), "genesis"
    return staleness.judge(
        told.base_version, version, config.max_staleness, config.staleness_discount
    )


def refusal(cause: str, learner: str, told: ContributionHeader | None = None) -> Refused:
    """Return the record of a refusal."""
    if told is None:
        return Refused(cause, learner)
    return Refused(
        cause,
        learner,
        told.incarnation,
        told.identity,
        told.tokens,
        told.cursor_from,
        told.cursor_to,
    )


def mark(contribution: Contribution) -> tuple[str, int, int]:
    """Return what tells a contribution from every other one to its fragment."""
    told = contribution.header
    return told.learner, told.incarnation, told.identity


async def _floors(bus: Bus, run: str, manifests: Mapping[int, Manifest]) -> dict[int, int]:
    """Return each fragment's floor; none where the stream is not the one they were counted in.

    Somebody has removed it, or its end went down with the machine: sequences count from further
    down again, and what they number now is not what the floors speak of. Progress still tells what
    was consumed.
    """
    stream = Subjects(run).stream("CONTRIB")
    newest = max((info.last_seq for info in await bus.streams() if info.name == stream), default=0)
    floors = {index: manifest.commit.contrib_floor for index, manifest in manifests.items()}
    return floors if max(floors.values(), default=0) <= newest else {}


async def _restore(bus: Bus, run: str, plan: Plan, state: FragmentState, outer: Outer) -> None:
    manifest = state.manifest
    if manifest is None:
        return
    vectors = {
        part.name: await read_part(bus, run, plan, manifest, part.name)
        for part in manifest.parts
        if part.name == MASTER or part.name.startswith(OUTER)
    }
    state.master = vectors.pop(MASTER)
    leaves = {name.removeprefix(OUTER): vector for name, vector in vectors.items()}
    state.outer = outer.restore(state.master, leaves)
