"""infra/otel: the collector's pipelines hold together, and Compose joins them to the services."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest

from skerry.settings import loading

TELLING = {"syncer", "checkpointer", "evaluator", "learner-1", "learner-2", "learner-gpu"}
BACKENDS = {"otel-collector", "jaeger", "prometheus"}


def compose(root: Path, *options: str, given: str | None = None) -> dict[str, Any]:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "docker-compose"), *options, "--format", "json"],
        capture_output=True,
        input=given,
        text=True,
        check=False,
        cwd=root,
    )
    assert (done.returncode, done.stderr) == (0, "")
    resolved: dict[str, Any] = json.loads(done.stdout)
    return resolved


@pytest.fixture(scope="module")
def services(root: Path) -> dict[str, Any]:
    """Every service as Compose resolves both files together."""
    files = ("-f", "docker-compose.yml", "-f", "infra/otel/compose.otel.yml", "--profile", "gpu")
    services: dict[str, Any] = compose(root, *files, "config")["services"]
    return services


@pytest.fixture(scope="module")
def collector(root: Path) -> dict[str, Any]:
    """The collector's config, read by the one YAML parser that is here: Compose's own."""
    text = textwrap.indent((root / "infra/otel/collector.yml").read_text(), "  ")
    wrapped = f"services: {{none: {{image: none}}}}\nx-config:\n{text}"
    found = compose(root, "-f", "-", "config", "--no-interpolate", given=wrapped)
    config: dict[str, Any] = found["x-config"]
    return config


def test_every_service_that_reports_rounds_sends_to_the_collector(
    services: dict[str, Any],
) -> None:
    for name in TELLING:
        found = loading.load(None, (), services[name]["environment"]).local.telemetry
        assert found.traces_url == "http://otel-collector:4318/v1/traces", name
        assert found.metrics_url == "http://otel-collector:4318/v1/metrics", name


def test_backends_are_locked_down_and_published_on_the_loopback_only(
    services: dict[str, Any],
) -> None:
    for name in BACKENDS:
        assert services[name]["read_only"], name
        assert services[name]["cap_drop"] == ["ALL"], name
        assert {port["host_ip"] for port in services[name]["ports"]} == {"127.0.0.1"}


def test_pipelines_name_parts_that_are_there_and_every_part_is_used(
    collector: dict[str, Any],
) -> None:
    pipelines = collector["service"]["pipelines"].values()
    for part in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines for name in pipeline[part]}
        assert used == collector[part].keys(), part


def test_the_collector_is_reached_from_outside_only_where_compose_says_so(
    collector: dict[str, Any], services: dict[str, Any]
) -> None:
    protocols = collector["receivers"]["otlp"]["protocols"].values()
    endpoints = [protocol["endpoint"] for protocol in protocols]
    assert all(endpoint.startswith("${env:OTLP_HOST:-127.0.0.1}:") for endpoint in endpoints)
    told = services["otel-collector"]
    assert told["environment"]["OTLP_HOST"] == "0.0.0.0"  # noqa: S104 - inside the container
    assert {port["host_ip"] for port in told["ports"]} == {"127.0.0.1"}


def test_memory_is_bounded_before_anything_else(collector: dict[str, Any]) -> None:
    for pipeline in collector["service"]["pipelines"].values():
        assert pipeline["processors"][0] == "memory_limiter"


def test_the_collector_hands_on_to_the_backends_of_the_same_file(
    collector: dict[str, Any], services: dict[str, Any]
) -> None:
    endpoints = [exporter["endpoint"] for exporter in collector["exporters"].values()]
    hosts = {endpoint.split("//")[1].split(":")[0] for endpoint in endpoints}  # the defaults
    assert hosts <= services.keys()
