"""The settings themselves: every table, field, default, unit and bound.

``RunConfig`` is what every service of a run shares; it is stored in the ledger when the run is
created, with what its mode has filled in. ``LocalSettings`` is what belongs to one machine:
addresses, folders, ports.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    model_validator,
)
from pydantic_core import PydanticCustomError

from skerry.algorithm.schemes import SCHEMES
from skerry.settings.modes import Mode, fills


class Table(BaseModel):
    """A table of settings: unknown keys are refused, values are frozen."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False
    )


def _one_of(names: Sequence[str]) -> AfterValidator:
    """Return what a ``Literal`` of these names does, for names that a table elsewhere holds."""
    expected = f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"

    def check(value: str) -> str:
        if value not in names:
            raise PydanticCustomError("literal_error", "{expected}", {"expected": expected})  # noqa: EM101
        return value

    return AfterValidator(check)


class ModelConfig(Table):
    """Which model is trained."""

    preset: Literal["nano", "micro", "small", "base"] = "nano"
    """Sizes to start from; any field below overrides its part of the preset."""
    factory: str = ""
    """``module:function`` returning a model of your own; empty: the built-in transformer."""
    options: dict[str, str | int | float | bool] = Field(default_factory=dict)
    """Keyword arguments for ``factory``."""
    layers: int | None = Field(default=None, ge=1)
    """Transformer blocks."""
    d_model: int | None = Field(default=None, ge=8)
    """Width of the residual stream."""
    heads: int | None = Field(default=None, ge=1)
    """Query heads; must divide d_model."""
    kv_heads: int | None = Field(default=None, ge=1)
    """Key and value heads; must divide heads."""
    d_ff: int | None = Field(default=None, ge=8)
    """Width of the gated MLP."""
    vocab: int | None = Field(default=None, ge=2)
    """Tokens in the vocabulary; 256 for bytes."""


class DataConfig(Table):
    """What text is trained on."""

    source: Literal["stdlib", "text", "tokens"] = "stdlib"
    """The Python standard library's sources, text files, or memory-mapped token shards."""
    paths: tuple[str, ...] = ()
    """Files or folders, for ``text`` and ``tokens``."""
    suffixes: tuple[str, ...] = (".py", ".txt", ".md", ".rst")
    """Which files of a folder are text."""
    token_dtype: Literal["uint8", "uint16", "uint32"] = "uint16"  # noqa: S105 - a dtype
    """Element type of token shards."""
    seq_len: int = Field(default=128, ge=8)
    """Tokens per sequence."""
    batch: int = Field(default=8, ge=1)
    """Sequences per step and learner."""
    streams: int = Field(default=8, ge=1)
    """Disjoint data streams; a learner whose rank is higher reads an earlier one's, reshuffled."""
    partition: Literal["interleaved", "contiguous"] = "interleaved"
    """``interleaved``: every stream is a sample of all text; ``contiguous``: a part of its own."""
    held_out: float = Field(default=0.02, gt=0, lt=0.5)
    """Share of the text, picked by content hash, that no learner trains on."""
    seed: int = 0
    """Seed of the shuffle."""


class TrainConfig(Table):
    """The inner loop."""

    inner: str = "adamw"
    """``adamw``, ``gradient`` (a step subtracts the bare gradient, for mode data-parallel), or
    ``module:function`` that takes ``learning_rate`` and returns an optax optimizer."""
    steps: int = Field(default=1000, ge=1)
    """Steps on the global clock after which a run ends."""
    duration_s: float | None = Field(default=None, gt=0)
    """Ends the run this long after its first commit, if that is sooner; the schedule follows."""
    lr: float = Field(default=3e-3, gt=0)
    """Peak learning rate of AdamW (experiment ``learning-rate`` of docs/quality.md)."""
    lr_final: float = Field(default=0.1, ge=0, le=1)
    """Share of the peak left at the end of the cosine."""
    warmup: float = Field(default=0.05, ge=0, lt=1)
    """Share of the run spent warming up."""
    b1: float = Field(default=0.9, ge=0, lt=1)
    """AdamW's first-moment decay."""
    b2: float = Field(default=0.95, ge=0, lt=1)
    """AdamW's second-moment decay (experiment ``inner`` of docs/quality.md)."""
    weight_decay: float = Field(default=0.1, ge=0)
    """Decoupled weight decay, on matrices only."""
    clip: float = Field(default=1.0, gt=0)
    """Global gradient norm above which gradients are scaled down."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype; auto: bfloat16 on accelerators that have it in hardware (NVIDIA: from Ampere
    on), float32 elsewhere."""
    seed: int = 0
    """Seed of the initial parameters."""
    inner_max_age_steps: int = Field(default=1000, ge=0)
    """A restarted learner goes on with a saved inner optimizer state that is no older than this
    (experiment ``failures`` of docs/quality.md: warm against cold)."""
    rewarm_steps: int = Field(default=50, ge=0)
    """Steps over which the learning rate rises again where that state had to begin anew: a choice,
    under which experiment ``failures`` restarted cold."""


