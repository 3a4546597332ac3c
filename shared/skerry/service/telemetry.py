"""Where a service's spans and metrics go: begun and ended around its ``main``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

import structlog

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

    from skerry.settings.models import LocalSettings
    from skerry.telemetry.export import Telemetry

log = structlog.get_logger()

STOP_S = 2.0
"""How long the end of a process waits for the collector at most."""


@contextmanager
def telemetry(local: LocalSettings, service: str, run: str, name: str) -> Generator[None]:
    """Send this process's spans and metrics until the block ends; without an address, nothing.

    The end of the block takes ``STOP_S`` at most, in whatever state the collector is.
    Raises ConfigError where there is an address and OpenTelemetry's SDK is not installed.
    """
    wanted = local.telemetry
    if not (wanted.traces_url or wanted.metrics_url):
        yield
        return
    exporters = _start(local, service, run, name)
    log.info(
        "telemetry_begins",
        traces=bool(wanted.traces_url),
        metrics=bool(wanted.metrics_url),
        sample_ratio=wanted.sample_ratio,
    )
    try:
        yield
    finally:
        if not exporters.stop(STOP_S):
            log.warning("telemetry_unsent", waited_s=STOP_S)


def _start(local: LocalSettings, service: str, run: str, name: str) -> Telemetry:
    from importlib.metadata import version

    try:
        from skerry.telemetry import export
    except ModuleNotFoundError as error:
        msg = (
            "telemetry.endpoint is set, but OpenTelemetry's SDK is not installed: "
            "run `pip install 'skerry[otel]'`, or leave the endpoint out."
        )
        raise ConfigError(msg, path="telemetry.endpoint") from error
    broker = urlsplit(local.nats.url.split(",")[0].strip())
    identity = export.Identity(
        service,
        run,
        name,
        version("skerry"),
        broker=(broker.hostname, broker.port or 4222) if broker.hostname else None,
    )
    return export.start(identity, local.telemetry, _complain)


def _complain(trouble: str) -> None:
    log.warning("telemetry_trouble", cause=trouble)
