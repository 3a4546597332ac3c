"""Every metric of Skerry, in one table: what it is called, what it counts, and who tells of it.

Names and units are OpenTelemetry's; ``prometheus_name`` derives the other spelling by its rule.
Services send theirs over OTLP where an endpoint is set; the health monitor serves what it reads
from the log, and from the broker, on ``/metrics``. A metric means the same whoever tells of it, so
a backend that gets both tells them apart by job.

Counters start again at 0 with the process they count for, as Prometheus expects: a learner's with
its incarnation, also where the health monitor tells of them.
"""

from __future__ import annotations

from skerry.telemetry.metric import (
    CHECKPOINTER,
    EVALUATOR,
    LEARNER,
    MONITOR,
    SYNCER,
    Kind,
    Metric,
    prometheus_name,
)

__all__ = ["ALL", "Kind", "Metric", "of", "prometheus_name"]

RUN = "run"
"""The run's id: an attribute of every metric but the broker's own."""
LEARNER_NAME = "learner"
EVALUATOR_NAME = "evaluator"
FRAGMENT = "fragment"
REASON = "reason"
"""Why a round closed: ``Commit.reason``."""
OUTCOME = "outcome"
"""Of a contribution: ``accepted``, ``stale`` (merged with a discount) or ``refused``."""
CAUSE = "cause"
"""Why a contribution was refused (empty for others), or what time was lost to."""
DIRECTION = "direction"
"""``up`` from a learner to the log or ``down``; ``in`` to the broker or ``out``."""
USE = "use"
"""What time went into: ``train``, or a cause of badput (``skerry.algorithm.goodput``)."""
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

BY_MONITOR = (MONITOR,)
BY_LEARNER = (LEARNER, MONITOR)
BY_SYNCER = (SYNCER, MONITOR)

LONG_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0, 500.0)
SHORT_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
VERSIONS_BEHIND = (0.0, 1.0, 2.0, 3.0, 4.0, 8.0, 16.0)


def _gauge(
    name: str, unit: str, description: str, *keys: str, by: tuple[str, ...] = BY_MONITOR
) -> Metric:
    return Metric(name, Kind.GAUGE, unit, description, (RUN, *keys), by)


def _counter(
    name: str, unit: str, description: str, *keys: str, by: tuple[str, ...] = BY_MONITOR
) -> Metric:
    return Metric(name, Kind.COUNTER, unit, description, (RUN, *keys), by)


def _histogram(
    name: str,
    buckets: tuple[float, ...],
    description: str,
    *keys: str,
    by: tuple[str, ...],
    unit: str = "s",
) -> Metric:
    return Metric(name, Kind.HISTOGRAM, unit, description, (RUN, *keys), by, buckets)


def _broker(kind: Kind, name: str, unit: str, description: str, *keys: str) -> Metric:
    return Metric(name, kind, unit, description, (SERVER, *keys), BY_MONITOR)


# The run as a whole.

RUN_INFO = _gauge("skerry.run.info", "{run}", "Always 1; says what the run is.", MODE, VERSION)
RUN_FINISHED = _gauge("skerry.run.finished", "{run}", "1 once the run is finished.")
RUN_STEP = _gauge("skerry.run.step", "{step}", "The global clock's step.")
RUN_STEP_TARGET = _gauge("skerry.run.step.target", "{step}", "The step at which the run ends.")
RUN_TIME_LEFT = _gauge("skerry.run.time_left", "s", "Expected time until the run ends.")
RUN_LOSS = _gauge(
    "skerry.run.loss", "{nat}", "Training loss per token, each learner weighted by its speed."
)
HELD_OUT_LOSS = _gauge(
    "skerry.held_out.loss",
    "{nat}",
    "Loss per token of the global model on held-out text.",
    EVALUATOR_NAME,
    by=(EVALUATOR, MONITOR),
)
HELD_OUT_BEST = _gauge(
    "skerry.held_out.best",
    "{nat}",
    "Least loss of this run so far on the text that the evaluator reads now.",
    EVALUATOR_NAME,
)
HELD_OUT_RECENT = _gauge(
    "skerry.held_out.recent",
    "{nat}",
    "Least of the newest three losses on that text: well above the best, it goes the wrong way.",
    EVALUATOR_NAME,
)
HELD_OUT_TEXTS = _gauge(
    "skerry.held_out.texts",
    "{text}",
    "Different texts that evaluators of late have read: losses on them cannot be compared.",
)
EVALUATION_DURATION = _histogram(
    "skerry.evaluation.duration",
    LONG_S,
    "Time to read the global state and judge it.",
    by=(EVALUATOR,),
)
GOODPUT = _gauge(
    "skerry.goodput.ratio", "1", "Training time over the time given to the run, all learners."
)
BADPUT = _gauge(
    "skerry.badput.ratio", "1", "Share of the time given to the run lost to each cause.", CAUSE
)

# Rounds.

