"""Every metric of Skerry, in one table: what it is called, what it counts, and who tells of it.

Names and units are OpenTelemetry's; ``prometheus_name`` derives the other spelling by its rule.
Services send theirs over OTLP where an endpoint is set; the health monitor serves what it reads
from the log, and from the broker, on ``/metrics``. A metric means the same whoever tells of it, so
a backend that gets both tells them apart by job.

Counters start again at 0 with the process they count for, as Prometheus expects: a learner's with
its incarnation, also where the health monitor tells of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

LEARNER = "learner"
SYNCER = "syncer"
CHECKPOINTER = "checkpointer"
EVALUATOR = "evaluator"
MONITOR = "health-monitor"


class Kind(StrEnum):
    """What a metric may do: only grow, go up and down, be what it is, or be spread out."""

    COUNTER = "counter"
    UPDOWNCOUNTER = "updowncounter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric; ``unit`` in UCUM, ``source`` are the services that emit it.

    ``attributes`` are the keys of every data point; ``buckets`` the upper bounds of a histogram,
    in ``unit``, without the last, infinite one.
    """

    name: str
    kind: Kind
    unit: str
    description: str
    attributes: tuple[str, ...]
    source: tuple[str, ...]
    buckets: tuple[float, ...] = ()


RUN = "run"
"""The run's id: an attribute of every metric but the broker's own."""
LEARNER_NAME = "learner"
"""A learner's name."""
EVALUATOR_NAME = "evaluator"
FRAGMENT = "fragment"
REASON = "reason"
"""Why a round closed: ``all``, ``quorum``, ``grace``, ...: ``Commit.reason``."""
OUTCOME = "outcome"
"""Of a contribution: ``accepted``, ``stale`` (merged with a discount) or ``refused``."""
CAUSE = "cause"
"""Why a contribution was refused (empty for others), or what time was lost to."""
DIRECTION = "direction"
"""``up`` from a learner to the log or ``down``; ``in`` to the broker or ``out``."""
USE = "use"
"""What time went into: ``train``, or a cause of badput (``skerry.core.goodput``)."""
STATE = "state"
"""Of learners: ``alive``, ``suspect`` or ``gone``."""
OPERATION = "operation"
"""Of the codec: ``encode`` or ``decode``."""
MESSAGE = "message"
"""Kind of a record in the log: ``pulse``, ``commit``, ..."""
STREAM = "stream"
SERVER = "server"
MODE = "mode"
VERSION = "version"
STORAGE = "storage"
"""Of the broker: ``memory`` or ``file``."""

LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
"""Bounds of what takes from a blink to minutes."""
SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds of what takes from half a millisecond to seconds."""
VERSIONS_BEHIND = (0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0)


# The run as a whole.

RUN_INFO = Metric(
    "skerry.run.info",
    Kind.GAUGE,
    "{run}",
    "Always 1; the attributes say what the run is.",
    (RUN, MODE, VERSION),
    (MONITOR,),
)
RUN_FINISHED = Metric(
    "skerry.run.finished", Kind.GAUGE, "{run}", "1 once the run is finished.", (RUN,), (MONITOR,)
)
RUN_STEP = Metric(
    "skerry.run.step", Kind.GAUGE, "{step}", "The global clock's step.", (RUN,), (MONITOR,)
)
RUN_STEP_TARGET = Metric(
    "skerry.run.step.target",
    Kind.GAUGE,
    "{step}",
    "The step at which the run ends.",
    (RUN,),
    (MONITOR,),
)
RUN_TIME_LEFT = Metric(
    "skerry.run.time_left",
    Kind.GAUGE,
    "s",
    "Expected time until the run ends, at the present speed.",
    (RUN,),
    (MONITOR,),
)
RUN_LOSS = Metric(
    "skerry.run.loss",
    Kind.GAUGE,
    "{nat}",
    "Training loss per token over all learners, each weighted by its speed.",
    (RUN,),
    (MONITOR,),
)
HELD_OUT_LOSS = Metric(
    "skerry.held_out.loss",
    Kind.GAUGE,
    "{nat}",
    "Loss per token of the global model on held-out text.",
    (RUN, EVALUATOR_NAME),
    (EVALUATOR, MONITOR),
)
EVALUATION_DURATION = Metric(
    "skerry.evaluation.duration",
    Kind.HISTOGRAM,
    "s",
    "Time to read the global state and judge it.",
    (RUN,),
    (EVALUATOR,),
    LONG_S,
)

# Rounds.

ROUND_DURATION = Metric(
    "skerry.round.duration",
    Kind.HISTOGRAM,
    "s",
    "From the opening of a round to the moment it closed.",
    (RUN, REASON),
    (SYNCER, MONITOR),
    LONG_S,
)
QUORUM_WAIT = Metric(
    "skerry.round.quorum_wait",
    Kind.HISTOGRAM,
    "s",
    "From the opening of a round to its K-th contribution.",
    (RUN,),
    (SYNCER, MONITOR),
    LONG_S,
)
GRACE_WAIT = Metric(
    "skerry.round.grace_wait",
    Kind.HISTOGRAM,
    "s",
    "Time a round waited beyond its quorum, for contributions that cost nothing.",
    (RUN,),
    (SYNCER, MONITOR),
    LONG_S,
)
COMMIT_AGE = Metric(
    "skerry.round.commit_age",
    Kind.GAUGE,
    "s",
    "Time since the newest commit of any fragment.",
    (RUN,),
    (MONITOR,),
)
ROUND_INTERVAL = Metric(
    "skerry.round.interval",
    Kind.GAUGE,
    "s",
    "Expected time between two commits, at the present step time.",
    (RUN,),
    (MONITOR,),
)
FRAGMENT_VERSION = Metric(
    "skerry.fragment.version",
    Kind.GAUGE,
    "{version}",
    "The newest committed version of a fragment.",
    (RUN, FRAGMENT),
    (SYNCER, MONITOR),
)
MERGE_DURATION = Metric(
    "skerry.merge.duration",
    Kind.HISTOGRAM,
    "s",
    "Time to merge a round's contributions and take the outer step.",
    (RUN,),
    (SYNCER,),
    SHORT_S,
)
COMMIT_DURATION = Metric(
    "skerry.commit.duration",
    Kind.HISTOGRAM,
    "s",
    "From the end of a merge until the log holds its commit.",
    (RUN,),
    (SYNCER,),
    SHORT_S,
)

# Contributions.

CONTRIBUTIONS = Metric(
    "skerry.contributions",
    Kind.COUNTER,
    "{contribution}",
    "Contributions that rounds decided about, by what became of them.",
    (RUN, OUTCOME, CAUSE),
    (SYNCER, MONITOR),
)
STALENESS = Metric(
    "skerry.contribution.staleness",
    Kind.HISTOGRAM,
    "{version}",
    "How many versions behind its fragment a merged contribution was.",
    (RUN,),
    (SYNCER, MONITOR),
    VERSIONS_BEHIND,
)
CODEC_DURATION = Metric(
    "skerry.codec.duration",
    Kind.HISTOGRAM,
    "s",
    "Time to encode or decode one fragment's vector.",
    (RUN, OPERATION),
    (LEARNER, SYNCER),
    SHORT_S,
)
WIRE_IO = Metric(
    "skerry.wire.io",
    Kind.COUNTER,
    "By",
    "Payload bytes between a learner and the log.",
    (RUN, LEARNER_NAME, DIRECTION),
    (LEARNER, MONITOR),
)
WIRE_UNCOMPRESSED = Metric(
    "skerry.wire.uncompressed",
    Kind.COUNTER,
    "By",
    "What those payloads are in float32: over skerry.wire.io this is the compression ratio.",
    (RUN, LEARNER_NAME, DIRECTION),
    (LEARNER, MONITOR),
)

# Learners.

LEARNERS = Metric(
    "skerry.learners",
    Kind.GAUGE,
    "{learner}",
    "Learners by how they look; those that have finished or stopped are left out.",
    (RUN, STATE),
    (MONITOR,),
)
LEARNER_ALIVE = Metric(
    "skerry.learner.alive",
    Kind.GAUGE,
    "{learner}",
    "1 while a learner is alive, 0 while it is suspect or gone.",
    (RUN, LEARNER_NAME),
    (MONITOR,),
)
LEARNER_INCARNATION = Metric(
    "skerry.learner.incarnation",
    Kind.GAUGE,
    "{incarnation}",
    "Which start of its process a learner is at.",
    (RUN, LEARNER_NAME),
    (MONITOR,),
)
LEARNER_SILENCE = Metric(
    "skerry.learner.silence",
    Kind.GAUGE,
    "s",
    "Time since a learner's last pulse.",
    (RUN, LEARNER_NAME),
    (MONITOR,),
)
LEARNER_STEP = Metric(
    "skerry.learner.step",
    Kind.GAUGE,
    "{step}",
    "A learner's step on the global clock.",
    (RUN, LEARNER_NAME),
    (LEARNER, MONITOR),
)
LEARNER_STALENESS = Metric(
    "skerry.learner.staleness",
    Kind.GAUGE,
    "{version}",
    "How many versions a learner's oldest fragment is behind the log.",
    (RUN, LEARNER_NAME),
    (LEARNER, MONITOR),
)
LEARNER_CONTRIBUTIONS = Metric(
    "skerry.learner.contributions",
    Kind.COUNTER,
    "{contribution}",
    "Contributions that a learner has sent.",
    (RUN, LEARNER_NAME),
    (LEARNER, MONITOR),
)
LEARNER_SYNCS_SKIPPED = Metric(
    "skerry.learner.syncs_skipped",
    Kind.COUNTER,
    "{sync}",
    "Rounds that a learner could not answer before they closed.",
    (RUN, LEARNER_NAME),
    (LEARNER, MONITOR),
)
LEARNER_TIME = Metric(
    "skerry.learner.time",
    Kind.COUNTER,
    "s",
    "A learner's time, by what it went into: train is goodput, all else is badput.",
    (RUN, LEARNER_NAME, USE),
    (LEARNER, MONITOR),
)
TOKENS = Metric(
    "skerry.tokens",
    Kind.COUNTER,
    "{token}",
    "Tokens that a learner has trained on.",
    (RUN, LEARNER_NAME),
    (LEARNER, MONITOR),
)
STEP_DURATION = Metric(
    "skerry.step.duration",
    Kind.HISTOGRAM,
    "s",
    "One inner step, its boundary included.",
    (RUN, LEARNER_NAME),
    (LEARNER,),
    SHORT_S,
)
STEP_TIME = Metric(
    "skerry.step.time",
    Kind.GAUGE,
    "s",
    "Moving average of a learner's inner step, its boundary included.",
    (RUN, LEARNER_NAME),
    (MONITOR,),
)
LOSS = Metric(
    "skerry.loss",
    Kind.GAUGE,
    "{nat}",
    "A learner's training loss per token.",
    (RUN, LEARNER_NAME),
    (LEARNER, MONITOR),
)
GOODPUT = Metric(
    "skerry.goodput.ratio",
    Kind.GAUGE,
    "1",
    "Useful training time over the time given to the run, over all learners.",
    (RUN,),
    (MONITOR,),
)
BADPUT = Metric(
    "skerry.badput.ratio",
    Kind.GAUGE,
    "1",
    "Share of the time given to the run that was lost to each cause.",
    (RUN, CAUSE),
    (MONITOR,),
)

# Checkpoints.

CHECKPOINT_AGE = Metric(
    "skerry.checkpoint.age",
    Kind.GAUGE,
    "s",
    "Time since the newest checkpoint was written, or since the run began.",
    (RUN,),
    (MONITOR,),
)
CHECKPOINT_INTERVAL = Metric(
    "skerry.checkpoint.interval",
    Kind.GAUGE,
    "s",
    "How often a checkpoint is due (checkpoint.every_s).",
    (RUN,),
    (MONITOR,),
)
CHECKPOINT_SIZE = Metric(
    "skerry.checkpoint.size",
    Kind.GAUGE,
    "By",
    "Size of the newest checkpoint.",
    (RUN,),
    (CHECKPOINTER, MONITOR),
)
CHECKPOINT_DURATION = Metric(
    "skerry.checkpoint.duration",
    Kind.HISTOGRAM,
    "s",
    "Time to capture, write and read back a checkpoint.",
    (RUN,),
    (CHECKPOINTER,),
    LONG_S,
)

# The log, the monitor and the broker.

STREAM_MESSAGES = Metric(
    "skerry.stream.messages",
    Kind.GAUGE,
    "{message}",
    "Messages that a stream of the run holds.",
    (RUN, STREAM),
    (MONITOR,),
)
STREAM_SIZE = Metric(
    "skerry.stream.size",
    Kind.GAUGE,
    "By",
    "What a stream of the run holds.",
    (RUN, STREAM),
    (MONITOR,),
)
STREAM_LIMIT = Metric(
    "skerry.stream.limit",
    Kind.GAUGE,
    "By",
    "What a stream of the run may hold; none for a stream without a limit.",
    (RUN, STREAM),
    (MONITOR,),
)
STREAM_LAG = Metric(
    "skerry.stream.lag",
    Kind.GAUGE,
    "{message}",
    "Messages of a stream that its slowest reader has not been given yet.",
    (RUN, STREAM),
    (MONITOR,),
)
MONITOR_MESSAGES = Metric(
    "skerry.monitor.messages",
    Kind.COUNTER,
    "{message}",
    "Records of the log that the health monitor has read.",
    (RUN, MESSAGE),
    (MONITOR,),
)
MONITOR_MALFORMED = Metric(
    "skerry.monitor.malformed",
    Kind.COUNTER,
    "{message}",
    "Records that it could not read and left out.",
    (RUN, MESSAGE),
    (MONITOR,),
)
BROKER_UP = Metric(
    "skerry.broker.up",
    Kind.GAUGE,
    "{server}",
    "1 while a broker answers on its monitoring port.",
    (SERVER,),
    (MONITOR,),
)
BROKER_CONNECTIONS = Metric(
    "skerry.broker.connections",
    Kind.GAUGE,
    "{connection}",
    "Clients of a broker.",
    (SERVER,),
    (MONITOR,),
)
BROKER_MESSAGES = Metric(
    "skerry.broker.messages",
    Kind.COUNTER,
    "{message}",
    "Messages between a broker and its clients.",
    (SERVER, DIRECTION),
    (MONITOR,),
)
BROKER_IO = Metric(
    "skerry.broker.io",
    Kind.COUNTER,
    "By",
    "Bytes between a broker and its clients.",
    (SERVER, DIRECTION),
    (MONITOR,),
)
BROKER_SLOW_CONSUMERS = Metric(
    "skerry.broker.slow_consumers",
    Kind.COUNTER,
    "{client}",
    "Clients that a broker has dropped because they read too slowly.",
    (SERVER,),
    (MONITOR,),
)
BROKER_MEMORY = Metric(
    "skerry.broker.memory",
    Kind.GAUGE,
    "By",
    "Resident memory of a broker's process.",
    (SERVER,),
    (MONITOR,),
)
BROKER_CPU = Metric(
    "skerry.broker.cpu.ratio",
    Kind.GAUGE,
    "1",
    "Cores that a broker's process keeps busy.",
    (SERVER,),
    (MONITOR,),
)
BROKER_STORAGE = Metric(
    "skerry.broker.storage",
    Kind.GAUGE,
    "By",
    "What JetStream holds on a broker.",
    (SERVER, STORAGE),
    (MONITOR,),
)
BROKER_STORAGE_LIMIT = Metric(
    "skerry.broker.storage.limit",
    Kind.GAUGE,
    "By",
    "What JetStream may hold on a broker.",
    (SERVER, STORAGE),
    (MONITOR,),
)
BROKER_API_ERRORS = Metric(
    "skerry.broker.api.errors",
    Kind.COUNTER,
    "{error}",
    "JetStream requests that a broker has refused.",
    (SERVER,),
    (MONITOR,),
)

ALL: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)
"""The whole table, in the order of this file."""

UNITS = {"s": "seconds", "By": "bytes"}


def prometheus_name(metric: Metric) -> str:
    """Return the metric's name in Prometheus, by OpenTelemetry's rule; a histogram's base name.

    Dots become underscores, the unit is spelt out unless the name has it already, a gauge of unit
    ``1`` is a ratio, a counter a total; units in braces are annotations and leave no trace.
    """
    words = metric.name.replace(".", "_").split("_")
    unit = UNITS.get(metric.unit, "")
    if metric.unit == "1" and metric.kind is Kind.GAUGE:
        unit = "ratio"
    if unit and unit not in words:
        words.append(unit)
    if metric.kind is Kind.COUNTER:
        words = [*(word for word in words if word != "total"), "total"]
    return "_".join(words)


def of(source: str) -> tuple[Metric, ...]:
    """Return the metrics that a service emits."""
    return tuple(metric for metric in ALL if source in metric.source)
