"""A learner without a model: speaks the whole protocol, moves parameters by a known random walk.

What a run of puppets must commit can be computed from the log alone, so that fault tests compare
parameters exactly and start in milliseconds. A puppet keeps the rules of a learner that rebases:
one capture in flight per fragment, each step contributed once, and a place in its data that it
takes from the log when it starts again. It shares the learner's place, codec and wire, but those
rules are written here once more: a test with puppets proves nothing of the learner's own session.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from contextlib import aclosing, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm.backend import cpu
from skerry.algorithm.merge import slice_norms
from skerry.errors import BrokerUnavailable, StorageFull
from skerry.log import contributions, place, presence, state
from skerry.protocol.codec import pack, packed_bound
from skerry.protocol.messages import (
    ContributionHeader,
    ContributionKind,
    InnerState,
    LearnerPhase,
    Pulse,
)
from skerry.protocol.subjects import Subjects
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan
    from skerry.log.base import Bus
    from skerry.protocol.messages import Round

    Vector = NDArray[np.float32]


RETRY_S = 0.5
CHUNK_BYTES = 64 * 1024
TOKENS = 100
"""Tokens in a step; a step takes one sequence from the data."""


def walk(fragment: Fragment, *key: object) -> Vector:
    """Return f32 (padded,): a small random step that depends on ``key`` only; padding is zero."""
    seed = hashlib.blake2b(repr((fragment.index, *key)).encode(), digest_size=8).digest()
    rng = np.random.default_rng(int.from_bytes(seed))
    vector = np.zeros(fragment.padded_size, np.float32)
    for offset, part in zip(fragment.offsets, fragment.slices, strict=False):
        vector[offset : offset + part.size] = rng.normal(0, 1e-2, part.size)
    return vector


@dataclass(slots=True)
class Held:
    """Where one fragment stands on a puppet; ``origin`` and ``captured`` are steps it has taken.

    ``newest`` is the version that the log has announced, ``identity`` counts contributions.
    """

    origin: int = 0
    captured: int | None = None
    answered: int = 0
    attempt: int = 0
    identity: int = 0
    newest: int = 0


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A contribution that is not in the log yet."""

    fragment: Fragment
    vector: Vector
    header: ContributionHeader
    scheme: str
    poison: float = 0.0


