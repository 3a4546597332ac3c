"""The network's side of a learner: asyncio loops between the log and the mailbox."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing, suppress
from dataclasses import asdict, replace
from functools import partial
from types import MappingProxyType

import structlog

from skerry.algorithm.fragments import Plan
from skerry.client.connection import LearnerConnection
from skerry.client.joining import LearnerPlace
from skerry.client.mailbox import Initial, Mailbox
from skerry.client.processes import LeadProcess, OtherProcesses
from skerry.client.receiving import FragmentReceiver
from skerry.client.sending import ContributionSender
from skerry.client.session import Fragments, Session
from skerry.client.telemetry import LearnerTelemetry
from skerry.errors import BrokerUnavailable, StorageFull, Superseded, first_cause
from skerry.log import ledger, place, run_records
from skerry.log.base import Bus
from skerry.log.global_fragments import GlobalReader
from skerry.log.streams import vectors_ahead
from skerry.protocol import genesis
from skerry.protocol.learner import DoorReason, LearnerPolicy, supersedes
from skerry.protocol.messages import LearnerPhase, MemberRecord, Pulse, SyncerPulse
from skerry.protocol.subjects import Subjects
from skerry.service.shell import outlast
from skerry.settings.models import RunConfig
from skerry.tasks import TaskGroup, happens

log = structlog.get_logger()

NANOSECONDS = 1e9
ALONE_S = 15.0
"""Seconds without a syncer after which a warning is logged, even while the trainer compiles."""
PREPARING = {LearnerPhase.STARTING, LearnerPhase.CATCHING_UP}


class Network:
    """One learner's loops; ``run`` them until ``finished`` returns.

    ``last_pulse`` is the one that was sent last; None before the first.
    """

    def __init__(
        self,
        link: LearnerConnection,
        others: OtherProcesses | None = None,
        own: Callable[[int], Sequence[range]] | None = None,
        missing: Sequence[int] = (),
        recorded: Mapping[int, int] = MappingProxyType({}),
    ) -> None:
        """``missing`` are the fragments that the log lacks, if the trainer can offer them.

        ``recorded`` are the newest versions that the ledger had when it joined.
        """
        self.link = link
        self._missing = missing
        reader = GlobalReader(link.bus, link.run, link.plan, own, link.config.sync.chunk_bytes)
        self.receiver = FragmentReceiver(link, reader, others, recorded=dict(recorded))
        if others is None:  # else the trainer has some blocks of each
            self.receiver.unasked.update(missing)
        self.sender = ContributionSender(link, others)
        self.last_pulse: Pulse | None = None
        self._pulse: Pulse | None = None
        self._pulse_ordered = asyncio.Event()

    def take_orders(self) -> None:
        """Pass on the trainer's orders; send only the newest pulse."""
        for order in self.link.mailbox.take_orders():
            if isinstance(order, Pulse):
                self._pulse = order
                self._pulse_ordered.set()
            elif isinstance(order, Initial):
                self.receiver.take_initial(order)
            else:
                self.sender.take(order)
        self.receiver.changed.set()

    async def run(self) -> None:
        """Keep log and mailbox in step for ever; raises what ends the learner."""
        loops = (
            self.receiver.rounds,
            self.receiver.deltas,
            self.receiver.manifests,
            self.receiver.prove,
            self.receiver.fragments,
            self.sender.run,
            self.pulses,
            self.offer,
            self.genesis,
            self.watch_name,
        )
        try:
            async with TaskGroup() as group:
                for loop in loops:
                    group.create_task(loop(), name=loop.__name__)
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def finished(self) -> None:
        """Return once the run is finished; StateLost once another run has its place in the log."""
        bus, identity = self.link.bus, self.link.identity
        wait = partial(ledger.wait_finished, bus, identity.run, created_ns=identity.created_ns)
        await outlast(wait, event="end_unread")
        log.info("run_finished")

    async def flush(self) -> None:
        """Send what is left, after ``run`` and the trainer have stopped."""
        self.take_orders()
        await self.sender.flush()

    async def offer(self) -> None:
        """Have the trainer offer what the log lacks, once no other learner is to do so."""
        link, pulse_s = self.link, self.link.config.liveness.pulse_s
        before, changed_s = list[int](), link.clock()
        while missing := [f for f in self._missing if f not in self.receiver.announced]:
            if missing != before:
                before, changed_s = missing, link.clock()
            with suppress(BrokerUnavailable):
                first = await place.first_to_offer(link.bus, link.run, pulse_s)
                if genesis.is_to_offer(link.identity.name, first, link.clock() - changed_s):
                    link.mailbox.post_to_offer(missing)
                    return
                if link.mailbox.to_offer is None:
                    link.mailbox.post_to_offer(())
            await asyncio.sleep(pulse_s)
        if link.mailbox.to_offer is None:  # others were faster, and the trainer waits to hear
            link.mailbox.post_to_offer(())

    async def genesis(self) -> None:
        """Post when the run's first commit was made, on the trainer's clock.

        Its age is computed once by the broker's clock, as machines' clocks differ and jump. If
        there is neither a commit nor a sign of a syncer, a warning is logged once.
        """
        async with TaskGroup() as group:
            alone = group.create_task(self._say_alone())
            try:
                begun_ns = await ledger.begun_ns(self.link.bus, self.link.run)
            finally:
                alone.cancel()
        now_ns, at_s = await self._broker_time()
        self.link.mailbox.post_genesis(at_s - (now_ns - begun_ns) / NANOSECONDS)

    async def _say_alone(self) -> None:
        await asyncio.sleep(ALONE_S)
        run = self.link.run
        with suppress(BrokerUnavailable):
            if not await run_records.newest_each(self.link.bus, run, SyncerPulse):
                hint = f"start `skerry syncer --run {run}` on the same broker, or see its log"
                log.warning("waits_for_syncer", seconds=ALONE_S, hint=hint)

    async def _broker_time(self) -> tuple[int, float]:
        """Return the broker's time and the trainer's, in step to within a round trip."""
        link = self.link
        while True:
            with suppress(BrokerUnavailable):
                return await link.bus.now_ns(Subjects(link.run).ledger("run")), link.clock()

    async def pulses(self) -> None:
        """Publish the newest pulse whenever there is one; a lost pulse is replaced by the next.

        Before the first step is measured, the last pulse is repeated: a trainer that compiles, or
        runs a compiled program for the first time, has no step boundaries.
        """
        repeat = False
        while True:
            self._pulse_ordered.clear()
            await self.pulse(repeat=repeat)
            pulse_s = self.link.config.liveness.pulse_s if _prepares(self.last_pulse) else None
            repeat = not await happens(self._pulse_ordered, pulse_s)

    async def pulse(self, *, repeat: bool = False) -> None:
        """Publish the pulse that waits, if there is one.

        ``repeat``: if none waits, publish the last one again.
        """
        link = self.link
        self.take_orders()
        pulse, self._pulse = self._pulse or (self.last_pulse if repeat else None), None
        if pulse is None:
            return
        shared, traffic = link.bus.shared_reads, link.traffic
        traffic.region, traffic.cached_bytes = shared.region, shared.cached_bytes
        pulse = replace(pulse, sent_ns=link.wall_ns(), **asdict(traffic))
        self.last_pulse = pulse
        if pulse.phase is LearnerPhase.FINISHED:
            link.door.end()
            link.mailbox.post_rounds(link.door.rounds)
        try:
            await run_records.publish(link.bus, pulse)
        except (BrokerUnavailable, StorageFull) as error:
            log.warning("pulse_lost", error=str(error))

    async def watch_name(self) -> None:
        """Raise Superseded once a newer incarnation of this learner has joined."""
        name, incarnation = self.link.identity.start
        members = run_records.follow(self.link.bus, self.link.run, MemberRecord)
        async with aclosing(members):
            async for member in members:
                if member.learner != name or member.incarnation <= incarnation:
                    continue
                if not supersedes(member.incarnation, incarnation):
                    self.link.refuse(DoorReason.TOO_MANY_STARTS)
                    continue
                msg = (
                    f"Learner {name!r} was started again on {member.host}:"
                    " this one stops. Give each learner a name of its own."
                )
                raise Superseded(msg)