ROUND_DURATION = _histogram(
    "skerry.round.duration",
    LONG_S,
    "From the opening of a round until it closed.",
    REASON,
    by=BY_SYNCER,
)
QUORUM_WAIT = _histogram(
    "skerry.round.quorum_wait",
    LONG_S,
    "From the opening of a round to its K-th contribution.",
    by=BY_SYNCER,
)
GRACE_WAIT = _histogram(
    "skerry.round.grace_wait",
    LONG_S,
    "What a round waited beyond its quorum, for contributions that cost nothing.",
    by=BY_SYNCER,
)
COMMIT_AGE = _gauge(
    "skerry.round.commit_age",
    "s",
    "Time since the newest commit; since the run was created before there is one.",
)
ROUND_INTERVAL = _gauge("skerry.round.interval", "s", "Expected time between two commits.")
FRAGMENT_VERSION = _gauge(
    "skerry.fragment.version", "{version}", "Newest version of a fragment.", FRAGMENT, by=BY_SYNCER
)
MERGE_DURATION = _histogram(
    "skerry.merge.duration",
    SHORT_S,
    "Time to merge a round and take the outer step.",
    by=BY_SYNCER,
)
COMMIT_DURATION = _histogram(
    "skerry.commit.duration", SHORT_S, "From a merge until the log has its commit.", by=(SYNCER,)
)

# Contributions, and what they weigh on the wire.

CONTRIBUTIONS = _counter(
    "skerry.contributions",
    "{contribution}",
    "Contributions that rounds decided about, by what became of them.",
    OUTCOME,
    CAUSE,
    by=BY_SYNCER,
)
STALENESS = _histogram(
    "skerry.contribution.staleness",
    VERSIONS_BEHIND,
    "How many versions behind its fragment a merged contribution was.",
    by=BY_SYNCER,
    unit="{version}",
)
CODEC_DURATION = _histogram(
    "skerry.codec.duration",
    SHORT_S,
    "Time to encode or decode one fragment's vector.",
    OPERATION,
    by=(LEARNER, SYNCER, CHECKPOINTER, EVALUATOR),
)
WIRE_IO = _counter(
    "skerry.wire.io",
    "By",
    "Payload between a learner and the log.",
    LEARNER_NAME,
    DIRECTION,
    by=BY_LEARNER,
)
WIRE_UNCOMPRESSED = _counter(
    "skerry.wire.uncompressed",
    "By",
    "The same payload in float32; over skerry.wire.io it is the compression ratio.",
    LEARNER_NAME,
    DIRECTION,
    by=BY_LEARNER,
)

# Learners.

LEARNERS = _gauge(
    "skerry.learners",
    "{learner}",
    "Learners by how they look; those that have stopped, or finished and left, are not in.",
    STATE,
)
LEARNERS_MISSED = _gauge(
    "skerry.learners.missed",
    "{learner}",
    "Learners gone without a goodbye, and whose place no name that joined since has taken.",
)
LEARNERS_TARGET = _gauge(
    "skerry.learners.target", "{learner}", "Learners that the run is laid out for."
)
LEARNER_ALIVE = _gauge(
    "skerry.learner.alive", "{learner}", "1 alive, 0 suspect or gone.", LEARNER_NAME
)
LEARNER_DIVERGED = _gauge(
    "skerry.learner.diverged",
    "{learner}",
    "1 while it trains with a loss that is no finite number.",
    LEARNER_NAME,
)
LEARNER_INCARNATION = _gauge(
    "skerry.learner.incarnation", "{incarnation}", "Starts of its process.", LEARNER_NAME
)
LEARNER_SILENCE = _gauge("skerry.learner.silence", "s", "Time since its last pulse.", LEARNER_NAME)
LEARNER_STEP = _gauge(
    "skerry.learner.step", "{step}", "Its step on the global clock.", LEARNER_NAME, by=BY_LEARNER
)
LEARNER_STALENESS = _gauge(
    "skerry.learner.staleness",
    "{version}",
    "How many versions its oldest fragment is behind the log.",
    LEARNER_NAME,
    by=BY_LEARNER,
)
LEARNER_CONTRIBUTIONS = _counter(
    "skerry.learner.contributions",
    "{contribution}",
    "Contributions that it has sent.",
    LEARNER_NAME,
    by=BY_LEARNER,
)
LEARNER_SYNCS_SKIPPED = _counter(
    "skerry.learner.syncs_skipped",
    "{sync}",
    "Rounds that it could not answer before they closed.",
    LEARNER_NAME,
    by=BY_LEARNER,
)
LEARNER_TIME = _counter(
    "skerry.learner.time",
    "s",
    "Its time by use: train is goodput, all else is badput.",
    LEARNER_NAME,
    USE,
    by=BY_LEARNER,
)
CODEC_TIME = _counter(
    "skerry.learner.codec_time",
    "s",
    "Time in which it encoded what it sent or decoded what it read, beside its steps.",
    LEARNER_NAME,
    OPERATION,
    by=BY_LEARNER,
)
TOKENS = _counter(
    "skerry.tokens", "{token}", "Tokens it has trained on.", LEARNER_NAME, by=BY_LEARNER
)
STEP_DURATION = _histogram(
    "skerry.step.duration",
    SHORT_S,
    "One inner step, its boundary included.",
    LEARNER_NAME,
    by=(LEARNER,),
)
STEPS_SKIPPED = _counter(
    "skerry.steps.skipped",
    "{step}",
    "Steps that changed nothing: their loss or gradient was not finite.",
    LEARNER_NAME,
    by=(LEARNER,),
)
STEP_TIME = _gauge("skerry.step.time", "s", "Moving average of its inner step.", LEARNER_NAME)
LOSS = _gauge("skerry.loss", "{nat}", "Its training loss per token.", LEARNER_NAME, by=BY_LEARNER)

