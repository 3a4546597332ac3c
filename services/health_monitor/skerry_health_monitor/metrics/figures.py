"""Every metric of the health monitor, as a pure function of what it knows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from itertools import islice
from statistics import median
from typing import TYPE_CHECKING

from skerry.algorithm.goodput import TRAIN, Cause, split
from skerry.algorithm.liveness import Liveness
from skerry.status.recent import (
    LATE_ROUNDS,
    STARTING_S,
    awaited,
    diverged,
    ending,
    held_out,
    missed,
)
from skerry.status.report import report
from skerry.status.sources import MOST_LEARNERS, MessageCounts
from skerry.status.view import ENDED, spent_in
from skerry.telemetry import metrics
from skerry.telemetry.points import Point

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from skerry.log.base import Room, StreamInfo
    from skerry.protocol.messages import Pulse
    from skerry.settings.models import RunConfig
    from skerry.status.model import RunModel
    from skerry.status.report import LearnerRow, RunReport
    from skerry.status.view import RunView
    from skerry.telemetry.metrics import Metric
    from skerry.telemetry.points import Figure
    from skerry_health_monitor.metrics.broker import Server

MOST_NAME = 128


@dataclass(frozen=True, slots=True)
class Known:
    """All that is known of a run, and of the messages and streams it is known from."""

    model: RunModel
    counts: MessageCounts = field(default_factory=MessageCounts)
    streams: Sequence[StreamInfo] = ()
    rooms: Sequence[Room] = ()


def figures(known: Known | None, servers: Sequence[Server], now_s: float) -> list[Figure]:
    """Return everything there is to tell at ``now_s``; of the broker alone before there is a run.

    While an old ledger is still being read, what it adds up to is left out: a sum that begins
    again at 0 and jumps up would look like as much work done in no time.
    """
    found: list[Figure] = [*_servers(servers)]
    if known is None:
        return found
    reported = report(known.model.view, now_s)
    found += _run(known, reported)
    if not reported.run.counting:
        found += known.model.totals.figures()
    for row in islice(reported.learners, MOST_LEARNERS):
        found += _learner(known.model.view, row)
    found += _log(known, servers)
    return found


def _run(known: Known, reported: RunReport) -> Iterator[Figure]:
    row, config, run = reported.run, known.model.config, known.model.view.frame.run
    yield Point(metrics.RUN_INFO, 1, (run, config.mode, known.model.record.skerry_version))
    yield Point(metrics.RUN_FINISHED, row.finished, (run,))
    yield Point(metrics.RUN_STEP, row.step, (run,))
    yield Point(metrics.RUN_STEP_TARGET, row.steps, (run,))
    age_s = row.wall_s if row.checkpoint_s_ago is None else row.checkpoint_s_ago
    yield Point(metrics.CHECKPOINT_AGE, age_s, (run,))
    gap_s = interval_s(config, reported.learners)
    yield Point(metrics.CHECKPOINT_INTERVAL, max(config.checkpoint.every_s, gap_s or 0.0), (run,))
    yield Point(metrics.CHECKPOINT_BEHIND, row.checkpoint_lacks, (run,))
    behind_s = min(age_s, row.checkpoint_lacks_s)
    yield Point(metrics.CHECKPOINT_BEHIND_TIME, behind_s, (run,))
    checkpoint = known.model.view.checkpoint
    since_s = row.wall_s if row.last_round_s_ago is None else row.last_round_s_ago
    yield Point(metrics.COMMIT_AGE, since_s, (run,))
    told_if_known: dict[Metric, float | None] = {
        metrics.RUN_TIME_LEFT: row.eta_s,
        metrics.RUN_LOSS: row.loss,
        metrics.ROUND_INTERVAL: gap_s,
        metrics.CHECKPOINT_SIZE: None if checkpoint is None else checkpoint.size_bytes,
    }
    for metric, value in told_if_known.items():
        if value is not None:
            yield Point(metric, value, (run,))
    for fragment, version in enumerate(row.versions):
        yield Point(metrics.FRAGMENT_VERSION, version, (run, str(fragment)))
    if not known.model.view.evaluating:
        yield from _held_out(run, reported)
    yield Point(metrics.GOODPUT, row.time[TRAIN], (run,))
    for cause in Cause:
        yield Point(metrics.BADPUT, row.time[cause], (run, cause.value))
    rows = reported.learners
    there = (r for r in rows if r.liveness is not Liveness.GONE or r.phase not in ENDED)
    looks = Counter(r.liveness for r in there)
    for state in Liveness:
        yield Point(metrics.LEARNERS, looks[state], (run, state.value))
    yield Point(metrics.LEARNERS_MISSED, len(missed(reported.learners)), (run,))
    yield Point(metrics.LEARNERS_TARGET, config.sync.learners, (run,))


def _held_out(run: str, reported: RunReport) -> Iterator[Figure]:
    newest = {e.evaluator: e.loss for e in reported.evaluations}
    for evaluator, loss in newest.items():
        if loss is not None:
            yield Point(metrics.HELD_OUT_LOSS, loss, (run, evaluator[:MOST_NAME]))
    for evaluator, found in held_out(reported.evaluations).items():
        labels = (run, evaluator[:MOST_NAME])
        yield Point(metrics.HELD_OUT_BEST, found.best, labels)
        yield Point(metrics.HELD_OUT_RECENT, found.recent, labels)
    yield Point(metrics.HELD_OUT_TEXTS, reported.run.held_out_texts, (run,))


def interval_s(config: RunConfig, rows: Sequence[LearnerRow]) -> float | None:
    """Return the expected time between two commits: H steps over P; None while none trains.

    Once all have finished it is the timeout of a round, where that is longer: so long does the
    syncer wait for a learner that fell silent at work. While the end waits for one that starts, it
    is such that ten of them are longer than that ever takes.
    """
    done, coming = ending(rows), awaited(rows)
    there = [row for row in rows if row.liveness is not Liveness.GONE]
    timed = there if done or coming else [row for row in rows if row.takes_steps]
    if not timed:
        return None
    step_s = median(row.step_time_s for row in timed)
    gap_s = config.sync.h_steps * step_s / config.sync.fragments
    if coming:
        gap_s = max(gap_s, STARTING_S / LATE_ROUNDS)
    return max(gap_s, config.sync.round_timeout_s) if done or coming else gap_s


def _learner(view: RunView, row: LearnerRow) -> Iterator[Figure]:
    """Yield a learner's metrics; its counters are those of its newest incarnation."""
    labels = (view.frame.run, row.name[:MOST_NAME])
    yield Point(metrics.LEARNER_ALIVE, row.liveness is Liveness.ALIVE, labels)
    yield Point(metrics.LEARNER_DIVERGED, bool(diverged([row])), labels)
    yield Point(metrics.LEARNER_INCARNATION, row.incarnation, labels)
    yield Point(metrics.LEARNER_SILENCE, row.seen_s_ago, labels)
    pulse = view.learners[row.name].pulse
    if pulse is None:
        return
    yield Point(metrics.LEARNER_STEP, pulse.step, labels)
    yield Point(metrics.LEARNER_STALENESS, pulse.max_staleness, labels)
    yield Point(metrics.LEARNER_CONTRIBUTIONS, pulse.contributions, labels)
    yield Point(metrics.LEARNER_SYNCS_SKIPPED, pulse.syncs_skipped, labels)
    yield Point(metrics.TOKENS, pulse.tokens, labels)
    if pulse.step_time_s > 0:
        yield Point(metrics.STEP_TIME, pulse.step_time_s, labels)
    if row.loss is not None:
        yield Point(metrics.LOSS, row.loss, labels)
    yield from _traffic(pulse, labels)
    for operation, seconds in (("encode", pulse.encode_s), ("decode", pulse.decode_s)):
        yield Point(metrics.CODEC_TIME, seconds, (*labels, operation))
    for use, seconds in split(spent_in(pulse), pulse.alive_s).items():
        if use != Cause.DOWN:
            yield Point(metrics.LEARNER_TIME, seconds, (*labels, use))


