"""What quantised contributions did not hold, by fragment: error feedback on the learner.

A scheme with ``feedback`` sends ``Q(g + e)`` instead of ``Q(g)`` and keeps ``g + e - Q(g + e)`` as
the next ``e`` of the same fragment, so that the sum of what has been decoded stays within one
residual of the sum of what was meant (Karimireddy et al., arXiv 1901.09847, algorithm 2).

A contribution that no commit merges leaves ``e`` as it was before it. One that is not finite never
gets here. One that left the log is in the next outer gradient as a whole, unless its progress is
given up for good; one that a commit refuses is given up for good: what it failed to hold is either
in the next one anyway or not wanted. Of one that the window drops unheard of, what it failed to
hold is still sent, once, though the rest is gone. A learner that starts again has no ``e``, nor has
genesis, which is f32.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class _Kept:
    """Residuals f32 [padded_size] around the newest contribution; None is zero."""

    identity: int
    before: Vector | None
    after: Vector | None


@dataclass(slots=True)
class Residuals:
    """Residuals by fragment, on the host: up to 8 bytes a parameter.

    Used by one thread; arrays are never written to once they are here.
    """

    _kept: dict[int, _Kept] = field(default_factory=dict[int, _Kept])

    def owed(self, fragment: int, identity: int) -> Vector | None:
        """Return what is to be added to a contribution: the same whenever it is encoded again."""
        kept = self._kept.get(fragment)
        if kept is None:
            return None
        return kept.before if kept.identity == identity else kept.after

    def keep(self, fragment: int, identity: int, residual: Vector) -> None:
        """Keep what an encoded contribution did not hold."""
        self._kept[fragment] = _Kept(identity, self.owed(fragment, identity), residual)

    def unmerged(self, fragment: int, identity: int) -> None:
        """Forget what a contribution did not hold, for it will never be merged.

        Nothing happens once a newer one has been made of it.
        """
        kept = self._kept.get(fragment)
        if kept is not None and kept.identity == identity:
            self._kept[fragment] = _Kept(identity, kept.before, kept.before)
