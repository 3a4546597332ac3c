"""Services that read a run's global state take turns, from its first whole state to its end.

A turn reads the global state and does something with it, such as saving or evaluating it. Its spans
are a trace of their own, which links to the rounds that it has read.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, aclosing
from dataclasses import dataclass, field

import structlog
from opentelemetry.trace import Link, SpanContext

from skerry.algorithm.fragments import Plan
from skerry.errors import Overtaken, StateLost, StoreError, WireError
from skerry.log import ledger, state
from skerry.log.base import Bus
from skerry.protocol.messages import Commit, RunRecord
from skerry.protocol.subjects import ANY, Subjects
from skerry.tasks import TaskGroup, happens
from skerry.telemetry import spans, tracing
from skerry.telemetry.spans import Attributes, FinishedSpan, Interval, Messages

log = structlog.get_logger()


async def take_turns(
    bus: Bus,
    record: RunRecord,
    plan: Plan,
    turn: Callable[[], Awaitable[object]],
    pause_s: Callable[[], float],
    failed: str,
) -> None:
    """Take a turn once every fragment has a version, then one after each pause, one at the end.

    A turn that fails (Overtaken, StateLost, WireError, StoreError) is logged as ``failed`` and
    tried again at the next; the last one raises its error. Raises an exception group for
    BrokerUnavailable and StorageFull, and for StateLost once the log holds another run of that
    name.
    """
    finished = asyncio.Event()

    async def watch_end() -> None:
        await ledger.wait_finished(bus, record.run, created_ns=record.created_ns)
        finished.set()

    async with TaskGroup() as group:
        end = group.create_task(watch_end(), name="end")
        begin = group.create_task(_whole(bus, record.run, plan), name="begin")
        await asyncio.wait({begin, end}, return_when=asyncio.FIRST_COMPLETED)
        begin.cancel()
        while True:
            last = finished.is_set()
            try:
                await turn()
            except (StoreError, Overtaken, StateLost, WireError) as error:
                if last:
                    raise
                log.error(failed, run=record.run, error=str(error))  # noqa: TRY400  the sentence says it all
            if last:
                break
            await happens(finished, pause_s())
        end.cancel()


async def _whole(bus: Bus, run: str, plan: Plan) -> None:
    """Wait until every fragment has a version."""
    missing = {fragment.index for fragment in plan.fragments}
    async with aclosing(state.follow_manifests(bus, run, plan)) as manifests:
        async for manifest in manifests:
            missing.discard(manifest.commit.fragment)
            if not missing:
                return


@dataclass(slots=True)
class TurnTrace:
    """The trace of one turn: its reading, and the work named ``then`` that follows it."""

    record: RunRecord
    name: str
    then: str
    began_ns: int = field(init=False)
    read_ns: int = field(init=False)
    root: SpanContext = field(init=False)

    def __post_init__(self) -> None:
        self.began_ns = self.read_ns = time.time_ns()
        run = self.record
        self.root = tracing.context(
            tracing.turn_id(run.run, run.created_ns, self.name, self.began_ns)
        )

    def working(self) -> AbstractContextManager[object]:
        """Return a context in which log lines carry the ids of this turn."""
        return tracing.within(self.root)

    def has_read(self) -> None:
        """Note that the reading is over."""
        self.read_ns = time.time_ns()

    def over(self, commits: Iterable[Commit], attributes: Attributes) -> None:
        """Emit the spans of a turn that did its work, with a link to each commit that it read."""
        if not self.root.trace_flags.sampled:
            return
        ended_ns, root = time.time_ns(), self.root
        shards = self.record.shards
        found = (_link(commit, shards) for commit in commits)
        links = tuple(link for link in found if link.context.is_valid)
        subject = Subjects(self.record.run).shard(ANY).manifest()
        read = Messages(spans.GLOBAL_FRAGMENT, subject, batch=len(links))
        whole, reading = Interval(self.began_ns, ended_ns), Interval(self.began_ns, self.read_ns)
        tracing.emit(FinishedSpan(self.name, root, None, whole, attributes))
        place = tracing.child(root, spans.RECEIVE)
        tracing.emit(FinishedSpan(spans.RECEIVE, place, root, reading, {}, read, links))
        place, working = tracing.child(root, self.then), Interval(self.read_ns, ended_ns)
        tracing.emit(FinishedSpan(self.then, place, root, working))


def _link(commit: Commit, shards: int) -> Link:
    shard = Subjects(commit.run).of_fragment(commit.fragment, shards)
    about: Attributes = {
        spans.FRAGMENT: commit.fragment,
        spans.VERSION: commit.version,
        spans.MESSAGING_DESTINATION_NAME: shard.manifest(commit.fragment),
    }
    return Link(tracing.context(commit.trace_id, spans.COMMIT), about)
