"""Merging quantised outer gradients: the weighted average, or radial-directional averaging (RDA).

Decoupled DiLoCo (arXiv 2604.21428) merges the direction and the length of each tensor separately:
with weights ``w_m`` that sum to one, norms ``n_m = |x_m|`` and unit vectors ``u_m = x_m / n_m``,

    merged = (sum_m w_m n_m) * d / |d|,   d = sum_m w_m u_m,

so that the merged norm does not shrink as more, nearly orthogonal learners join, while averaging
shrinks it by ``sqrt((1 + (M-1) rho) / M)``. Embeddings are averaged. Where the unit vectors cancel
(``|d| <= 1e-6``) or every norm is zero, there is no direction, and the average is taken.

A contribution that is too long is merged as if it were shorter by its ``cut``. The rules of
``skerry.algorithm.merge_robust`` hold for embeddings, too.

Contributions are put into an order that depends on their contents only, and added in f32 in that
order: a permutation changes no bit, and a second run on a machine gives the same bits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from skerry import code
from skerry.algorithm import backend
from skerry.algorithm.fragments import BLOCK, Fragment, padded
from skerry.algorithm.merge_numpy import OuterGradient, Spans, spans_of
from skerry.algorithm.merge_robust import robust
from skerry.algorithm.planes import check_planes, peak
from skerry.algorithm.presets import MERGES, ROBUST
from skerry.algorithm.weighting import by_slice
from skerry.errors import ConfigError, Diverged

DEGENERATE = 1e-6
"""A mean of unit vectors this short is rounding noise, not a direction."""
ABSURD = 100.0
"""A contribution with a value above this, and above this times the fragment's largest parameter,
does not come from training: a faulty device can send finite numbers, too."""
_ROUNDING = 1e-3
"""A bound on what rounding in f32 adds to a norm."""
_NO_NORM = 2.0**-100
"""Norms up to this count as zero: their reciprocal would leave f32."""


MergeRule: TypeAlias = "Callable[[NDArray[np.float32], NDArray[np.float64]], NDArray[np.float32]]"
"""A rule besides ``average`` and ``rda``, for the part of one tensor that a fragment holds.

It takes the decoded outer gradients f32 (contributions, n), in an order that depends on their
contents only, and weights f64 (contributions,) that sum to one, and returns the merged f32 (n,).
"""


class Direction(NamedTuple):
    """A merge before its last multiplication: merged slice s is ``gains[s] * vector`` over span s.

    ``vector`` is f32 (padded_size,), ``gains`` f32 (slices,). No contribution trained a slice that
    is ``idle``, bool (slices,): the vector is zero there, and no step is to be taken.
    """

    vector: NDArray[np.float32]
    gains: NDArray[np.float32]
    spans: Spans
    idle: NDArray[np.bool_]


def sound(item: OuterGradient, fragment: Fragment, master: NDArray[np.float32] | None) -> bool:
    """Return True if a contribution can come from training that has not diverged.

    Its norms come from its sender and set the length of the merge: none may be longer than its
    values allow. ``master`` f32 (padded_size,) is what it would be merged into; None for bare
    gradients, which have no scale of their own, and whose optimizer clips.
    """
    top = peak(item.scheme, item.planes)
    if not math.isfinite(top):
        return False
    if item.norms:
        longest = top * np.sqrt(np.diff(fragment.offsets)) * (1 + _ROUNDING)
        if bool((np.asarray(item.norms) > longest).any()):
            return False
    return top <= ABSURD or master is None or top <= ABSURD * float(np.abs(master).max(initial=0.0))


def rule_of(method: str) -> MergeRule | None:
    """Return the function that ``sync.merge`` names; None for a built-in rule.

    Raises CodeRefused if this machine does not allow it, ConfigError if it cannot be loaded.
    """
    if method in MERGES:
        return None
    try:
        return code.load(method, "sync.merge")
    except (ImportError, AttributeError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        known = ", ".join(MERGES)
        msg = f"sync.merge {method!r} cannot be loaded ({error}): use {known} or module:function"
        raise ConfigError(msg, path="sync.merge") from error


def slice_norms(fragment: Fragment, x: NDArray[np.float32]) -> tuple[float, ...]:
    """Return the L2 norm of each slice of a padded vector f32 (padded_size,)."""
    squares = backend.merger().segment_squares(x, spans_of(fragment))
    return tuple(float(norm) for norm in np.sqrt(squares))


def decoded_norms(item: OuterGradient, fragment: Fragment) -> tuple[float, ...]:
    """Return the L2 norm of each decoded slice of an outer gradient, without decoding it whole."""
    squares = backend.merger().decoded_squares(item, spans_of(fragment))
    return tuple(float(norm) for norm in np.sqrt(squares))


def merge(
    method: str,
    contributions: Sequence[OuterGradient],
    weights: Sequence[float],
    fragment: Fragment,
    averaged: Sequence[bool],
) -> NDArray[np.float32]:
    """Merge contributions to one outer gradient f32 (padded_size,).

    Args:
        method: the rule for every slice that ``averaged`` does not mark: one of ``MERGES`` or
            the ``module:function`` of a MergeRule.
        contributions: quantised outer gradients of this fragment; missing norms are computed.
        weights: one per contribution, none negative, sum one; else ValueError.
        fragment: which slices the vector holds.
        averaged: per slice, whether it is always averaged (embeddings).

    Raises:
        Diverged: the result would not be finite.

    """
    return scaled(direction(method, contributions, weights, fragment, averaged))


def scaled(found: Direction) -> NDArray[np.float32]:
    """Return the merged outer gradient f32 (padded_size,), in the direction's own memory."""
    zero = np.zeros_like(found.vector)
    step = backend.merger().step
    step(found.vector, found.gains, found.spans, zero, None, lr=-1.0, decay=0.0)
    return found.vector


