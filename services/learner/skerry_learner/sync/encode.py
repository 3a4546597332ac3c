"""From an outer gradient on the device to chunks: run by the network's side, never by a step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import numpy as np

from skerry.core.backend import cpu, merger
from skerry.core.fragments import Fragment, Plan
from skerry.core.merge import slice_norms
from skerry.core.quantise import Planes
from skerry.errors import Diverged
from skerry.wire.codec import Chunk, pack
from skerry.wire.messages import ContributionHeader
from skerry_learner.sync.mailbox import Outgoing


def load_kernels() -> None:
    """Import, and the first time compile, what would else hold up the first contribution."""
    cpu()
    merger()


def encode(
    outgoing: Outgoing, plan: Plan, chunk_bytes: int
) -> tuple[ContributionHeader, Callable[[], Iterator[Chunk]]]:
    """Quantise a contribution: its header with norms, and a way to make its chunks, repeatedly.

    The norms are those of the decoded gradient. Quantised where the gradient lies: an accelerator
    sends an eighth of it to the host, a CPU uses the numba kernels, which give up the GIL. Raises
    Diverged if anything is not finite.
    """
    fragment = plan.fragments[outgoing.header.fragment]
    on_cpu = all(d.platform == "cpu" for d in outgoing.gradient.devices())
    planes, norms = (_on_cpu if on_cpu else _on_device)(outgoing, fragment)
    header = replace(outgoing.header, norms=norms)
    return header, lambda: pack(outgoing.scheme, planes, chunk_bytes)


def _on_cpu(outgoing: Outgoing, fragment: Fragment) -> tuple[Planes, tuple[float, ...]]:
    gradient = np.array(outgoing.gradient)  # a copy: the kernels want memory that is ours
    planes = cpu().quantise(outgoing.scheme, gradient)
    return planes, slice_norms(fragment, cpu().dequantise(outgoing.scheme, planes, gradient))


def _on_device(outgoing: Outgoing, fragment: Fragment) -> tuple[Planes, tuple[float, ...]]:
    from skerry.core import device

    codes, scales, finite = device.quantise(outgoing.scheme, outgoing.gradient)
    decoded = device.dequantise(outgoing.scheme, codes, scales)
    norms = device.slice_norms(fragment, decoded)
    codes, scales, finite, norms = jax.device_get((codes, scales, finite, norms))
    if not finite:
        msg = f"The outer gradient of fragment {fragment.index} is not finite: it is not sent."
        raise Diverged(msg)
    return Planes(codes, scales), tuple(float(norm) for norm in norms)
