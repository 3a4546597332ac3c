"""How a learner's processes other than the first handle the log and fragments.

The thread of the devices does what the first process says, in the same order; the event loop reads
and sends the blocks that this process holds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from skerry.algorithm.fragments import Fragment, Plan
from skerry.algorithm.planes import Planes
from skerry.algorithm.schemes import scheme_of
from skerry.client.encode import Residuals, quantised_part
from skerry.client.peer import Deed, Words
from skerry.client.processes import Assignment, FollowingProcess
from skerry.errors import Overtaken, SkerryError
from skerry.log import contributions, state
from skerry.log.base import Bus
from skerry.log.global_fragments import GlobalReader
from skerry.log.state import Meters
from skerry.protocol.codec import pack
from skerry.protocol.messages import ContributionHeader, ContributionKind
from skerry.tasks import TaskGroup, in_thread

if TYPE_CHECKING:
    from skerry.client.jax_processes import SharedFragments, SharedGradient


@dataclass(frozen=True, slots=True)
class _Made:
    """Our part of a contribution with error feedback."""

    capture: int
    planes: Planes
    squares: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class _Quantised:
    """Our part of the newest contribution with error feedback, by fragment, and its residuals."""

    residuals: Residuals = field(default_factory=Residuals)
    made: dict[int, _Made] = field(default_factory=dict[int, _Made])

    async def take(self, gradient: SharedGradient, fragment: Fragment, identity: int) -> _Made:
        """Return our part of a capture; the same one each time that it is asked for.

        The identity alone names none: that of a capture that could not be sent is used again.
        """
        index = fragment.index
        if index not in self.made or self.made[index].capture != gradient.number:
            owed = self.residuals.owed(index, identity)
            planes, squares, residual = await in_thread(quantised_part, gradient, fragment, owed)
            self.residuals.keep(index, identity, residual)
            self.made[index] = _Made(gradient.number, planes, squares)
            gradient.release()
        return self.made[index]


class Following:
    """One process at work on the fragments that it holds with others."""

    def __init__(
        self,
        bus: Bus,
        place: Assignment,
        plan: Plan,
        chunk_bytes: int,
        fragments: SharedFragments,
        process: FollowingProcess,
    ) -> None:
        self._bus = bus
        self._place = place
        self._plan = plan
        self._chunk_bytes = chunk_bytes
        self._fragments = fragments
        self._process = process
        self._loop: asyncio.AbstractEventLoop | None = None
        self._captured = asyncio.Event()
        self._sender = contributions.Sender(bus, place.origin.run, plan)
        self._reader = GlobalReader(bus, place.origin.run, plan, fragments.own_blocks, chunk_bytes)
        self._read: dict[tuple[int, int], Any] = {}
        self._quantised = _Quantised()

    # in the thread of the devices

    def do(self, deed: Deed, fragment: int = 0, version: int = 0) -> None:
        """Do what the first process does to one fragment, or to all."""
        fragments = self._fragments
        match deed:
            case Deed.GENESIS:
                fragments.genesis(fragment)
            case Deed.CAPTURE:
                fragments.capture(fragment)
            case Deed.RELEASE:
                fragments.release(fragment)
            case Deed.RESET:
                fragments.reset()
            case Deed.ADOPT:
                fragments.adopt(fragment, self._read[fragment, version])
                # A copy, as the event loop reads on.
                older = [at for at in [*self._read] if at[0] == fragment and at[1] <= version]
                for at in older:
                    del self._read[at]
            case _:
                pass
        self._call(self._captured.set)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        if self._loop is not None:
            with suppress(RuntimeError):  # the loop has closed
                self._loop.call_soon_threadsafe(function, *args)

    # in the event loop

    async def requests(self) -> None:
        """Answer requests of the first process's network, for ever."""
        self._loop = asyncio.get_running_loop()
        asked: asyncio.Queue[tuple[Deed, Words]] = asyncio.Queue()
        self._process.take_requests(lambda *request: self._call(asked.put_nowait, request))
        async with TaskGroup() as group:
            while True:
                deed, (number, *words) = await asked.get()
                if deed is Deed.FORGET:
                    self._quantised.residuals.unmerged(*words)
                else:
                    group.create_task(self._answer(deed, number, words))

    async def _answer(self, deed: Deed, number: int, words: Words) -> None:
        try:
            match deed:
                case Deed.SEND:
                    done: object = await self._send(*words)
                case Deed.QUANTISE:
                    done = await self._quantise(*words)
                case _:
                    done = await self._fetch(*words)
        except SkerryError as error:
            self._process.answer(number, error=error)
        else:
            self._process.answer(number, done)

    async def _fetch(self, fragment: int, version: int) -> int:
        """Read our blocks of a version; returns the bytes read."""
        run, sizes = self._place.origin.run, list[int]()
        manifest = await state.read_manifest(self._bus, run, self._plan, fragment)
        if manifest is None or manifest.commit.version != version:
            msg = f"Fragment {fragment} has moved on from version {version}."
            raise Overtaken(msg)
        self._read[fragment, version] = await self._reader.read(manifest, Meters(sizes.append))
        return sum(sizes)

    async def _capture(self, number: int, fragment: int) -> SharedGradient:
        """Return a capture once it is made here too."""
        while True:
            self._captured.clear()
            gradient = self._fragments.gradients.get(fragment)
            if gradient is not None and gradient.number >= number:
                return gradient
            await self._captured.wait()

    async def _quantise(self, capture: int, fragment: int, identity: int) -> tuple[float, ...]:
        """Quantise our blocks with error feedback; returns the squares of the norms, by slice."""
        gradient = await self._capture(capture, fragment)
        made = await self._quantised.take(gradient, self._plan.fragments[fragment], identity)
        return made.squares

    async def _send(self, capture: int, fragment: int, identity: int, base_version: int) -> int:
        """Send our blocks of a capture; returns the bytes sent."""
        gradient = await self._capture(capture, fragment)
        if scheme_of(gradient.scheme).feedback:
            planes = self._quantised.made[fragment].planes
        else:
            cut = self._plan.fragments[fragment]
            planes, _ = await in_thread(gradient.quantise, gradient.scheme, cut)
        header = ContributionHeader(
            kind=ContributionKind.OUTER_GRADIENT,  # the first chunk, with the rest, is not ours
            learner=self._place.origin.learner,
            incarnation=self._place.incarnation,
            identity=identity,
            fragment=fragment,
            base_version=base_version,
            round_version=0,
            step=0,
            steps=0,
            tokens=0,
            cursor_from=0,
            cursor_to=0,
            loss=0.0,
            captured_ns=0,
        )
        chunks = pack(gradient.scheme, planes, self._chunk_bytes, gradient.shares)
        return await self._sender.send(header, chunks)
