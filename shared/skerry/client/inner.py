"""How a learner's inner optimizer begins: new, warm as it was saved, or cold."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from numpy.typing import NDArray

from skerry.protocol.messages import InnerState

Point: TypeAlias = tuple[int, int]
"""When a state was saved: the incarnation, and the step of the global clock."""


@dataclass(frozen=True, slots=True)
class RestoredState:
    """How the inner optimizer begins, and why; ``tensors`` by name if it begins warm.

    NEW: the run begins, and its warm-up suffices. WARM: as saved ``age_steps`` ago, at ``point``.
    COLD: moments are lost, or begin in mid-schedule, as in a learner that joins later or in a
    restored run; so the learning rate rises again.
    """

    inner: InnerState
    reason: str
    age_steps: int = 0
    tensors: Mapping[str, NDArray[Any]] = field(default_factory=dict[str, NDArray[Any]])
    point: Point = (0, 0)


@dataclass(frozen=True, slots=True)
class Found:
    """The saved states that a learner finds, by point, newest first; ``reason`` if there is none.

    Each process of a learner finds its own part.
    """

    saves: Mapping[Point, Mapping[str, NDArray[Any]]] = field(default_factory=dict[Point, Any])
    reason: str = ""

    def common(self, others: Collection[Collection[Point]]) -> Found:
        """Return only the states whose points each of the ``others`` has, one item per process."""
        kept = {p: held for p, held in self.saves.items() if all(p in other for other in others)}
        if kept or not (self.saves or any(others)):
            return Found(kept, self.reason)
        return Found(reason="its processes have saved no boundary that all of them have")

    def begin(self, incarnation: int, step: int, most_steps: int) -> RestoredState:
        """Return how the learner starts at ``step`` of the global clock."""
        if not self.saves:
            return fresh(incarnation, step, self.reason)
        point, tensors = next(iter(self.saves.items()))
        age = max(0, step - point[1])  # a learner may have been ahead of the newest commit
        if age > most_steps:
            return fresh(incarnation, step, f"it is {age} steps old, of {most_steps} allowed")
        return RestoredState(InnerState.WARM, "saved", age, tensors, point)


def fresh(incarnation: int, step: int, reason: str) -> RestoredState:
    """Return how a learner without a saved state starts at ``step`` of the global clock."""
    first = incarnation <= 1 and not step
    return RestoredState(InnerState.NEW if first else InnerState.COLD, reason)
