"""The network's side of a learner: asyncio loops between the log and the mailbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from dataclasses import replace

import structlog

from skerry.algorithm.fragments import Plan
from skerry.errors import BrokerUnavailable, StorageFull, Superseded, first_cause
from skerry.log import ledger, run_records
from skerry.log.base import Bus
from skerry.protocol.learner import DoorReason, LearnerPolicy, TrainingProgress, supersedes
from skerry.protocol.messages import LearnerPhase, MemberRecord, Pulse
from skerry.protocol.subjects import Subjects
from skerry.settings.models import RunConfig
from skerry.tasks import TaskGroup
from skerry_learner.sync.connection import LearnerConnection
from skerry_learner.sync.identity import LearnerIdentity
from skerry_learner.sync.mailbox import Changed, Mailbox
from skerry_learner.sync.receiving import FragmentReceiver
from skerry_learner.sync.sending import ContributionSender
from skerry_learner.sync.session import Fragments, Session
from skerry_learner.sync.telemetry import LearnerTelemetry

log = structlog.get_logger()

NANOSECONDS = 1e9


class Network:
    """One learner's loops; ``run`` them until ``finished`` returns."""

    def __init__(self, link: LearnerConnection) -> None:
        self.link = link
        self.receiver = FragmentReceiver(link)
        self.sender = ContributionSender(link)
        self._last_pulse: Pulse | None = None
        self._pulse_posted = asyncio.Event()

    async def run(self) -> None:
        """Keep log and mailbox in step for ever; raises what ends the learner."""
        loops = (
            self.receiver.rounds,
            self.receiver.manifests,
            self.receiver.prove,
            self.transfer,
            self.pulses,
            self.genesis,
            self.watch_name,
        )
        try:
            async with TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop(), name=loop.__name__)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def transfer(self) -> None:
        """Send, read and look for whatever is to be, whenever anything has changed."""
        try:
            async with TaskGroup() as group:
                while True:
                    self.link.wake.clear()
                    self.sender.start(group)
                    self.receiver.start(group)
                    self._pulse_posted.set()
                    await self.link.wake.wait()
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def genesis(self) -> None:
        """Post when the run's first commit was made, on the trainer's clock.

        How long ago that is the broker's clock tells, once: those of machines differ, and jump.
        """
        begun_ns = await ledger.begun_ns(self.link.bus, self.link.run)
        now_ns, at_s = await self._broker_time()
        self.link.mailbox.post_genesis(at_s - (now_ns - begun_ns) / NANOSECONDS)

    async def _broker_time(self) -> tuple[int, float]:
        """Return what the broker's clock and the trainer's show, to within a round trip.

        A pulse is said again for it: what the broker stores, it stores with its time.
        """
        link = self.link
        while True:
            if await self.pulse(repeat=True):
                at_s = link.clock()
                with suppress(BrokerUnavailable):
                    stored = await link.bus.last(Subjects(link.run).pulse(link.identity.name))
                    if stored is not None:
                        return stored.time_ns, at_s
            await asyncio.sleep(link.config.liveness.pulse_s)

    async def pulses(self) -> None:
        """Publish the newest pulse whenever there is one; a lost pulse is replaced by the next.

        Before training the last one is said again: a trainer that compiles has no step boundaries.
        """
        repeat = False
        while True:
            self._pulse_posted.clear()
            await self.pulse(repeat=repeat)
            repeat = False
            try:
                async with asyncio.timeout(self._repeat_s):
                    await self._pulse_posted.wait()
            except TimeoutError:
                repeat = True

    @property
    def _repeat_s(self) -> float | None:
        last = self._last_pulse
        preparing = {LearnerPhase.STARTING, LearnerPhase.CATCHING_UP}
        return None if last and last.phase not in preparing else self.link.config.liveness.pulse_s

    def newest_pulse(self) -> Pulse | None:
        """Return the pulse that was sent last; None before the first."""
        return self._last_pulse

    async def pulse(self, *, repeat: bool = False) -> bool:
        """Publish the pulse that waits, if one does; return True once the log has it.

        ``repeat``: where none waits, say the last one once more.
        """
        link = self.link
        pulse = link.mailbox.take_pulse()
        if pulse is None and repeat and self._last_pulse is not None:
            pulse = replace(self._last_pulse, sent_ns=link.wall_ns())
        if pulse is None:
            return False
        self._last_pulse = pulse
        if pulse.phase is LearnerPhase.FINISHED:
            link.door.end()
            link.mailbox.post_rounds(link.door.rounds)
        try:
            await run_records.publish(link.bus, pulse)
        except (BrokerUnavailable, StorageFull) as error:
            log.warning("pulse_lost", error=str(error))
            return False
        return True

    async def watch_name(self) -> None:
        """Raise Superseded once a newer incarnation of this learner has joined."""
        identity = self.link.identity
        members = run_records.follow(self.link.bus, self.link.run, MemberRecord)
        async with aclosing(members):
            async for member in members:
                if member.learner == identity.name and member.incarnation > identity.incarnation:
                    self._replaced_by(member)

    def _replaced_by(self, member: MemberRecord) -> None:
        identity = self.link.identity
        if not supersedes(member.incarnation, identity.incarnation):
            self.link.refuse(DoorReason.TOO_MANY_STARTS)
            return
        msg = (
            f"Learner {identity.name!r} was started again on {member.host}:"
            " this one stops. Give each learner a name of its own."
        )
        raise Superseded(msg)

    async def finished(self) -> None:
        """Return once the run is finished; StateLost once another run has its place in the log."""
        identity = self.link.identity
        await ledger.wait_finished(self.link.bus, identity.run, created_ns=identity.created_ns)
        log.info("run_finished")


def open_sync(  # noqa: PLR0913 - the one place where a learner's two sides are put together
    bus: Bus,
    identity: LearnerIdentity,
    plan: Plan,
    config: RunConfig,
    fragments: Fragments,
    start: TrainingProgress,
    *,
    notify: Callable[[asyncio.Event], None] = asyncio.Event.set,
    changed: Changed | None = None,
    wall_ns: Callable[[], int] = time.time_ns,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[Session, Network]:
    """Return the trainer's and the network's side of one learner, with a mailbox between them.

    Args:
        bus: The log.
        identity: Who the learner is.
        plan: The run's fragments.
        config: The run's settings.
        fragments: What holds the parameters.
        start: Where the learner goes on.
        notify: Sets the network's event for the trainer, from whichever thread that runs in.
        changed: What the trainer waits for where it has no thread.
        wall_ns: The wall clock.
        clock: The monotonic clock that the trainer counts by.
    """
    wake, telemetry = asyncio.Event(), LearnerTelemetry(identity)
    mailbox = Mailbox(LearnerPolicy.of(config.sync).room, lambda: notify(wake), changed)
    session = Session(
        telemetry, plan, config.sync, fragments, mailbox, start=start, wall_ns=wall_ns
    )
    link = LearnerConnection(
        bus, identity, plan, config, mailbox, wake, telemetry, wall_ns=wall_ns, clock=clock
    )
    return session, Network(link)