class SyncConfig(Table):
    """When and how learners meet; experiments are those of docs/quality.md."""

    learners: int = Field(default=2, ge=1)
    """Learners this run is laid out for (M); more or fewer may come and go."""
    fragments: int = Field(default=8, ge=1)
    """Fragments the model is cut into (P). Rounds follow the global clock: any P will do, but in
    mode ``streaming``, whose fragments take turns evenly, one of P and H must divide the other.
    Not measured."""
    h_steps: int = Field(default=24, ge=1)
    """Every fragment is due once per this many steps (H): the paper's. Lower is better for the loss
    where links allow it: experiments ``outer`` and ``batch``."""
    overlap_steps: int = Field(default=2, ge=0)
    """Steps a learner goes on between its contribution and adoption (tau): ``adoption``."""
    shards: int = Field(default=1, ge=1)
    """Groups of fragments that syncers own one by one: fragment f is in shard f modulo this."""
    lease_s: float = Field(default=2.0, gt=0)
    """A syncer that is silent for this long loses its shards to another one."""
    quorum: int = Field(default=1, ge=1)
    """Contributions after which a round may close (K): experiment ``speeds``."""
    grace_gamma: float = Field(default=0.8, ge=0, lt=1)
    """Share of the time until a round holds up others that its grace window may use, a step at
    least; 0: no window. Experiments ``speeds`` and ``lateness``."""
    round_timeout_s: float = Field(default=60.0, gt=0)
    """A round without quorum for this long closes with what it has; one that nobody answered is
    opened anew. No grace window is longer."""
    max_staleness: int = Field(default=4, ge=0)
    """Contributions whose base is further behind, in versions, are refused and counted: experiment
    ``lateness`` compares it with 0. With the grace window hardly anything gets as late."""
    staleness_discount: float = Field(default=0.5, gt=0, le=1)
    """A contribution's weight is multiplied by this for each version it is behind: experiment
    ``lateness``. With the grace window little is, unless rounds take longer than H steps."""
    merge: str = "rda"
    """How outer gradients are merged: ``average``, ``rda`` (experiment ``outer``), or
    ``module:function`` as ``skerry.algorithm.merge.MergeRule``. Embeddings are always averaged."""
    adoption: Literal["overwrite", "blend", "rebase"] = "rebase"
    """What a learner does with its own progress when a new global fragment arrives: experiment
    ``adoption``."""
    blend_alpha: float = Field(default=0.5, ge=0, le=1)
    """Share of the local value that ``blend`` keeps."""
    contribution_scheme: Annotated[str, _one_of(tuple(SCHEMES))] = "int4"
    """Quantisation of contributions: experiment ``quantisation``."""
    global_scheme: Annotated[str, _one_of([n for n, s in SCHEMES.items() if s.for_global])] = "bf16"
    """Quantisation of the global fragments that learners read: experiment ``quantisation``."""
    chunk_bytes: int = Field(default=524_288, ge=4096)
    """Largest payload of one message, before its envelope."""


class OuterConfig(Table):
    """The outer optimizer on the syncer."""

    preset: str = "auto"
    """``auto`` (by H: experiment ``outer`` of docs/quality.md), ``nesterov``, ``direct``,
    ``adamw`` (for mode data-parallel), or ``module:function`` to an optax one."""
    lr: float | None = Field(default=None, gt=0)
    """Outer learning rate; empty: the preset's."""
    momentum: float | None = Field(default=None, ge=0, lt=1)
    """Outer momentum; empty: the preset's."""


class CheckpointConfig(Table):
    """When checkpoints are written and which are kept."""

    every_s: float = Field(default=30.0, gt=0)
    """Seconds between checkpoints; one is also written at the start and at the end."""
    keep_newest: int = Field(default=3, ge=1)
    """The newest N are kept,"""
    keep_every: int = Field(default=10, ge=0)
    """and every Mth for ever (0: none)."""


class EvalConfig(Table):
    """When an evaluator looks at the global model, and how much held-out text it reads."""

    every_s: float = Field(default=15.0, gt=0)
    """Seconds between evaluations at least; one is also made at the end."""
    batches: int = Field(default=8, ge=1)
    """Held-out batches of each, of data.batch sequences; they are always the same."""
    sample_tokens: int = Field(default=96, ge=0, le=512)
    """Tokens that the global model writes with an evaluation, for people to read; 0: none."""


