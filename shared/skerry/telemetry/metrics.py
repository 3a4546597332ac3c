"""Every metric of Skerry, in one table: its name, unit, attributes, meaning, and who reports it.

Names and units are OpenTelemetry's; ``prometheus_name`` derives the other spelling by its rule.
Services send theirs by OTLP where an endpoint is set; the health monitor serves what it reads from
the log and from the broker on ``/metrics``. A metric means the same in both, so a backend that
gets both tells them apart by job.

Counters start again at 0 with the process they count for, as Prometheus expects: a learner's with
its incarnation, also where the health monitor reports them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from math import isfinite

LEARNER, SYNCER, CHECKPOINTER, EVALUATOR = "learner", "syncer", "checkpointer", "evaluator"
MONITOR = "health-monitor"


class MetricKind(StrEnum):
    """What a metric does: only grow, hold a value, or count a distribution."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True, eq=False)
class Metric:
    """One metric, made once and its own key; ``source`` are the services that emit it.

    ``unit`` is in UCUM; ``attributes`` are the keys of every data point; ``buckets`` the upper
    bounds of a histogram, in ``unit``, without the last, infinite one.
    """

    name: str
    kind: MetricKind
    unit: str
    description: str
    attributes: tuple[str, ...]
    source: tuple[str, ...]
    buckets: tuple[float, ...] = ()


UNITS = {"s": "seconds", "By": "bytes"}
"""Units that Prometheus spells out; those in braces are annotations and leave no trace."""


def prometheus_name(metric: Metric) -> str:
    """Return the metric's name in Prometheus, by OpenTelemetry's rule; a histogram's base name.

    Dots become underscores, the unit is spelt out unless the name has it already, a gauge of unit
    ``1`` is a ratio, a counter a total.
    """
    words = metric.name.replace(".", "_").split("_")
    unit = UNITS.get(metric.unit, "")
    if metric.unit == "1" and metric.kind is MetricKind.GAUGE:
        unit = "ratio"
    if unit and unit not in words:
        words.append(unit)
    if metric.kind is MetricKind.COUNTER:
        words = [*(word for word in words if word != "total"), "total"]
    return "_".join(words)


# Keys of attributes; the run's id is one of every metric but the broker's own.
RUN, FRAGMENT, STREAM, SERVER = "run", "fragment", "stream", "server"
LEARNER_NAME, EVALUATOR_NAME = "learner", "evaluator"
MODE, VERSION = "mode", "version"
CONFIG = "config"  # digest of the run's config as its record has it: 16 hexadecimal digits
REASON = "reason"  # why a round closed: ``Commit.reason``
OUTCOME = "outcome"  # of a contribution: accepted, stale (merged with a discount) or refused
CAUSE = "cause"  # why a contribution was refused (empty for others), or what time was lost to
REGION = "region"  # whose broker a learner dials; none: the hub's
DIRECTION = "direction"  # up from a learner to the log or down; in to the broker or out
USE = "use"  # what time went into: train, or a cause of badput (``skerry.algorithm.goodput``)
STATE = "state"  # of learners: alive, suspect or gone
OPERATION = "operation"  # of the codec: encode or decode
MESSAGE = "message"  # kind of a record in the log: pulse, commit, ...
STORAGE = "storage"  # of the broker: memory or file
ALERT_KEY, SEVERITY = "alert", "severity"  # which alert of the page, and how bad it is

LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
NORMS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.7, 1.0)
SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
VERSIONS_LATE = (0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0)
COUNTER, GAUGE, HISTOGRAM = MetricKind.COUNTER, MetricKind.GAUGE, MetricKind.HISTOGRAM


def _metric(
    name: str,
    kind: MetricKind,
    unit: str,
    description: str,
    *keys: str,
    by: tuple[str, ...] = (MONITOR,),
    of: tuple[str, ...] = (RUN,),
    buckets: tuple[float, ...] = (),
) -> Metric:
    return Metric(name, kind, unit, description, (*of, *keys), by, buckets)


_run = _metric
_round = partial(_metric, by=(SYNCER, MONITOR))
_learner = partial(_metric, by=(LEARNER, MONITOR), of=(RUN, LEARNER_NAME))
_watched = partial(_metric, of=(RUN, LEARNER_NAME))
"""Of a learner, as only the health monitor sees it."""
_broker = partial(_metric, of=(SERVER,))

# A table: two lines for most metrics.
# fmt: off
# The run as a whole.
RUN_INFO = _run("skerry.run.info", GAUGE, "{run}",
    "Always 1: what the run is.", MODE, VERSION, CONFIG)
