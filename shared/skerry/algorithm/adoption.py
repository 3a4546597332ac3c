"""What a learner does with its own progress when a new global fragment arrives.

The formulas take NumPy and JAX arrays alike, f32 and of one shape. ``local`` is the learner's
fragment now, ``captured`` what it was when the learner made its contribution (its anchor, if it
made none), ``fresh`` the new global fragment exactly as decoded, which is also the learner's next
anchor. ``share`` is an f32 scalar.

What the next outer gradient ``anchor - local`` then holds: after ``overwrite`` only steps from now
on, after ``rebase`` and ``blend`` also those since the capture.
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Method = Literal["overwrite", "blend", "rebase"]
Vector: TypeAlias = Any
"""An array of NumPy or of JAX; this module imports neither."""


def blend(local: Vector, fresh: Vector, share: Vector) -> Vector:
    """Return ``share * local + (1 - share) * fresh``.

    Streaming DiLoCo (arXiv 2501.18512), section on overlapping communication with computation.
    ``share = 0`` is ``overwrite``, ``share = 1`` ignores the others.
    """
    return share * local + (1.0 - share) * fresh


def rebase(local: Vector, captured: Vector, fresh: Vector) -> Vector:
    """Return ``fresh + (local - captured)``: the steps since the capture, made from ``fresh`` on.

    Ours, after the delayed updates of Streaming DiLoCo (arXiv 2501.18512), section on overlapping
    communication: nothing a learner did is lost, and nothing is contributed twice, because the
    next outer gradient is ``fresh - rebased = captured - local``. Exact where nothing was done
    since the capture; elsewhere rounded once per operation in f32.
    """
    return fresh + (local - captured)


def adopt(method: Method, local: Vector, captured: Vector, fresh: Vector, share: Vector) -> Vector:
    """Return the new local fragment by the named method; only ``blend`` uses ``share``.

    overwrite: ``fresh``, so the steps since the capture are thrown away. Decoupled DiLoCo (arXiv
    2604.21428), on the learner; DiLoCo (2311.08105), algorithm 1, where there are none.
    """
    if method == "overwrite":
        return fresh
    if method == "blend":
        return blend(local, fresh, share)
    return rebase(local, captured, fresh)
