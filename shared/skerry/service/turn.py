"""A turn of a reader of the global state, told as a trace of its own that links to its rounds."""

from __future__ import annotations

import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from skerry.protocol.subjects import Subjects
from skerry.telemetry import ids as tracing
from skerry.telemetry import spans, tracer
from skerry.telemetry.spans import Kind, Link, Span, messaging, messaging_name

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable

    from skerry.protocol.messages import Commit, RunRecord
    from skerry.telemetry.ids import SpanContext
    from skerry.telemetry.spans import Attributes


@dataclass(slots=True)
class Turn:
    """One look at the global state, and what is done about it; times in ns since the epoch.

    ``name`` is that of the whole, ``then`` what follows the reading.
    """

    record: RunRecord
    name: str
    then: str
    wall_ns: Callable[[], int] = time.time_ns
    began_ns: int = field(init=False)
    read_ns: int = field(init=False)
    place: SpanContext = field(init=False)

    def __post_init__(self) -> None:
        self.began_ns = self.read_ns = self.wall_ns()
        run = self.record
        trace = tracing.turn_id(run.run, run.created_ns, self.name, self.began_ns)
        self.place = tracer.context(trace)

    @contextmanager
    def working(self) -> Generator[None]:
        """Have log lines carry the ids of this turn."""
        with tracer.within(self.place):
            yield

    def has_read(self) -> None:
        """Note that what the turn is about has been read."""
        self.read_ns = self.wall_ns()

    def over(self, commits: Iterable[Commit], attributes: Attributes) -> None:
        """Tell of a turn that came to something, with a link to each commit that it read."""
        if not self.place.sampled:
            return
        ended_ns, run = self.wall_ns(), self.record.run
        tracer.tell(
            Span(self.name, Kind.INTERNAL, self.place, None, self.began_ns, ended_ns, attributes)
        )
        links = tuple(_link(commit) for commit in commits if commit.trace_id)
        tracer.tell(
            Span(
                name=messaging_name(spans.RECEIVE, spans.GLOBAL_FRAGMENT),
                kind=Kind.CLIENT,
                context=self._child(spans.RECEIVE),
                parent=self.place,
                start_ns=self.began_ns,
                end_ns=self.read_ns,
                attributes={
                    **messaging(spans.RECEIVE, Subjects(run).manifests(), spans.GLOBAL_FRAGMENT),
                    spans.MESSAGING_BATCH_MESSAGE_COUNT: len(links),
                },
                links=links,
            )
        )
        tracer.tell(
            Span(
                name=self.then,
                kind=Kind.INTERNAL,
                context=self._child(self.then),
                parent=self.place,
                start_ns=self.read_ns,
                end_ns=ended_ns,
            )
        )

    def _child(self, name: str) -> SpanContext:
        return tracer.context(self.place.trace_id, name)


def _link(commit: Commit) -> Link:
    told: Attributes = {
        spans.FRAGMENT: commit.fragment,
        spans.VERSION: commit.version,
        spans.MESSAGING_DESTINATION_NAME: Subjects(commit.run).manifest(commit.fragment),
    }
    return Link(tracer.context(commit.trace_id, spans.COMMIT), told)
