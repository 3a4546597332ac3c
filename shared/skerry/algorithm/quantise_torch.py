"""Quantisation on a torch device: the arithmetic of ``blocks`` in torch operations.

torch has no arithmetic on unsigned words, so bits are moved as int32; codes and scales have the
bits that every backend gives. A scheme with error feedback is left to the host, where its residuals
are.
"""
# pyright: basic

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from skerry.algorithm.blocks import (
    BF16_MAX,
    HALF,
    INF_BITS,
    MAGNITUDE,
    POWER_BASE,
    POWER_UP,
    SCALE_FLOOR,
    ZERO_PEAK,
    step,
)
from skerry.algorithm.fragments import BLOCK, Fragment
from skerry.algorithm.schemes import Scheme, scheme_of
from skerry.errors import UnknownScheme

SIGN = 0x8000


class TorchPlanes(NamedTuple):
    """``Planes`` as tensors: codes u8 (blocks, code_bytes), scales i16 (blocks,) or (0,).

    ``finite`` is a bool scalar; the planes mean nothing where it is false.
    """

    codes: Tensor
    scales: Tensor
    finite: Tensor


def quantise(scheme: str, x: Tensor) -> TorchPlanes:
    """Quantise f32 (blocks*256,) on its device; UnknownScheme for a scheme with feedback."""
    kind = scheme_of(scheme)
    if kind.feedback:
        msg = f"{scheme} keeps residuals on the host: quantise it there."
        raise UnknownScheme(msg)
    rows = x.reshape(-1, BLOCK)
    bits = rows.view(torch.int32)
    peak = (bits & MAGNITUDE).amax(dim=1) if rows.numel() else bits.new_zeros(0)
    finite = (peak < INF_BITS).all()
    none = torch.zeros(0, dtype=torch.int16, device=x.device)
    if scheme == "f32":
        return TorchPlanes(rows.view(torch.uint8), none, finite)
    if scheme == "bf16":
        return TorchPlanes(_bf16(bits), none, finite)
    scales = _scales(kind, peak)
    ratios = rows * _reciprocals(scales)[:, None]
    packed = _powers(ratios) if scheme == "e3m0" else _integers(kind.low_bits, ratios)
    return TorchPlanes(packed, scales.to(torch.int16), finite)


def dequantise(scheme: str, planes: TorchPlanes) -> Tensor:
    """Decode what ``quantise`` made, f32 (blocks*256,)."""
    codes = planes.codes
    if scheme == "f32":
        return codes.view(torch.float32).reshape(-1)
    if scheme == "bf16":
        return _widened(codes.view(torch.int16)).reshape(-1)
    if scheme != "e3m0":
        high, low = codes[:, :HALF], scheme_of(scheme).low_bits
        whole = torch.cat((high << 4, high & 0xF0), dim=1).view(torch.int8) >> (4 - low)
        if low:
            fine = [(codes[:, HALF:] >> shift) & (2**low - 1) for shift in range(0, 8, low)]
            whole = (whole & -(2**low)) | torch.cat(fine, dim=1).view(torch.int8)
    else:
        fours = torch.cat((codes & 15, codes >> 4), dim=1).to(torch.int32)
        magnitude = (1 << (fours & 7)) >> 1
        whole = torch.where((fours & 8) > 0, -magnitude, magnitude)
    return (_widened(planes.scales)[:, None] * whole.to(torch.float32)).reshape(-1)


def slice_norms(fragment: Fragment, x: Tensor) -> Tensor:
    """Return the L2 norm of each slice of a padded vector, f32 (slices,).

    Each is scaled by its largest magnitude, so that no square leaves f32.
    """
    spans = zip(fragment.offsets[:-1], fragment.offsets[1:], strict=True)
    return torch.stack([_norm(x[start:stop]) for start, stop in spans])


def _norm(x: Tensor) -> Tensor:
    top = x.abs().amax()
    return top * torch.linalg.vector_norm(x / torch.where(top > 0, top, torch.ones_like(top)))


def _widened(words: Tensor) -> Tensor:
    """Return bf16 bits as the f32 that they stand for."""
    return (words.to(torch.int32) << 16).view(torch.float32)


def _scales(kind: Scheme, peak: Tensor) -> Tensor:
    """Return each block's scale, bf16 bits as i32: rounded up, 0 for a zero block."""
    raw = (peak.view(torch.float32) * float(step(kind))).view(torch.int32)
    held = ((raw + 0xFFFF) >> 16).clamp(SCALE_FLOOR, kind.scale_ceiling)
    return torch.where(peak <= ZERO_PEAK, torch.zeros_like(held), held)


def _reciprocals(scales: Tensor) -> Tensor:
    wide = (scales << 16).view(torch.float32)
    zero = torch.zeros_like(wide)
    return torch.where(scales > 0, 1.0 / torch.where(scales > 0, wide, zero + 1.0), zero)


def _powers(ratios: Tensor) -> Tensor:
    """Return sign and exponent in four bits, two elements a byte."""
    bits = ratios.view(torch.int32)
    raised = ((bits & MAGNITUDE) + POWER_UP) >> 23
    power = raised.clamp(POWER_BASE, POWER_BASE + 7) - POWER_BASE
    return _nibbles(torch.where(power > 0, power | ((bits >> 28) & 8), power).to(torch.int8))


def _nibbles(codes: Tensor) -> Tensor:
    """Return the low nibbles of both halves, one byte for two elements."""
    whole = codes.view(torch.uint8)
    return (whole[:, :HALF] & 15) | (whole[:, HALF:] << 4)


def _integers(low: int, ratios: Tensor) -> Tensor:
    """Return the high nibbles of both halves, then the low bits, one part of a block at a time."""
    codes = torch.round(ratios).to(torch.int8)
    high = _nibbles(codes >> low)
    if not low:
        return high
    fine = (codes.view(torch.uint8) & (2**low - 1)).reshape(-1, 8 // low, BLOCK * low // 8)
    packed = fine[:, 0]
    for number in range(1, 8 // low):
        packed = packed | (fine[:, number] << (number * low))
    return torch.cat((high, packed), dim=1)


def _bf16(bits: Tensor) -> Tensor:
    """Round to nearest even, but beyond the largest value towards zero; u8 (blocks, 512)."""
    low = bits & MAGNITUDE
    word = ((low + 0x7FFF + ((low >> 16) & 1)) >> 16).clamp(max=BF16_MAX)
    return (word | ((bits >> 16) & SIGN)).to(torch.int16).view(torch.uint8)
