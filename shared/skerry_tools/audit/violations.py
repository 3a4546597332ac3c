"""What an audit finds: one promise of the log that is broken, and where."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class What(StrEnum):
    """Which promise is broken."""

    UNREADABLE = "unreadable"
    MISSING = "missing"
    VERSIONS = "versions"
    CHAIN = "chain"
    TWICE = "twice"
    ORDER = "order"
    UNRESOLVED = "unresolved"
    PROGRESS = "progress"
    TOKENS = "tokens"
    OVERLAP = "overlap"
    COUNTED_AGAIN = "counted_again"
    GAP = "gap"
    MEMBER = "member"
    FENCE = "fence"
    FLOOR = "floor"
    WEIGHTS = "weights"
    STALENESS = "staleness"
    STATE = "state"
    REPLAY = "replay"


@dataclass(frozen=True, slots=True)
class Violation:
    """One broken promise; ``fragment`` and ``version`` are -1 and ``learner`` empty where none is.

    ``sentence`` says it to a person; ``sequence`` is where in the ledger it shows, 0 if elsewhere.
    """

    what: What
    sentence: str
    fragment: int = -1
    version: int = -1
    learner: str = ""
    sequence: int = 0