RUN_FINISHED = _run("skerry.run.finished", GAUGE, "{run}", "1 once the run is finished.")
RUN_STEP = _run("skerry.run.step", GAUGE, "{step}", "The global clock's step.")
RUN_STEP_TARGET = _run("skerry.run.step.target", GAUGE, "{step}", "The step at which the run ends.")
RUN_TIME_LEFT = _run("skerry.run.time_left", GAUGE, "s", "Expected time until the run ends.")
RUN_LOSS = _run("skerry.run.loss", GAUGE, "{nat}",
    "Training loss per token, each learner weighted by its speed.")
HELD_OUT_LOSS = _metric("skerry.held_out.loss", GAUGE, "{nat}",
    "Loss per token of the global model on held-out text.", EVALUATOR_NAME, by=(EVALUATOR, MONITOR))
HELD_OUT_AVERAGE = _metric("skerry.held_out.average_loss", GAUGE, "{nat}",
    "Loss per token of the global model's moving average (eval.ema) on held-out text.",
    EVALUATOR_NAME, by=(EVALUATOR,))
HELD_OUT_BEST = _run("skerry.held_out.best", GAUGE, "{nat}",
    "Least loss of this run so far on the text that the evaluator reads now.", EVALUATOR_NAME)
HELD_OUT_RECENT = _run("skerry.held_out.recent", GAUGE, "{nat}",
    "Least of the newest three losses on that text: well above the best, it goes the wrong way.",
    EVALUATOR_NAME)
HELD_OUT_TEXTS = _run("skerry.held_out.texts", GAUGE, "{text}",
    "Different texts that evaluators have read lately: losses on them cannot be compared.")
EVALUATION_DURATION = _metric("skerry.evaluation.duration", HISTOGRAM, "s",
    "Time to read the global state and evaluate it.", buckets=LONG_S, by=(EVALUATOR,))
ALERT = _run("skerry.alert", GAUGE, "{alert}",
    "1 while an alert of the page holds: Prometheus' rules are made from it.", ALERT_KEY, SEVERITY)
GOODPUT = _run("skerry.goodput.ratio", GAUGE, "1",
    "Training time over the time given to the run, all learners.")
BADPUT = _run("skerry.badput.ratio", GAUGE, "1",
    "Share of the time given to the run lost to each cause.", CAUSE)
# Rounds.
ROUND_DURATION = _round("skerry.round.duration", HISTOGRAM, "s",
    "From the opening of a round until it closed.", REASON, buckets=LONG_S)
QUORUM_WAIT = _round("skerry.round.quorum_wait", HISTOGRAM, "s",
    "From the opening of a round to its K-th contribution.", buckets=LONG_S)
GRACE_WAIT = _round("skerry.round.grace_wait", HISTOGRAM, "s",
    "What a round waited beyond its quorum, for contributions that cost nothing.", buckets=LONG_S)
COMMIT_AGE = _run("skerry.round.commit_age", GAUGE, "s",
    "Time since the newest commit; since the run was created before there is one.")
ROUND_INTERVAL = _run("skerry.round.interval", GAUGE, "s", "Expected time between two commits.")
FRAGMENT_VERSION = _round("skerry.fragment.version", GAUGE, "{version}",
    "Newest version of a fragment.", FRAGMENT)
MERGE_DURATION = _round("skerry.merge.duration", HISTOGRAM, "s",
    "Time to merge a round and take the outer step.", buckets=SHORT_S)
COMMIT_DURATION = _metric("skerry.commit.duration", HISTOGRAM, "s",
    "From a merge until the log has its commit.", buckets=SHORT_S, by=(SYNCER,))
# Contributions, and what they weigh on the wire.
CONTRIBUTIONS = _round("skerry.contributions", COUNTER, "{contribution}",
    "Contributions that rounds decided about, by what became of them.", OUTCOME, CAUSE)
STALENESS = _round("skerry.contribution.staleness", HISTOGRAM, "{version}",
    "How many versions late a merged contribution was.", buckets=VERSIONS_LATE)
CODEC_DURATION = _metric("skerry.codec.duration", HISTOGRAM, "s",
    "Time to encode or decode one fragment's vector.",
    OPERATION, buckets=SHORT_S, by=(LEARNER, SYNCER, CHECKPOINTER, EVALUATOR))
WIRE_IO = _learner("skerry.wire.io", COUNTER, "By",
    "Payload between a learner and the log.", DIRECTION)
WIRE_UNCOMPRESSED = _learner("skerry.wire.uncompressed", COUNTER, "By",
    "The same payload in float32; over skerry.wire.io it is the compression ratio.", DIRECTION)
WIRE_CACHED = _learner("skerry.wire.cached", COUNTER, "By",
    "Of skerry.wire.io down, what came out of the cache of the learner's region.", REGION)
