"""What a syncer measures of the contributions to a merge, to limit hostile or broken ones.

Every rule compares a learner with at least two others: of two learners neither outvotes the other,
so nothing is held against either. Norms are clipped as Z. Sun et al. (arXiv 1911.07963) do against
backdoors in federated learning, but relative to what the others send. P. Blanchard et al. (arXiv
1703.02757) and X. Cao et al. (FLTrust, arXiv 2012.13995) also look for outer gradients that point
against the others'.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm import backend
from skerry.algorithm.fragments import BLOCK, Fragment
from skerry.algorithm.merge_numpy import OuterGradient
from skerry.algorithm.weighting import LEAST_OTHERS

F32s = NDArray[np.float32]

SAMPLE_BLOCKS = 256
"""Blocks by which directions are compared: a cosine of 65,536 values is exact to 0.004."""
STATED = 0.01
"""A norm may differ from what its sender says by this share: the sender may have summed in f32."""
ECHO = 0.02
"""A cosine with known work that is less than this from 1 marks a copy; a copy in int4 has 0.993."""
APART = 0.1
"""A copy is marked only if all others' cosines are this far from 1: without noise all are close."""
AGAINST, AGREED = -0.25, 0.2
"""An outer gradient is opposed if its cosine with the others' mean direction is below AGAINST and
the mean cosine among the others is above AGREED."""


class Effort(NamedTuple):
    """The decoded length of an outer gradient, and the number of steps that it claims."""

    norm: float
    steps: float


class Likeness(NamedTuple):
    """How the outer gradients of a merge compare: each field has one value per contribution.

    ``alignment`` is the cosine with the mean direction of the other learners, 0 if there are fewer
    than two of them, or if it is below 0 because of one of them alone. ``echo`` is True for a copy
    of what others had sent before, or of the last change; ``opposed`` if it points against them. A
    learner that sees the others' before it sends its own can bring neither mark on one of them.
    """

    alignment: tuple[float, ...]
    opposed: tuple[bool, ...]
    echo: tuple[bool, ...]


def uncounted(steps: float, others: Sequence[float], most: float) -> float:
    """Return the share of steps beyond ``most`` times the median of the others'; ``most`` 0: none.

    The others take as many steps as time allows: their median bounds what one can have done.
    """
    if not most or len(others) < LEAST_OTHERS or steps <= 0:
        return 0.0
    return max(0.0, 1.0 - most * max(1.0, median(others)) / steps)


def cut(own: Effort, others: Sequence[Effort], most: float) -> float:
    """Return the share by which an outer gradient is to be shortened; ``most`` 0: none.

    It may be ``most`` times as long as the median of the others. One of fewer steps is first scaled
    up to as many, by the square root of the ratio, as noise grows. Zeros are left out.
    """
    known = [o.norm * math.sqrt(max(1.0, own.steps / max(1.0, o.steps))) for o in others if o.norm]
    if not most or len(known) < LEAST_OTHERS or not own.norm:
        return 0.0
    return max(0.0, 1.0 - most * median(known) / own.norm)


