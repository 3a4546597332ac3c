"""What goes to the log: contributions, each until the log has it, and the search for missing ones.

Trouble with the broker is waited out here; the step loop does not notice it.
"""

from __future__ import annotations

import asyncio
from contextlib import aclosing, suppress
from functools import partial

import structlog

from skerry.algorithm.fragments import Plan
from skerry.errors import BrokerUnavailable, Diverged, ModelError, StorageFull, WireError
from skerry.log import contributions, state
from skerry.log.base import Bus
from skerry.protocol.contribution import Contribution, ContributionAssembler, ContributionId
from skerry.protocol.learner import MissingCheck
from skerry.protocol.messages import ContributionKind
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup, in_thread
from skerry.telemetry import instruments, metrics, tracing
from skerry.telemetry.spans import Interval
from skerry_learner.sync import connection
from skerry_learner.sync.connection import LearnerConnection
from skerry_learner.sync.encode import Encoded, encode
from skerry_learner.sync.mailbox import OutgoingContribution
from skerry_learner.sync.telemetry import Stopwatch

log = structlog.get_logger()

ANSWERED_S = 1.0
"""What a run's end waits at most for the log's answers to what is on its way."""
STALLED_S = 2.0


class ContributionSender:
    """Sends what the trainer posts, and looks for what a round asks for again."""

    def __init__(self, link: LearnerConnection) -> None:
        self._link = link
        self._sender = contributions.Sender(link.bus, link.run, link.plan)
        self._encoding = asyncio.Lock()
        self._sending: dict[int, asyncio.Task[None]] = {}

    def start(self, group: TaskGroup) -> None:
        """Begin to send what waits, in the order it was made, and to look for what is missing.

        One does not wait until the log has those before it: rounds may begin more often than a
        distant broker answers.
        """
        while (outgoing := self._link.mailbox.next_outgoing(self._sending)) is not None:
            fragment = outgoing.header.fragment
            task = self._sending[fragment] = group.create_task(self.send(outgoing))
            task.add_done_callback(partial(self._send_ended, fragment))
        for check in self._link.mailbox.take_checks():
            group.create_task(self.look_for(check))

    async def flush(self) -> None:
        """Send what is left; for the end, after the trainer has stopped."""
        while (outgoing := self._link.mailbox.next_outgoing()) is not None:
            await self.send(outgoing)

    async def answered(self, within_s: float = ANSWERED_S) -> None:
        """Return once what is on its way has come to an end, or after that long.

        The last commits may be here before the log's answers to what they merged: without these it
        would count as never sent, and be missing from its round's trace.
        """
        if self._sending:
            await asyncio.wait(self._sending.values(), timeout=within_s)

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
            link.mailbox.post_lost(check)

    def _send_ended(self, fragment: int, _: object) -> None:
        """Have what could not be sent looked at again."""
        self._sending.pop(fragment, None)
        self._link.wake.set()

    async def send(self, outgoing: OutgoingContribution) -> None:
        """Send one contribution; what the broker does not take stays in the mailbox."""
        header = outgoing.header
        with tracing.within(
            self._link.identity.publishing(header.fragment, header.round_version, header.identity)
        ):
            try:
                encoded, quantised = await self._encode(outgoing)
            except Diverged as error:
                self._drop(outgoing, error)
                return
            await self._publish(outgoing, encoded, quantised)

    async def _encode(self, outgoing: OutgoingContribution) -> tuple[Encoded, Interval]:
        """Quantise, one contribution at a time: the rest of the machine trains."""
        async with self._encoding:
            link, header, began_ns = self._link, outgoing.header, self._link.wall_ns()
            owed = link.residuals.owed(header.fragment, header.identity)
            encoded = await in_thread(encode, outgoing, link.plan, owed)
            return encoded, Interval(began_ns, link.wall_ns())

    def _drop(self, outgoing: OutgoingContribution, error: Diverged) -> None:
        fragment = outgoing.header.fragment
        if outgoing.header.kind is ContributionKind.GENESIS:
            msg = f"The initial parameters are not finite ({error}): correct the model's init."
            raise ModelError(msg, path="model") from error
        log.warning("contribution_diverged", fragment=fragment, error=str(error))
        self._link.telemetry.dropped(fragment)
        self._link.mailbox.diverged(outgoing)

    async def _publish(
        self, outgoing: OutgoingContribution, encoded: Encoded, quantised: Interval
    ) -> None:
        link, fragment, header = self._link, outgoing.header.fragment, encoded.header
        if encoded.residual is not None:
            link.residuals.keep(fragment, header.identity, encoded.residual)
        chunks = Stopwatch(encoded.chunks(link.config.sync.chunk_bytes))
        try:
            sent = await self._sender.send(
                header, chunks, lambda: link.telemetry.begins(fragment, link.wall_ns())
            )
        except (BrokerUnavailable, StorageFull) as error:
            log.warning("contribution_unsent", fragment=fragment, error=str(error))
            link.telemetry.failed(fragment, str(error), link.wall_ns())
            await asyncio.sleep(connection.RETRY_S)
            return
        spent_s = quantised.seconds + chunks.spent_s
        traffic = link.traffic
        traffic.bytes_up += sent
        traffic.f32_bytes_up += link.f32_bytes(fragment)
        traffic.contributions += 1
        traffic.encode_s += spent_s
        link.telemetry.quantised(header, encoded.scheme, quantised)
        link.telemetry.published(header, sent, link.wall_ns())
        link.mailbox.sent(outgoing)
        about = {metrics.RUN: link.run, metrics.OPERATION: "encode"}
        instruments.record(metrics.CODEC_DURATION, spent_s, about)


async def is_lost(bus: Bus, run: str, plan: Plan, check: MissingCheck) -> bool:
    """Return True if a contribution is neither resolved nor whole in the log: it will never be.

    Reads what the learner sent after the fragment's floor. False while that is uncertain: a
    contribution that is given up and merged after all would count its data twice. Raises
    BrokerUnavailable.
    """
    manifest = await state.read_manifest(bus, run, plan, check.fragment)
    if manifest is None or manifest.commit.version >= check.round_version:
        return False
    subjects = Subjects(run)
    subject = subjects.contribution(check.fragment, check.learner)
    newest = await bus.last(subject)
    if newest is None:
        return True
    wanted = ContributionId(check.learner, check.incarnation, check.identity)
    assembler = ContributionAssembler(run, plan, keeps_payload=False)
    floor = manifest.commit.contrib_floor
    # A floor above what is there was counted in another stream, and says nothing about this one.
    position, whole = floor if floor < newest.sequence else 0, False
    while position < newest.sequence and not whole:
        loop = asyncio.get_running_loop()
        follower = bus.follow(subject, after=position)
        with suppress(TimeoutError):
            async with asyncio.timeout(STALLED_S) as stalled, aclosing(follower):
                async for record in follower:
                    stalled.reschedule(loop.time() + STALLED_S)
                    got = assembler.feed(record)
                    whole = isinstance(got, Contribution) and got.id == wanted
                    position = record.sequence
                    if whole or position >= newest.sequence:
                        break
        if not whole and position < newest.sequence:
            found = await bus.get(subjects.stream("CONTRIB"), newest.sequence)
            if found is None:  # retention has dropped it and all before it
                return True
    return not whole
