"""Where this process's spans and metrics go: OTLP by http/protobuf, if anywhere.

OpenTelemetry's SDK is imported by ``start``, so only where there is somebody to tell. Everything is
sent from threads of its own: a collector that is dead, slow or refuses takes nothing from whoever
tells, what cannot be sent is dropped, and ``stop`` waits for a bounded time.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from skerry.telemetry import instruments, spans, tracer

STOP_S = 2.0
"""What a process's end waits for the collector at most."""
SAY_AGAIN_S = 60.0
"""Between two complaints about a collector that takes nothing."""

Complain = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Identity:
    """Whose spans and metrics these are: ``service`` of ``run``, under a name of its own."""

    service: str
    run: str
    name: str
    version: str

    def resource(self) -> dict[str, str]:
        """Return the resource's attributes."""
        return {
            "service.namespace": "skerry",
            "service.name": f"skerry-{self.service}",
            "service.instance.id": f"{self.run}/{self.name}",
            "service.version": self.version,
            spans.RUN: self.run,
        }

    def resource_of(self, service: str, instance: str) -> dict[str, str]:
        """Return those of another service that we tell of; its version is not known."""
        return {
            "service.namespace": "skerry",
            "service.name": service,
            "service.instance.id": instance,
            spans.RUN: self.run,
        }


@dataclass(frozen=True, slots=True)
class Target:
    """Where to: full addresses of the two signals, each empty for none.

    ``broker`` is the host and port that messaging spans name, ``broker_subject`` where the broker
    shall tell of sampled messages.
    """

    traces: str = ""
    metrics: str = ""
    sample_ratio: float = 1.0
    metrics_interval_s: float = 10.0
    broker_subject: str = ""
    broker: tuple[str, int] | None = None


class Provider(Protocol):
    """What of the SDK has to be ended."""

    def shutdown(self) -> None: ...


class Telemetry:
    """What ``start`` has begun; ``stop`` it at the end of the process."""

    def __init__(self, providers: Sequence[Provider]) -> None:
        self._providers = providers

    def stop(self, within_s: float = STOP_S) -> bool:
        """Send what is left, and return after that long at most; False if some may be lost."""
        tracer.install(None)
        instruments.install(None)
        deadline = time.monotonic() + within_s
        # Daemons: the interpreter's end waits for no collector either.
        threads = [
            threading.Thread(target=provider.shutdown, name="telemetry-stop", daemon=True)
            for provider in self._providers
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in threads)


def start(identity: Identity, target: Target, complain: Complain) -> Telemetry:
    """Have this process's spans and metrics sent; ModuleNotFoundError without the extra ``otel``.

    ``complain`` hears, from another thread and now and then, what is wrong with a collector.
    """
    from skerry.telemetry import otlp

    _hear(complain)
    providers: list[Provider] = []
    if target.traces:
        sink = otlp.span_sink(identity, target)
        providers.append(sink.provider)
        tracer.install(sink, target.sample_ratio, target.broker_subject)
    if target.metrics:
        meters = otlp.meters(identity, target)
        providers.append(meters.provider)
        instruments.install(meters)
    return Telemetry(providers)


class _Hearing(logging.Handler):
    """Passes on what the SDK logs, seldom: a dead collector is one thing to know, not thousands."""

    def __init__(self, complain: Complain) -> None:
        super().__init__(logging.WARNING)
        self._complain = complain
        self._said_s = float("-inf")

    def emit(self, record: logging.LogRecord) -> None:
        now_s = time.monotonic()
        if now_s - self._said_s >= SAY_AGAIN_S:
            self._said_s = now_s
            self._complain(record.getMessage())


def _hear(complain: Complain) -> None:
    logger = logging.getLogger("opentelemetry")
    logger.handlers = [_Hearing(complain)]
    logger.propagate = False
