"""What a syncer reports of its rounds."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import structlog
from opentelemetry.trace import SpanContext

from skerry.protocol.contribution import Contribution, Refusal, id_of
from skerry.protocol.messages import (
    CloseReason,
    Commit,
    CommitOrigin,
    Consumed,
    ContributionHeader,
    ContributionKind,
    RefusalCause,
    Refused,
)
from skerry.protocol.rounds import WITHOUT_QUORUM
from skerry.telemetry import metrics, spans, tracing
from skerry.telemetry.spans import Interval
from skerry_syncer.telemetry import CommitTimes, RoundTelemetry
from tests.support.builders import commit, consumed, round_, run_record
from tests.support.telemetry import Collected

RECORD = run_record(created_ns=7)
OPENED = round_(5, opened_ns=1_000)
S = 1_000_000_000
TIMES = CommitTimes(2 * S, 2 * S + S // 2, 3 * S + S // 2)


def context(version: int, *what: str | int) -> SpanContext:
    return tracing.context(tracing.trace_id("run", 0, version, 7), *what)


def publishing(version: int, identity: int) -> SpanContext:
    return context(version, "publish", "a", 1, identity)


def merged(identity: int, staleness: int) -> Consumed:
    base: dict[str, Any] = {
        "base_version": 4 - staleness,
        "staleness": staleness,
        "steps": 3,
        "tokens": 4,
    }
    return consumed(identity=identity, weight=0.5, **base)


def committed(*taken: Consumed, **changes: Any) -> Commit:
    times = {"opened_ns": S, "closed_ns": 2 * S, "quorum_s": 0.75}
    trace = tracing.trace_id("run", 0, 5, 7)
    base: dict[str, Any] = {"reason": CloseReason.GRACE_OVER, "trace_id": trace, **times}
    return commit(5, consumed=taken, **(base | changes))


@pytest.fixture
def telemetry() -> RoundTelemetry:
    return RoundTelemetry(RECORD, "rda")


def test_a_late_contribution_is_linked_across_traces_with_its_staleness(
    telemetry: RoundTelemetry, collected: Collected
) -> None:
    fresh, late = publishing(5, 8), publishing(4, 7)
    parents = tracing.trace_parent(fresh), tracing.trace_parent(late)
    origins = {id_of(merged(identity, 0)): p for identity, p in zip((8, 7), parents, strict=True)}
    telemetry.committed(committed(merged(8, 0), merged(7, 1)), OPENED, origins, TIMES)
    links = collected.named("process").links
    staleness = [(link.context, (link.attributes or {})[spans.STALENESS]) for link in links]
    assert staleness == [(fresh, 0), (late, 1)]
    assert late.trace_id != fresh.trace_id == context(5).trace_id


def test_the_root_lasts_as_long_as_the_round_and_merge_and_commit_what_they_took(
    telemetry: RoundTelemetry, collected: Collected
) -> None:
    telemetry.committed(committed(), OPENED, {}, TIMES)
    root, process = collected.named("round"), collected.named("process")
    assert (root.parent, root.context) == (None, context(5))
    assert root.interval == Interval(S, TIMES.written_ns)
    assert [e.time_ns for e in root.events] == [S + 3 * S // 4, 2 * S]
    assert process.parent == root.context
    for name, ends in (("merge", TIMES.merged_ns), ("commit", TIMES.written_ns)):
        assert collected.named(name).parent == process.context
        assert collected.named(name).interval.end_ns == ends


@pytest.mark.parametrize(("count", "said"), [(0, 0), (1, None), (2, 2)])
def test_only_a_span_about_several_messages_counts_them(
    telemetry: RoundTelemetry, collected: Collected, count: int, said: int | None
) -> None:
    telemetry.committed(committed(*[merged(8, 0)] * count), OPENED, {}, TIMES)
    attributes = collected.named("process").all_attributes()
    assert attributes.get(spans.MESSAGING_BATCH_MESSAGE_COUNT) == said


def test_a_round_is_counted_by_reason_and_its_contributions_by_outcome(
    telemetry: RoundTelemetry, collected: Collected
) -> None:
    refused = (Refused(RefusalCause.TOO_STALE, "b"), Refused(RefusalCause.GENESIS, "c"))
    commit = committed(merged(8, 0), merged(7, 2), merged(8, 0), refused=refused)
    telemetry.committed(commit, OPENED, {}, TIMES)
    found = collected.metrics()
    of = {"run": "run"}
    assert found["skerry.round.duration"] == [(of | {"reason": "grace_over"}, 1.0)]
    assert found["skerry.contributions"] == [
        (of | {"outcome": "accepted", "cause": ""}, 2),
        (of | {"outcome": "stale", "cause": ""}, 1),
        (of | {"outcome": "refused", "cause": "too_stale"}, 1),
    ]


@pytest.mark.parametrize("reason", sorted(WITHOUT_QUORUM))
def test_a_round_that_never_had_its_quorum_reports_no_wait_for_it(
    telemetry: RoundTelemetry, collected: Collected, reason: CloseReason
) -> None:
    telemetry.committed(committed(merged(8, 0), reason=reason), OPENED, {}, TIMES)
    assert [event.name for event in collected.named(spans.ROUND).events] == ["closed"]
    names = collected.metrics().keys()
    assert not names & {metrics.QUORUM_WAIT.name, metrics.GRACE_WAIT.name}
    assert metrics.ROUND_DURATION.name in names


def test_genesis_is_no_round_and_a_clock_set_back_makes_no_negative_time(
    telemetry: RoundTelemetry, collected: Collected
) -> None:
    genesis = committed(origin=CommitOrigin.GENESIS)
    telemetry.committed(genesis, None, {}, CommitTimes(3, 2, 1))
    found = collected.metrics()
    assert found.keys() == {"skerry.commit.duration", "skerry.fragment.version"}, "genesis"
    assert min(value for points in found.values() for _, value in points) >= 0


Lines = list[tuple[structlog.typing.EventDict, SpanContext | None]]


@pytest.fixture
def lines() -> Iterator[Lines]:
    """What is logged, each line with the span that it names."""
    found: Lines = []

    def keep(
        _logger: object, _method: str, event: structlog.typing.EventDict
    ) -> structlog.typing.EventDict:
        found.append((event, tracing.current()))
        raise structlog.DropEvent

    structlog.configure(processors=[keep])
    yield found
    structlog.reset_defaults()


def test_the_line_of_a_round_names_its_trace_without_a_collector_too(
    telemetry: RoundTelemetry, lines: Lines
) -> None:
    telemetry.committed(committed(), OPENED, {}, TIMES)
    ((event, place),) = lines
    assert (event["event"], place) == ("round_committed", context(5))


@pytest.mark.parametrize(
    ("cause", "version"), [(RefusalCause.TOO_STALE, 2), (RefusalCause.CORRUPT, 0)]
)
def test_a_refusal_is_logged_in_the_trace_of_the_round_that_it_was_made_for_if_any(
    telemetry: RoundTelemetry, lines: Lines, cause: RefusalCause, version: int
) -> None:
    refused = Refused(cause, "a", 1, 8)
    telemetry.refused(Refusal(refused, "base 1", 9, "skerry.run.contrib.0.0.a", version))
    ((event, place),) = lines
    assert place == (context(version) if version else None)
    assert event == {
        "event": "contribution_refused",
        "fragment": 0,
        "version": version or None,
        "learner": "a",
        "cause": cause,
        "counts": {cause: 1},
        "detail": "base 1",
    }


def test_a_contribution_is_received_from_its_first_chunk_on_in_the_round_it_is_for(
    telemetry: RoundTelemetry, collected: Collected
) -> None:
    header = ContributionHeader(
        ContributionKind.OUTER_GRADIENT, "a", 1, 8, 0, 4, 5, 9, 3, 4, 0, 5, 1.0, 0
    )
    sender = tracing.trace_parent(publishing(5, 8))
    planes: Any = None  # nothing of it is reported
    whole = Contribution(header, "int4", planes, 1, 2, 0, sender)
    for now_ns in (10, 20, 30):
        telemetry.chunk_arrived("subject", now_ns)
    telemetry.received(whole, "subject", 30)
    telemetry.settled("subject")
    telemetry.chunk_arrived("subject", 40)
    telemetry.received(replace(whole, trace_parent=""), "subject", 50)
    first, second = collected.spans
    assert (first.interval, second.interval) == (Interval(10, 30), Interval(40, 50))
    assert first.parent == context(5)
    assert first.all_attributes()[spans.MESSAGING_MESSAGE_ID] == "a/1/0/8"
    assert [link.context for link in first.links] == [publishing(5, 8)]
    assert second.links == ()