class LogConfig(Table):
    """The streams of a run."""

    replicas: int = Field(default=1, ge=1, le=5)
    """Copies of each stream in a broker cluster."""
    window_bytes: int = Field(default=512 * 1024**2, ge=1024**2)
    """Contributions kept for replay, in bytes, which the broker reserves at once (left as it is, a
    run whose learners' initial parameters take more gets twice those),"""
    window_s: float = Field(default=24 * 3600.0, gt=0)
    """and in seconds; the smaller bound counts."""


class LivenessConfig(Table):
    """How silence is judged; times are learnt from each learner's own pulses."""

    pulse_s: float = Field(default=0.5, gt=0)
    """A learner pulses at the first step boundary after this long."""
    suspect_phi: float = Field(default=3.0, gt=0)
    """Suspicion level (-log10 of the chance that it is alive) above which a learner is suspect,"""
    gone_phi: float = Field(default=8.0, gt=0)
    """and above which it is gone. Where the broker tells that its connection is closed, the health
    monitor calls it gone sooner."""


class ChaosConfig(Table):
    """Whether faults may be injected on purpose."""

    allow: bool = False
    """``skerry chaos`` refuses to touch a run that does not say so itself."""
    clocks: bool = False
    """Whether services are started under libfaketime, so that chaos can move their clocks; it makes
    them slower, a learner by more than half."""
    netns: bool = False
    """Whether services, all but the monitor, are started in network namespaces of their own, where
    a partition loses packets instead of holding bytes up; it needs root."""


class RunConfig(Table):
    """Everything that must be equal on every island of a run."""

    mode: Mode = "decoupled"
    """Fills in what the settings below leave open (``skerry.settings.modes``), and refuses what
    contradicts it."""
    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    train: TrainConfig = TrainConfig()
    sync: SyncConfig = SyncConfig()
    outer: OuterConfig = OuterConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    liveness: LivenessConfig = LivenessConfig()
    chaos: ChaosConfig = ChaosConfig()

    @model_validator(mode="after")
    def _fill_in(self) -> Self:
        """Fill in what the mode says; a stored config, where all is set, stays as it is."""
        tables: dict[str, Table] = {"train": self.train, "sync": self.sync, "outer": self.outer}
        given = {name: table.model_fields_set for name, table in tables.items()}
        for name, values in fills(self.mode, self.sync.learners, given).items():
            # Frozen for everybody else: nobody has seen this value yet.
            vars(self)[name] = tables[name].model_copy(update=values)
        return self


class NatsSettings(Table):
    """How to reach the broker."""

    url: str = "nats://127.0.0.1:4222"
    """Server addresses, comma separated."""
    credentials: Path | None = None
    """A NATS credentials file."""
    user: str = ""
    """User name, where the server asks for one."""
    password_file: Path | None = None
    """File that holds the password; secrets are read from files only."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """How long a service waits for a broker when it starts; one that goes away later is waited for
    without end."""
    request_timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one request; requests that are safe to repeat are."""
    publish_window: int = Field(default=6, ge=1, le=64)
    """Publishes in flight at once."""


STORE_KINDS = "skerry.store.kinds"
"""Holds a module for each URL scheme that ``store.url`` may have; the extra of pip has its name."""


def store_kinds() -> tuple[str, ...]:
    """Return the URL schemes of stores; finding them imports no adapter."""
    return tuple(sorted(m.name for m in iter_modules(import_module(STORE_KINDS).__path__)))


class StoreSettings(Table):
    """Where checkpoints go."""

    path: Path = Field(default=Path(".skerry/checkpoints"), validate_default=False)
    """Folder; a run's checkpoints lie below <path>/<run>."""
    url: str = ""
    """``s3://bucket/prefix``: they lie below <url>/<run> instead; needs the extra ``s3``."""
    endpoint: str = ""
    """Address of an S3 that is not Amazon's; empty: AWS_ENDPOINT_URL, or Amazon's."""
    region: str = ""
    """Region of the bucket; empty: AWS_REGION."""
    credentials: Path | None = None
    """File with S3 keys in AWS's format; empty: the environment, or ~/.aws/credentials."""
    profile: str = "default"
    """Which keys of that file."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one request to S3, its repetitions included; a part has 8 MiB."""


class LearnerSettings(Table):
    """What a learner keeps on its own disk, so that its next start begins warm."""

    path: Path = Field(default=Path(".skerry/learners"), validate_default=False)
    """Folder; a learner's inner optimizer state lies below <path>/<run>/<name>."""
    save_every_s: float = Field(default=30.0, ge=0)
    """Seconds between saves; 0: never."""


