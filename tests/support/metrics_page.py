"""The table of metrics as a page: ``python -m tests.support.metrics_page > docs/metrics.md``."""

from __future__ import annotations

from skerry.telemetry.metrics import ALL, Metric, MetricKind, prometheus_name

HEAD = """\
# Metrics

For people who query metrics: each one with its unit, its attributes and the services that report
it. The page is generated from `shared/skerry/telemetry/metrics.py` by
`python -m tests.support.metrics_page > docs/metrics.md`; a test compares the two.

Names and units are OpenTelemetry's (UCUM; a unit in braces only says what is counted). Services
send theirs by OTLP where `telemetry.endpoint` is set. The health monitor serves what it reads from
the log and from the broker on `/metrics`, in Prometheus' format, and writes the same every
`metrics.every_s` seconds to the file that `telemetry.jsonl` names (`.skerry/RUN/metrics.jsonl`),
and to TensorBoard or Weights & Biases where `metrics.tensorboard` or `metrics.wandb` says so.

- A metric means the same whichever service reports it. Where a backend gets it from two services,
  the job tells them apart.
- Counters begin at 0 with the process that they count for: a learner's with each of its starts.
- While a restarted monitor still reads an old ledger, it leaves out totals of the ledger (rounds,
  contributions, staleness), so that no rate takes the past for work done now.
- Histograms of rounds carry the trace id of their newest round as an exemplar (OpenMetrics).
- The file has one JSON object per row, with `name{key=value}` for each number. At
  `metrics.file_bytes` it is compressed and set aside; `metrics.keep_files` of these are kept.
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
