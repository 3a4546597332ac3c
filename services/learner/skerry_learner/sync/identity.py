"""Who a learner is in its run, and what the two sides of its process share."""

from __future__ import annotations

from dataclasses import dataclass

from opentelemetry.trace import SpanContext

from skerry.telemetry import ids, spans, tracing


@dataclass(frozen=True, slots=True)
class LearnerIdentity:
    """One incarnation in one run; ``created_ns`` tells the run from others of its id."""

    run: str
    name: str
    incarnation: int
    created_ns: int = 0

    def trace(self, fragment: int, version: int) -> str:
        """Return the id of the trace of the round that makes this version."""
        return ids.trace_id(self.run, fragment, version, self.created_ns)

    def publishing(self, fragment: int, version: int, identity: int) -> SpanContext:
        """Return the span that sends a contribution: the same one at each attempt."""
        trace = self.trace(fragment, version)
        return tracing.context(trace, spans.PUBLISH, self.name, self.incarnation, identity)


@dataclass(slots=True)
class Traffic:
    """What this incarnation has moved; written by the network, read for pulses.

    ``f32_bytes_up`` and ``f32_bytes_down``: the same vectors without quantisation or compression.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    f32_bytes_up: int = 0
    f32_bytes_down: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    contributions: int = 0
