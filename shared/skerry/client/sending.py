"""Sends contributions until the log has each, and looks for missing ones.

It waits while the broker is away; the step loop does not notice.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace

import structlog

from skerry.algorithm.fragments import Plan
from skerry.client import connection
from skerry.client.connection import LearnerConnection
from skerry.client.encode import Stopwatch, encode
from skerry.client.mailbox import Gone, OutgoingContribution
from skerry.client.processes import OtherProcesses
from skerry.errors import BrokerUnavailable, Diverged, ModelError, StorageFull, WireError
from skerry.log import contributions, state
from skerry.log.base import Bus, Record
from skerry.log.place import read_until
from skerry.protocol.contribution import Contribution, ContributionAssembler, ContributionId
from skerry.protocol.learner import MissingCheck
from skerry.protocol.messages import ContributionKind
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup, in_thread
from skerry.telemetry import instruments, metrics, tracing
from skerry.telemetry.spans import Interval

log = structlog.get_logger()

ANSWERED_S = 1.0
"""Most seconds that a run's end waits for the log to acknowledge what is being sent."""


class ContributionSender:
    """Sends what the trainer offers, and checks whether the log still has what it sent.

    ``unsent`` are the contributions that the log does not have yet, by fragment.
    """

    def __init__(self, link: LearnerConnection, others: OtherProcesses | None = None) -> None:
        self.unsent: dict[int, OutgoingContribution] = {}
        self._link = link
        self._others = others
        self._sender = contributions.Sender(link.bus, link.run, link.plan)
        self._encoding = asyncio.Lock()
        self._orders: asyncio.Queue[OutgoingContribution | MissingCheck] = asyncio.Queue()
        self._sending: set[asyncio.Task[None]] = set()

    def take(self, order: OutgoingContribution | MissingCheck) -> None:
        """Have something sent, or looked for."""
        if isinstance(order, OutgoingContribution):
            self.unsent[order.header.fragment] = order
        self._orders.put_nowait(order)

    async def run(self) -> None:
        """Do what was taken, for ever; contributions start in the order they were made.

        None waits for the log to acknowledge the one before: rounds may begin more often than a
        distant broker answers.
        """
        async with TaskGroup() as group:
            while True:
                order = await self._orders.get()
                if isinstance(order, MissingCheck):
                    group.create_task(self.look_for(order))
                else:
                    task = group.create_task(self.send(order))
                    self._sending.add(task)
                    task.add_done_callback(self._sending.discard)
                del order  # else its gradient would be held until the next one comes

    async def flush(self) -> None:
        """Send what is left, after ``run`` and the trainer have stopped."""
        for outgoing in list(self.unsent.values()):
            await self.send(outgoing)

    async def answered(self, within_s: float = ANSWERED_S) -> None:
        """Return once all that is being sent has ended, or after ``within_s`` seconds.

        The last commits may arrive before the log acknowledges the contributions they merged; these
        would then count as never sent, and their spans would be missing from traces.
        """
        if self._sending:
            await asyncio.wait(self._sending, timeout=within_s)

    async def look_for(self, check: MissingCheck) -> None:
        """Tell the trainer if a contribution has left the log unmerged."""
        link = self._link
        try:
            lost = await is_lost(link.bus, link.run, link.plan, check)
        except (BrokerUnavailable, WireError) as error:
            # The round is opened again while it has no answer.
            log.warning("contribution_unchecked", fragment=check.fragment, error=str(error))
            return
        if lost:
            link.residuals.unmerged(check.fragment, check.identity)
            link.mailbox.post(check)

    async def send(self, outgoing: OutgoingContribution) -> None:
        """Send one contribution, repeatedly until the log has it.

        One that is not finite is dropped; if it holds initial parameters, ModelError is raised.
        """
        header, link, sent = outgoing.header, self._link, False
        place = link.identity.publishing(header.fragment, header.round_version, header.identity)
        with tracing.within(place):
            while not sent:
                try:
                    await self._encode_and_send(outgoing)
                    sent = True
                except (BrokerUnavailable, StorageFull) as error:
                    log.warning("contribution_unsent", fragment=header.fragment, error=str(error))
                    link.telemetry.failed(header.fragment, error, link.wall_ns())
                    await asyncio.sleep(connection.RETRY_S)
                except Diverged as error:
                    if header.kind is ContributionKind.GENESIS:
                        msg = f"The initial parameters are not finite ({error}): correct the model."
                        raise ModelError(msg, path="model") from error
                    log.warning("contribution_diverged", fragment=header.fragment, error=str(error))
                    link.telemetry.dropped(header.fragment)
                    break
        del self.unsent[header.fragment]
        link.mailbox.post(Gone(header, sent=sent))

    async def _encode_and_send(self, outgoing: OutgoingContribution) -> None:
        """Encode and send once; errors are the caller's to retry."""
        link, fragment = self._link, outgoing.header.fragment
        async with self._encoding:  # one at a time: the rest of the machine trains
            began_ns = link.wall_ns()
            owed = link.residuals.owed(fragment, outgoing.header.identity)
            encoded = await in_thread(encode, outgoing, link.plan, owed)
            quantised = Interval(began_ns, link.wall_ns())
        header, number = encoded.header, int(getattr(outgoing.gradient, "number", 0))
        if encoded.residual is not None:
            link.residuals.keep(fragment, header.identity, encoded.residual)
        if self._others is not None and encoded.squares:
            try:
                norms = await self._others.quantise(number, header, encoded.squares)
            except Diverged:
                link.residuals.unmerged(fragment, header.identity)
                raise
            header = replace(header, norms=norms)
        chunks = Stopwatch(encoded.chunks(link.config.sync.chunk_bytes))
        sending = self._sender.send(
            header, chunks, lambda: link.telemetry.begins(fragment, link.wall_ns())
        )
        if self._others is None or encoded.shares is None:
            size = await sending
        else:
            size = sum(await asyncio.gather(sending, self._others.send(number, header)))
        spent_s = quantised.seconds + chunks.spent_s
        link.traffic.bytes_up += size
        link.traffic.f32_bytes_up += link.f32_bytes(fragment)
        link.traffic.contributions += 1
        link.traffic.encode_s += spent_s
        link.telemetry.quantised(header, encoded.scheme, quantised)
        link.telemetry.published(header, size, link.wall_ns())
        about = {metrics.RUN: link.run, metrics.OPERATION: "encode"}
        instruments.record(metrics.CODEC_DURATION, spent_s, about)