def _traffic(pulse: Pulse, labels: tuple[str, ...]) -> Iterator[Figure]:
    for direction, packed, f32 in (
        ("up", pulse.bytes_up, pulse.f32_bytes_up),
        ("down", pulse.bytes_down, pulse.f32_bytes_down),
    ):
        yield Point(metrics.WIRE_IO, packed, (*labels, direction))
        yield Point(metrics.WIRE_UNCOMPRESSED, f32, (*labels, direction))


def _log(known: Known, servers: Iterable[Server]) -> Iterator[Figure]:
    run = known.model.view.frame.run
    for kind, count in known.counts.read.items():
        yield Point(metrics.MONITOR_MESSAGES, count, (run, kind))
    for kind in known.counts.read.keys() | known.counts.malformed.keys():
        yield Point(metrics.MONITOR_MALFORMED, known.counts.malformed.get(kind, 0), (run, kind))
    lags: dict[str, int] = {}
    for server in servers:
        for name, lag in server.lags.items():
            lags[name] = max(lag, lags.get(name, 0))
    for stream in known.streams:
        labels = (run, stream.name.rpartition("_")[2])
        yield Point(metrics.STREAM_MESSAGES, stream.messages, labels)
        yield Point(metrics.STREAM_SIZE, stream.bytes, labels)
        if stream.spec.max_bytes > 0:
            yield Point(metrics.STREAM_LIMIT, stream.spec.max_bytes, labels)
        if stream.name in lags:
            yield Point(metrics.STREAM_LAG, lags[stream.name], labels)
    for room in known.rooms:
        labels = (run, room.storage.value)
        yield Point(metrics.ACCOUNT_STORAGE, room.used_bytes, labels)
        if room.limit_bytes > 0:
            yield Point(metrics.ACCOUNT_STORAGE_LIMIT, room.limit_bytes, labels)


def _servers(servers: Iterable[Server]) -> Iterator[Figure]:
    for server in servers:
        name = (server.name[:MOST_NAME],)
        yield Point(metrics.BROKER_UP, server.up, name)
        if not server.up:
            continue
        yield Point(metrics.BROKER_CONNECTIONS, server.connections, name)
        yield Point(metrics.BROKER_SLOW_CONSUMERS, server.slow_consumers, name)
        yield Point(metrics.BROKER_MEMORY, server.memory_bytes, name)
        yield Point(metrics.BROKER_CPU, server.cores, name)
        yield Point(metrics.BROKER_API_ERRORS, server.api_errors, name)
        for direction, messages, size in (
            ("in", server.in_messages, server.in_bytes),
            ("out", server.out_messages, server.out_bytes),
        ):
            yield Point(metrics.BROKER_MESSAGES, messages, (*name, direction))
            yield Point(metrics.BROKER_IO, size, (*name, direction))
        for storage, held, limit in (
            ("memory", server.held_memory_bytes, server.most_memory_bytes),
            ("file", server.held_file_bytes, server.most_file_bytes),
        ):
            yield Point(metrics.BROKER_STORAGE, held, (*name, storage))
            if limit > 0:
                yield Point(metrics.BROKER_STORAGE_LIMIT, limit, (*name, storage))
