"""From an outer gradient on the device to chunks: run by the network's side, never by a step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu, merger
from skerry.algorithm.fragments import Fragment, Plan
from skerry.algorithm.merge import slice_norms
from skerry.algorithm.planes import Planes
from skerry.algorithm.schemes import scheme_of
from skerry.errors import Diverged
from skerry.protocol.codec import Chunk, pack
from skerry.protocol.messages import ContributionHeader
from skerry_learner.sync.mailbox import Gradient, OutgoingContribution


def load_kernels() -> None:
    """Import, and the first time compile, what would else hold up the first contribution."""
    cpu()
    merger()


class Quantised(NamedTuple):
    """Planes, the norms of what they decode to per slice, and what they do not hold.

    ``residual`` is f32 [padded_size], None for a scheme without feedback.
    """

    planes: Planes
    norms: tuple[float, ...]
    residual: NDArray[np.float32] | None = None


@dataclass(frozen=True, slots=True)
class Encoded:
    """A contribution ready to leave: its header with norms, its planes, what they do not hold."""

    header: ContributionHeader
    scheme: str
    planes: Planes
    residual: NDArray[np.float32] | None

    def chunks(self, chunk_bytes: int) -> Iterator[Chunk]:
        """Make the chunks, each when it is asked for; as often as one likes."""
        return pack(self.scheme, self.planes, chunk_bytes)


def encode(
    outgoing: OutgoingContribution, plan: Plan, owed: NDArray[np.float32] | None = None
) -> Encoded:
    """Quantise a contribution; ``owed`` f32 [padded_size] is what earlier ones did not hold.

    The norms are those of the decoded value. Quantised where the gradient lies: an accelerator
    sends an eighth of it to the host, a CPU uses the numba kernels, which give up the GIL. With
    error feedback always on the host, where there is room for residuals. Raises Diverged if
    anything is not finite.
    """
    fragment = plan.fragments[outgoing.header.fragment]
    if scheme_of(outgoing.scheme).feedback:
        made = _with_feedback(outgoing, fragment, owed)
    else:
        made = (_on_cpu if _is_on_cpu(outgoing.gradient) else _on_device)(outgoing, fragment)
    header = replace(outgoing.header, norms=made.norms)
    return Encoded(header, outgoing.scheme, made.planes, made.residual)


def _is_on_cpu(gradient: Gradient) -> bool:
    if isinstance(gradient, np.ndarray):
        return True
    return all(device.platform == "cpu" for device in gradient.devices())


def _on_cpu(outgoing: OutgoingContribution, fragment: Fragment) -> Quantised:
    gradient = np.array(outgoing.gradient)  # a copy: the kernels want memory that is ours
    planes = cpu().quantise(outgoing.scheme, gradient)
    decoded = cpu().dequantise(outgoing.scheme, planes, gradient)
    return Quantised(planes, slice_norms(fragment, decoded))


def _with_feedback(
    outgoing: OutgoingContribution, fragment: Fragment, owed: NDArray[np.float32] | None
) -> Quantised:
    meant = np.array(outgoing.gradient)
    if owed is not None:
        with np.errstate(over="ignore", invalid="ignore"):  # the quantiser refuses what comes of it
            meant += owed
    planes = cpu().quantise(outgoing.scheme, meant)
    decoded = cpu().dequantise(outgoing.scheme, planes)
    norms = slice_norms(fragment, decoded)
    return Quantised(planes, norms, np.subtract(meant, decoded, out=meant))


def _on_device(outgoing: OutgoingContribution, fragment: Fragment) -> Quantised:
    import jax

    from skerry.algorithm import quantise_jax

    gradient = jax.numpy.asarray(outgoing.gradient)
    codes, scales, finite = quantise_jax.quantise(outgoing.scheme, gradient)
    decoded = quantise_jax.dequantise(outgoing.scheme, codes, scales)
    norms = quantise_jax.slice_norms(fragment, decoded)
    codes, scales, finite, norms = jax.device_get((codes, scales, finite, norms))
    if not finite:
        msg = f"The outer gradient of fragment {fragment.index} is not finite: it is not sent."
        raise Diverged(msg)
    return Quantised(Planes(codes, scales), tuple(float(norm) for norm in norms))