def sampled_blocks(fragment: Fragment, version: int) -> NDArray[np.int64]:
    """Return the blocks by which directions are compared in the merge towards a version."""
    count = min(SAMPLE_BLOCKS, fragment.blocks)
    return (np.arange(count) * fragment.blocks // count + version) % fragment.blocks


def sample(items: Sequence[OuterGradient], blocks: NDArray[np.int64]) -> F32s:
    """Return some blocks of each outer gradient as rows of length one, f32 (m, n); zeros stay."""
    rows = np.zeros((len(items), blocks.size * BLOCK), np.float32)
    for row, item in zip(rows, items, strict=True):
        planes = item.planes
        scales = planes.scales[blocks] if planes.scales.size else planes.scales
        backend.cpu().dequantise(item.scheme, type(planes)(planes.codes[blocks], scales), row)
    return unit(rows)


def moved(fragment: Fragment, version: int, before: F32s, after: F32s) -> F32s:
    """Return what a version changed, f32 (n,) of length one, as the next merge compares it.

    ``version`` is that next one; ``before`` and ``after`` are masters f32 (padded_size,).
    """
    blocks = sampled_blocks(fragment, version)
    change = before.reshape(-1, BLOCK)[blocks] - after.reshape(-1, BLOCK)[blocks]
    return unit(change.reshape(1, -1)).reshape(-1)


@np.errstate(over="ignore", invalid="ignore")
def unit(rows: F32s) -> F32s:
    """Return rows f32 (m, n) at length one; rows of length 0, or not finite, become zero."""
    lengths = np.sqrt(np.square(rows, dtype=np.float64).sum(axis=1))
    usable = np.isfinite(lengths) & (lengths > 0)
    inverse = np.divide(1.0, lengths, out=np.zeros_like(lengths), where=usable).astype(np.float32)
    found = np.zeros_like(rows)
    np.multiply(rows, inverse[:, None], out=found, where=usable[:, None])
    return found


def compare(
    rows: F32s, learners: Sequence[str], spans: Sequence[tuple[int, int]], moved: F32s | None
) -> Likeness:
    """Compare the sampled rows of ``sample``, one learner's newest last; each learner has one vote.

    ``spans`` says where in the log each contribution began and where it was whole. ``moved`` f32
    (n,) of length one is what the newest version changed; None: not known.
    """
    newest = {learner: number for number, learner in enumerate(learners)}
    aligned, opposed = np.zeros(len(learners)), np.zeros(len(learners), np.bool_)
    echo, cosines = np.zeros(len(learners), np.bool_), np.zeros((len(learners),) * 2)
    votes = list(newest.values())
    cosines[:, votes] = rows @ rows[votes].T
    for number, learner in enumerate(learners):
        others = [place for name, place in newest.items() if name != learner]
        before = [place for place in others if spans[place][1] < spans[number][0]]
        copied, agreed = _alignment(cosines, number, before)
        # Of many whose cosine with each other is c, each has about sqrt(c) with their mean.
        echo[number] = copied > 1.0 - ECHO and agreed < (1.0 - APART) ** 2
        aligned[number], agreed = _alignment(cosines, number, others)
        own = cosines[number, others]
        if aligned[number] < 0 and own.sum() >= own.min():  # because of one of them alone
            aligned[number] = 0.0
        opposed[number] = aligned[number] < AGAINST and agreed > AGREED
    if moved is not None:
        echo |= _near(rows @ moved, learners)
    return Likeness(tuple(aligned.tolist()), tuple(opposed.tolist()), tuple(echo.tolist()))


def _alignment(
    cosines: NDArray[np.float64], number: int, others: Sequence[int]
) -> tuple[float, float]:
    """Return a row's cosine with the mean of the others, and the mean cosine among these."""
    count, square = len(others), float(cosines[np.ix_(others, others)].sum())
    if count < LEAST_OTHERS or square <= 0:
        return 0.0, 0.0
    aligned = float(cosines[number, others].sum()) / math.sqrt(square)
    return aligned, (square - count) / (count * (count - 1))


def _near(cosines: NDArray[np.floating], learners: Sequence[str]) -> NDArray[np.bool_]:
    """Return which cosines are almost 1 while those of all other learners are further away."""
    names, far = np.array(learners), 1.0 - cosines
    found = np.zeros(far.size, np.bool_)
    for number in np.flatnonzero(far < ECHO):
        others = names != names[number]
        enough = np.unique(names[others]).size >= LEAST_OTHERS
        found[number] = enough and float(far[others].min()) > APART
    return found


def states_truly(stated: Sequence[float], found: Sequence[float]) -> bool:
    """Return True if norms, where a sender states them, are those of what it sent."""
    least = STATED * 1e-3 * math.hypot(*found)
    return not stated or all(
        abs(says - is_) <= STATED * is_ + least for says, is_ in zip(stated, found, strict=True)
    )
