"""What a learner does with its own progress when a new global fragment arrives.

The reference formulas; the learner runs the same ones on its device. All vectors are f32 of one
shape. ``local`` is the learner's fragment now, ``captured`` what it was when the learner made its
contribution (its anchor, if it made none), ``fresh`` the new global fragment exactly as decoded,
which is also the learner's next anchor.

What the next outer gradient ``anchor - local`` then holds: after ``overwrite`` only steps from now
on, after ``rebase`` and ``blend`` also those since the capture.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

Method = Literal["overwrite", "blend", "rebase"]


def overwrite(fresh: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return ``fresh``: the steps since the capture are thrown away.

    Decoupled DiLoCo (arXiv 2604.21428), on the learner; DiLoCo (2311.08105), algorithm 1, where
    there are no steps since the capture.
    """
    return fresh.copy()


def blend(
    local: NDArray[np.float32], fresh: NDArray[np.float32], alpha: float
) -> NDArray[np.float32]:
    """Return ``alpha * local + (1 - alpha) * fresh``; alpha is the share of the local value.

    Streaming DiLoCo (arXiv 2501.18512), section on overlapping communication with computation.
    ``alpha = 0`` is ``overwrite``, ``alpha = 1`` ignores the others.
    """
    share = np.float32(alpha)
    mixed = share * local + (np.float32(1) - share) * fresh
    return mixed.astype(np.float32, copy=False)


def rebase(
    local: NDArray[np.float32], captured: NDArray[np.float32], fresh: NDArray[np.float32]
) -> NDArray[np.float32]:
    """Return ``fresh + (local - captured)``: the steps since the capture, made from ``fresh`` on.

    Ours, after the delayed updates of Streaming DiLoCo (arXiv 2501.18512), section on overlapping
    communication: nothing a learner did is lost, and nothing is contributed twice, because the
    next outer gradient is ``fresh - rebased = captured - local``. Exact where nothing was done
    since the capture; elsewhere rounded once per operation in f32.
    """
    done: NDArray[np.float32] = np.subtract(local, captured)
    done += fresh
    return done


def adopt(
    method: Method,
    local: NDArray[np.float32],
    captured: NDArray[np.float32],
    fresh: NDArray[np.float32],
    alpha: float,
) -> NDArray[np.float32]:
    """Return the new local fragment by the named method; only ``blend`` uses ``alpha``."""
    if method == "overwrite":
        return overwrite(fresh)
    if method == "blend":
        return blend(local, fresh, alpha)
    return rebase(local, captured, fresh)
