"""What a syncer tells of its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import structlog

from skerry.algorithm.quantise import Planes
from skerry.log.contributions import Contribution, Refusal
from skerry.protocol.messages import (
    Commit,
    Consumed,
    ContributionHeader,
    ContributionKind,
    Refused,
    Round,
    RunRecord,
)
from skerry.telemetry import ids as tracing
from skerry.telemetry import instruments, metrics, spans, tracer
from skerry.telemetry.ids import SpanContext
from skerry.telemetry.instruments import Attributes, Observer
from skerry.telemetry.metrics import Metric
from skerry.telemetry.spans import Span
from skerry_syncer.telling import Spent, Teller

RECORD = RunRecord("run", "{}", (), 1, 0, created_ns=7, skerry_version="0")
OPENED = Round("run", 0, 0, 5, 1, 1_000, "s")
SPENT = Spent(2_000_000_000, 2_500_000_000, 3_500_000_000)


class Taken:
    """Keeps the spans and the recorded metrics."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.recorded: list[tuple[str, float, dict[str, str]]] = []

    def take(self, span: Span) -> None:
        self.spans.append(span)

    def record(self, metric: Metric, value: float, attributes: Attributes) -> None:
        self.recorded.append((metric.name, value, dict(attributes)))

    def observe(self, metric: Metric, observer: Observer) -> None:
        raise NotImplementedError

    def named(self, name: str) -> Span:
        (found,) = [span for span in self.spans if span.name.split()[0] == name]
        return found


@pytest.fixture
def taken() -> Iterator[Taken]:
    sink = Taken()
    tracer.install(sink)
    instruments.install(sink)
    yield sink
    tracer.install(None)
    instruments.install(None)


def trace(version: int) -> str:
    return tracing.trace_id("run", 0, version, 7)


def publishing(version: int, identity: int) -> SpanContext:
    return tracer.context(trace(version), "publish", "a", 1, identity)


def consumed(identity: int, staleness: int) -> Consumed:
    return Consumed("a", 1, identity, 1, 2, 4 - staleness, staleness, 9, 3, 4, 0, 5, 0.5, 1.0)


def committed(*merged: Consumed, refused: tuple[Refused, ...] = ()) -> Commit:
    return Commit(
        run="run",
        plan_digest=0,
        fragment=0,
        version=5,
        step=9,
        reason="grace_over",
        syncer="s",
        fence=1,
        opened_ns=1_000_000_000,
        closed_ns=2_000_000_000,
        quorum_s=0.75,
        grace_s=0.25,
        consumed=merged,
        refused=refused,
        contrib_floor=0,
        progress=(),
        params_digest=0,
        master_digest=0,
        trace_id=trace(5),
    )


def test_a_late_contribution_is_linked_across_traces_with_its_staleness(taken: Taken) -> None:
    fresh, late = publishing(5, 8), publishing(4, 7)
    Teller(RECORD, "rda").committed(
        committed(consumed(8, 0), consumed(7, 1)),
        OPENED,
        {("a", 1, 8): fresh, ("a", 1, 7): late},
        SPENT,
    )
    links = {
        link.context: link.attributes[spans.STALENESS] for link in taken.named("process").links
    }
    assert links == {fresh: 0, late: 1}
    assert late.trace_id != fresh.trace_id == trace(5)


def test_the_root_spans_the_round_and_merge_and_commit_what_they_took(taken: Taken) -> None:
    Teller(RECORD, "rda").committed(committed(), OPENED, {}, SPENT)
    root, process = taken.named("round"), taken.named("process")
    assert (root.parent, root.context.span_id) == (None, tracing.span_id(trace(5)))
    assert (root.start_ns, root.end_ns) == (1_000_000_000, 3_500_000_000)
    assert [e.time_ns for e in root.events] == [1_750_000_000, 2_000_000_000]
    assert process.parent == root.context
    for name, ends in (("merge", 2_500_000_000), ("commit", 3_500_000_000)):
        assert taken.named(name).parent == process.context
        assert taken.named(name).end_ns == ends


