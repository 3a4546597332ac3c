"""The metrics that a pulse holds: learners send them, the monitor reads them from the log."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from skerry.algorithm.goodput import Cause, split
from skerry.protocol.messages import Pulse
from skerry.status.view import spent_in
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Metric


def _uses(pulse: Pulse) -> dict[str, float]:
    """Return what this process's time went into; time in which it is down it cannot know."""
    uses = split(spent_in(pulse), pulse.alive_s)
    return {use: seconds for use, seconds in uses.items() if use != Cause.DOWN}


ReadPulse = Callable[[Pulse], Mapping[str, float]]
PULSE_METRICS: Mapping[Metric, tuple[str, ReadPulse]] = {
    metrics.LEARNER_STEP: ("", lambda p: {"": p.step}),
    metrics.LEARNER_STALENESS: ("", lambda p: {"": p.max_staleness}),
    metrics.LEARNER_CONTRIBUTIONS: ("", lambda p: {"": p.contributions}),
    metrics.LEARNER_SYNCS_SKIPPED: ("", lambda p: {"": p.syncs_skipped}),
    metrics.LEARNER_DIGEST_MISMATCHES: ("", lambda p: {"": p.digest_mismatches}),
    metrics.TOKENS: ("", lambda p: {"": p.tokens}),
    metrics.LOSS: ("", lambda p: {"": p.loss} if p.steps and math.isfinite(p.loss) else {}),
    metrics.LEARNER_TIME: (metrics.USE, _uses),
    metrics.CODEC_TIME: (metrics.OPERATION, lambda p: {"encode": p.encode_s, "decode": p.decode_s}),
    metrics.WIRE_IO: (metrics.DIRECTION, lambda p: {"up": p.bytes_up, "down": p.bytes_down}),
    metrics.WIRE_CACHED: (
        metrics.REGION,
        lambda p: {p.region: p.cached_bytes} if p.region else {},
    ),
    metrics.WIRE_UNCOMPRESSED: (
        metrics.DIRECTION,
        lambda p: {"up": p.f32_bytes_up, "down": p.f32_bytes_down},
    ),
}
"""Metrics that a pulse holds: the attribute that tells its values apart, if any, and the values."""
