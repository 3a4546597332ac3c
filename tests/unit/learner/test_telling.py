"""What a learner tells of its rounds."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from skerry.protocol.messages import (
    Commit,
    ContributionHeader,
    ContributionKind,
    LearnerPhase,
    Pulse,
)
from skerry.telemetry import ids as tracing
from skerry.telemetry import instruments, metrics, spans, tracer
from skerry.telemetry.instruments import Attributes, Observation, Observer
from skerry.telemetry.metrics import Metric
from skerry.telemetry.spans import Span
from skerry_learner.sync.session import Learner
from skerry_learner.sync.telling import MOST_TROUBLE, Stopwatch, Stretch, Teller, observe

ME = Learner("run", "a", 3, created_ns=7)
HEADER = ContributionHeader(
    ContributionKind.OUTER_GRADIENT, "a", 3, 8, 0, 4, 5, 9, 24, 512, 0, 5, 1.0, 0
)
TOOK = Stretch(1_000_000, 3_000_000)
PULSE = Pulse(
    run="run",
    learner="a",
    incarnation=3,
    phase=LearnerPhase.TRAINING,
    sent_ns=1,
    step=40,
    steps=30,
    tokens=960,
    cursor=0,
    loss=2.5,
    step_time_s=0.1,
    busy_s=6.0,
    alive_s=10.0,
    bytes_up=100,
    bytes_down=200,
    contributions=4,
    max_staleness=2,
    compile_s=3.0,
)


class Taken:
    """Keeps the spans and the observers."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.observers: dict[str, Observer] = {}

    def take(self, span: Span) -> None:
        self.spans.append(span)

    def record(self, metric: Metric, value: float, attributes: Attributes) -> None:
        raise NotImplementedError

    def observe(self, metric: Metric, observer: Observer) -> None:
        self.observers[metric.name] = observer

    def read(self, metric: Metric) -> list[Observation]:
        return list(self.observers[metric.name]())


@pytest.fixture
def taken() -> Iterator[Taken]:
    sink = Taken()
    tracer.install(sink)
    instruments.install(sink)
    yield sink
    tracer.install(None)
    instruments.install(None)


def commit(version: int) -> Commit:
    return Commit(
        run="run",
        plan_digest=0,
        fragment=0,
        version=version,
        step=9,
        reason="all_arrived",
        syncer="s",
        fence=1,
        opened_ns=0,
        closed_ns=0,
        quorum_s=0.0,
        grace_s=0.0,
        consumed=(),
        refused=(),
        contrib_floor=0,
        progress=(),
        params_digest=0,
        master_digest=0,
        trace_id="",
    )


def test_a_contribution_sent_at_the_third_attempt_is_one_span_from_the_first_one_on(
    taken: Taken,
) -> None:
    teller = Teller()
    teller.begins(0, 1_000)
    teller.failed(0, "away", 2_000)
    teller.begins(0, 3_000)
    teller.failed(0, "still away", 4_000)
    teller.begins(0, 5_000)
    teller.published(ME, HEADER, 100, 6_000)
    (span,) = taken.spans
    assert (span.start_ns, span.end_ns) == (1_000, 6_000)
    assert [(e.name, e.time_ns) for e in span.events] == [("not_sent", 2_000), ("not_sent", 4_000)]
    assert span.context == ME.publishing(0, 5, 8)


def test_a_day_without_a_broker_fills_no_memory(taken: Taken) -> None:
    teller = Teller()
    for attempt in range(10_000):
        teller.failed(0, f"attempt {attempt}", attempt)
    teller.begins(0, 1)
    teller.published(ME, HEADER, 100, 20_000)
    (span,) = taken.spans
    events = span.events
    assert len(events) == MOST_TROUBLE
    said = [event.attributes["exception.message"] for event in events]
    assert (said[0], said[-1]) == ("attempt 0", "attempt 9999")