async def is_lost(bus: Bus, run: str, plan: Plan, check: MissingCheck) -> bool:
    """Return True if a contribution is neither resolved nor whole in the log, so never will be.

    Reads what the learner sent after the fragment's floor. Returns False while it is uncertain: a
    contribution that is given up but merged all the same would count its data twice. Raises
    BrokerUnavailable.
    """
    manifest = await state.read_manifest(bus, run, plan, check.fragment)
    if manifest is None or manifest.commit.version >= check.round_version:
        return False
    subjects = Subjects(run).of_fragment(check.fragment, plan.shards)
    subject = subjects.contribution(check.fragment, check.learner)
    newest = await bus.last(subject)
    if newest is None:
        return True
    assembler, whole = ContributionAssembler(run, plan, keeps_payload=False), set[ContributionId]()

    def feed(record: Record) -> None:
        got = assembler.feed(record)
        if isinstance(got, Contribution):
            whole.add(got.id)

    floor, last = manifest.commit.contrib_floor, newest.sequence
    # A floor above what is there was counted in another stream, and says nothing about this one.
    position = floor if floor < last else 0

    async def is_there() -> bool:
        return await bus.get(subjects.stream("CONTRIB"), last) is not None

    if await read_until(bus, [subject], position, last, feed, is_there) < last:
        return True  # retention has dropped it and all before it
    return ContributionId(check.learner, check.incarnation, check.identity) not in whole
