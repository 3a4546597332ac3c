"""The settings of one machine: addresses, folders, ports; and all settings together."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Literal

from pydantic import Field

from skerry.settings.models import RunConfig, Table, Texts


class NatsSettings(Table):
    """How to reach the NATS broker."""

    url: str = "nats://127.0.0.1:4222"
    """Server addresses, separated by commas."""
    credentials: Path | None = None
    """File with a NATS user's JWT and seed, or with the seed of an NKey; read at every login."""
    user: str = ""
    """User name, if the server asks for one."""
    password_file: Path | None = None
    """File that holds the password; secrets are read from files only."""
    inbox_prefix: str = Field(default="", pattern=r"^([A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*)?$")
    """Prefix of the subjects of replies; empty: ``_INBOX.`` and the login's name."""
    ca_file: Path | None = None
    """PEM file of the certificate authorities that the broker's certificate may be from; requires
    TLS. Empty: this machine's own authorities."""
    cert_file: Path | None = None
    """PEM file of our client certificate, for a broker that asks for one."""
    key_file: Path | None = None
    """File with the private key of ``cert_file``, if that file does not hold it."""
    handshake_first: bool = False
    """Start TLS before the broker's greeting, for a broker configured with ``handshake_first``."""
    login_patience_s: float = Field(default=120.0, ge=0)
    """Seconds for which a refused login is tried again, if the broker accepted it before."""
    connect_timeout_s: float = Field(default=30.0, gt=0)
    """Seconds that a service waits for the broker when it starts; for one that goes away later it
    waits without end."""
    request_timeout_s: float = Field(default=5.0, gt=0)
    """Deadline of one request in seconds; requests that are safe to repeat are repeated."""
    publish_window: int = Field(default=64, ge=1, le=256)
    """Most publishes in flight at once; with fewer than 63, contributions wait on far links."""


STORE_KINDS = "skerry.store.kinds"
"""The package with one module, and one pip extra, named after each URL scheme of ``store.url``."""


def store_kinds() -> tuple[str, ...]:
    """Return the URL schemes of stores; finding them imports no adapter."""
    return tuple(sorted(m.name for m in iter_modules(import_module(STORE_KINDS).__path__)))


class StoreSettings(Table):
    """Where checkpoints are stored."""

    path: Path = Field(default=Path(".skerry/checkpoints"), validate_default=False)
    """Folder; a run's checkpoints are below <path>/<run>."""
    url: str = ""
    """``s3://bucket/prefix``: checkpoints are below <url>/<run> instead; needs the extra ``s3``."""
    endpoint: str = ""
    """Address of an S3 that is not Amazon's; empty: AWS_ENDPOINT_URL, or Amazon's."""
    region: str = ""
    """Region of the bucket; empty: AWS_REGION."""
    credentials: Path | None = None
    """File with S3 keys in AWS's format; empty: the environment, or ~/.aws/credentials."""
    profile: str = "default"
    """Profile in that file."""
    timeout_s: float = Field(default=60.0, gt=0)
    """Deadline of one request to S3 in seconds, retries included; one carries 8 MiB."""


class LearnerSettings(Table):
    """A learner's devices, and the state that it saves on its own disk for its next start."""

    path: Path = Field(default=Path(".skerry/learners"), validate_default=False)
    """Folder; a learner's inner optimizer state is below <path>/<run>/<name>."""
    save_every_s: float = Field(default=30.0, ge=0)
    """Seconds between saves; 0: never."""
    mesh: str = "auto"
    """Devices by axis (data, fsdp, tensor, expert), such as data=2,fsdp=4; auto: all devices that
    the learner sees, on fsdp."""
    processes: int = Field(default=1, ge=1, le=4096)
    """Number of processes that together are this learner, on one machine or several."""
    process: int = Field(default=0, ge=0)
    """Index of this process, from 0; process 0 talks to the log for all of them."""
    coordinator: str = ""
    """Host and port where the first of several processes listens for the others."""
    secret_file: Path | None = None
    """File with a secret that all processes of this learner share; without one, any program that
    reaches the coordinator's port first may pose as one of them."""
    nice: int = Field(default=5, ge=0, le=19)
    """How far a learner on a CPU lowers its priority, so that it yields to other work here."""
    stopped_code: int = Field(default=0, ge=0, le=125)
    """Exit code of a learner that a signal stops before its run ends. Set one such as 75 where 0
    means done, so that the learner is not started again: in a Kubernetes Job, in Slurm."""


