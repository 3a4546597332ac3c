"""Which learner offers a run's initial parameters: one that lives, since all have the same."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

STALE_PULSES = 10.0
"""A learner that was silent for this many intervals between pulses is passed over."""
MOST_WAIT_S = 300.0
"""After this time without initial parameters every learner that has them offers them."""


class Candidate(NamedTuple):
    """A learner that has initial parameters; ``heard_ns`` is when the log last heard of it.

    ``shard`` is its rank by the first time it joined, ``sent`` is True once it has sent some.
    """

    learner: str
    shard: int
    heard_ns: int
    sent: bool


def first_to_offer(candidates: Iterable[Candidate], now_ns: int, pulse_s: float) -> str | None:
    """Return the learner that offers the initial parameters; None where none lives.

    It is the first that joined, unless another one has begun meanwhile. Two that have heard
    different things may both offer: the first offer that is whole becomes version 1.
    """
    oldest_ns = now_ns - STALE_PULSES * pulse_s * 1e9
    living = [c for c in candidates if c.heard_ns >= oldest_ns]
    return min(living, key=lambda c: (not c.sent, c.shard)).learner if living else None


def is_to_offer(learner: str, first: str | None, waited_s: float) -> bool:
    """Return True if a learner should offer its initial parameters, after ``waited_s`` without any.

    A ``first`` learner that pulses but sends nothing must not hold up all others for ever.
    """
    return learner == first or waited_s > MOST_WAIT_S
