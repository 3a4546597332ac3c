"""A syncer beside others: says what it holds, hears the rest, takes shards and hands them over."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import structlog

from skerry.errors import BrokerUnavailable, BusError, Denied
from skerry.log import fences, ledger, recovery, run_records
from skerry.protocol import succession
from skerry.protocol.messages import SyncerPulse
from skerry.tasks import TaskGroup, happens, now_s
from skerry_syncer.following import StandbyFollower
from skerry_syncer.leadership import RETRY_S, Leadership, LeadershipEnd

if TYPE_CHECKING:
    from skerry_syncer.run import ServedRun

log = structlog.get_logger()

STUCK_S = 60.0
"""A shard that has made no progress for this long, while the event loop lives, is given up."""
SHY_LEASES = 4.0
"""Leases for which a syncer leaves a shard that it was stuck with to others."""


@dataclass(slots=True)
class StandBy:
    """One syncer process: a stand-by for every shard that it does not hold.

    Its decisions are those of ``skerry.protocol.succession``, made again whenever something is
    heard or time has passed; each shard that it serves is a task of its own. ``watched`` holds each
    shard's progress as it last changed, and when that was.
    """

    served: ServedRun
    host: str
    view: succession.View
    policy: succession.Policy
    leaderships: dict[int, Leadership] = field(default_factory=dict[int, Leadership])
    watched: dict[int, tuple[tuple[int, ...], float]] = field(default_factory=dict[int, Any])
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict[int, "asyncio.Task[None]"])
    shy_until_s: dict[int, float] = field(default_factory=dict[int, float])
    governed_s: float = 0.0
    said: succession.SuccessionReason | None = None
    wake: asyncio.Event = field(default_factory=asyncio.Event)
    due: asyncio.Event = field(default_factory=asyncio.Event)

    @classmethod
    def of(cls, served: ServedRun, instance: str, host: str) -> StandBy:
        view = succession.View(served.name, instance)
        policy = succession.Policy(served.plan.shards, served.config.sync.lease_s)
        return cls(served, host, view, policy)

    async def stand(self) -> None:
        """Serve what falls to this syncer until the run is finished.

        Raises what a person must repair, such as StateLost.
        """
        bus, run = self.served.bus, self.served.record.run
        follower = StandbyFollower(run, self.served.name, self.served.restorer)
        await self._look()
        async with TaskGroup() as group:
            loops = [
                *(
                    group.create_task(self._follow_fence(shard), name=f"fence-{shard}")
                    for shard in range(self.policy.shards)
                ),
                group.create_task(self._follow_syncers(), name="syncers"),
                group.create_task(self.served.follow_pulses(self._wake_all), name="pulses"),
                group.create_task(self.served.follow_quarantine(self._wake_all), name="quarantine"),
                group.create_task(self._pulse(), name="pulse"),
                group.create_task(follower.follow(lambda: not self.leaderships), name="state"),
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

    def _saw(self, held: fences.HeldFence, *, found: bool = False) -> None:
        self.view = succession.fenced(
            self.view, now_s(), held.shard, held.token, held.holder, found=found
        )
        self.wake.set()

    async def _follow_fence(self, shard: int) -> None:
        async for held in fences.follow_fence(self.served.bus, self.served.record.run, shard):
            known = self.view.fences.get(held.shard)
            if known is None or held.token >= known.token:
                self._saw(held)
                continue
            with suppress(BrokerUnavailable):
                newest = fences.token_of(await self._look_again(held.shard, known.token))
                led = self.leaderships.get(held.shard)
                if led is not None and led.taken and newest < led.token <= known.token:
                    # It cannot write, and might not try for long.
                    self._drop(led, cancel=True)

    async def _look_again(self, shard: int, known: int) -> fences.HeldFence | None:
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

    async def _follow_syncers(self) -> None:
        async for pulse in run_records.follow(self.served.bus, self.served.record.run, SyncerPulse):
            claims = dict(zip(pulse.shards, pulse.fences, strict=False))
            now, before = now_s(), self.view
            self.view = succession.heard(
                before, now, self.policy, pulse.syncer, pulse.instance, claims
            )
            self.wake.set()
            gap_s = 0.0 if before.echo_s is None else now - before.echo_s
            if (
                self.leaderships
                and pulse.instance == self.view.instance
                and gap_s > self.policy.lease_s
            ):
                log.warning(
                    "pulses_late",
                    gap_s=round(gap_s, 2),
                    lease_s=self.policy.lease_s,
                    hint="other syncers may take its shards: raise sync.lease_s if that happens",
                )

    async def _pulse(self) -> None:
        """Say what is held, a few times per lease and whenever that changes."""
        every_s = self.policy.lease_s / succession.PULSES_PER_LEASE
        while True:
            self.due.clear()
            holds = sorted(self._holds().items())
            pulse = SyncerPulse(
                run=self.served.record.run,
                syncer=self.served.name,
                instance=self.view.instance,
                sent_ns=self.served.wall_ns(),
                shards=tuple(shard for shard, _ in holds),
                fences=tuple(token for _, token in holds),
                host=self.host,
            )
            try:
                async with asyncio.timeout(2 * every_s):
                    await run_records.publish(self.served.bus, pulse)
            except Denied:
                raise
            except (BusError, TimeoutError) as error:
                log.debug("pulse_not_sent", cause=str(error))
            await happens(self.due, every_s)

    def _holds(self) -> dict[int, int]:
        return {shard: led.token for shard, led in self.leaderships.items() if led.taken}

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
                    fence = self.view.fences.get(shard)
                    led = Leadership(self.served, shard, fence.token if fence else 0, self._tell)
                    self.leaderships[shard] = led
                    self.tasks[shard] = group.create_task(self._serve(led), name=f"shard-{shard}")
            await happens(self.wake, succession.next_wake_s(now, self.view, self.policy))

    async def _serve(self, leadership: Leadership) -> None:
        """Serve a shard to the end of its leadership, and say at once that it is not held any more.

        If its fence is gone, find out whether another syncer took it or the log lost it.
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
                log.warning(
                    "stepped_down",
                    shard=leadership.shard,
                    fence=leadership.token,
                    cause=f"Another syncer has taken shard {leadership.shard} of run"
                    f" {self.served.record.run!r}: {self.served.name!r} steps down and stands by;"
                    " nothing is lost.",
                )
        self._drop(leadership)

    def _drop(self, leadership: Leadership, *, cancel: bool = False) -> None:
        shard = leadership.shard
        if self.leaderships.get(shard) is leadership:
            if cancel:
                self.tasks[shard].cancel()
            del self.leaderships[shard], self.tasks[shard]
            self.watched.pop(shard, None)
            self._tell()

    def _give_up_stuck(self, now: float) -> None:
        """Stop claiming a shard that makes no progress, so that another syncer can have it.

        After a stop of this whole process no shard counts as stuck: ``Leadership`` finds out what
        has happened since.
        """
        if now - self.governed_s > 2 * self.policy.lease_s:
            self.watched.clear()
        self.governed_s = now
        for shard, leadership in list(self.leaderships.items()):
            progress, changed_s = self.watched.get(shard, ((), now))
            if progress != leadership.progress:
                self.watched[shard] = leadership.progress, now
            elif now - changed_s >= STUCK_S:
                log.error("shard_stuck", shard=shard, fence=leadership.token, after_s=STUCK_S)
                self.shy_until_s[shard] = now + SHY_LEASES * self.policy.lease_s
                self._drop(leadership, cancel=True)

    def _tell(self) -> None:
        """Have the others hear of what has changed without waiting for the next pulse."""
        self.due.set()
        self.wake.set()

    def _wake_all(self) -> None:
        for leadership in self.leaderships.values():
            leadership.wake()
