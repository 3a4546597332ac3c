"""The network's side of a learner: asyncio loops between the log and the mailbox.

Trouble with the broker is waited out here; the step loop does not notice it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextlib import aclosing, suppress
from functools import partial

import structlog

from skerry.algorithm.fragments import Plan
from skerry.errors import (
    BrokerUnavailable,
    Diverged,
    ModelError,
    Overtaken,
    StateLost,
    StorageFull,
    Superseded,
    WireError,
    first_cause,
)
from skerry.log import contributions, ledger, presence, recovery, state
from skerry.log.base import Bus
from skerry.protocol.messages import Commit, ContributionKind, LearnerPhase, Manifest
from skerry.tasks import TaskGroup, in_thread
from skerry.telemetry import instruments, metrics, tracing
from skerry.telemetry.spans import Interval
from skerry_learner.sync.encode import Encoded, encode
from skerry_learner.sync.lost import is_lost
from skerry_learner.sync.mailbox import Fresh, Mailbox, Outgoing
from skerry_learner.sync.residual import Residuals
from skerry_learner.sync.session import Learner
from skerry_learner.sync.telemetry import Stopwatch

log = structlog.get_logger()

RETRY_S = 1.0
ANSWERED_S = 1.0
"""What a run's end waits at most for the log's answers to what is on its way."""
FLOAT32_BYTES = 4
NANOSECONDS = 1e9


class Network:
    """One learner's loops; ``run`` them all until ``finished`` returns."""

    def __init__(  # noqa: PLR0913 - two of them clocks
        self,
        bus: Bus,
        learner: Learner,
        plan: Plan,
        mailbox: Mailbox,
        wake: asyncio.Event,
        *,
        chunk_bytes: int,
        pulse_s: float,
        wall_ns: Callable[[], int] = time.time_ns,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``wake`` is what the mailbox sets (through ``notify``) when the trainer has posted.

        ``clock`` is the one that the trainer counts by.
        """
        self._bus = bus
        self._learner = learner
        self._plan = plan
        self._mailbox = mailbox
        self._wake = wake
        self._chunk_bytes = chunk_bytes
        self._pulse_s = pulse_s
        self._wall_ns = wall_ns
        self._clock = clock
        self._preparing = True
        self._wanted: dict[int, Manifest] = {}
        self._said_lost: dict[int, int] = {}
        self._residuals = Residuals()
        self._reading: set[int] = set()
        self._sender = contributions.Sender(bus, learner.run, plan)
        self._encoding = asyncio.Lock()
        self._sending: dict[int, asyncio.Task[None]] = {}
        self._posted = {name: asyncio.Event() for name in ("outgoing", "pulse", "wanted", "doubt")}

    async def dispatch(self) -> None:
        """Pass the trainer's wake-up on to the loops that wait for it."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            for event in self._posted.values():
                event.set()

    async def rounds(self) -> None:
        """Post every round that a syncer opens."""
        rounds = presence.follow_rounds(self._bus, self._learner.run, self._plan.digest)
        async with aclosing(rounds):
            async for opened in rounds:
                self._mailbox.post_round(opened)

    async def manifests(self) -> None:
        """Note the newest version of every fragment; StateLost once the log has gone back.

        All that is known here is of versions that the log does not have any more: rounds towards
        them would count as answered, and what was captured as part of them.
        """
        run, plan, newest = self._learner.run, self._plan, dict[int, int]()
        manifests = state.follow_manifests(self._bus, run, plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                commit = manifest.commit
                known = newest.get(commit.fragment, 0)
                if commit.version < known:
                    await recovery.not_gone_back(self._bus, run, plan, commit.fragment, known)
                    continue
                newest[commit.fragment] = commit.version
                self._wanted[commit.fragment] = manifest
                self._posted["wanted"].set()
                self._note_refused(commit)

    async def genesis(self) -> None:
        """Post when the run's first commit was made, on the trainer's clock, then be idle for ever.

        How long ago that is the broker's clock tells, once: those of machines differ, and jump.
        """
        begun_ns = await ledger.begun_ns(self._bus, self._learner.run)
        now_ns, at_s = await self._broker_time()
        self._mailbox.post_genesis(at_s - (now_ns - begun_ns) / NANOSECONDS)
        await asyncio.Event().wait()

    async def _broker_time(self) -> tuple[int, float]:
        """Return what the broker's clock and the trainer's show, to within a round trip.

        A pulse is said again for it: what the broker stores, it stores with its time.
        """
        while True:
            self._mailbox.repeat_pulse(self._wall_ns())
            if await self.pulse():
                at_s = self._clock()
                with suppress(BrokerUnavailable):
                    told = self._learner
                    now_ns = await presence.pulsed_ns(self._bus, told.run, told.name)
                    if now_ns is not None:
                        return now_ns, at_s
            await asyncio.sleep(self._pulse_s)

    async def fetch(self) -> None:
        """Read what is wanted, as many fragments at once as the mailbox has room for.

        One does not wait for those before it: commits may follow each other faster than a distant
        broker answers.
        """
        try:
            async with TaskGroup() as group:
                while True:
                    await self._posted["wanted"].wait()
                    self._posted["wanted"].clear()
                    for fragment in [f for f in self._wanted if f not in self._reading]:
                        if self._mailbox.takes_fresh(fragment, len(self._reading)):
                            self._reading.add(fragment)
                            task = group.create_task(self._read(self._wanted.pop(fragment)))
                            task.add_done_callback(partial(self._read_ended, fragment))
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def send(self) -> None:
        """Send contributions in the order they were made, each until the log has it.

        One does not wait until the log has those before it: rounds may begin more often than a
        distant broker answers.
        """
        try:
            async with TaskGroup() as group:
                while True:
                    self._posted["outgoing"].clear()
                    outgoing = self._mailbox.next_outgoing(self._sending)
                    if outgoing is None:
                        await self._posted["outgoing"].wait()
                        continue
                    task = group.create_task(self._send(outgoing))
                    self._sending[outgoing.header.fragment] = task
                    task.add_done_callback(partial(self._send_ended, outgoing.header.fragment))
        except BaseExceptionGroup as errors:
            raise first_cause(errors) from None

    async def doubts(self) -> None:
        """Look in the log for contributions that were asked for again."""
        while True:
            self._posted["doubt"].clear()
            doubt = self._mailbox.take_doubt()
            if doubt is None:
                await self._posted["doubt"].wait()
                continue
            try:
                lost = await is_lost(self._bus, self._learner.run, self._plan, doubt)
            except (BrokerUnavailable, WireError) as error:
                log.warning("contribution_in_doubt", fragment=doubt.fragment, error=str(error))
                continue  # the round is opened again while nobody answers it
            if lost:
                self._residuals.unmerged(doubt.fragment, doubt.identity)
                self._mailbox.post_lost(doubt)

    async def flush(self) -> None:
        """Send what is left; for the end, after the trainer has stopped."""
        while (outgoing := self._mailbox.next_outgoing()) is not None:
            await self._send(outgoing)

    async def pulses(self) -> None:
        """Publish the newest pulse whenever there is one; a lost pulse is replaced by the next.

        Before training the last one is said again: a trainer that compiles has no step boundaries.
        """
        while True:
            self._posted["pulse"].clear()
            await self.pulse()
            try:
                async with asyncio.timeout(self._pulse_s if self._preparing else None):
                    await self._posted["pulse"].wait()
            except TimeoutError:
                self._mailbox.repeat_pulse(self._wall_ns())

    async def pulse(self) -> bool:
        """Publish the pulse that waits, if one does; tell whether the log has it."""
        pulse = self._mailbox.take_pulse()
        if pulse is None:
            return False
        self._preparing = pulse.phase in {LearnerPhase.STARTING, LearnerPhase.CATCHING_UP}
        try:
            await presence.publish_pulse(self._bus, pulse)
        except (BrokerUnavailable, StorageFull) as error:
            log.warning("pulse_lost", error=str(error))
            return False
        return True

    async def watch_name(self) -> None:
        """Raise Superseded once a newer incarnation of this learner has joined."""
        members = ledger.follow_members(self._bus, self._learner.run)
        async with aclosing(members):
            async for member in members:
                newer = member.incarnation > self._learner.incarnation
                if member.learner == self._learner.name and newer:
                    msg = (
                        f"Learner {self._learner.name!r} was started again on {member.host}:"
                        " this one stops. Give each learner a name of its own."
                    )
                    raise Superseded(msg)

    async def finished(self) -> None:
        """Return once the run is finished; StateLost once another run has its place in the log."""
        told = self._learner
        await ledger.wait_finished(self._bus, told.run, created_ns=told.created_ns)
        log.info("run_finished")

    async def answered(self, within_s: float = ANSWERED_S) -> None:
        """Return once what is on its way has come to an end, or after that long.

        The last commits may be here before the log's answers to what they merged: without these it
        would count as never sent, and be missing from its round's trace.
        """
        if self._sending:
            await asyncio.wait(self._sending.values(), timeout=within_s)

    def _read_ended(self, fragment: int, _: object) -> None:
        """Have what is wanted by now looked at again."""
        self._reading.discard(fragment)
        self._posted["wanted"].set()

    async def _read(self, manifest: Manifest) -> None:
        commit, began_ns = manifest.commit, self._wall_ns()
        traffic, sizes = self._mailbox.traffic, list[int]()

        def came(size: int) -> None:
            sizes.append(size)
            traffic.bytes_down += size

        def decoded(seconds: float) -> None:
            traffic.decode_s += seconds

        try:
            vector = await state.read_part(
                self._bus,
                self._learner.run,
                self._plan,
                manifest,
                state.PARAMS,
                on_bytes=came,
                on_decoded=decoded,
            )
        except Overtaken:
            return  # the newer manifest is announced, or about to be
        except StateLost as error:
            self._say_lost(commit.fragment, commit.version, error)
            # Training goes on; the next commit makes it whole, or somebody who mends the store.
            self._wanted.setdefault(commit.fragment, manifest)
            await asyncio.sleep(RETRY_S)
            return
        except (BrokerUnavailable, WireError) as error:
            log.warning("fragment_unread", fragment=commit.fragment, error=str(error))
            self._wanted.setdefault(commit.fragment, manifest)
            await asyncio.sleep(RETRY_S)
            return
        traffic.f32_bytes_down += self._f32_bytes(commit.fragment)
        took = Interval(began_ns, self._wall_ns())
        self._mailbox.telemetry.received(self._learner, commit, sum(sizes), took)
        self._mailbox.post_fresh(Fresh(manifest, vector))

    def _say_lost(self, fragment: int, version: int, error: StateLost) -> None:
        """Say once per version what the log has lost."""
        if self._said_lost.get(fragment) != version:
            self._said_lost[fragment] = version
            log.error("fragment_lost", fragment=fragment, version=version, error=str(error))

    def _send_ended(self, fragment: int, _: object) -> None:
        """Have what could not be sent looked at again."""
        self._sending.pop(fragment, None)
        self._posted["outgoing"].set()

    async def _send(self, outgoing: Outgoing) -> None:
        told = outgoing.header
        with tracing.within(
            self._learner.publishing(told.fragment, told.round_version, told.identity)
        ):
            await self._send_within(outgoing)

    async def _send_within(self, outgoing: Outgoing) -> None:
        fragment, telemetry = outgoing.header.fragment, self._mailbox.telemetry
        try:
            encoded, quantised = await self._encode(outgoing)
        except Diverged as error:
            if outgoing.header.kind is ContributionKind.GENESIS:
                msg = f"The initial parameters are not finite ({error}): correct the model's init."
                raise ModelError(msg, path="model") from error
            log.warning("contribution_diverged", fragment=fragment, error=str(error))
            telemetry.dropped(fragment)
            self._mailbox.diverged(outgoing)
            return
        if encoded.residual is not None:
            self._residuals.keep(fragment, outgoing.header.identity, encoded.residual)
        run, traffic = self._learner.run, self._mailbox.traffic
        header, chunks = encoded.header, Stopwatch(encoded.chunks(self._chunk_bytes))
        try:
            sent = await self._sender.send(
                header, chunks, lambda: telemetry.begins(fragment, self._wall_ns())
            )
        except (BrokerUnavailable, StorageFull) as error:
            log.warning("contribution_unsent", fragment=fragment, error=str(error))
            telemetry.failed(fragment, str(error), self._wall_ns())
            await asyncio.sleep(RETRY_S)
            return
        traffic.bytes_up += sent
        traffic.f32_bytes_up += self._f32_bytes(fragment)
        traffic.contributions += 1
        telemetry.quantised(self._learner, header, encoded.scheme, quantised)
        telemetry.published(self._learner, header, sent, self._wall_ns())
        self._mailbox.sent(outgoing)
        of = {metrics.RUN: run, metrics.OPERATION: "encode"}
        spent_s = quantised.seconds + chunks.spent_s
        traffic.encode_s += spent_s
        instruments.record(metrics.CODEC_DURATION, spent_s, of)

    async def _encode(self, outgoing: Outgoing) -> tuple[Encoded, Interval]:
        """Quantise, one contribution at a time: the rest of the machine trains."""
        async with self._encoding:
            told, began_ns = outgoing.header, self._wall_ns()
            owed = self._residuals.owed(told.fragment, told.identity)
            encoded = await in_thread(encode, outgoing, self._plan, owed)
            return encoded, Interval(began_ns, self._wall_ns())

    def _note_refused(self, commit: Commit) -> None:
        """Have nothing of a contribution that a commit refuses come back with the next one."""
        ours = self._learner.name, self._learner.incarnation
        for refused in commit.refused:
            if (refused.learner, refused.incarnation) == ours:
                self._residuals.unmerged(commit.fragment, refused.identity)

    def _f32_bytes(self, fragment: int) -> int:
        return FLOAT32_BYTES * self._plan.fragments[fragment].size
