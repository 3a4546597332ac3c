"""Every metric of the health monitor, as a pure function of what it knows."""

from __future__ import annotations

from collections import Counter
from itertools import islice
from typing import TYPE_CHECKING

import xxhash

from skerry.algorithm.goodput import TRAIN, Cause
from skerry.algorithm.liveness import Liveness
from skerry.log.streams import STREAM_PREFIX
from skerry.status.alerts import checkpoint_due_s, diverged, held_out, missed, round_s
from skerry.status.pulse_metrics import PULSE_METRICS
from skerry.status.sources import MOST_LEARNERS
from skerry.status.view import ENDED
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Point
from skerry_health_monitor.metrics.broker import MOST_NAME

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from skerry.log.base import Room, StreamInfo
    from skerry.status.model import RunSnapshot
    from skerry.status.report import LearnerRow
    from skerry.status.sources import MessageCounts
    from skerry.status.view import RunView
    from skerry.telemetry.metrics import Figure, Metric
    from skerry_health_monitor.metrics.broker import Server


def figures(
    now: RunSnapshot | None,
    counts: MessageCounts,
    streams: Iterable[StreamInfo] = (),
    rooms: Iterable[Room] = (),
    servers: Sequence[Server] = (),
) -> list[Figure]:
    """Return everything there is to report: of a run, if there is one, its log and the broker.

    ``counts`` are of the messages that were read, ``streams`` those of the run, ``rooms`` the
    account's share of the broker's stores. While an old ledger is still being read, what it adds up
    to is left out: a sum that begins again at 0 and jumps up would look like as much work done in
    no time.
    """
    found: list[Figure] = []
    for server in servers:
        label = (server.name[:MOST_NAME],)
        found += [Point(metrics.BROKER_UP, server.up, label), *server.figures]
        for room in server.rooms:
            storage = (metrics.BROKER_STORAGE, metrics.BROKER_STORAGE_LIMIT)
            found += _room(room, label, *storage)
    if now is None:
        return found
    run = now.report.run.run
    found += [*_run(now), *_held_out(now), *_read(run, counts), *_streams(run, streams, servers)]
    for room in rooms:
        found += _room(room, (run,), metrics.ACCOUNT_STORAGE, metrics.ACCOUNT_STORAGE_LIMIT)
    if not now.report.run.counting:
        found += now.model.totals.figures()
    for row in islice(now.report.learners, MOST_LEARNERS):
        found += _learner(now.model.view, row)
    return found


def _run(now: RunSnapshot) -> Iterator[Figure]:
    row, rows, model = now.report.run, now.report.learners, now.model
    config, run = model.config, model.record.run
    checkpoint = model.view.checkpoint
    values: dict[Metric, float | None] = {
        metrics.RUN_FINISHED: row.finished,
        metrics.RUN_STEP: row.step,
        metrics.RUN_STEP_TARGET: row.steps,
        metrics.RUN_TIME_LEFT: row.eta_s,
        metrics.RUN_LOSS: row.loss,
        metrics.CHECKPOINT_AGE: row.checkpoint_age_s,
        metrics.CHECKPOINT_INTERVAL: checkpoint_due_s(model.gap_s, config, rows),
        metrics.CHECKPOINT_BEHIND: row.checkpoint_lacks,
        metrics.CHECKPOINT_BEHIND_TIME: min(row.checkpoint_age_s, row.checkpoint_lacks_s),
        metrics.CHECKPOINT_SIZE: None if checkpoint is None else checkpoint.size_bytes,
        metrics.COMMIT_AGE: row.commit_age_s,
        metrics.ROUND_INTERVAL: round_s(model.gap_s, config.sync.h_steps, rows) or None,
        metrics.GOODPUT: row.time[TRAIN],
        metrics.LEARNERS_MISSED: len(missed(rows)),
        metrics.LEARNERS_TARGET: config.sync.learners,
    }
    record = model.record
    digest = xxhash.xxh3_64_hexdigest(record.config_json.encode())
    yield Point(metrics.RUN_INFO, 1, (run, config.mode, record.skerry_version, digest))
    yield from (Point(m, value, (run,)) for m, value in values.items() if value is not None)
    for fragment, version in enumerate(row.versions):
        yield Point(metrics.FRAGMENT_VERSION, version, (run, str(fragment)))
    for cause in Cause:
        yield Point(metrics.BADPUT, row.time[cause], (run, cause.value))
    there = (r for r in rows if r.liveness is not Liveness.GONE or r.phase not in ENDED)
    looks = Counter(r.liveness for r in there)
    for state in Liveness:
        yield Point(metrics.LEARNERS, looks[state], (run, state.value))
    for alert in now.alerts:
        labels = (run, alert.key[:MOST_NAME], alert.severity.value)
        yield Point(metrics.ALERT, 1, labels)


