"""Follow a run through its log into a RunView: what status, up and the demo all show."""

from __future__ import annotations

import asyncio
import time
from contextlib import aclosing
from typing import TYPE_CHECKING

from skerry.algorithm.liveness import policy_from
from skerry.errors import BrokerUnavailable
from skerry.log import ledger, presence
from skerry.protocol.messages import RunRecord, RunState
from skerry.settings.loading import run_config_from_json
from skerry.status.report import Report, report
from skerry.status.view import (
    Frame,
    Message,
    RunView,
    committed,
    fold,
    peek,
    peek_evaluation,
    seen_s,
)
from skerry.tasks import TaskGroup

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from skerry.log.base import Bus
    from skerry.settings.models import RunConfig

AHEAD_S = 60.0
RETRY_S = 1.0


def frame_of(run: str, config: RunConfig) -> Frame:
    """Return what a view needs of a run's settings."""
    return Frame(
        run=run,
        fragments=config.sync.fragments,
        quorum=config.sync.quorum,
        steps=config.train.steps,
        duration_s=config.train.duration_s,
        liveness=policy_from(
            pulse_s=config.liveness.pulse_s,
            suspect_phi=config.liveness.suspect_phi,
            gone_phi=config.liveness.gone_phi,
            blocking=not config.sync.overlap_steps,
        ),
    )


class _BegunAnew(Exception):
    """The log holds another run of that name than the one that is followed."""


class Feed:
    """The newest view of one run; ``run`` keeps it new until it is cancelled.

    ``finished`` is set once the run is, and all of its rounds are in the view.
    """

    def __init__(
        self, bus: Bus, run: str, *, on_message: Callable[[Message, float], None] | None = None
    ) -> None:
        self.bus = bus
        self.name = run
        self.view: RunView | None = None
        self.record: RunRecord | None = None
        self.finished = asyncio.Event()
        self._on_message = on_message
        self._created_ns = 0
        self._known_to = self._starts_to = 0

    async def run(self) -> None:
        """Wait for the run, then fold in all that is said about it, for ever.

        Where the log is begun anew, so is the view: versions count from 1 again there.
        """
        while True:
            try:
                await self._follow()
            except* _BegunAnew:
                pass

    async def _follow(self) -> None:
        """Fold in one log of the run until another one takes its place."""
        self.record = await ledger.wait_run(self.bus, self.name)
        self._created_ns = self.record.created_ns
        config = run_config_from_json(self.record.config_json)
        self.view = await self._ahead(RunView(frame_of(self.name, config)))
        if self._on_message is not None:
            self._on_message(self.record, time.time())
        async with TaskGroup() as group:
            streams: dict[str, AsyncIterator[Message]] = {
                "run": ledger.follow_run(self.bus, self.name),
                "pulses": presence.follow_pulses(self.bus, self.name),
                "checkpoints": ledger.follow_checkpoints(self.bus, self.name),
                "evaluations": ledger.follow_evaluations(self.bus, self.name),
            }
            for name, messages in streams.items():
                group.create_task(self._take(messages), name=name)
            group.create_task(self._take_starts(), name="starts")
            group.create_task(self._take_commits(), name="commits")

    async def _ahead(self, view: RunView) -> RunView:
        """Return the view that knows what is newest before the history that leads to it is read.

        That may take minutes, in which the newest commit read so far would look days old.
        """
        while True:
            try:
                async with asyncio.timeout(AHEAD_S):  # a log begun anew meanwhile may lack its end
                    starts = await ledger.starts(self.bus, self.name)
                    commits = await ledger.newest_commits(self.bus, self.name)
                    written = await ledger.newest_checkpoint(self.bus, self.name)
                    judged = await ledger.last_evaluation(self.bus, self.name)
            except (BrokerUnavailable, TimeoutError):
                await asyncio.sleep(RETRY_S)
                continue
            for stored, member in starts:
                view = fold(view, member, min(time.time(), stored.time_ns / 1e9))
            view = view if written is None else fold(view, written, time.time())
            for stored, commit in commits:
                view = peek(view, commit, min(time.time(), stored.time_ns / 1e9))
            self._known_to, self._starts_to = (
                max((stored.sequence for stored, _ in known), default=0)
                for known in (commits, starts)
            )
            return view if judged is None else peek_evaluation(view, judged)

    def report(self) -> Report | None:
        """Return the rows as of now, or None before there is a run."""
        return None if self.view is None else report(self.view, time.time())

    async def _take(self, messages: AsyncIterator[Message]) -> None:
        async for message in messages:
            if isinstance(message, RunRecord) and message.created_ns != self._created_ns:
                raise _BegunAnew
            if isinstance(message, RunRecord) and is_finished(message):
                await self._know_the_end()
            now_s = time.time()
            if self.view is not None:
                self.view = self._seen(fold(self.view, message, now_s))
            if self._on_message is not None:
                self._on_message(message, now_s)

    async def _know_the_end(self) -> None:
        """Take note of the last commits: those of the beginning may be read before these are."""
        while True:
            try:
                async with asyncio.timeout(AHEAD_S):
                    commits = await ledger.newest_commits(self.bus, self.name)
                break
            except (BrokerUnavailable, TimeoutError):
                await asyncio.sleep(RETRY_S)
        for stored, commit in commits:
            if self.view is not None:
                self.view = peek(self.view, commit, min(time.time(), stored.time_ns / 1e9))

    async def _take_starts(self) -> None:
        """Take every start there was, each as old as the log says: who flaps did so before."""
        async for stored, member in ledger.follow_starts(self.bus, self.name):
            at_s = seen_s(time.time(), stored.time_ns, stored.sequence, self._starts_to)
            if self.view is not None:
                self.view = fold(self.view, member, at_s)
            if self._on_message is not None:
                self._on_message(member, at_s)

    async def _take_commits(self) -> None:
        """Take every commit: what is history as old as the log says, what is new by our own clock.

        The broker's may be behind ours, and nothing would ever look new.
        """
        async for stored, commit in ledger.follow_stored_commits(self.bus, self.name):
            at_s = seen_s(time.time(), stored.time_ns, stored.sequence, self._known_to)
            if self.view is not None:
                self.view = self._seen(committed(self.view, commit, at_s))
            if self._on_message is not None:
                self._on_message(commit, at_s)

    def _seen(self, view: RunView) -> RunView:
        """Return the view; a run is over once its history is read too, not when its record is."""
        if view.finished and not view.counting:
            self.finished.set()
        return view