@dataclass(slots=True)
class Puppet:
    """One puppet: ``await puppet.train()`` pulses and answers rounds until it is cancelled.

    ``step_s`` is its pretended step time; ``steps`` after which it calls itself finished; answers
    to rounds towards versions below ``poisoned_below`` are not finite; ``overlap_steps`` it goes on
    between a capture and an adoption; ``chunk_blocks`` fill a chunk
    of what it sends, 0: as many as 64 KiB hold.
    """

    bus: Bus
    run: str
    plan: Plan
    name: str
    scheme: str = "f32"
    step_s: float = 0.02
    steps: int = 1_000_000
    poisoned_below: int = 0
    incarnation: int = 0
    versions: dict[int, int] = field(default_factory=dict[int, int])
    overlap_steps: int = 0
    pulse_s: float = 0.05
    chunk_blocks: int = 0
    wall_ns: Callable[[], int] = time.time_ns
    began_s: float = 0.0
    start_step: int = 0
    start_cursor: int = 0
    sent: int = 0
    held: dict[int, Held] = field(default_factory=dict[int, Held])
    rounds: dict[int, Round] = field(default_factory=dict[int, "Round"])
    outgoing: list[Outgoing] = field(default_factory=list[Outgoing])
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    posted: asyncio.Event = field(default_factory=asyncio.Event)

    async def train(self) -> None:
        """Take a place in the run, offer genesis, then pulse and answer rounds until cancelled."""
        taken = await place.take_place(
            self.bus, self.run, self.plan, self.name, host="test", now_ns=self.wall_ns()
        )
        self.incarnation = taken.member.incarnation
        self.start_step, self.start_cursor = taken.step, taken.cursor
        self.began_s = asyncio.get_running_loop().time()
        await place.settle_in(self.bus, replace(taken.member, inner=InnerState.NEW))
        have = await state.read_manifests(self.bus, self.run, self.plan)
        self.outgoing += [self._genesis(f) for f in self.plan.fragments if f.index not in have]
        async with TaskGroup() as group:
            for loop in (self._pulse, self._manifests, self._rounds, self._send, self._work):
                group.create_task(loop())

    @property
    def taken(self) -> int:
        """How many steps this incarnation has taken by now."""
        elapsed_s = asyncio.get_running_loop().time() - self.began_s
        return max(0, min(self.steps - self.start_step, int(elapsed_s / self.step_s + 1e-9)))

    @property
    def step(self) -> int:
        return self.start_step + self.taken

    @property
    def finished(self) -> bool:
        return self.step >= self.steps

    async def offer_genesis(self) -> None:
        """Offer every fragment that the log has no version of."""
        have = await state.read_manifests(self.bus, self.run, self.plan)
        for fragment in self.plan.fragments:
            if fragment.index not in have:
                await self._publish(self._genesis(fragment))

    async def send_gradient(self, index: int, round_version: int, *, poison: float = 0.0) -> None:
        """Contribute the next step of the walk; ``poison`` is its first value then (f32)."""
        await self._publish(self._capture(index, round_version, poison=poison))

    async def pulse(self, step: int) -> None:
        """Publish one pulse that tells of this step."""
        taken = max(0, step - self.start_step)
        pulse = Pulse(
            run=self.run,
            learner=self.name,
            incarnation=self.incarnation,
            phase=LearnerPhase.FINISHED if step >= self.steps else LearnerPhase.TRAINING,
            sent_ns=self.wall_ns(),
            step=step,
            steps=taken,
            tokens=taken * TOKENS,
            cursor=self.start_cursor + taken,
            loss=1.0,
            step_time_s=self.step_s,
            busy_s=taken * self.step_s,
            alive_s=taken * self.step_s,
            bytes_up=0,
            bytes_down=0,
            contributions=self.sent,
            versions=(),
        )
        await presence.publish_pulse(self.bus, pulse)

    def _state(self, index: int) -> Held:
        return self.held.setdefault(index, Held())

    # what comes

    async def _pulse(self) -> None:
        while True:
            with suppress(BrokerUnavailable, StorageFull):  # the next one replaces it
                await self.pulse(self.step)
            await asyncio.sleep(self.pulse_s)

    async def _manifests(self) -> None:
        manifests = state.follow_manifests(self.bus, self.run, self.plan)
        async with aclosing(manifests):
            async for manifest in manifests:
                held = self._state(manifest.commit.fragment)
                held.newest = max(held.newest, manifest.commit.version)
                self.changed.set()

    async def _rounds(self) -> None:
        rounds = presence.follow_rounds(self.bus, self.run, self.plan.digest)
        async with aclosing(rounds):
            async for opened in rounds:
                await self._look_after(opened)
                self.rounds[opened.fragment] = opened
                self.changed.set()

    async def _look_after(self, opened: Round) -> None:
        """Give up a capture that has left the log unmerged, when its round is opened again."""
        held = self._state(opened.fragment)
        if opened.attempt <= held.attempt or held.captured is None:
            held.attempt = opened.attempt
            return
        sending = any(o.fragment.index == opened.fragment for o in self.outgoing)
        subject = Subjects(self.run).contribution(opened.fragment, self.name)
        try:
            lost = not sending and await self.bus.last(subject) is None
        except BrokerUnavailable:
            return
        held.attempt = opened.attempt
        if lost and held.answered >= opened.version:
            held.captured = None
            held.answered = min(held.answered, self.versions.get(opened.fragment, 0))

    # what is done about it

    async def _work(self) -> None:
        """Adopt and answer whenever something came, or the step for it has come."""
        while True:
            self.changed.clear()
            later_s = [self._adopt(index) for index in tuple(self.held)]
            if len(self.versions) == len(self.plan.fragments):
                for index in tuple(self.rounds):
                    self._answer(self.rounds[index])
            wait_s = min((s for s in later_s if s is not None), default=self.step_s)
            try:
                async with asyncio.timeout(max(wait_s, 1e-3)):
                    await self.changed.wait()
            except TimeoutError:
                pass

    def _adopt(self, index: int) -> float | None:
        """Take the newest version; seconds until it is due where a capture is still in the air."""
        held = self.held[index]
        if held.newest <= self.versions.get(index, 0):
            return None
        if held.captured is not None and not self.finished:
            steps_left = held.captured + self.overlap_steps - self.taken
            if steps_left > 0:
                return steps_left * self.step_s
        if held.captured is not None or index not in self.versions:
            held.origin = held.captured or 0
        held.captured = None
        self.versions[index] = held.newest
        return None

    def _answer(self, opened: Round) -> None:
        """Capture for a round if the rules allow it now."""
        index = opened.fragment
        held = self._state(index)
        fits = opened.version == self.versions[index] + 1 and opened.version > held.answered
        sending = any(o.fragment.index == index for o in self.outgoing)
        moved = self.taken > held.origin or self.finished
        if not fits or held.captured is not None or sending or not moved:
            return
        poison = math.inf if opened.version < self.poisoned_below else 0.0
        made = self._capture(index, opened.version, poison=poison)
        held.captured = made.header.cursor_to - self.start_cursor
        held.answered = opened.version
        self.outgoing.append(made)
        self.posted.set()

    async def _send(self) -> None:
        """Send contributions in the order they were made, each until the log has it."""
        while True:
            self.posted.clear()
            if not self.outgoing:
                await self.posted.wait()
                continue
            try:
                await self._publish(self.outgoing[0])
            except (BrokerUnavailable, StorageFull):
                await asyncio.sleep(RETRY_S)
                continue
            del self.outgoing[0]
            self.changed.set()

    def _genesis(self, fragment: Fragment) -> Outgoing:
        vector = -walk(fragment, "init")
        header = self._header(fragment, vector, ContributionKind.GENESIS, 0, 1)
        return Outgoing(fragment, vector, header, "f32")

    def _capture(self, index: int, round_version: int, *, poison: float = 0.0) -> Outgoing:
        fragment = self.plan.fragments[index]
        vector = walk(fragment, self.name, self.incarnation, self._state(index).identity + 1)
        base = self.versions[index]
        header = self._header(
            fragment, vector, ContributionKind.OUTER_GRADIENT, base, round_version
        )
        return Outgoing(fragment, vector, header, self.scheme, poison)

    def _header(
        self,
        fragment: Fragment,
        vector: Vector,
        kind: ContributionKind,
        base_version: int,
        round_version: int,
    ) -> ContributionHeader:
        held = self._state(fragment.index)
        held.identity += 1
        start = held.origin
        stop = start if kind is ContributionKind.GENESIS else max(start, self.taken)
        return ContributionHeader(
            kind=kind,
            learner=self.name,
            incarnation=self.incarnation,
            identity=held.identity,
            fragment=fragment.index,
            base_version=base_version,
            round_version=round_version,
            step=self.start_step + stop,
            steps=stop - start,
            tokens=(stop - start) * TOKENS,
            cursor_from=self.start_cursor + start,
            cursor_to=self.start_cursor + stop,
            loss=1.0,
            captured_ns=self.wall_ns(),
            norms=slice_norms(fragment, vector),
        )

    async def _publish(self, outgoing: Outgoing) -> None:
        planes = cpu().quantise(outgoing.scheme, outgoing.vector)
        if outgoing.poison:
            planes.codes[0, :4] = np.array([outgoing.poison], "<f4").view(np.uint8)
        held = self.chunk_blocks
        chunk_bytes = packed_bound(outgoing.scheme, held) if held else CHUNK_BYTES
        chunks = pack(outgoing.scheme, planes, chunk_bytes)
        await contributions.Sender(self.bus, self.run, self.plan).send(outgoing.header, chunks)
        self.sent += 1