def test_what_held_up_a_dropped_contribution_is_not_told_of_the_next_one(taken: Taken) -> None:
    teller = Teller()
    teller.begins(0, 1_000)
    teller.failed(0, "away", 2_000)
    teller.dropped(0)
    teller.begins(0, 5_000)
    teller.published(ME, HEADER, 100, 6_000)
    (span,) = taken.spans
    assert (span.start_ns, span.events) == (5_000, ())


def test_all_spans_of_a_round_are_in_its_trace_below_its_root(taken: Taken) -> None:
    teller = Teller()
    teller.captured(ME, HEADER, TOOK)
    teller.quantised(ME, HEADER, "int4", TOOK)
    teller.published(ME, HEADER, 100, 6_000)
    teller.received(ME, commit(5), 100, TOOK)
    teller.adopted(ME, commit(5), 4, "rebase", TOOK)
    trace = tracing.trace_id("run", 0, 5, 7)
    assert {span.context.trace_id for span in taken.spans} == {trace}
    assert {span.parent for span in taken.spans} == {tracer.context(trace)}
    assert len({span.context.span_id for span in taken.spans}) == 5
    names = [span.name.split()[0] for span in taken.spans]
    assert names == ["capture", "quantise", "publish", "receive", "adopt"]


def test_a_round_has_one_line_that_says_how_late_its_answer_was(taken: Taken) -> None:
    teller = Teller()
    with capture_logs() as lines:
        teller.captured(ME, HEADER, TOOK)
        teller.published(ME, HEADER, 100, 6_000)
        teller.received(ME, commit(6), 300, TOOK)
        teller.adopted(ME, commit(6), 4, "rebase", TOOK)
        teller.adopted(ME, commit(7), 6, "rebase", TOOK)
    first: dict[str, Any] = dict(lines[0])
    assert (first["event"], first["version"], first["answered"]) == ("round_adopted", 6, 5)
    assert (first["sent_bytes"], first["received_bytes"], first["adopt_ms"]) == (100, 300, 2.0)
    assert "answered" not in lines[1], "a fact of an earlier round was told twice"
    assert teller.facts == {}


def test_metrics_are_read_off_the_newest_pulse(taken: Taken) -> None:
    pulses: list[Pulse | None] = [None]
    observe(ME, lambda: pulses[-1])
    assert taken.read(metrics.TOKENS) == []
    pulses.append(PULSE)
    of = {"run": "run", "learner": "a"}
    assert taken.read(metrics.TOKENS) == [(960, of)]
    assert taken.read(metrics.LOSS) == [(2.5, of)]
    assert taken.read(metrics.WIRE_IO) == [
        (100, of | {"direction": "up"}),
        (200, of | {"direction": "down"}),
    ]
    time = {attributes["use"]: value for value, attributes in taken.read(metrics.LEARNER_TIME)}
    assert (time["train"], time["compile"], time["idle"]) == (6.0, 3.0, 1.0)
    assert "down" not in time


def test_a_loss_that_has_not_been_measured_is_not_told(taken: Taken) -> None:
    observe(ME, lambda: replace(PULSE, loss=math.nan))
    assert taken.read(metrics.LOSS) == []


def test_every_metric_of_a_learner_that_its_pulse_holds_is_observed(taken: Taken) -> None:
    observe(ME, lambda: PULSE)
    recorded = {metrics.STEP_DURATION, metrics.STEPS_SKIPPED, metrics.CODEC_DURATION}
    assert taken.observers.keys() == {m.name for m in metrics.of("learner")} - {
        metric.name for metric in recorded
    }


def test_a_stopwatch_passes_everything_on() -> None:
    watched = Stopwatch(iter([1, 2, 3]))
    assert list(watched) == [1, 2, 3]
    assert watched.spent_s >= 0


def test_the_header_of_a_contribution_names_its_span_whether_it_is_told_or_not() -> None:
    place = ME.publishing(0, 5, 8)
    assert tracing.parse(place.trace_parent) == place
    assert not place.sampled
    assert spans.extract({"Traceparent": place.trace_parent}) == place