# Learners.
LEARNERS = _run("skerry.learners", GAUGE, "{learner}",
    "Learners by how they look; those that have stopped, or finished and left, are not in.", STATE)
LEARNERS_MISSED = _run("skerry.learners.missed", GAUGE, "{learner}",
    "Learners gone without a goodbye, and whose place no name that joined since has taken.")
LEARNERS_TARGET = _run("skerry.learners.target", GAUGE, "{learner}",
    "Learners that the run is laid out for.")
LEARNER_ALIVE = _watched("skerry.learner.alive", GAUGE, "{learner}", "1 alive, 0 suspect or gone.")
LEARNER_DIVERGED = _watched("skerry.learner.diverged", GAUGE, "{learner}",
    "1 while it trains with a loss that is no finite number.")
LEARNER_QUARANTINED = _watched("skerry.learner.quarantined", GAUGE, "{learner}",
    "1 while nothing of it is merged.")
LEARNER_INCARNATION = _watched("skerry.learner.incarnation", GAUGE, "{incarnation}",
    "Starts of its process.")
LEARNER_SILENCE = _watched("skerry.learner.silence", GAUGE, "s", "Time since its last pulse.")
LEARNER_STEP = _learner("skerry.learner.step", GAUGE, "{step}", "Its step on the global clock.")
LEARNER_STALENESS = _learner("skerry.learner.staleness", GAUGE, "{version}",
    "How many versions its oldest fragment lags the log.")
LEARNER_CONTRIBUTIONS = _learner("skerry.learner.contributions", COUNTER, "{contribution}",
    "Contributions that it has sent.")
LEARNER_SYNCS_SKIPPED = _learner("skerry.learner.syncs_skipped", COUNTER, "{sync}",
    "Rounds that it could not answer before they closed.")
LEARNER_DIGEST_MISMATCHES = _learner("skerry.learner.digest_mismatches", COUNTER, "{fragment}",
    "Global fragments that were not what was committed, and were read from a keyframe again.")
LEARNER_TIME = _learner("skerry.learner.time", COUNTER, "s",
    "Its time by use: train is goodput, all else is badput.", USE)
CODEC_TIME = _learner("skerry.learner.codec_time", COUNTER, "s",
    "Time in which it encoded what it sent or decoded what it read, beside its steps.", OPERATION)
TOKENS = _learner("skerry.tokens", COUNTER, "{token}", "Tokens it has trained on.")
STEP_DURATION = _metric("skerry.step.duration", HISTOGRAM, "s",
    "One inner step, its boundary included.", LEARNER_NAME, buckets=SHORT_S, by=(LEARNER,))
GRADIENT_NORM = _metric("skerry.gradient.norm", HISTOGRAM, "{nat}",
    "Global norm of a step's gradient, before it is clipped to train.clip.", LEARNER_NAME,
    buckets=NORMS, by=(LEARNER,))
EXPERT_SHARE = _metric("skerry.expert.ratio", HISTOGRAM, "1",
    "Largest share of a layer's tokens that a step routed to one expert.", LEARNER_NAME,
    buckets=SHARES, by=(LEARNER,))
STEPS_SKIPPED = _metric("skerry.steps.skipped", COUNTER, "{step}",
    "Steps that changed nothing: their loss or gradient was not finite.",
    LEARNER_NAME, by=(LEARNER,))
STEP_TIME = _watched("skerry.step.time", GAUGE, "s", "Moving average of its inner step.")
LOSS = _learner("skerry.loss", GAUGE, "{nat}", "Its training loss per token.")
# Checkpoints.
CHECKPOINT_AGE = _run("skerry.checkpoint.age", GAUGE, "s",
    "Time since the newest checkpoint, or since the run began.")
CHECKPOINT_INTERVAL = _run("skerry.checkpoint.interval", GAUGE, "s",
    "How often one is due: checkpoint.every_s, or once a round where rounds are rarer.")
CHECKPOINT_BEHIND = _run("skerry.checkpoint.behind", GAUGE, "{commit}",
    "Commits that the newest one does not hold.")
CHECKPOINT_BEHIND_TIME = _run("skerry.checkpoint.behind_time", GAUGE, "s",
    "For how long there have been commits that the newest one does not hold, at most its age.")
CHECKPOINT_SIZE = _metric("skerry.checkpoint.size", GAUGE, "By",
    "Size of the newest one.", by=(CHECKPOINTER, MONITOR))
CHECKPOINT_DURATION = _metric("skerry.checkpoint.duration", HISTOGRAM, "s",
    "Time to capture, write and read back one.", buckets=LONG_S, by=(CHECKPOINTER,))