async def snapshot(
    bus: Bus, run: str, *, on_message: Callable[[Message, float], None] | None = None
) -> RunView:
    """Return a view of the run as it stands in the log; RunNotFound if there is none.

    ``on_message`` hears each message that the view is made of.
    """
    record = await ledger.read_run(bus, run)
    view = fold(
        RunView(frame_of(run, run_config_from_json(record.config_json))), record, time.time()
    )
    for stored, member in await ledger.starts(bus, run):
        at_s = min(time.time(), stored.time_ns / 1e9)
        view = fold(view, member, at_s)
        if on_message is not None:
            on_message(member, at_s)
    messages: list[Message] = [*(await presence.last_pulses(bus, run)).values()]
    checkpoint = await ledger.newest_checkpoint(bus, run)
    messages += [checkpoint] if checkpoint else []
    messages += await ledger.evaluations(bus, run)

    def take(message: Message) -> RunView:
        now_s = time.time()
        if on_message is not None:
            on_message(message, now_s)
        return fold(view, message, now_s)

    for message in messages:
        view = take(message)
    commits = ledger.stored_commits(bus, run)
    async with aclosing(commits):
        async for stored, commit in commits:
            at_s = min(time.time(), stored.time_ns / 1e9)
            if on_message is not None:
                on_message(commit, at_s)
            view = committed(view, commit, at_s)
    return view


def is_finished(record: RunRecord) -> bool:
    """Say whether a run takes no more contributions."""
    return record.state is RunState.FINISHED
