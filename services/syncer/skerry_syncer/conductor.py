"""One session of the syncer: when the core says so, open a round, close it, commit."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from skerry.algorithm import schedule
from skerry.errors import BrokerUnavailable
from skerry.log import ledger, presence
from skerry.log.contributions import Contribution, Refusal
from skerry.protocol import rounds
from skerry.protocol.messages import CloseReason, Round
from skerry.protocol.subjects import Subjects, contributor
from skerry_syncer.committer import Closing
from skerry_syncer.ending import EndReason, Tail, may_end
from skerry_syncer.telemetry import RoundTelemetry, contribution_id

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from skerry.algorithm.fragments import Plan
    from skerry.log.base import Bus, Record
    from skerry.protocol.messages import RunRecord
    from skerry.settings.models import RunConfig
    from skerry_syncer.committer import Committer
    from skerry_syncer.fleet import Fleet
    from skerry_syncer.shard import FragmentState, Shard

log = structlog.get_logger()

REPUBLISH_S = 2.0
EMA_FACTOR = 0.2
MOST_LAST_ROUNDS = 8
"""Last rounds of a fragment that refusals alone ask for: who goes on sending what is refused does
not keep a run from ending."""


def now_s() -> float:
    """Return the event loop's time: what simulated time replaces."""
    return asyncio.get_running_loop().time()


@dataclass(slots=True)
class Open:
    """A round in the air."""

    record: Round
    opened_s: float
    published_s: float


