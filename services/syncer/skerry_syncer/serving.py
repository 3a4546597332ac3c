"""One shard in service: feed the coordinator from the log, and do what it decides."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import structlog

from skerry.algorithm.fragments import shard_of
from skerry.errors import BrokerUnavailable
from skerry.log import ledger, run_records
from skerry.log.base import Bus, Record
from skerry.protocol.clock import LearnerTable
from skerry.protocol.contribution import Contribution, Refusal
from skerry.protocol.coordinator import (
    Action,
    CommitVersion,
    EndReason,
    EndRun,
    Publish,
    RoundCoordinator,
    may_end,
)
from skerry.protocol.messages import Quarantine, RunRecord
from skerry.protocol.subjects import Subjects, contributor
from skerry.tasks import TaskGroup, happens, now_s
from skerry.telemetry import tracing
from skerry_syncer.committer import Committer
from skerry_syncer.telemetry import RoundTelemetry

log = structlog.get_logger()

SLICE = 64
"""Messages taken in one go before other tasks of this process have their turn."""


def note_quarantine(learners: LearnerTable, record: Quarantine) -> None:
    """Note a decision on a learner, and report it if it changes anything."""
    if learners.set_quarantine(record):
        about = {"learner": record.learner, "reason": record.reason, "by": record.by}
        log.warning("quarantine_released" if record.released else "quarantined", **about)


@dataclass(slots=True)
class ContributionTail:
    """Where in its CONTRIB the newest message to each fragment lies.

    ``ends`` are where the shards' streams ended when ``newest`` was read: reading it takes one
    chunk of each fragment, so that is done only once one of them has grown.
    """

    bus: Bus
    run: str
    shards: int
    ends: tuple[int, ...] = ()
    newest: dict[int, int] = field(default_factory=dict[int, int])

    async def beyond(self, known: Mapping[int, int]) -> frozenset[int]:
        """Return the fragments with messages beyond the sequence that is given for each.

        Raises BrokerUnavailable if the broker does not report a stream, as a cluster does not while
        it elects the stream's leader: such a stream must not look empty.
        """
        subjects = Subjects(self.run)
        names = [subjects.shard(shard).stream("CONTRIB") for shard in range(self.shards)]
        known_ends = {info.name: info.last_seq for info in await self.bus.streams()}
        if unknown := [name for name in names if name not in known_ends]:
            msg = f"The broker does not say how far {unknown[0]} goes: is it electing its leader?"
            raise BrokerUnavailable(msg)
        ends = tuple(known_ends[name] for name in names)
        if ends != self.ends:
            self.ends, self.newest = ends, {}
        for fragment, sequence in known.items():
            if fragment not in self.newest and sequence < ends[shard_of(fragment, self.shards)]:
                shard = subjects.of_fragment(fragment, self.shards)
                found = await self.bus.last(shard.contribution(fragment))
                self.newest[fragment] = 0 if found is None else found.sequence
        return frozenset(f for f, sequence in known.items() if self.newest.get(f, 0) > sequence)


@dataclass(slots=True)
class ShardServer:
    """Drives the coordinator of one shard under one fence.

    ``turns`` counts how often it has looked at everything: a watcher sees that it lives.
    """

    bus: Bus
    run: RunRecord
    coordinator: RoundCoordinator
    committer: Committer
    telemetry: RoundTelemetry
    wall_ns: Callable[[], int]
    leaving: bool = False
    turns: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    tail: ContributionTail = field(init=False)

    def __post_init__(self) -> None:
        self.tail = ContributionTail(self.bus, self.run.run, self.run.shards)

    async def serve(self) -> bool:
        """Serve until the run is finished (True) or the shard is to be left (False).

        Any other end raises an exception group, with Fenced if another syncer has taken the shard.
        """
        async with TaskGroup() as group:
            followers = [
                group.create_task(self._follow_contributions(), name="contributions"),
                group.create_task(self.committer.writer.hold(), name="fence"),
            ]
            finished = await group.create_task(self._coordinate(), name="rounds")
            for task in followers:
                task.cancel()
        return finished

    def leave(self) -> None:
        """Have ``serve`` return as soon as the commit in hand is done."""
        self.leaving = True
        self.wake.set()

    async def _follow_contributions(self) -> None:
        """Take every contribution to this shard after what the manifests have resolved.

        Raises BrokerUnavailable when their stream began again: what the shard has counted in the
        old one must be read again.
        """
        shard, last = self.coordinator.shard, 0
        pattern = Subjects(self.run.run).shard(self.committer.writer.shard).contribution()
        async for record in self.bus.follow(pattern, after=shard.resume_after):
            if record.sequence <= last:
                msg = "The stream of contributions began again."
                raise BrokerUnavailable(msg)
            last = record.sequence
            self._take(record)
            if not record.sequence % SLICE:
                await asyncio.sleep(0)

    def _take(self, record: Record) -> None:
        self.telemetry.chunk_arrived(record.subject, self.wall_ns())
        shard, now = self.coordinator.shard, now_s()
        got = shard.take(record, now)
        if isinstance(got, Contribution):
            self.coordinator.arrived(got, now)
            self.telemetry.received(got, record.subject, self.wall_ns())
            self.wake.set()
        elif isinstance(got, Refusal):
            self.telemetry.refused(got)
        if contributor(record.subject) not in shard.assembler.open:
            self.telemetry.settled(record.subject)

    async def _coordinate(self) -> bool:
        while not self.leaving:
            self.turns += 1
            self.wake.clear()
            now = now_s()
            action = self.coordinator.decide(now, self.wall_ns())
            if action is None:
                await happens(self.wake, self.coordinator.idle_s(now))
            elif await self._do(action):
                return True
        return False

    async def _do(self, action: Action) -> bool:
        """Do what was decided; return True once the run is marked as finished."""
        match action:
            case Publish():
                if action.round.attempt:
                    log.warning("round_reopened", fragment=action.round.fragment)
                    # Learners that cannot read what was committed last do not answer either.
                    await self.committer.writer.check()
                headers = tracing.headers_for(action.round.trace_id)
                await run_records.publish(self.bus, action.round, headers=headers)
            case CommitVersion():
                await self._commit(action)
            case EndRun():
                return await self._finish_run()
        return False

    async def _commit(self, action: CommitVersion) -> None:
        shard = self.coordinator.shard
        state = shard.fragments[action.fragment]
        origins = {known: waiting.trace_parent for known, waiting in state.pending.items()}
        commit = self.committer.merge if action.round else self.committer.genesis
        manifest = await commit(shard, state, action.closing)
        self.coordinator.committed(action, manifest, now_s())
        if manifest is not None and shard.containment.quarantine:
            shard.conduct.take(manifest.commit)
            await self._quarantine()
        if manifest is None:
            log.info("round_empty", fragment=action.fragment, reason=action.closing.reason)
        else:
            self.telemetry.committed(manifest.commit, action.round, origins, self.committer.spent)

    async def _quarantine(self) -> None:
        """Quarantine, for all shards, the learners whom the newest outcomes speak against."""
        writer, learners = self.committer.writer, self.coordinator.clock.learners
        for learner, reason in self.coordinator.shard.conduct.suspects(learners.quarantined):
            record = Quarantine(writer.run, learner, reason, writer.holder, self.wall_ns())
            await run_records.publish(self.bus, record)
            note_quarantine(learners, record)

    async def _finish_run(self) -> bool:
        """Mark the run as finished if the other shards are done too; return whether it is.

        Whichever syncer sees that first does it.
        """
        coordinator = self.coordinator
        shard, end = coordinator.shard, coordinator.end
        others: dict[int, int] = {}
        if len(shard.fragments) < len(shard.plan.fragments):
            # By the ledger: a manifest may be ahead of it, and no syncer recovers a finished run.
            commits = await ledger.last_commits(self.bus, self.run.run)
            finals = {index for index, c in commits.items() if c.final} | end.finals
            if not finals >= {fragment.index for fragment in shard.plan.fragments}:
                return False
            others = {i: c.contrib_floor for i, c in commits.items() if i not in shard.fragments}
        if not await self._resolved(others):
            return False
        await self.committer.writer.check()  # rounds that stayed empty have met no fence
        if end.left(shard) or not coordinator.over(now_s()):  # not any more, by now
            return False
        await ledger.finish_run(self.bus, self.run)
        log.info("run_finished", run=self.run.run)
        return True

    async def _resolved(self, others: Mapping[int, int]) -> bool:
        """Return True if nothing that the log holds is still to be merged or refused.

        Acknowledged messages may still be unread, and chunks may lack the rest of their
        contribution. If its learner is gone or takes too long, a last commit refuses it, once all
        that the log holds for the fragment has been read. ``others`` are the other shards'
        fragments, with the floors of their newest commits.
        """
        coordinator, now = self.coordinator, now_s()
        shard = coordinator.shard
        own = {i: max(shard.seen_sequence, state.floor) for i, state in shard.fragments.items()}
        try:
            beyond = await self.tail.beyond({**others, **own})
        except BrokerUnavailable as error:  # as while a stream has no leader: look again
            log.info("end_held_up", reason="unknown", cause=str(error))
            return False
        parts = {key for key in shard.assembler.open if key[0] in own}
        unread, late = bool(parts or beyond & own.keys()), bool(beyond & others.keys())
        waited_s = coordinator.end.wait(now, held_up=unread or late)
        patience_s = coordinator.settings.policy.round_timeout_s
        working = {} if waited_s >= patience_s else coordinator.clock.learners.working(now)
        shard.give_up(key for key in parts if not (key[0] in beyond or key[1] in working))
        ends, reason = may_end(waited_s, patience_s, unread=unread, late=late)
        if reason is not EndReason.RESOLVED:
            senders = sorted({learner for _, learner in parts})
            waited_s = round(waited_s, 1)
            log.info("end_held_up", reason=reason, waited_s=waited_s, senders=senders)
        return ends
