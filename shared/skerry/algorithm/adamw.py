"""AdamW on the syncer: the learner's own step, on averaged gradients.

For mode ``data-parallel``, where contributions are bare gradients. In the order of the learner's
step: clipping by the global norm, Adam (arXiv 1412.6980) with bias correction and eps = 1e-8,
decoupled weight decay on matrices only (AdamW, arXiv 1711.05101), and the run's learning rate,
linear warm-up then a cosine, at this optimizer's own step. Equal to the learner's up to the order
of f32 roundings, in numpy: a syncer needs no jax.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np

from skerry.algorithm import backend
from skerry.algorithm.merge_numpy import whole

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Plan

    F32s = NDArray[np.float32]

EPS = np.float32(1e-8)
CHUNK = 64 * 1024
"""Elements in one pass, so that the vectors of a step stay in cache."""


class Training(Protocol):
    """The training settings that an AdamW step depends on."""

    @property
    def inner(self) -> str: ...
    @property
    def steps(self) -> int: ...
    @property
    def lr(self) -> float: ...
    @property
    def lr_final(self) -> float: ...
    @property
    def warmup(self) -> float: ...
    @property
    def b1(self) -> float: ...
    @property
    def b2(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...


class Moments(NamedTuple):
    """First and second moment f32 (padded_size,), and how many steps have been taken."""

    first: F32s
    second: F32s
    steps: int


@dataclass(frozen=True, slots=True)
class AdamW:
    """The learner's AdamW over the whole model, as pure functions over one padded vector.

    ``decayed`` are the spans ``[start, stop)`` of the vector with weight decay; ``fragments`` is
    the number of fragments of the model, which must be 1: clipping needs the whole gradient.
    """

    training: Training
    decayed: tuple[tuple[int, int], ...]
    fragments: int

    @classmethod
    def of(cls, training: Training, plan: Plan) -> AdamW | None:
        """Return the AdamW of a run whose learners send bare gradients; None for any other run."""
        if training.inner != "gradient":
            return None
        fragment = plan.fragments[0]
        spans = zip(fragment.slices, pairwise(fragment.offsets), strict=True)
        decayed = (span for piece, span in spans if len(plan.leaves[piece.leaf].shape) >= 2)
        return cls(training, tuple(decayed), len(plan.fragments))

    def init(self, master: F32s) -> Moments:
        """Return the state before the first step."""
        return Moments(np.zeros_like(master), np.zeros_like(master), 0)

    def apply(self, master: F32s, merged: F32s, state: Moments) -> tuple[F32s, Moments]:
        """Return master and state after one step on the averaged gradient; inputs are untouched.

        A gradient of zeros comes from a round of no work, or of skipped steps: it is no step.
        """
        norm = float(np.sqrt(backend.merger().segment_squares(merged, whole(merged))[0]))
        if norm == 0:
            return master.copy(), state
        given, count = self.training, state.steps + 1
        clip = np.float32(min(1.0, given.clip / norm))
        b1, a1 = np.float32(given.b1), np.float32(1 - given.b1)
        b2, a2 = np.float32(given.b2), np.float32(1 - given.b2)
        unbias = np.float32(1 - given.b1**count), np.float32(1 - given.b2**count)
        rate = np.float32(learning_rate(given, state.steps / given.steps))
        out, first, second = np.empty_like(master), np.empty_like(master), np.empty_like(master)
        with np.errstate(over="ignore", invalid="ignore"):
            for at in _chunks(master.size):
                g = merged[at] * clip
                first[at] = a1 * g + b1 * state.first[at]
                second[at] = a2 * (g * g) + b2 * state.second[at]
                out[at] = (first[at] / unbias[0]) / (np.sqrt(second[at] / unbias[1]) + EPS)
            decay = np.float32(given.weight_decay)
            for start, stop in self.decayed:
                out[start:stop] += decay * master[start:stop]
            for at in _chunks(master.size):
                out[at] = master[at] - rate * out[at]
        return out, Moments(first, second, count)


def learning_rate(given: Training, done: float) -> float:
    """Return the learner's rate at ``done`` in [0, 1]: linear warm-up, then a cosine."""
    done = min(1.0, done)
    if done < given.warmup:
        return given.lr * max(done / given.warmup, 0.01)
    falling = (done - given.warmup) / (1.0 - given.warmup)
    cosine = 0.5 * (1.0 + math.cos(math.pi * falling))
    return given.lr * (given.lr_final + (1.0 - given.lr_final) * cosine)


def _chunks(size: int) -> Iterator[slice]:
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))