def open_sync(  # noqa: PLR0913 - the one place where a learner's two sides are put together
    bus: Bus,
    joined: LearnerPlace,
    plan: Plan,
    config: RunConfig,
    fragments: Fragments,
    *,
    call: Callable[[Callable[[], None]], None] = lambda function: function(),
    wake: Callable[[], None] | None = None,
    wall_ns: Callable[[], int] = time.time_ns,
    clock: Callable[[], float] = time.monotonic,
    lead: LeadProcess | None = None,
) -> tuple[Session, Network]:
    """Return the trainer's and the network's side of one learner, with a mailbox between them.

    ``fragments`` holds the parameters, ``joined`` says where the learner goes on. ``call`` calls a
    function in the network's thread, from the trainer's. ``wake`` is called when there is news for
    a trainer that has no thread to wait in. ``clock`` is monotonic, and the one it counts by.
    ``lead`` is the learner's first process, where it has several: those send and read their own
    blocks, if the fragments say which these are.
    """
    identity, telemetry = joined.learner, LearnerTelemetry(joined.learner)
    room = max(LearnerPolicy.of(config.sync).room, vectors_ahead(plan.largest))
    mailbox = Mailbox(room, lambda: call(network.take_orders), wake)
    own = getattr(fragments, "own_blocks", None)
    others = None if own is None or lead is None else lead.others
    link = LearnerConnection(
        bus, identity, plan, config, mailbox, telemetry, wall_ns=wall_ns, clock=clock
    )
    if others is not None:
        link.residuals.forgets = others.forget
    network = Network(link, others, own, joined.missing, joined.recorded)
    start = joined.start
    session = Session(
        telemetry, plan, config.sync, fragments, mailbox, start=start, wall_ns=wall_ns
    )
    return session, network


def _prepares(last: Pulse | None) -> bool:
    """Return True until training has measured a step."""
    if last is None or last.phase in PREPARING:
        return True
    return last.phase is LearnerPhase.TRAINING and last.step_time_s <= 0
