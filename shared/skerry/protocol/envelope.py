"""The envelope of a payload chunk: its header and its packed bytes in one checked frame."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.algorithm.fragments import BLOCK
from skerry.algorithm.schemes import raw_bytes, scheme_of
from skerry.errors import Corrupt, Oversized, WrongPlan
from skerry.protocol import frame, proto
from skerry.protocol.codec import packed_bound
from skerry.protocol.door import check, check_contribution
from skerry.protocol.messages import ChunkHeader, FrameKind
from skerry.protocol.records import check_plan, check_run

if TYPE_CHECKING:
    from skerry.algorithm.fragments import Fragment, Plan

OUTER_STACK = 16
"""A leaf of the outer optimizer's state is at most this many times as long as its fragment."""


def seal(header: ChunkHeader, packed: bytes) -> bytes:
    """Return the message that carries one chunk; Oversized above the caps of the frame."""
    return frame.write(FrameKind.CHUNK, proto.encode(header), packed)


def unseal(
    data: bytes | memoryview, *, run: str, plan: Plan, checked: bool = False
) -> tuple[ChunkHeader, memoryview]:
    """Return the header of a chunk and its packed bytes, a view into ``data``.

    Each check that fails is a WireError of its own, in this order: wire version (WrongVersion),
    sizes (Truncated, Oversized), checksum (Corrupt), run (WrongRun), plan digest and fragment
    (WrongPlan), scheme (UnknownScheme), blocks and sizes against the plan's fragment (Corrupt,
    Oversized), numbers and norms (Implausible, Corrupt). What a returned header says may be
    allocated. With ``checked`` the checksum is skipped, because the caller has compared one over
    all of ``data``.
    """
    found = frame.read(FrameKind.CHUNK, data, checked=checked)
    header = proto.decode(ChunkHeader, found.header)
    check_run(header.run, run)
    check_plan(header.plan_digest, plan.digest)
    if header.fragment >= len(plan.fragments):
        msg = f"There is no fragment {header.fragment} in a plan of {len(plan.fragments)}."
        raise WrongPlan(msg)
    fragment = plan.fragments[header.fragment]
    scheme_of(header.scheme)
    _check_blocks(header, fragment)
    _check_sizes(header, len(found.payload))
    check(header)
    _check_contribution(header, fragment)
    return header, found.payload


def _check_blocks(header: ChunkHeader, fragment: Fragment) -> None:
    limit = vector_blocks(header.part, fragment)
    stop = header.first_block + header.blocks
    if header.blocks < 1 or stop > limit:
        msg = f"Blocks {header.first_block} to {stop} are not in a vector of {limit} blocks."
        raise Oversized(msg) if header.blocks > limit else Corrupt(msg)
    if header.index >= header.count or header.count > limit:
        msg = f"Chunk {header.index} of {header.count} cannot be of a vector of {limit} blocks."
        raise Corrupt(msg)


def vector_blocks(part: str, fragment: Fragment) -> int:
    """Return the most blocks a part can have; an outer optimizer may stack several vectors."""
    stacked = OUTER_STACK if part.startswith("outer.") else 1
    return stacked * fragment.padded_size // BLOCK


def _check_sizes(header: ChunkHeader, packed: int) -> None:
    want = raw_bytes(header.scheme, header.blocks)
    if header.raw_bytes != want:
        msg = f"{header.raw_bytes} bytes are not the {want} of {header.blocks} blocks."
        raise Oversized(msg) if header.raw_bytes > want else Corrupt(msg)
    bound = packed_bound(header.scheme, header.blocks)
    if packed > bound:
        msg = f"A payload of {packed} bytes is above the {bound} that its blocks can take."
        raise Oversized(msg)


def _check_contribution(header: ChunkHeader, fragment: Fragment) -> None:
    contribution = header.contribution
    if contribution is None:
        return
    if contribution.fragment != header.fragment:
        msg = f"A contribution to {contribution.fragment} came as fragment {header.fragment}."
        raise Corrupt(msg)
    check_contribution(contribution, len(fragment.slices))
