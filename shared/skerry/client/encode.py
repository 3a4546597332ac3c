"""Turns an outer gradient on the device into chunks, on the network's side, never in a step."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK, Fragment, Plan
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.planes import Planes, allocate
from skerry.algorithm.schemes import scheme_of
from skerry.client.mailbox import DeviceGradient, OutgoingContribution
from skerry.protocol.codec import Chunk, Shares, pack
from skerry.protocol.learner import claimed_by_slice
from skerry.protocol.messages import ContributionHeader

Vector = NDArray[np.float32]
Quantised = tuple[Planes, tuple[float, ...], Vector | None]
"""Planes, the norms of the decoded value per slice, and the residual that planes do not hold.

The residual is f32 [padded_size], None for a scheme without feedback.
"""
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Encoded:
    """A contribution ready to send: its header with norms, its planes, its residual."""

    header: ContributionHeader
    scheme: str
    planes: Planes
    residual: Vector | None
    shares: Shares | None = None
    squares: tuple[float, ...] = ()
    """Squares of the norms, if other processes of this learner must add theirs."""

    def chunks(self, chunk_bytes: int) -> Iterator[Chunk]:
        """Make the chunks, each when it is asked for; may be called again."""
        return pack(self.scheme, self.planes, chunk_bytes, self.shares)


class Stopwatch(Iterator[T]):
    """Passes an iterator's items on and counts the seconds that making them took."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self.spent_s = 0.0

    def __next__(self) -> T:
        began_s = time.perf_counter()
        try:
            return next(self._items)
        finally:
            self.spent_s += time.perf_counter() - began_s


def encode(outgoing: OutgoingContribution, plan: Plan, owed: Vector | None = None) -> Encoded:
    """Quantise a contribution; ``owed`` f32 [padded_size] is the residual of earlier ones.

    The norms are those of the decoded value. An accelerator quantises itself, and sends an eighth
    of the gradient to the host; a CPU uses the numba kernels, which release the GIL. Error feedback
    is always on the host, which has room for residuals. Raises Diverged if anything is not finite.
    """
    fragment, gradient = plan.fragments[outgoing.header.fragment], outgoing.gradient
    feedback = scheme_of(outgoing.scheme).feedback
    shares: Shares | None = getattr(gradient, "shares", None)
    squares: tuple[float, ...] = ()
    if feedback and isinstance(gradient, PartGradient):
        planes, squares, left_over = quantised_part(gradient, fragment, owed)
        made: Quantised = planes, tuple(math.sqrt(square) for square in squares), left_over
    elif feedback or isinstance(gradient, np.ndarray) or _is_on_cpu(gradient):
        made = _on_host(outgoing, fragment, owed, feedback=feedback)
    else:
        made = (*gradient.quantise(outgoing.scheme, fragment), None)
    planes, norms, residual = made
    tokens = claimed_by_slice(plan.leaves, fragment, outgoing.header.tokens, *outgoing.routed)
    header = replace(outgoing.header, norms=norms, slice_tokens=tokens)
    return Encoded(header, outgoing.scheme, planes, residual, shares, squares)


@runtime_checkable
class PartGradient(Protocol):
    """An outer gradient of which this process holds some blocks."""

    @property
    def scheme(self) -> str: ...
    @property
    def shares(self) -> Shares: ...
    def own(self) -> Vector:
        """Return those blocks, one after the other, in memory that the caller may write to."""
        ...


def quantised_part(
    gradient: PartGradient, fragment: Fragment, owed: Vector | None
) -> tuple[Planes, tuple[float, ...], Vector]:
    """Quantise this process's blocks with error feedback, each in its place.

    ``owed`` and the returned residual cover its own blocks. The second result is the sum of squares
    of the decoded values, by slice. Raises Diverged if anything is not finite.
    """
    scheme, shares = gradient.scheme, gradient.shares
    own = np.array([n for blocks in shares.ranges[shares.mine] for n in blocks], np.int64)
    meant, planes = gradient.own(), allocate(scheme, fragment.blocks)
    if not own.size:
        return planes, (0.0,) * len(fragment.slices), meant
    if owed is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            meant += owed
    made = cpu().quantise(scheme, meant)
    decoded = cpu().dequantise(scheme, made, None)
    planes.codes[own], planes.scales[own] = made.codes, made.scales
    starts = np.array(fragment.offsets[: len(fragment.slices)]) // BLOCK
    squares = np.zeros(len(starts))
    rows = np.square(decoded.reshape(-1, BLOCK), dtype=np.float64).sum(axis=1)
    np.add.at(squares, np.searchsorted(starts, own, side="right") - 1, rows)
    return planes, tuple(squares.tolist()), np.subtract(meant, decoded, out=meant)


def _is_on_cpu(gradient: DeviceGradient) -> bool:
    """Return True if the device is the CPU, where numba's kernels free the GIL."""
    devices = getattr(gradient, "devices", None)
    return devices is not None and all(device.platform == "cpu" for device in devices())


def _on_host(
    outgoing: OutgoingContribution, fragment: Fragment, owed: Vector | None, *, feedback: bool
) -> Quantised:
    meant = np.array(outgoing.gradient)  # a copy that may be written to
    if owed is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # the quantiser refuses what comes of it
            meant += owed
    planes = cpu().quantise(outgoing.scheme, meant)
    decoded = cpu().dequantise(outgoing.scheme, planes, None if feedback else meant)
    norms = slice_norms(fragment, decoded)
    residual = np.subtract(meant, decoded, out=meant) if feedback else None
    return planes, norms, residual


@dataclass(frozen=True, slots=True)
class _Kept:
    """Residuals f32 [padded_size] around the newest contribution; None is zero."""

    identity: int
    before: Vector | None
    after: Vector | None


@dataclass(slots=True)
class Residuals:
    """Quantisation errors of contributions, by fragment: up to 8 bytes a parameter.

    A scheme with ``feedback`` sends ``Q(g + e)`` instead of ``Q(g)`` and keeps ``g + e - Q(g + e)``
    as the next ``e`` of the same fragment, so that the sum of what has been decoded stays within
    one residual of the sum of what was meant (Karimireddy et al., arXiv 1901.09847, algorithm 2).

    A contribution that no commit merges leaves ``e`` as it was before: if it left the log, the next
    outer gradient has all of it, unless its progress is given up for good; if a commit refused it,
    its error is in the next one anyway, or not wanted. If the window dropped it and this learner
    never heard, its error is still sent, once. A learner that starts again has no ``e``, nor has
    genesis, which is f32. Used by one thread; arrays are never written to.
    """

    forgets: Callable[[int, int], None] = lambda *_: None
    """Called when a residual is forgotten: other processes of the learner forget theirs."""
    _kept: dict[int, _Kept] = field(default_factory=dict[int, _Kept])

    def owed(self, fragment: int, identity: int) -> Vector | None:
        """Return the residual to add to a contribution; the same each time that it is encoded."""
        kept = self._kept.get(fragment)
        if kept is None:
            return None
        return kept.before if kept.identity == identity else kept.after

    def keep(self, fragment: int, identity: int, residual: Vector) -> None:
        """Keep the residual of an encoded contribution."""
        self._kept[fragment] = _Kept(identity, self.owed(fragment, identity), residual)

    def unmerged(self, fragment: int, identity: int) -> None:
        """Forget the residual of a contribution that will never be merged.

        Nothing happens if a newer contribution has used it.
        """
        self.forgets(fragment, identity)
        kept = self._kept.get(fragment)
        if kept is not None and kept.identity == identity:
            self._kept[fragment] = _Kept(identity, kept.before, kept.before)