def test_a_round_is_counted_by_reason_and_its_contributions_by_what_became_of_them(
    taken: Taken,
) -> None:
    refused = (Refused("too_stale", "b"), Refused("genesis", "c"))
    commit = committed(consumed(8, 0), consumed(7, 2), consumed(8, 0), refused=refused)
    Teller(RECORD, "rda").committed(commit, OPENED, {}, SPENT)
    durations = [(v, a) for n, v, a in taken.recorded if n == metrics.ROUND_DURATION.name]
    assert durations == [(1.0, {"run": "run", "reason": "grace_over"})]
    outcomes = [
        (v, a["outcome"], a["cause"])
        for n, v, a in taken.recorded
        if n == metrics.CONTRIBUTIONS.name
    ]
    assert outcomes == [(2, "accepted", ""), (1, "stale", ""), (1, "refused", "too_stale")]


@pytest.mark.parametrize("reason", ["short_handed", "timeout", "final_empty"])
def test_a_round_that_never_had_its_quorum_tells_of_no_wait_for_it(
    taken: Taken, reason: str
) -> None:
    commit = replace(committed(consumed(8, 0)), reason=reason)
    Teller(RECORD, "rda").committed(commit, OPENED, {}, SPENT)
    assert [event.name for event in taken.named(spans.ROUND).events] == ["closed"]
    names = {name for name, _, _ in taken.recorded}
    assert not names & {metrics.QUORUM_WAIT.name, metrics.GRACE_WAIT.name}
    assert metrics.ROUND_DURATION.name in names


def test_genesis_is_no_round_that_anybody_waited_for(taken: Taken) -> None:
    Teller(RECORD, "rda").committed(committed(consumed(8, 0)), None, {}, SPENT)
    told = {name for name, _, _ in taken.recorded}
    rounds = {metrics.ROUND_DURATION, metrics.MERGE_DURATION, metrics.CONTRIBUTIONS}
    assert not told & {metric.name for metric in rounds}
    assert metrics.FRAGMENT_VERSION.name in told


def test_a_clock_that_was_set_back_makes_no_negative_time(taken: Taken) -> None:
    Teller(RECORD, "rda").committed(committed(), OPENED, {}, Spent(3, 2, 1))
    assert min(value for _, value, _ in taken.recorded) >= 0


Lines = list[tuple[structlog.typing.EventDict, SpanContext | None]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What is logged, each line with the span that it names."""
    found: Lines = []

    def keep(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        found.append((event, tracer.current()))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    yield found
    structlog.reset_defaults()


def test_the_line_of_a_round_names_its_trace_even_where_nobody_collects_any(lines: Lines) -> None:
    Teller(RECORD, "rda").committed(committed(), OPENED, {}, SPENT)
    ((event, place),) = lines
    assert (event["event"], place) == ("round_committed", tracer.context(trace(5)))


def test_a_refusal_is_logged_in_the_trace_of_the_round_that_it_was_made_for(lines: Lines) -> None:
    late = Refusal(Refused("too_stale", "a", 1, 8), "base 1", 9, "skerry.run.contrib.0.a", 2)
    Teller(RECORD, "rda").refused(late)
    ((event, place),) = lines
    assert place == tracer.context(trace(2))
    assert event == {
        "event": "contribution_refused",
        "fragment": 0,
        "version": 2,
        "learner": "a",
        "cause": "too_stale",
        "detail": "base 1",
    }


def test_bytes_that_say_of_no_round_are_refused_outside_of_every_trace(lines: Lines) -> None:
    bytes_ = Refusal(Refused("corrupt", "a"), "damaged", 9, "skerry.run.contrib.0.a")
    Teller(RECORD, "rda").refused(bytes_)
    ((event, place),) = lines
    assert (event["learner"], event["version"], place) == ("a", None, None)


def test_a_contribution_is_received_from_its_first_chunk_on_in_the_round_it_is_for(
    taken: Taken,
) -> None:
    header = ContributionHeader(
        ContributionKind.OUTER_GRADIENT, "a", 1, 8, 0, 4, 5, 9, 3, 4, 0, 5, 1.0, 0
    )
    whole = Contribution(header, "int4", Planes(None, None), 1, 2, publishing(5, 8))  # type: ignore[arg-type]
    teller = Teller(RECORD, "rda")
    for now_ns in (10, 20, 30):
        teller.heard("subject", now_ns)
    teller.received(whole, "subject", 30)
    teller.settled("subject")
    teller.heard("subject", 40)
    teller.received(replace(whole, origin=None), "subject", 50)
    first, second = taken.spans
    assert (first.start_ns, first.end_ns, second.start_ns) == (10, 30, 40)
    assert first.parent == tracer.context(trace(5))
    assert [link.context for link in first.links] == [publishing(5, 8)]
    assert second.links == ()
