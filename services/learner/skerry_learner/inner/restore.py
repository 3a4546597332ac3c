"""Choose the inner optimizer state that a learner starts with: a saved one or a fresh one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from skerry.protocol.messages import InnerState
from skerry_learner.inner.file import Origin, Saved


@dataclass(frozen=True, slots=True)
class RestoredState:
    """How the inner optimizer begins, and why; ``tensors`` by name if it begins warm.

    NEW: the learner's own warm-up is all it needs. WARM: as it was ``age_steps`` ago. COLD: its
    moments are gone, or begin in mid-schedule, as in a learner that joins later or in a restored
    run; so the learning rate rises again.
    """

    inner: InnerState
    reason: str
    age_steps: int = 0
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])


def fresh(incarnation: int, step: int, reason: str) -> RestoredState:
    """Return how a learner without a saved state starts at ``step``."""
    first = incarnation <= 1 and not step
    return RestoredState(InnerState.NEW if first else InnerState.COLD, reason)


def decide(
    saved: Saved,
    tensors: Mapping[str, NDArray[Any]],
    *,
    origin: Origin,
    incarnation: int,
    step: int,
    max_age_steps: int,
) -> RestoredState:
    """Decide whether a saved state may be used at ``step`` of the global clock."""
    if saved.origin != origin:
        return fresh(incarnation, step, "it belongs to another run or learner")
    age = max(0, step - saved.step)  # a learner may have been ahead of the newest commit
    if age > max_age_steps:
        return fresh(incarnation, step, f"it is {age} steps old, of {max_age_steps} allowed")
    return RestoredState(InnerState.WARM, "saved", age, tensors)


def rewarm_share(now_steps: int, rewarm_steps: int) -> float:
    """Return the factor on the learning rate for the next step of a cold start, in (0, 1]."""
    return min(1.0, (now_steps + 1) / max(1, rewarm_steps))
