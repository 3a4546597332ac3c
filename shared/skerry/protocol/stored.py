"""A message as a log holds it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """One stored message; ``time_ns`` is the broker's clock, in ns since the epoch.

    ``headers`` are those it was published with, and its ``Nats-Msg-Id`` if it had one.
    """

    subject: str
    sequence: int
    time_ns: int
    payload: bytes
    headers: Mapping[str, str] = field(default_factory=dict[str, str])