# The log, its reader and its broker.
STREAM_MESSAGES = _run("skerry.stream.messages", GAUGE, "{message}",
    "Messages that a stream of the run holds.", STREAM)
STREAM_SIZE = _run("skerry.stream.size", GAUGE, "By",
    "Bytes that a stream of the run holds.", STREAM)
STREAM_LIMIT = _run("skerry.stream.limit", GAUGE, "By",
    "Bytes it may hold; not there for one without a limit.", STREAM)
STREAM_LAG = _run("skerry.stream.lag", GAUGE, "{message}",
    "Messages its slowest reader has not been given yet.", STREAM)
ACCOUNT_STORAGE = _run("skerry.account.storage", GAUGE, "By",
    "What the NATS account holds, of every run and client.", STORAGE)
ACCOUNT_STORAGE_LIMIT = _run("skerry.account.storage.limit", GAUGE, "By",
    "What it may hold; not there without a limit.", STORAGE)
MONITOR_MESSAGES = _run("skerry.monitor.messages", COUNTER, "{message}",
    "Records that the health monitor has read.", MESSAGE)
MONITOR_MALFORMED = _run("skerry.monitor.malformed", COUNTER, "{message}",
    "Records that it could not read.", MESSAGE)
BROKER_UP = _broker("skerry.broker.up", GAUGE, "{server}",
    "1 while it answers on its monitoring port.")
BROKER_CONNECTIONS = _broker("skerry.broker.connections", GAUGE, "{connection}",
    "Clients of a broker.")
BROKER_MESSAGES = _broker("skerry.broker.messages", COUNTER, "{message}",
    "To and from its clients.", DIRECTION)
BROKER_IO = _broker("skerry.broker.io", COUNTER, "By", "Bytes to and from its clients.", DIRECTION)
BROKER_SLOW_CONSUMERS = _broker("skerry.broker.slow_consumers", COUNTER, "{client}",
    "Clients dropped as too slow.")
BROKER_MEMORY = _broker("skerry.broker.memory", GAUGE, "By", "Memory of its process.")
BROKER_CPU = _broker("skerry.broker.cpu.ratio", GAUGE, "1", "Cores it keeps busy.")
BROKER_STORAGE = _broker("skerry.broker.storage", GAUGE, "By",
    "What JetStream holds on it.", STORAGE)
BROKER_STORAGE_LIMIT = _broker("skerry.broker.storage.limit", GAUGE, "By",
    "What JetStream may hold on it.", STORAGE)
BROKER_API_ERRORS = _broker("skerry.broker.api.errors", COUNTER, "{error}",
    "JetStream requests it has refused.")

# fmt: on

ALL: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)
"""The whole table, in the order of this file."""


def of(source: str) -> tuple[Metric, ...]:
    """Return the metrics that a service emits."""
    return tuple(metric for metric in ALL if source in metric.source)


@dataclass(frozen=True, slots=True)
class Point:
    """One number; ``labels`` are the values of the metric's attributes, in their order."""

    metric: Metric
    value: float
    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Example:
    """One value out of a histogram's bucket, the trace it came from, and when it was."""

    value: float
    trace_id: str
    at_s: float


@dataclass(slots=True)
class Spread:
    """One histogram; ``counts`` has a number per bucket, that of all larger values at its end.

    ``examples`` is the newest one of each bucket, by its index, where one is known.
    """

    metric: Metric
    labels: tuple[str, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0
    examples: dict[int, Example] = field(default_factory=dict[int, Example])

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.metric.buckets) + 1)

    def add(self, value: float, *, trace_id: str = "", at_s: float = 0.0) -> None:
        """Count one value; buckets hold their upper bound. What is no number is left out."""
        if not isfinite(value):
            return
        bucket = bisect_left(self.metric.buckets, value)
        self.counts[bucket] += 1
        self.total += value
        if trace_id:
            self.examples[bucket] = Example(value, trace_id, at_s)


Figure = Point | Spread


def flat(figures: Iterable[Figure]) -> dict[str, float]:
    """Return each number by ``name{key=value,...}``, a histogram by its count and its sum.

    The run is left out, since the file or tracker that gets these names it once.
    """
    found: dict[str, float] = {}
    for figure in figures:
        metric = figure.metric
        pairs = zip(metric.attributes, figure.labels, strict=True)
        labels = ",".join(f"{key}={value}" for key, value in pairs if key != RUN)
        name = f"{metric.name}{{{labels}}}" if labels else metric.name
        if isinstance(figure, Point):
            found[name] = figure.value
        else:
            found |= {f"{name}.count": sum(figure.counts), f"{name}.sum": figure.total}
    return found