def _held_out(now: RunSnapshot) -> Iterator[Figure]:
    if now.model.view.evaluations.incomplete:
        return
    run, evaluations = now.report.run.run, now.report.evaluations
    for evaluator, loss in {e.evaluator: e.loss for e in evaluations}.items():
        if loss is not None:
            yield Point(metrics.HELD_OUT_LOSS, loss, (run, evaluator[:MOST_NAME]))
    for evaluator, found in held_out(evaluations).items():
        labels = (run, evaluator[:MOST_NAME])
        yield Point(metrics.HELD_OUT_BEST, found.best, labels)
        yield Point(metrics.HELD_OUT_RECENT, found.recent, labels)
    yield Point(metrics.HELD_OUT_TEXTS, now.report.run.held_out_texts, (run,))


def _learner(view: RunView, row: LearnerRow) -> Iterator[Figure]:
    """Yield a learner's metrics; its counters are those of its newest incarnation."""
    labels = (view.run, row.name[:MOST_NAME])
    yield Point(metrics.LEARNER_ALIVE, row.liveness is Liveness.ALIVE, labels)
    yield Point(metrics.LEARNER_DIVERGED, bool(diverged([row])), labels)
    yield Point(metrics.LEARNER_QUARANTINED, row.quarantine is not None, labels)
    yield Point(metrics.LEARNER_INCARNATION, row.incarnation, labels)
    yield Point(metrics.LEARNER_SILENCE, row.seen_s_ago, labels)
    pulse = view.learners[row.name].pulse
    if pulse is None:
        return
    if pulse.step_time_s > 0:
        yield Point(metrics.STEP_TIME, pulse.step_time_s, labels)
    for metric, (key, read) in PULSE_METRICS.items():
        for label, value in read(pulse).items():
            yield Point(metric, value, (*labels, label[:MOST_NAME]) if key else labels)


def _read(run: str, counts: MessageCounts) -> Iterator[Figure]:
    for kind, count in counts.read.items():
        yield Point(metrics.MONITOR_MESSAGES, count, (run, kind))
    for kind in counts.read.keys() | counts.malformed.keys():
        yield Point(metrics.MONITOR_MALFORMED, counts.malformed[kind], (run, kind))


def _streams(
    run: str, streams: Iterable[StreamInfo], servers: Iterable[Server]
) -> Iterator[Figure]:
    for stream in streams:
        labels = (run, stream.name.removeprefix(f"{STREAM_PREFIX}{run}_"))
        yield Point(metrics.STREAM_MESSAGES, stream.messages, labels)
        yield Point(metrics.STREAM_SIZE, stream.bytes, labels)
        if stream.spec.max_bytes > 0:
            yield Point(metrics.STREAM_LIMIT, stream.spec.max_bytes, labels)
        lags = [s.lags[stream.name] for s in servers if stream.name in s.lags]
        if lags:
            yield Point(metrics.STREAM_LAG, max(lags), labels)


def _room(room: Room, labels: tuple[str, ...], used: Metric, limit: Metric) -> Iterator[Figure]:
    yield Point(used, room.used_bytes, (*labels, room.storage.value))
    if room.limit_bytes > 0:
        yield Point(limit, room.limit_bytes, (*labels, room.storage.value))