@np.errstate(over="ignore", invalid="ignore")
def direction(
    method: str,
    contributions: Sequence[OuterGradient],
    weights: Sequence[float],
    fragment: Fragment,
    averaged: Sequence[bool],
    into: NDArray[np.float32] | None = None,
) -> Direction:
    """Merge like ``merge``, but leave the gain of each slice to the caller's last pass.

    The vector is written into ``into`` if given.
    """
    spans, rule = spans_of(fragment), rule_of(method)
    _check(contributions, weights, fragment, averaged)
    radial = ~np.asarray(averaged, np.bool_) & (method == "rda")
    ordered, shares, norms = _in_order(contributions, weights, fragment, needed=bool(radial.any()))
    idle = np.asarray(shares.max(axis=0) == 0)
    present = norms > _NO_NORM
    inverse = np.divide(1.0, norms, out=np.zeros_like(norms), where=present)
    left = np.array([[1.0 - item.cut] for item in ordered])
    radii = (shares * np.where(present, norms * left, 0.0)).sum(axis=0)
    averages = shares * left
    coefficients = np.where(radial, shares * inverse, averages).astype(np.float32)

    out = np.empty(fragment.padded_size, np.float32) if into is None else into
    accumulate = backend.merger().accumulate
    if method in ROBUST:
        for start, stop in zip(*spans.only(idle), strict=True):
            out[start * BLOCK : stop * BLOCK] = 0
        robust(method, ordered, shares[:, ~idle], left[:, 0], spans.only(~idle), out)
        lengths = np.sqrt(backend.merger().segment_squares(out, spans))
    else:
        lengths = np.sqrt(accumulate(ordered, coefficients, spans, out))
    if rule is not None:
        chosen = ~np.asarray(averaged, np.bool_) & ~idle
        _apply_rule(rule, ordered, shares, left[:, 0], fragment, chosen, out)
        lengths = np.sqrt(backend.merger().segment_squares(out, spans))
    lost = radial & (lengths <= DEGENERATE)
    if bool(lost.any()):
        average = averages[:, lost].astype(np.float32)
        lengths[lost] = np.sqrt(accumulate(ordered, average, spans.only(lost), out))
    kept = radial & ~lost
    gains = np.divide(radii, lengths, out=np.ones_like(lengths), where=kept).astype(np.float32)
    if not np.isfinite(np.square(gains * lengths).sum()):
        msg = "a merged outer gradient is not finite; a contribution carries NaN or infinity"
        raise Diverged(msg)
    return Direction(out, gains, spans, idle)