# Checkpoints.

CHECKPOINT_AGE = _gauge(
    "skerry.checkpoint.age", "s", "Time since the newest checkpoint, or since the run began."
)
CHECKPOINT_INTERVAL = _gauge(
    "skerry.checkpoint.interval",
    "s",
    "How often one is due: checkpoint.every_s, or once a round where rounds are rarer.",
)
CHECKPOINT_BEHIND = _gauge(
    "skerry.checkpoint.behind", "{commit}", "Commits that the newest one does not hold."
)
CHECKPOINT_BEHIND_TIME = _gauge(
    "skerry.checkpoint.behind_time",
    "s",
    "For how long there have been commits that the newest one does not hold, at most its age.",
)
CHECKPOINT_SIZE = _gauge(
    "skerry.checkpoint.size", "By", "Size of the newest one.", by=(CHECKPOINTER, MONITOR)
)
CHECKPOINT_DURATION = _histogram(
    "skerry.checkpoint.duration",
    LONG_S,
    "Time to capture, write and read back one.",
    by=(CHECKPOINTER,),
)

# The log, its reader and its broker.

STREAM_MESSAGES = _gauge(
    "skerry.stream.messages", "{message}", "Messages that a stream of the run holds.", STREAM
)
STREAM_SIZE = _gauge("skerry.stream.size", "By", "Bytes that a stream of the run holds.", STREAM)
STREAM_LIMIT = _gauge(
    "skerry.stream.limit", "By", "Bytes it may hold; not there for one without a limit.", STREAM
)
STREAM_LAG = _gauge(
    "skerry.stream.lag", "{message}", "Messages its slowest reader has not been given yet.", STREAM
)
ACCOUNT_STORAGE = _gauge(
    "skerry.account.storage", "By", "What the NATS account holds, whoever wrote it.", STORAGE
)
ACCOUNT_STORAGE_LIMIT = _gauge(
    "skerry.account.storage.limit", "By", "What it may hold; not there without a limit.", STORAGE
)
MONITOR_MESSAGES = _counter(
    "skerry.monitor.messages", "{message}", "Records that the health monitor has read.", MESSAGE
)
MONITOR_MALFORMED = _counter(
    "skerry.monitor.malformed", "{message}", "Records that it could not read.", MESSAGE
)
BROKER_UP = _broker(
    Kind.GAUGE, "skerry.broker.up", "{server}", "1 while it answers on its monitoring port."
)
BROKER_CONNECTIONS = _broker(
    Kind.GAUGE, "skerry.broker.connections", "{connection}", "Clients of a broker."
)
BROKER_MESSAGES = _broker(
    Kind.COUNTER, "skerry.broker.messages", "{message}", "To and from its clients.", DIRECTION
)
BROKER_IO = _broker(
    Kind.COUNTER, "skerry.broker.io", "By", "Bytes to and from its clients.", DIRECTION
)
BROKER_SLOW_CONSUMERS = _broker(
    Kind.COUNTER, "skerry.broker.slow_consumers", "{client}", "Clients dropped as too slow."
)
BROKER_MEMORY = _broker(Kind.GAUGE, "skerry.broker.memory", "By", "Memory of its process.")
BROKER_CPU = _broker(Kind.GAUGE, "skerry.broker.cpu.ratio", "1", "Cores it keeps busy.")
BROKER_STORAGE = _broker(
    Kind.GAUGE, "skerry.broker.storage", "By", "What JetStream holds on it.", STORAGE
)
BROKER_STORAGE_LIMIT = _broker(
    Kind.GAUGE, "skerry.broker.storage.limit", "By", "What JetStream may hold on it.", STORAGE
)
BROKER_API_ERRORS = _broker(
    Kind.COUNTER, "skerry.broker.api.errors", "{error}", "JetStream requests it has refused."
)

ALL: tuple[Metric, ...] = tuple(
    value for value in tuple(globals().values()) if isinstance(value, Metric)
)
"""The whole table, in the order of this file."""


def of(source: str) -> tuple[Metric, ...]:
    """Return the metrics that a service emits."""
    return tuple(metric for metric in ALL if source in metric.source)