@dataclass(slots=True)
class Conductor:
    """One session over one shard: decides by the core, does by the ports.

    ``closed`` is, by fragment, which version the newest round that closed made, and when its K-th
    contribution was there. ``held_up_s`` is since when contributions hold up the end of the run.
    ``turns`` counts how often it has looked at everything: whoever watches sees that it lives.
    """

    bus: Bus
    run: RunRecord
    config: RunConfig
    plan: Plan
    committer: Committer
    shard: Shard
    fleet: Fleet
    timetable: schedule.Schedule
    policy: rounds.Policy
    wall_ns: Callable[[], int]
    timings: rounds.Timings = field(default_factory=rounds.Timings)
    open: dict[int, Open] = field(default_factory=dict[int, Open])
    finals: set[int] = field(default_factory=set[int])
    last_rounds: Counter[int] = field(default_factory=Counter[int])
    held_up_s: float | None = None
    launched_s: float | None = None
    short_since_s: float | None = None
    closed: dict[int, tuple[int, float]] = field(default_factory=dict[int, tuple[int, float]])
    looked_s: float | None = None
    leaving: bool = False
    turns: int = 0
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    telemetry: RoundTelemetry = field(init=False)
    tail: Tail = field(init=False)

    def __post_init__(self) -> None:
        self.tail = Tail(self.bus, self.run.run)
        self.telemetry = RoundTelemetry(self.run, self.config.sync.merge)

    async def follow_contributions(self) -> None:
        """Take every contribution to this shard behind what the manifests have resolved.

        Raises BrokerUnavailable when their stream began anew: what the shard has counted in the
        old one must be read again.
        """
        subjects, last = Subjects(self.run.run), 0
        own = [subjects.contributions(fragment) for fragment in self.shard.fragments]
        everything = len(own) == len(self.plan.fragments)
        patterns = [subjects.contributions()] if everything else [*own, subjects.starts()]
        async for record in self.bus.follow(patterns, after=self.shard.resume_after):
            if record.sequence <= last:
                msg = "The stream of contributions began anew."
                raise BrokerUnavailable(msg)
            last = record.sequence
            self._take(record)

    def _take(self, record: Record) -> None:
        self.telemetry.chunk_arrived(record.subject, self.wall_ns())
        now = now_s()
        got = self.shard.take(record, now)
        if isinstance(got, Contribution):
            self._measure_late(got, now)
            self.telemetry.received(got, record.subject, self.wall_ns())
            self.wake.set()
        elif isinstance(got, Refusal):
            self.telemetry.refused(got)
        if contributor(record.subject) not in self.shard.inbox.open:
            self.telemetry.settled(record.subject)

    def _measure_late(self, got: Contribution, now: float) -> None:
        """Learn from one that missed its round how long the next ones should wait."""
        closed = self.closed.get(got.header.fragment)
        if closed is not None and closed[0] == got.header.round_version:
            behind_s = now - closed[1]
            self.timings = rounds.measured_behind(self.timings, EMA_FACTOR, behind_s, self.policy)

    def leave(self) -> None:
        """Have ``conduct`` return as soon as the commit in hand is done."""
        self.leaving = True
        self.wake.set()

    async def conduct(self) -> bool:
        """Open, close and commit until the run is finished; False when told to leave before."""
        while not self.leaving:
            self.turns += 1
            self.wake.clear()
            self._count_hands()
            await self._genesis()
            await self._close_due()
            if await self._finish():
                return True
            await self._open_due()
            await self._republish()
            with suppress(TimeoutError):
                async with asyncio.timeout(self._idle_s()):
                    await self.wake.wait()
        return False

    async def _genesis(self) -> None:
        for state in self.shard.fragments.values():
            if state.version == 0 and state.pending:
                now_ns = self.wall_ns()
                trace = self.telemetry.trace(state.fragment.index, 1)
                closing = Closing(None, 0, now_ns, now_ns, 0.0, 0.0, final=False, trace_id=trace)
                origins = {contribution_id(c): c.origin for c in state.pending}
                manifest = await self.committer.genesis(self.shard, state, closing)
                self.telemetry.committed(manifest.commit, None, origins, self.committer.spent)

    def _count_hands(self) -> None:
        """Remember since when fewer than K learners work."""
        now = now_s()
        working = len(self.fleet.working(now))
        self.short_since_s = rounds.short_since_s(now, self.short_since_s, working, self.policy)

    async def _close_due(self) -> None:
        if self.timings.step_s is None:
            self.timings = replace(self.timings, step_s=self.fleet.step_time_s(now_s()) or None)
        for index, opened in list(self.open.items()):
            if self.leaving:
                return
            state = self.shard.fragments[index]
            now = now_s()
            view = self._view(state, opened, now)
            match rounds.decide(now, view, self.policy, self.timings):
                case _, CloseReason() as reason:
                    await self._close(state, opened, view, reason)
                case rounds.Decision.REOPEN, reason:
                    log.warning("round_reopened", fragment=index, reason=reason)
                    over = opened.record.final or self.fleet.finished(now)
                    await self._launch(index, final=over, attempt=opened.record.attempt + 1)
                case _:
                    pass

    def _view(self, state: FragmentState, opened: Open, now: float) -> rounds.View:
        return rounds.View(
            opened_s=opened.opened_s,
            arrived=dict(state.arrived_s),
            expected=frozenset(self.fleet.working(now)),
            short_since_s=self.short_since_s,
            final=opened.record.final,
        )

    async def _close(
        self, state: FragmentState, opened: Open, view: rounds.View, reason: CloseReason
    ) -> None:
        closed_s = now_s()
        quorum_at = rounds.quorum_at_s(view, self.policy.quorum)
        quorum_s = max(0.0, (quorum_at or closed_s) - opened.opened_s)
        opened_ns = opened.record.opened_ns
        closing = Closing(
            reason=reason,
            step=self._closing_clock(state, closed_s),
            opened_ns=opened_ns,
            closed_ns=self.wall_ns(),
            quorum_s=quorum_s,
            grace_s=max(0.0, closed_s - opened.opened_s - quorum_s),
            final=opened.record.final,
            arrived_ns={
                name: opened_ns + max(0, round((at_s - opened.opened_s) * 1e9))
                for name, at_s in view.arrived.items()
            },
            trace_id=opened.record.trace_id,
        )
        origins, index = {contribution_id(c): c.origin for c in state.pending}, state.fragment.index
        self.closed.pop(index, None)
        self.timings = rounds.measured_arrivals(
            self.timings, EMA_FACTOR, view.arrived.values(), self.policy
        )
        if quorum_at is not None:
            self.closed[index] = (state.version + 1, quorum_at)  # who comes from here on is late
        manifest = await self.committer.merge(self.shard, state, closing)
        del self.open[index]
        (self.finals.add if closing.final else self.finals.discard)(index)
        self.looked_s = self.held_up_s = None
        if manifest is None:
            self.closed.pop(index, None)
            log.info("round_empty", fragment=index, reason=reason)
            return
        sync_s = now_s() - closed_s
        self.timings = rounds.measured(
            self.timings,
            EMA_FACTOR,
            step_s=self.fleet.step_time_s(closed_s) or None,
            quorum_s=None if quorum_at is None else quorum_s,
            sync_s=sync_s,
        )
        self.telemetry.committed(manifest.commit, opened.record, origins, self.committer.spent)

    async def _open_due(self) -> None:
        now = now_s()
        if self.leaving or self.fleet.finished(now):
            return
        launch, _ = self._launch_state(now).next_round()
        if launch is not None:
            self.shard.fragments[launch.fragment].launched_step = launch.due_step
            await self._launch(launch.fragment, final=False)
            self.wake.set()

    def _launch_state(self, now: float) -> schedule.LaunchState:
        states = [
            schedule.FragmentDue(index, s.version, s.last_due_step, index in self.open)
            for index, s in self.shard.fragments.items()
            if s.version > 0
        ]
        return schedule.LaunchState(
            self.timetable,
            self._clock(now),
            now,
            self.launched_s,
            self.fleet.step_time_s(now),
            states,
            schedule.max_in_flight(self.timetable),
        )

    async def _launch(self, fragment: int, *, final: bool, attempt: int = 0) -> None:
        state = self.shard.fragments[fragment]
        now = now_s()
        record = Round(
            run=self.run.run,
            plan_digest=self.plan.digest,
            fragment=fragment,
            version=state.version + 1,
            due_step=self._told_clock(now),
            opened_ns=self.wall_ns(),
            syncer=self.committer.writer.holder,
            final=final,
            trace_id=self.telemetry.trace(fragment, state.version + 1),
            attempt=max(attempt, self.shard.again.pop(fragment, 0)),
        )
        await presence.open_round(self.bus, record)
        self.open[fragment] = Open(record, now, now)
        self.launched_s = now

    async def _republish(self) -> None:
        """Say open rounds again now and then: rounds live in memory and a broker may restart."""
        now = now_s()
        for opened in self.open.values():
            if now - opened.published_s >= REPUBLISH_S:
                await presence.open_round(self.bus, opened.record)
                opened.published_s = now

    async def _finish(self) -> bool:
        """Collect what is left once training is over; True when the run has been closed.

        A round that is in the air is left to close first: those who have answered it have taken
        steps since, which only a round of its own collects. It takes room, too: learners who each
        answer as many as they have room for, and not the same ones, would wait for each other.
        """
        if not self.fleet.finished(now_s()):
            self.held_up_s = None
            return False
        left = self._left()
        if not left:
            return await self._finish_run()
        room = schedule.max_in_flight(self.timetable) - len(self.open)
        for index in [i for i in left if i not in self.open][: max(0, room)]:
            self.last_rounds[index] += 1
            await self._launch(index, final=True)
        return False

    def _left(self) -> list[int]:
        """Return the fragments of which a last round has something to merge or to refuse."""
        return [
            index
            for index, state in self.shard.fragments.items()
            if index not in self.finals
            or any(c.header.steps for c in state.pending)
            or (state.refused.contributions and self.last_rounds[index] < MOST_LAST_ROUNDS)
        ]

    async def _finish_run(self) -> bool:
        """Close the run if the other shards are done too; whoever sees that first does it."""
        now = now_s()
        if self.looked_s is not None and now - self.looked_s < REPUBLISH_S:
            return False
        self.looked_s = now
        others: dict[int, int] = {}
        if len(self.shard.fragments) < len(self.plan.fragments):
            # By the ledger: a manifest may be ahead of it, and nobody mends a finished run.
            commits = await ledger.last_commits(self.bus, self.run.run)
            finals = {index for index, c in commits.items() if c.final} | self.finals
            if len(finals) < len(self.plan.fragments):
                return False
            others = {
                i: c.contrib_floor for i, c in commits.items() if i not in self.shard.fragments
            }
        if not await self._resolved(others):
            return False
        await self.committer.writer.check()  # rounds that stayed empty have met no fence
        if self._left() or not self.fleet.finished(now_s()):  # not any more, by now
            return False
        await ledger.finish_run(self.bus, self.run)
        log.info("run_finished", run=self.run.run)
        return True

    async def _resolved(self, others: Mapping[int, int]) -> bool:
        """Tell whether nothing that the log holds is still to be merged or refused.

        What is acknowledged need not have been read, and chunks may lack the rest of their
        contribution: that of a learner that is gone, or takes too long, a last commit refuses, once
        all that the log holds for the fragment has been read.
        ``others`` are the other shards' fragments, with the floors of their newest commits.
        """
        shard, now = self.shard, now_s()
        own = {i: max(shard.seen_sequence, state.floor) for i, state in shard.fragments.items()}
        try:
            beyond = await self.tail.beyond({**others, **own})
        except BrokerUnavailable as error:  # as while a stream has no leader: look again
            log.info("end_held_up", reason="unknown", cause=str(error))
            return False
        parts = {key for key in shard.inbox.open if key[0] in own}
        unread, late = bool(parts or beyond & own.keys()), bool(beyond & others.keys())
        began_s = now if self.held_up_s is None else self.held_up_s
        self.held_up_s = began_s if unread or late else None
        waited_s = now - began_s
        patience_s = self.config.sync.round_timeout_s
        working = () if waited_s >= patience_s else self.fleet.working(now)
        shard.give_up(key for key in parts if not (key[0] in beyond or key[1] in working))
        ends, reason = may_end(waited_s, patience_s, unread=unread, late=late)
        if reason is not EndReason.RESOLVED:
            log.info(
                "end_held_up",
                reason=reason,
                waited_s=round(waited_s, 1),
                senders=sorted({name for _, name in parts}),
            )
        return ends

    def _clock(self, now: float) -> int:
        """Return the clock that rounds are opened by; a little ahead of what is on record.

        Not where learners stop and say so: a round that was opened early would be answered early,
        and whoever then comes to its due step would wait for another one.
        """
        if self.timetable.blocking:
            return self._told_clock(now)
        return max(self._committed, self.fleet.clock(now, self.config.sync.quorum))

    def _told_clock(self, now: float) -> int:
        return max(self._committed, self.fleet.told_clock(now, self.config.sync.quorum))

    def _closing_clock(self, state: FragmentState, now: float) -> int:
        """Return the clock to put on record; where learners stop for a round, not below its step.

        A learner that joined meanwhile has told a lower one; by that, those who stopped would wait
        for this round for ever.
        """
        stopped_at = state.launched_step if self.timetable.blocking else 0
        return max(stopped_at, self._told_clock(now))

    @property
    def _committed(self) -> int:
        return max(state.step for state in self.shard.fragments.values())

    def _idle_s(self) -> float:
        """Return how long nothing can happen unless something arrives."""
        now = now_s()
        waits = [REPUBLISH_S]
        launch_s = self._launch_state(now).next_launch_s()
        if launch_s is not None and not self.fleet.finished(now):
            waits.append(launch_s)
        waits += [
            rounds.next_wake_s(
                now, self._view(self.shard.fragments[i], opened, now), self.policy, self.timings
            )
            for i, opened in self.open.items()
        ]
        return min(waits)
