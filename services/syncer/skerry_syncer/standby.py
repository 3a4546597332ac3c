"""A syncer beside others: says what it holds, hears the rest, takes shards and hands them over."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import structlog

from skerry.errors import BrokerUnavailable, BusError
from skerry.log import fences, ledger, recovery, run_records
from skerry.protocol import succession
from skerry.protocol.messages import SyncerPulse
from skerry.tasks import TaskGroup
from skerry_syncer.leadership import RETRY_S, Leadership, LeadershipEnd
from skerry_syncer.serving import now_s

if TYPE_CHECKING:
    from skerry_syncer.run import ServedRun

log = structlog.get_logger()

STUCK_S = 60.0
"""A shard that has made no progress for this long, while the event loop lives, is given up."""
SHY_LEASES = 4.0
"""Leases for which a syncer leaves a shard to others that it was stuck with."""


@dataclass(slots=True)
class Watch:
    """What a leadership's progress was when it last changed, and when that was."""

    progress: tuple[int, ...]
    changed_s: float


@dataclass(slots=True)
class StandBy:
    """One syncer process: a stand-by for every shard that it does not hold.

    Its decisions are those of ``skerry.protocol.succession``, made again whenever something is
    heard or time has passed; each shard that it serves is a task of its own.
    """

    served: ServedRun
    instance: str
    host: str
    view: succession.View
    policy: succession.Policy
    leaderships: dict[int, Leadership] = field(default_factory=dict[int, Leadership])
    watched: dict[int, Watch] = field(default_factory=dict[int, Watch])
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, "asyncio.Task[None]"])
    shy_until_s: dict[int, float] = field(default_factory=dict[int, float])
    governed_s: float = 0.0
    said: succession.SuccessionReason | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    due: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, served: ServedRun, instance: str, host: str) -> StandBy:
        sync = served.config.sync
        view = succession.View(served.name, instance)
        return cls(served, instance, host, view, succession.Policy(sync.shards, sync.lease_s))

    async def stand(self) -> None:
        """Serve what falls to this syncer until the run is finished.

        Raises what a person must repair, such as StateLost.
        """
        bus, run = self.served.bus, self.served.record.run
        await self._look()
        async with TaskGroup() as group:
            loops = [
                group.create_task(self._follow_fences(), name="fences"),
                group.create_task(self._follow_syncers(), name="syncers"),
                group.create_task(self.served.follow_pulses(self._wake_all), name="pulses"),
                group.create_task(self._pulse(), name="pulse"),
                group.create_task(self._govern(group), name="govern"),
            ]
            await ledger.wait_finished(bus, run, created_ns=self.served.record.created_ns)
            log.info("run_is_finished", run=run)
            for task in (*loops, *self.tasks.values()):
                task.cancel()

    async def _look(self) -> None:
        """Read the fences as they are, waiting for the broker if need be."""
        shard = 0
        while shard < self.policy.shards:
            try:
                held = await fences.newest(self.served.bus, self.served.record.run, shard)
            except BrokerUnavailable:
                await asyncio.sleep(RETRY_S)
                continue
            if held is not None:
                self._saw(held, found=True)
            shard += 1

    def _saw(self, held: fences.Held, *, found: bool = False) -> None:
        self.view = succession.fenced(
            self.view, now_s(), held.shard, held.token, held.holder, found=found
        )
        self.wake.set()

    async def _follow_fences(self) -> None:
        shards = range(self.policy.shards)
        async for held in fences.follow_fences(self.served.bus, self.served.record.run, shards):
            known = self.view.fences.get(held.shard)
            if known is None or held.token >= known.token:
                self._saw(held)
                continue
            with suppress(BrokerUnavailable):
                newest = await self._look_again(held.shard, known.token)
                self._end_under(held.shard, known.token, fences.token_of(newest))

    async def _look_again(self, shard: int, known: int) -> fences.Held | None:
        """Return a shard's fence as the log has it, and forget ``known`` if the log has lost it.

        Raises StateLost where the whole run is lost, or another one has its place: nothing of this
        one must be written there.
        """
        held = await fences.settled(self.served.bus, self.served.record.run, shard, known)
        if fences.token_of(held) < known:
            await recovery.still_there(self.served.bus, self.served.record)
            log.error(
                "fence_lost",
                shard=shard,
                fence=known,
                cause=f"The log has lost the fence of shard {shard} of run"
                f" {self.served.record.run!r}: its state was purged or replaced;"
                f" {self.served.name!r} takes the shard again and looks what is left of it.",
            )
            self.view = succession.unfenced(self.view, shard)
        if held is not None:
            self._saw(held)
        return held

    def _end_under(self, shard: int, known: int, newest: int) -> None:
        """End a leadership whose fence is lost: it cannot write, and might not try for long."""
        leadership = self.leaderships.get(shard)
        if leadership is not None and leadership.taken and newest < leadership.token <= known:
            self.tasks[shard].cancel()
            self._drop(leadership)

    async def _follow_syncers(self) -> None:
        async for pulse in run_records.follow(self.served.bus, self.served.record.run, SyncerPulse):
            claims = dict(zip(pulse.shards, pulse.fences, strict=False))
            now, before = now_s(), self.view
            self.view = succession.heard(
                before, now, self.policy, pulse.syncer, pulse.instance, claims
            )
            if self.leaderships and before.echo_s is not None:
                self._warn_if_late(now - before.echo_s, pulse.instance)
            self.wake.set()

    def _warn_if_late(self, gap_s: float, instance: str) -> None:
        if instance == self.instance and gap_s > self.policy.lease_s:
            log.warning(
                "pulses_late",
                gap_s=round(gap_s, 2),
                lease_s=self.policy.lease_s,
                hint="other syncers may take its shards: raise sync.lease_s if this happens often",
            )

    async def _pulse(self) -> None:
        """Say what is held, a few times per lease and whenever that changes."""
        every_s = self.policy.lease_s / succession.PULSES_PER_LEASE
        while True:
            self.due.clear()
            try:
                async with asyncio.timeout(2 * every_s):
                    await run_records.publish(self.served.bus, self._said_now())
            except (BusError, TimeoutError) as error:
                log.debug("pulse_not_sent", cause=str(error))
            with suppress(TimeoutError):
                async with asyncio.timeout(every_s):
                    await self.due.wait()

    def _said_now(self) -> SyncerPulse:
        holds = sorted(self._holds().items())
        return SyncerPulse(
            run=self.served.record.run,
            syncer=self.served.name,
            instance=self.instance,
            sent_ns=self.served.wall_ns(),
            shards=tuple(shard for shard, _ in holds),
            fences=tuple(token for _, token in holds),
            host=self.host,
        )

    def _holds(self) -> dict[int, int]:
        return {
            shard: leadership.token
            for shard, leadership in self.leaderships.items()
            if leadership.taken
        }

    async def _govern(self, group: TaskGroup) -> None:
        """Take and hand over what the rule says, for ever."""
        while True:
            self.wake.clear()
            now = now_s()
            self._give_up_stuck(now)
            self.view = replace(self.view, holds=self._holds())
            moves, reason = succession.decide(now, self.view, self.policy)
            if reason != self.said:
                log.info("succession", reason=reason, take=moves.take, hand_over=moves.hand_over)
                self.said = reason
            for shard in moves.hand_over:
                self.leaderships[shard].leave()
            for shard in moves.take:
                if shard not in self.leaderships and self.shy_until_s.get(shard, now) <= now:
                    self._take(group, shard)
            with suppress(TimeoutError):
                async with asyncio.timeout(succession.next_wake_s(now, self.view, self.policy)):
                    await self.wake.wait()

    def _take(self, group: TaskGroup, shard: int) -> None:
        fence = self.view.fences.get(shard)
        leadership = Leadership(self.served, shard, fence.token if fence else 0, self._tell)
        self.leaderships[shard] = leadership
        self.tasks[shard] = group.create_task(self._serve(leadership), name=f"shard-{shard}")

    async def _serve(self, leadership: Leadership) -> None:
        """Serve a shard to the end of its leadership, and say at once that it is not held any more.

        Without its fence it may have been overtaken, or the log may have lost it: see which.
        """
        ending = await leadership.serve()
        if ending is LeadershipEnd.FINISHED:
            return
        if ending is LeadershipEnd.LEFT:
            log.info("shard_handed_over", shard=leadership.shard, fence=leadership.token)
        if ending in {LeadershipEnd.NOT_TAKEN, LeadershipEnd.OVERTAKEN}:
            overtaken = ending is LeadershipEnd.OVERTAKEN
            with suppress(BrokerUnavailable):  # then it is not known whether it is lost
                held = await self._look_again(leadership.shard, leadership.token)
                overtaken = overtaken and fences.token_of(held) > leadership.token
            if overtaken:
                self._say_overtaken(leadership)
        self._drop(leadership)

    def _say_overtaken(self, leadership: Leadership) -> None:
        taken = (
            f"Another syncer has taken shard {leadership.shard} of run {self.served.record.run!r}: "
            f"{self.served.name!r} steps down and stands by; nothing is lost."
        )
        log.warning("stepped_down", shard=leadership.shard, fence=leadership.token, cause=taken)

    def _drop(self, leadership: Leadership) -> None:
        if self.leaderships.get(leadership.shard) is leadership:
            del self.leaderships[leadership.shard], self.tasks[leadership.shard]
            self.watched.pop(leadership.shard, None)
            self._tell()

    def _give_up_stuck(self, now: float) -> None:
        """Stop claiming a shard that makes no progress, so that another syncer can have it.

        While this whole process was stopped nothing could, and what has happened since is for
        ``Leadership`` to find out.
        """
        if now - self.governed_s > 2 * self.policy.lease_s:
            self.watched.clear()
        self.governed_s = now
        for shard, leadership in list(self.leaderships.items()):
            watch = self.watched.get(shard)
            if watch is None or watch.progress != leadership.progress:
                self.watched[shard] = Watch(leadership.progress, now)
            elif now - watch.changed_s >= STUCK_S:
                log.error("shard_stuck", shard=shard, fence=leadership.token, after_s=STUCK_S)
                self.shy_until_s[shard] = now + SHY_LEASES * self.policy.lease_s
                self.tasks[shard].cancel()
                self._drop(leadership)

    def _tell(self) -> None:
        """Have the others hear of what has changed without waiting for the next pulse."""
        self.due.set()
        self.wake.set()

    def _wake_all(self) -> None:
        for leadership in self.leaderships.values():
            leadership.wake()
