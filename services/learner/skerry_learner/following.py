"""A learner's further processes: each does what the first one says, and talks to no one else.

It has the same mesh, model and data. A thread dispatches what the first process dispatches, in the
same order; the event loop reads from the log and sends to it what lies with this process.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from typing import Any

import structlog

from skerry.client.following import Following
from skerry.client.inner_state import InnerStateSaver
from skerry.client.jax_processes import SharedFragments
from skerry.client.peer import Deed
from skerry.client.processes import Assignment, FollowingProcess, await_own_end
from skerry.data.stream import stream_of
from skerry.errors import RunMismatch
from skerry.log.base import Bus
from skerry.models.axes import SETTING
from skerry.models.mesh import machine_of, make_mesh
from skerry.service.shell import run_loops
from skerry.settings import loading
from skerry.settings.local import LearnerSettings
from skerry.settings.models import RunConfig
from skerry_learner.service import feed, make_trainer
from skerry_learner.trainer.trainer import Trainer
from skerry_learner.work import Work, prepare

log = structlog.get_logger()

SAME_S = 1.0
"""How long the first process has to see a signal that all have had: a second one hurries it."""


async def follow(
    bus: Bus,
    follower: FollowingProcess,
    given: RunConfig,
    local: LearnerSettings,
    *,
    settled: Callable[[], None] = lambda: None,
) -> None:
    """Train with the first process of this learner until that one ends.

    Raises SkerryError once that one has failed, RunMismatch if model, text or mesh differ here.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, loop.call_later, SAME_S, follower.ask_stop)
    deed, words = await asyncio.to_thread(follower.next_order)
    if deed is Deed.END:
        return
    place = Assignment.read(words)
    structlog.contextvars.bind_contextvars(learner=place.origin.learner)
    config = loading.with_own_data(loading.run_config_from_json(place.config), given)
    mesh = make_mesh(local.mesh)
    if (own := machine_of(mesh, "").mesh) != place.mesh:
        msg = (
            f"This process lays out its devices as {own!r}, and the first one as {place.mesh!r}:"
            f" give all the same {SETTING}."
        )
        raise RunMismatch(msg)
    async with bus:
        work = await asyncio.to_thread(prepare, config)
        if work.plan.digest != place.origin.plan_digest:
            msg = "This process has another model than the first one: give all the same code."
            raise RunMismatch(msg)
        if work.corpus.digest != place.data:
            msg = "This process reads other text than the first one: give all the same files."
            raise RunMismatch(msg)
        trainer = await asyncio.to_thread(make_trainer, work, mesh, blank=place.blank)
        assert isinstance(trainer.fragment_port, SharedFragments)
        log.info("follows_first_process", run=place.origin.run, incarnation=place.incarnation)
        who, kind = (
            replace(place.origin, process=follower.number),
            trainer.moments_kind(),
        )
        saver = InnerStateSaver(local, who, place.incarnation, kind, process=follower)
        shared = work.plan, config.sync.chunk_bytes, trainer.fragment_port
        following = Following(bus, place, *shared, follower)
        await _Obedience(work, place.shard, trainer, saver, follower, following, settled).run()


class _Obedience:
    """One process at work: a thread for the devices, the event loop for the log."""

    def __init__(
        self,
        work: Work,
        shard: int,
        trainer: Trainer,
        saver: InnerStateSaver,
        follower: FollowingProcess,
        following: Following,
        settled: Callable[[], None],
    ) -> None:
        self._work = work
        self._stream = stream_of(work.corpus, shard)
        self._trainer = trainer
        self._saver = saver
        self._follower = follower
        self._following = following
        self._settled = settled
        self._loop = asyncio.get_running_loop()
        self._ended: asyncio.Future[None] = self._loop.create_future()
        self._saved = asyncio.Event()

    async def run(self) -> None:
        """Do what the first process says until it ends."""
        self._saver.start(lambda: self._call(self._saved.set))
        threading.Thread(target=self._obey, name="train", daemon=True).start()
        loops = {
            "orders": lambda: asyncio.shield(self._ended),
            "requests": self._following.requests,
        }
        await run_loops(loops, asyncio.Event())
        await self._saved.wait()

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop has closed
            self._loop.call_soon_threadsafe(function, *args)

    # in the thread of the devices

    def _obey(self) -> None:
        try:
            with ExitStack() as opened:
                self._dispatch(opened)
        except Exception as error:  # noqa: BLE001  handed over, and raised there
            await_own_end(error)
            self._call(self._ended.set_exception, error)
        else:
            self._call(self._ended.set_result, None)

    def _dispatch(self, opened: ExitStack) -> None:
        """Dispatch what the first process dispatches, in that order, until it ends."""
        trainer, batches = self._trainer, iter(list[Any]())
        while True:
            deed, words = self._follower.next_order()
            match deed:
                case Deed.END:
                    self._saver.close()
                    return
                case Deed.WARM:
                    trainer.warm(lambda: None, self._stream.read(0, self._work.config.data.batch))
                case Deed.MEET:
                    self._follower.meet()
                case Deed.FEED:
                    self._settled()
                    feeding = feed(self._work, trainer, self._stream, *words, whole=False)
                    batches = opened.enter_context(feeding)
                case Deed.STEP:
                    trainer.step(next(batches).batch, *words)
                case Deed.RESET:
                    trainer.reset()
                case Deed.RESTORE | Deed.SAVE | Deed.KEEP:
                    found = self._saver.follow(deed, words, lambda: trainer.moments)
                    if found:
                        trainer.restore_moments(found)
                case _:
                    self._following.do(deed, *words)