class HealthSettings(Table):
    """The health monitor's HTTP server."""

    host: str = "127.0.0.1"
    """Address it listens on."""
    port: int = Field(default=8787, ge=0, le=65535)
    """Port; 0 picks a free one."""
    trace_url: str = Field(default="", pattern=r"^(https?://[^\s]*\{trace_id\}[^\s]*)?$")
    """Where your backend shows a trace, such as http://127.0.0.1:16686/trace/{trace_id}: the page
    then links each round to it."""
    token_file: Path | None = None
    """File with the token that lets the page inject faults, where the run has chaos.allow;"""
    cluster: Path | None = None
    """and the run folder of their cluster on this machine. `skerry up` fills in both."""


class TelemetrySettings(Table):
    """Where traces and metrics of this machine's services go; nowhere, and free, by default."""

    endpoint: str = ""
    """Base address of an OTLP receiver (http/protobuf), such as http://127.0.0.1:4318; empty: off.
    OTEL_EXPORTER_OTLP_ENDPOINT and its variants for one signal count where nothing is said here."""
    traces_endpoint: str = ""
    """Full address for traces alone; empty: <endpoint>/v1/traces."""
    metrics_endpoint: str = ""
    """Full address for metrics alone; empty: <endpoint>/v1/metrics."""
    traces: bool = True
    """Whether traces are sent,"""
    metrics: bool = True
    """and whether metrics are."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of rounds that are traced; the same on every machine, else traces have holes."""
    metrics_interval_s: float = Field(default=10.0, gt=0)
    """Seconds between two sendings of metrics."""
    broker_hops: bool = False
    """Whether the broker's part in a traced message is a span too."""
    jsonl: Path | None = None
    """File that keeps all metrics of the run as JSON lines; empty: one in the run's folder, where
    ``skerry up`` has one."""

    @property
    def traces_url(self) -> str:
        """Where traces go; empty: nowhere."""
        return self._url("traces", self.traces_endpoint) if self.traces else ""

    @property
    def metrics_url(self) -> str:
        """Where metrics go; empty: nowhere."""
        return self._url("metrics", self.metrics_endpoint) if self.metrics else ""

    def _url(self, signal: str, given: str) -> str:
        base = self.endpoint.rstrip("/")
        return given or (f"{base}/v1/{signal}" if base else "")


class MetricsSettings(Table):
    """Where the health monitor gets the broker's figures from, and who is given its metrics."""

    broker: str = ""
    """Monitoring addresses of the brokers (http://host:8222), comma separated; empty: no figures
    of the broker's own. ``skerry up`` fills it in for the broker that it starts."""
    every_s: float = Field(default=10.0, gt=0)
    """Seconds between two rows of metrics, in the file and everywhere below."""
    file_bytes: int = Field(default=64 * 1024**2, ge=64 * 1024)
    """The file that telemetry.jsonl names is set aside when it would grow beyond this,"""
    keep_files: int = Field(default=10, ge=0)
    """and so many that were set aside are kept, packed (.gz)."""
    tensorboard: Path | None = None
    """Folder for TensorBoard: <folder>/<run>; needs the extra ``tensorboard``."""
    wandb: str = ""
    """Project at Weights & Biases; needs the extra ``wandb`` and its own settings (WANDB_...)."""

    @property
    def broker_urls(self) -> tuple[str, ...]:
        """The addresses one by one."""
        return tuple(url.strip() for url in self.broker.split(",") if url.strip())


def _by_comma(value: object) -> object:
    """Return names as a tuple; as text, as --set and the environment give it, they are split."""
    if isinstance(value, str):
        return tuple(value.replace(",", " ").split())
    return tuple(value) if isinstance(value, list) else value  # pyright: ignore[reportUnknownVariableType,reportUnknownArgumentType] - pydantic judges the elements


class LocalSettings(Table):
    """What belongs to one machine and is never stored in the log."""

    nats: NatsSettings = NatsSettings()
    store: StoreSettings = StoreSettings()
    learner: LearnerSettings = LearnerSettings()
    health: HealthSettings = HealthSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    metrics: MetricsSettings = MetricsSettings()
    allow_code: Annotated[tuple[str, ...], BeforeValidator(_by_comma)] = ()
    """Modules whose functions a run or a checkpoint may name (model.factory, train.inner,
    sync.merge, outer.preset); those that this machine's own settings name are allowed as well."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe log line that is written."""
    shutdown_s: float = Field(default=10.0, gt=0)
    """How long a service may take to drain after a signal."""


class Settings(Table):
    """One resolved file: the run's part and the machine's part."""

    run: RunConfig = RunConfig()
    local: LocalSettings = LocalSettings()
