"""The state that the parts of a learner's network side share, and its door."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from skerry.algorithm.fragments import Plan
from skerry.client.encode import Residuals
from skerry.client.mailbox import Mailbox
from skerry.client.telemetry import LearnerIdentity, LearnerTelemetry
from skerry.log.base import Bus
from skerry.protocol.learner import DoorReason, LearnerDoor
from skerry.settings.models import RunConfig

log = structlog.get_logger()

RETRY_S = 1.0
REPORT_S = 1.0
"""Least seconds between two reports of refusals."""
FLOAT32_BYTES = 4


@dataclass(slots=True)
class Traffic:
    """Bytes that this incarnation has sent and read, named as in its pulses.

    ``f32_bytes_up`` and ``f32_bytes_down``: the same vectors without quantisation or compression.
    ``cached_bytes``: the part of ``bytes_down`` that came from the cache of the ``region``.
    """

    bytes_up: int = 0
    bytes_down: int = 0
    f32_bytes_up: int = 0
    f32_bytes_down: int = 0
    encode_s: float = 0.0
    decode_s: float = 0.0
    contributions: int = 0
    digest_mismatches: int = 0
    region: str = ""
    cached_bytes: int = 0


@dataclass(slots=True)
class LearnerConnection:
    """One learner's log and mailbox; ``clock`` is the trainer's monotonic clock."""

    bus: Bus
    identity: LearnerIdentity
    plan: Plan
    config: RunConfig
    mailbox: Mailbox
    telemetry: LearnerTelemetry
    wall_ns: Callable[[], int] = time.time_ns
    clock: Callable[[], float] = time.monotonic
    traffic: Traffic = field(default_factory=Traffic)
    residuals: Residuals = field(default_factory=Residuals)
    door: LearnerDoor = field(init=False)
    _reported_s: float = field(init=False, default=float("-inf"))

    def __post_init__(self) -> None:
        self.door = LearnerDoor(len(self.plan.fragments), self.config.train.steps)

    @property
    def run(self) -> str:
        return self.identity.run

    def f32_bytes(self, fragment: int) -> int:
        """Return the bytes of a fragment without quantisation or compression."""
        return FLOAT32_BYTES * self.plan.fragments[fragment].size

    def refuse(self, reason: DoorReason) -> None:
        """Count a message that the door refuses, and report it."""
        self.door.refused[reason] += 1
        self.report_refused()

    def report_refused(self) -> None:
        """Log what was refused so far, at most once a second."""
        now_s = self.clock()
        if now_s - self._reported_s >= REPORT_S:
            self._reported_s = now_s
            counts = {reason.value: count for reason, count in self.door.refused.items()}
            log.warning("messages_refused", **counts)
