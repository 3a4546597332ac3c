"""Any process of a learner but the first: it does what that one says, and talks to no one else.

It has the same mesh, model and data. A thread dispatches what the first process dispatches, in the
same order; the event loop reads from the log and sends to it what lies with this process.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import structlog

from skerry.client.jax_processes import SharedFragments
from skerry.client.processes import Deed, FollowingProcess, Words, await_own_end
from skerry.data.stream import stream_of
from skerry.errors import Overtaken, RunMismatch, SkerryError
from skerry.log import contributions, state
from skerry.log.base import Bus
from skerry.models.mesh import make_mesh
from skerry.protocol.codec import pack
from skerry.protocol.messages import ContributionHeader, ContributionKind
from skerry.service.shell import run_loops
from skerry.settings import loading
from skerry.settings.models import LearnerSettings, RunConfig
from skerry.tasks import TaskGroup, in_thread
from skerry_learner.service import feed, make_trainer
from skerry_learner.trainer.trainer import Trainer
from skerry_learner.work import Standing, Work, prepare

log = structlog.get_logger()

SAME_S = 1.0
"""How long the first process is left to see a signal that all have had: a second one hurries it."""


async def follow(
    bus: Bus,
    follower: FollowingProcess,
    given: RunConfig,
    local: LearnerSettings,
    *,
    settled: Callable[[], None] = lambda: None,
) -> None:
    """Train with the first process of this learner until that one ends.

    Raises SkerryError once it has failed, RunMismatch if the model is another one here.
    """
    deed, words = await asyncio.to_thread(follower.orders.get)
    if deed is Deed.END:
        return
    _check(deed, words)
    place = Standing(**words[0])
    structlog.contextvars.bind_contextvars(learner=place.learner)
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, loop.call_later, SAME_S, follower.ask_stop)
    config = loading.with_own_data(loading.run_config_from_json(place.config), given)
    async with bus:
        mesh, work = make_mesh(local.mesh), await asyncio.to_thread(prepare, config)
        if work.plan.digest != place.plan_digest:
            msg = "This process has another model than the first one: give all the same code."
            raise RunMismatch(msg)
        if work.corpus.digest != place.data:
            msg = "This process reads other text than the first one: give all the same files."
            raise RunMismatch(msg)
        trainer = await asyncio.to_thread(make_trainer, work, mesh, blank=place.blank)
        log.info("follows_first_process", run=place.run, incarnation=place.incarnation)
        await _Following(bus, work, place, trainer, follower, settled).run()


def _check(deed: Deed, words: Words) -> None:
    if deed is Deed.FAIL:
        msg = f"The first process of this learner has failed: {words[0]}"
        raise SkerryError(msg)


class _Following:
    """One process at work: a thread for the devices, the event loop for the log."""

    def __init__(
        self,
        bus: Bus,
        work: Work,
        place: Standing,
        trainer: Trainer,
        follower: FollowingProcess,
        settled: Callable[[], None],
    ) -> None:
        assert isinstance(trainer.fragment_port, SharedFragments)
        self._bus = bus
        self._work = work
        self._place = place
        self._trainer = trainer
        self._follower = follower
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._captured = asyncio.Event()
        self._sender = contributions.Sender(bus, place.run, work.plan)
        self._read: dict[tuple[int, int], Any] = {}
        self._fragments = trainer.fragment_port

    async def run(self) -> None:
        """Do what the first process says until it ends."""
        threading.Thread(target=self._obey, name="train", daemon=True).start()
        loops = {"orders": lambda: asyncio.shield(self._ended), "requests": self._requests}
        await run_loops(loops, asyncio.Event())

    # in the thread of the devices

    def _obey(self) -> None:
        try:
            self._dispatch()
        except Exception as error:  # noqa: BLE001  handed over, and raised there
            await_own_end(error)
            self._call(self._ended.set_exception, error)
        else:
            self._call(self._ended.set_result, None)

    def _dispatch(self) -> None:
        """Dispatch what the first process dispatches, in that order, until it ends."""
        stream, trainer = stream_of(self._work.corpus, self._place.shard), self._trainer
        batches: Any = iter(())
        with ExitStack() as opened:
            while True:
                deed, words = self._follower.orders.get()
                _check(deed, words)
                match deed:
                    case Deed.END:
                        return
                    case Deed.WARM:
                        example = stream.read(0, self._work.config.data.batch)
                        trainer.warm(lambda: None, example)
                    case Deed.MEET:
                        self._follower.meet()
                    case Deed.FEED:
                        self._settled()
                        feeding = feed(self._work, trainer, stream, *words, whole=False)
                        batches = opened.enter_context(feeding)
                    case Deed.STEP:
                        trainer.step(next(batches).batch, *words)
                    case Deed.RESET:
                        trainer.reset()
                    case _:
                        self._do(deed, *words)

    def _do(self, deed: Deed, fragment: int, version: int = 0) -> None:
        """Do what the first process does to one fragment."""
        trainer = self._trainer
        match deed:
            case Deed.GENESIS:
                self._fragments.genesis(fragment)
            case Deed.CAPTURE:
                trainer.capture(fragment)
            case Deed.RELEASE:
                trainer.release(fragment)
            case Deed.ADOPT:
                trainer.adopt(fragment, self._read[fragment, version])
                older = [at for at in self._read if at[0] == fragment and at[1] <= version]
                for at in older:
                    del self._read[at]
            case _:
                pass
        self._call(self._captured.set)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(function, *args)

    # in the event loop

    async def _requests(self) -> None:
        """Answer what the first process's network asks for, for ever."""
        asked: asyncio.Queue[tuple[Deed, Words]] = asyncio.Queue()
        self._follower.take_requests(lambda *request: self._call(asked.put_nowait, request))
        async with TaskGroup() as group:
            while True:
                deed, (number, *words) = await asked.get()
                group.create_task(self._answer(deed, number, words))

    async def _answer(self, deed: Deed, number: int, words: Words) -> None:
        try:
            done = self._send if deed is Deed.SEND else self._fetch
            size = await done(*words)
        except SkerryError as error:
            self._follower.answer(number, error=error)
        else:
            self._follower.answer(number, size)

    async def _fetch(self, fragment: int, version: int) -> int:
        """Read our blocks of a version; returns the bytes read."""
        run, plan, sizes = self._place.run, self._work.plan, list[int]()
        manifest = await state.read_manifest(self._bus, run, plan, fragment)
        if manifest is None or manifest.commit.version != version:
            msg = f"Fragment {fragment} has moved on from version {version}."
            raise Overtaken(msg)
        own = state.OwnBlocks(
            self._fragments.own_blocks(fragment), self._work.config.sync.chunk_bytes
        )
        vector = await state.read_part(
            *(self._bus, run, plan, manifest, state.PARAMS), own=own, on_bytes=sizes.append
        )
        self._read[fragment, version] = vector
        return sum(sizes)

    async def _send(self, capture: int, fragment: int, identity: int, base_version: int) -> int:
        """Send our blocks of a capture once it is made here too; returns the bytes sent."""
        while True:
            self._captured.clear()
            gradient = self._fragments.gradients.get(fragment)
            if gradient is not None and gradient.number >= capture:
                break
            await self._captured.wait()
        cut, place = self._work.plan.fragments[fragment], self._place
        planes, _ = await in_thread(gradient.quantise, gradient.scheme, cut)
        header = ContributionHeader(
            kind=ContributionKind.OUTER_GRADIENT,  # no first chunk, which says more, is ours
            learner=place.learner,
            incarnation=place.incarnation,
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
        size = self._work.config.sync.chunk_bytes
        return await self._sender.send(header, pack(gradient.scheme, planes, size, gradient.shares))
