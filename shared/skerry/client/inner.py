"""How a learner's inner optimizer begins: new, warm as it was saved, or cold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray

from skerry.protocol.messages import InnerState


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
    """Return how a learner without a saved state starts at ``step`` of the global clock."""
    first = incarnation <= 1 and not step
    return RestoredState(InnerState.NEW if first else InnerState.COLD, reason)


def aged(
    saved_step: int,
    tensors: Mapping[str, NDArray[Any]],
    *,
    incarnation: int,
    step: int,
    most_steps: int,
) -> RestoredState:
    """Return how a learner with a state that was saved at ``saved_step`` starts at ``step``."""
    age = max(0, step - saved_step)  # a learner may have been ahead of the newest commit
    if age > most_steps:
        return fresh(incarnation, step, f"it is {age} steps old, of {most_steps} allowed")
    return RestoredState(InnerState.WARM, "saved", age, tensors)