def _apply_rule(
    rule: MergeRule,
    ordered: Sequence[OuterGradient],
    shares: NDArray[np.float64],
    left: NDArray[np.float64],
    fragment: Fragment,
    chosen: NDArray[np.bool_],
    out: NDArray[np.float32],
) -> None:
    """Write a rule's merge of each chosen slice to ``out``; ConfigError if it fails or misfits."""
    places = zip(fragment.slices, fragment.offsets, strict=False)
    for number, (piece, start) in enumerate(places):
        if not chosen[number]:
            continue
        stop = start + padded(piece.size)
        decode, blocks = backend.cpu().dequantise, slice(start // BLOCK, stop // BLOCK)
        values = [decode(i.scheme, i.planes.part(blocks))[: piece.size] for i in ordered]
        rows = np.stack(values) * left[:, None].astype(np.float32)
        try:
            merged = np.asarray(rule(rows, shares[:, number]))
        except Exception as error:
            msg = f"sync.merge failed {code.failure(error, 'the merged values, f32 (n,)')}"
            raise ConfigError(msg, path="sync.merge") from error
        if merged.shape != (piece.size,):
            msg = f"sync.merge returned shape {merged.shape} for {piece.size} values."
            raise ConfigError(msg, path="sync.merge")
        out[start : start + piece.size] = merged


def largest(contributions: Sequence[OuterGradient], fragment: Fragment) -> int:
    """Return the index of the contribution with the largest norm, stated or decoded.

    A merge uses both.
    """

    def size(item: OuterGradient) -> float:
        return max((*decoded_norms(item, fragment), *item.norms))

    sizes = [size(item) for item in contributions]
    return sizes.index(max(sizes))


def _check(
    contributions: Sequence[OuterGradient],
    weights: Sequence[float],
    fragment: Fragment,
    averaged: Sequence[bool],
) -> None:
    blocks = spans_of(fragment).stops[-1]
    for contribution in contributions:
        check_planes(contribution.scheme, contribution.planes, None)
        if len(contribution.reach) not in {0, len(fragment.slices)}:
            msg = f"{len(contribution.reach)} parts of tokens for {len(fragment.slices)} slices"
            raise ValueError(msg)
        if contribution.planes.codes.shape[0] != blocks:
            got = contribution.planes.codes.shape[0]
            msg = f"a contribution of {got} blocks to fragment {fragment.index} of {blocks}"
            raise ValueError(msg)
    if len(averaged) != len(fragment.slices):
        msg = f"{len(averaged)} averaged flags for {len(fragment.slices)} slices"
        raise ValueError(msg)
    sound = len(weights) == len(contributions) and all(weight >= 0 for weight in weights)
    if not (sound and math.isclose(math.fsum(weights), 1.0, rel_tol=1e-6)):
        msg = f"weights {tuple(weights)} for {len(contributions)} contributions: want a sum of 1"
        raise ValueError(msg)


def _in_order(
    contributions: Sequence[OuterGradient],
    weights: Sequence[float],
    fragment: Fragment,
    *,
    needed: bool,
) -> tuple[list[OuterGradient], NDArray[np.float64], NDArray[np.float64]]:
    """Sort by content; returns contributions, shares and norms, both (M, slices).

    Norms are ones unless ``needed``. Norms that a header lacks, or that are negative or not finite,
    are computed from its planes.
    """

    def norms(item: OuterGradient) -> tuple[float, ...]:
        if not needed:
            return (1.0,) * len(fragment.slices)
        usable = len(item.norms) == len(fragment.slices)
        if usable and all(math.isfinite(norm) and norm >= 0 for norm in item.norms):
            return item.norms
        return decoded_norms(item, fragment)

    keys = [
        (weight, item.scheme, norms(item), item.reach, item.cut)
        for weight, item in zip(weights, contributions, strict=True)
    ]
    tied = len(set(keys)) < len(keys)
    ranked = sorted(
        zip(keys, (_digest(c) if tied else b"" for c in contributions), contributions, strict=True),
        key=lambda entry: entry[:2],
    )
    ordered = [item for _, _, item in ranked]
    reach = [item.reach for item in ordered]
    shares = by_slice([key[0] for key, _, _ in ranked], reach, len(fragment.slices))
    return ordered, shares, np.array([key[2] for key, _, _ in ranked])


def _digest(item: OuterGradient) -> bytes:
    digest = blake2b(item.planes.scales.data, digest_size=16)
    digest.update(item.planes.codes.data)
    return digest.digest()
