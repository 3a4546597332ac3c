"""What a learner reports of its rounds."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from structlog.testing import capture_logs

from skerry.client.encode import Stopwatch
from skerry.client.telemetry import (
    MOST_FAILURES,
    LearnerIdentity,
    LearnerTelemetry,
    StepTimes,
    observe,
    trace_step,
)
from skerry.errors import BrokerUnavailable
from skerry.protocol.messages import (
    Pulse,
)
from skerry.telemetry import metrics, tracing
from skerry.telemetry.spans import MESSAGING_MESSAGE_ID, Interval
from tests.support.builders import commit, header, pulse
from tests.support.telemetry import Collected

ME = LearnerIdentity("run", "a", 3, created_ns=7)
HEADER = header(8, incarnation=3, base_version=4, steps=24, tokens=512)
TOOK = Interval(1_000_000, 3_000_000)
PULSE = pulse(
    step=40,
    incarnation=3,
    steps=30,
    tokens=960,
    loss=2.5,
    busy_s=6.0,
    alive_s=10.0,
    bytes_up=100,
    bytes_down=200,
    contributions=4,
    max_staleness=2,
    compile_s=3.0,
)


@pytest.fixture
def telemetry() -> LearnerTelemetry:
    return LearnerTelemetry(ME)


def test_contribution_sent_at_third_attempt_is_one_span_from_the_first_one_on(
    telemetry: LearnerTelemetry, collected: Collected
) -> None:
    for attempt in (1_000, 3_000):
        telemetry.begins(0, attempt)
        telemetry.failed(0, BrokerUnavailable("away"), attempt + 1_000)
    telemetry.begins(0, 5_000)
    telemetry.published(HEADER, 100, 6_000)
    (span,) = collected.spans
    assert (span.interval, span.context) == (Interval(1_000, 6_000), ME.publishing(0, 5, 8))
    assert [(e.name, e.time_ns) for e in span.events] == [("not_sent", 2_000), ("not_sent", 4_000)]


def test_a_day_without_a_broker_fills_no_memory(
    telemetry: LearnerTelemetry, collected: Collected
) -> None:
    for attempt in range(10_000):
        telemetry.failed(0, BrokerUnavailable(f"attempt {attempt}"), attempt)
    telemetry.published(HEADER, 100, 20_000)
    events = collected.spans[0].events
    reported = [event.attributes["exception.message"] for event in events]
    assert len(events) == MOST_FAILURES
    assert (reported[0], reported[-1]) == ("attempt 0", "attempt 9999")


def test_failures_of_a_dropped_contribution_are_not_reported_with_the_next_one(
    telemetry: LearnerTelemetry, collected: Collected
) -> None:
    telemetry.begins(0, 1_000)
    telemetry.failed(0, BrokerUnavailable("away"), 2_000)
    telemetry.dropped(0)
    telemetry.begins(0, 5_000)
    telemetry.published(HEADER, 100, 6_000)
    (span,) = collected.spans
    assert (span.interval.start_ns, span.events) == (5_000, ())


def test_all_spans_of_a_round_are_in_its_trace_below_its_root(
    telemetry: LearnerTelemetry, collected: Collected
) -> None:
    telemetry.captured(HEADER, TOOK)
    telemetry.quantised(HEADER, "int4", TOOK)
    telemetry.published(HEADER, 100, 6_000)
    telemetry.received(commit(5), 100, TOOK)
    telemetry.adopted(commit(5), 4, "rebase", TOOK)
    root = tracing.context(tracing.trace_id("run", 0, 5, 7))
    assert {span.context.trace_id for span in collected.spans} == {root.trace_id}
    assert [span.parent for span in collected.spans] == [root] * 5
    assert len({span.context.span_id for span in collected.spans}) == 5
    operations = [span.operation for span in collected.spans]
    assert operations == ["capture", "quantise", "publish", "receive", "adopt"]
    messages = [span.all_attributes().get(MESSAGING_MESSAGE_ID) for span in collected.spans]
    assert messages == [None, None, "a/3/0/8", "0/5", "0/5"]


def test_a_round_has_one_line_that_says_how_late_its_answer_was(
    telemetry: LearnerTelemetry,
) -> None:
    with capture_logs() as lines:
        telemetry.captured(HEADER, TOOK)
        telemetry.published(HEADER, 100, 6_000)
        telemetry.received(commit(6), 300, TOOK)
        telemetry.adopted(commit(6), 4, "rebase", TOOK)
        telemetry.adopted(commit(7), 6, "rebase", TOOK)
    first: dict[str, Any] = dict(lines[0])
    assert (first["event"], first["version"], first["answered"]) == ("round_adopted", 6, 5)
    assert (first["sent_bytes"], first["received_bytes"], first["adopt_ms"]) == (100, 300, 2.0)
    assert "answered" not in lines[1], "a fact of an earlier round was reported twice"
    assert telemetry.facts == {}


def test_metrics_are_read_from_the_newest_pulse(collected: Collected) -> None:
    pulses: list[Pulse | None] = [None]
    observe(ME, lambda: pulses[-1])
    assert collected.values(metrics.TOKENS) == []
    pulses.append(replace(PULSE, region="eu", cached_bytes=150))
    of = {"run": "run", "learner": "a"}
    found = collected.metrics()
    assert found["skerry.tokens"] == [(of, 960)]
    assert found["skerry.loss"] == [(of, 2.5)]
    assert found["skerry.wire.io"] == [
        (of | {"direction": "up"}, 100),
        (of | {"direction": "down"}, 200),
    ]
    assert found["skerry.wire.cached"] == [(of | {"region": "eu"}, 150)]
    time = {attributes["use"]: value for attributes, value in found["skerry.learner.time"]}
    assert (time["train"], time["compile"], time["idle"]) == (6.0, 3.0, 1.0)
    assert "down" not in time
    recorded = {metrics.STEP_DURATION, metrics.STEPS_SKIPPED, metrics.CODEC_DURATION}
    recorded |= {metrics.GRADIENT_NORM, metrics.EXPERT_SHARE}
    assert found.keys() == {m.name for m in {*metrics.of("learner")} - recorded}


def test_a_process_that_joins_again_reports_its_newest_start_alone(collected: Collected) -> None:
    for step in (8, 20):
        observe(ME, lambda step=step: pulse(step=step))
    assert [value for _, value in collected.values(metrics.LEARNER_STEP)] == [20]


def test_a_loss_that_has_not_been_measured_is_not_reported(collected: Collected) -> None:
    observe(ME, lambda: replace(PULSE, loss=math.nan))
    assert collected.values(metrics.LOSS) == []


def test_a_stopwatch_passes_everything_on() -> None:
    watched = Stopwatch(iter([1, 2, 3]))
    assert list(watched) == [1, 2, 3]
    assert watched.spent_s >= 0


def test_the_header_of_a_contribution_names_its_span_without_a_collector_too() -> None:
    place = ME.publishing(0, 5, 8)
    assert not place.trace_flags.sampled
    assert tracing.parse(tracing.trace_parent(place)) == place


def test_a_kept_step_is_a_trace_of_its_data_training_and_boundary(collected: Collected) -> None:
    lasted = StepTimes(data_s=0.25, train_s=0.5, boundary_s=0.125)
    trace_step(ME, 7, lasted)
    assert collected.spans == [], "steps are kept by a ratio of their own"
    tracing.install(collected.spans.append, steps=1.0)
    trace_step(ME, 7, lasted)
    step, data, train, boundary = collected.spans
    names = [span.operation for span in (step, data, train, boundary)]
    assert names == ["step", "data", "train", "boundary"]
    assert step.interval.seconds == pytest.approx(0.875)
    assert [part.interval.seconds for part in (data, train, boundary)] == [0.25, 0.5, 0.125]
    assert data.parent == train.parent == step.context
    assert (data.interval.end_ns, boundary.interval.end_ns) == (
        train.interval.start_ns,
        step.interval.end_ns,
    )
    assert step.attributes["skerry.step"] == 7
