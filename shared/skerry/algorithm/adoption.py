"""What a learner does with its own progress when a new global fragment arrives."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

Method = Literal["overwrite", "blend", "rebase"]
Vector: TypeAlias = Any
"""An array of NumPy or of JAX, f32; this module imports neither."""


def adopt(method: Method, local: Vector, captured: Vector, fresh: Vector, share: Vector) -> Vector:
    """Return the new local fragment, in the shape of the vectors given.

    ``local`` is the learner's fragment now, ``captured`` what it was when the learner made its
    contribution (its anchor, if it made none), ``fresh`` the new global fragment exactly as
    decoded, which is also the learner's next anchor. ``share`` is an f32 scalar.

    - overwrite: ``fresh``, so the steps since the capture are thrown away. Decoupled DiLoCo (arXiv
      2604.21428), on the learner; DiLoCo (2311.08105), algorithm 1, which takes no such steps.
    - blend: ``share * local + (1 - share) * fresh``. Streaming DiLoCo (arXiv 2501.18512), section
      on overlapping communication with computation.
    - rebase: ``fresh + (local - captured)``: what changed since the capture is added to ``fresh``.
      Ours, after Streaming DiLoCo's delayed updates: nothing a learner did is lost or contributed
      twice, because the next outer gradient is ``fresh - rebased = captured - local``. Exact if
      no step was taken since the capture; otherwise each operation rounds once in f32.
    """
    if method == "overwrite":
        return fresh
    if method == "blend":
        return share * local + (1.0 - share) * fresh
    return fresh + (local - captured)
