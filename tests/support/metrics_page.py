"""The table of metrics as a page: ``python -m tests.support.metrics_page > docs/metrics.md``."""

from __future__ import annotations

from skerry.telemetry.metrics import ALL, Metric, MetricKind, prometheus_name

HEAD = """\
# Metrics

Made out of `shared/skerry/telemetry/metrics.py` by `python -m tests.support.metrics_page >
docs/metrics.md`; a test keeps it so.

Names and units are OpenTelemetry's (UCUM; a unit in braces only says what is counted). Services
send theirs by OTLP where `telemetry.endpoint` is set. The health monitor serves what it reads from
the log and from the broker on `/metrics`, in Prometheus' format, and writes the same every
`metrics.every_s` seconds to the file that `telemetry.jsonl` names (`.skerry/RUN/metrics.jsonl`),
and to TensorBoard or Weights & Biases where `metrics.tensorboard` or `metrics.wandb` says so.

- A metric means the same whichever service reports it. Where a backend gets both, the job tells
  them apart.
- Counters begin at 0 with the process that they count for: a learner's with its incarnation.
- While a monitor that was started again still reads an old ledger, what the ledger adds up to
  (rounds, contributions, staleness) is left out, so that no rate sees the past as work done now.
- Histograms of rounds carry the trace id of their newest round as an exemplar (OpenMetrics).
- The file is one JSON object a row, `name{key=value}` for each number; it is set aside, packed, at
  `metrics.file_bytes`, and `metrics.keep_files` of those are kept.
- Figures of the broker need `metrics.broker`; `skerry up` fills it in for the broker it starts.
- Alerts are in `infra/prometheus/rules.yml`, a dashboard in `infra/grafana/skerry.json`.
"""
COLUMNS = ("Metric", "In Prometheus", "Kind", "Unit", "Attributes", "Reported by", "What it is")


def markdown() -> str:
    """Return the page."""
    rows = [COLUMNS, tuple("---" for _ in COLUMNS), *map(_row, ALL)]
    return HEAD + "\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows)


def _row(metric: Metric) -> tuple[str, ...]:
    suffix = "_bucket" if metric.kind is MetricKind.HISTOGRAM else ""
    return (
        f"`{metric.name}`",
        f"`{prometheus_name(metric)}{suffix}`",
        metric.kind.value,
        f"`{metric.unit}`",
        ", ".join(f"`{key}`" for key in metric.attributes),
        ", ".join(metric.source),
        metric.description,
    )


if __name__ == "__main__":
    print(markdown(), end="")