class HealthSettings(Table):
    """The health monitor's HTTP server."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = Field(default=8787, ge=0, le=65535)
    """Port; 0 picks a free one."""
    trace_url: str = Field(default="", pattern=r"^(https?://[^\s]*\{trace_id\}[^\s]*)?$")
    """Address of a trace in your backend, such as http://127.0.0.1:16686/trace/{trace_id}; the page
    links each round to its trace."""
    names: Texts = ()
    """Host names, in lower case, at which the page answers; it always does at localhost and at IP
    addresses."""
    token_file: Path | None = None
    """File with a token. Injecting faults always needs it; the page and /metrics need it where
    ``host`` is not the loopback. ``skerry up`` sets it for a run that allows faults."""
    cluster: Path | None = None
    """Folder of the cluster that the page injects faults into; ``skerry up`` sets it."""


class TelemetrySettings(Table):
    """Where services send traces, metrics and log lines; by default nowhere."""

    endpoint: str = ""
    """Base address of an OTLP receiver (http/protobuf), such as http://127.0.0.1:4318; empty: off.
    If unset, OTEL_EXPORTER_OTLP_ENDPOINT and its variants for one signal are used."""
    traces_endpoint: str = ""
    """Full address for traces; empty: <endpoint>/v1/traces."""
    metrics_endpoint: str = ""
    """Full address for metrics; empty: <endpoint>/v1/metrics."""
    logs_endpoint: str = ""
    """Full address for log lines; empty: <endpoint>/v1/logs."""
    sample_ratio: float = Field(default=1.0, ge=0, le=1)
    """Share of rounds that are traced; if machines have different shares, traces have gaps."""
    step_sample_ratio: float = Field(default=0.001, ge=0, le=1)
    """Share of a learner's training steps that are traced, at most ``sample_ratio``."""
    metrics_interval_s: float = Field(default=10.0, gt=0)
    """Seconds between two exports of metrics."""
    jsonl: Path | None = None
    """File for all metrics of the run as JSON lines; unset, ``skerry up`` uses one in its
    folder."""

    @property
    def traces_url(self) -> str:
        """Address for traces; empty: none."""
        base = self.endpoint.rstrip("/")
        return self.traces_endpoint or (base and f"{base}/v1/traces")

    @property
    def metrics_url(self) -> str:
        """Address for metrics; empty: none."""
        base = self.endpoint.rstrip("/")
        return self.metrics_endpoint or (base and f"{base}/v1/metrics")

    @property
    def logs_url(self) -> str:
        """Address for log lines; empty: none."""
        base = self.endpoint.rstrip("/")
        return self.logs_endpoint or (base and f"{base}/v1/logs")

    @property
    def wanted(self) -> bool:
        """Whether anything is sent."""
        return bool(self.traces_url or self.metrics_url or self.logs_url)


class MetricsSettings(Table):
    """Where the health monitor reads the broker's figures, and where it writes metrics."""

    broker: str = ""
    """Monitoring addresses of the brokers (http://host:8222), separated by commas; empty: brokers
    are not monitored. ``skerry up`` sets it for the broker that it starts."""
    every_s: float = Field(default=10.0, gt=0)
    """Seconds between two rows of metrics, in the file and in the backends below."""
    file_bytes: int = Field(default=64 * 1024**2, ge=64 * 1024)
    """Largest size of the file telemetry.jsonl, in bytes; then a new one begins."""
    keep_files: int = Field(default=10, ge=0)
    """Older files of metrics that are kept, compressed (.gz)."""
    tensorboard: Path | None = None
    """Folder for TensorBoard, which gets <folder>/<run>; needs the extra ``tensorboard``."""
    wandb: str = ""
    """Project at Weights & Biases; needs the extra ``wandb`` and its own settings (WANDB_...)."""

    @property
    def broker_urls(self) -> tuple[str, ...]:
        return tuple(url.strip() for url in self.broker.split(",") if url.strip())


class LocalSettings(Table):
    """The settings of one machine; the log never stores them."""

    nats: NatsSettings = NatsSettings()
    store: StoreSettings = StoreSettings()
    learner: LearnerSettings = LearnerSettings()
    health: HealthSettings = HealthSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    metrics: MetricsSettings = MetricsSettings()
    allow_code: Texts = ()
    """Modules whose functions a run or a checkpoint may name (model.factory, train.inner,
    sync.merge, outer.preset); those that this machine's own settings name are allowed as well."""
    allow_data: Texts = ()
    """Folders and bucket addresses below which a run's record or a checkpoint may name text and
    tokenizers; what this machine's own settings name is allowed as well."""
    alive_file: Path | None = None
    """File that a service touches every five seconds while its event loop runs, whether or not the
    broker answers; for a supervisor that restarts a hung process."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """Least severe level of log lines that are written."""
    stays: bool = False
    """Whether a syncer, checkpointer or evaluator stays until a signal after its run is over; for a
    supervisor that restarts whatever ends, such as a Kubernetes Deployment."""
    shutdown_s: float = Field(default=10.0, gt=0)
    """Seconds that a service may take to finish after a signal."""


class Settings(Table):
    """All settings: those of the run and those of the machine."""

    run: RunConfig = RunConfig()
    local: LocalSettings = LocalSettings()
