"""A chunk's envelope is believed only if it fits the run, the plan and its own sizes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skerry.algorithm.fragments import BLOCK, Fragment, LeafSpec, Plan, Slice
from skerry.algorithm.quantise_numpy import quantise
from skerry.algorithm.schemes import raw_bytes
from skerry.errors import (
    Corrupt,
    Implausible,
    Oversized,
    UnknownScheme,
    WireError,
    WrongPlan,
    WrongRun,
    WrongVersion,
)
from skerry.protocol import wire
from skerry.protocol.chunks import OUTER_STACK, seal, unseal
from skerry.protocol.codec import pack, packed_bound
from skerry.protocol.messages import ChunkHeader, ContributionHeader, ContributionKind, FrameKind

BLOCKS = 3
PLAN = Plan(
    leaves=(LeafSpec("a", (600,)), LeafSpec("b", (4, 100))),
    fragments=(
        Fragment(0, (Slice(0, 0, 512), Slice(1, 0, 200))),
        Fragment(1, (Slice(0, 512, 600), Slice(1, 200, 400))),
    ),
    digest=0xFFFF_0000_1234_5678,
)
X = np.random.default_rng(0).standard_normal(BLOCKS * BLOCK).astype(np.float32)
(CHUNK,) = pack("int4", quantise("int4", X), 1 << 20)
CONTRIBUTION = ContributionHeader(
    *(ContributionKind.OUTER_GRADIENT, "ann", 1, 5, 0, 2, 3, 40, 20, 81_920, 10, 20, 2.5, 99),
    norms=(1.5, 0.25),
)
HEADER = ChunkHeader(
    *("r", PLAN.digest, 0, 2, "ann", 1, 0, 1, "int4", 0, BLOCKS, raw_bytes("int4", BLOCKS)),
    identity=5,
    contribution=CONTRIBUTION,
)
BAD: tuple[Any, ...] = (float("nan"), float("inf"), -0.5)
MESSAGE = seal(HEADER, CHUNK.packed)


def refused(header: ChunkHeader = HEADER, packed: bytes = CHUNK.packed) -> type[WireError]:
    with pytest.raises(WireError) as caught:
        unseal(seal(header, packed), run="r", plan=PLAN)
    return caught.type


def test_what_is_sealed_is_unsealed() -> None:
    header, packed = unseal(MESSAGE, run="r", plan=PLAN)

    assert header == HEADER
    assert packed == CHUNK.packed
    assert packed.obj is MESSAGE, "it is a copy"


@settings(max_examples=300)
@given(st.binary(max_size=100), st.binary(max_size=100))
def test_any_bytes_in_a_good_frame_raise_nothing_but_wire_errors(
    header: bytes, payload: bytes
) -> None:
    with pytest.raises(WireError):
        unseal(wire.write(FrameKind.CHUNK, header, payload), run="r", plan=PLAN)


@settings(max_examples=200)
@given(st.data())
def test_any_header_values_are_accepted_or_a_wire_error(data: st.DataObject) -> None:
    number = st.integers(0, 2**64 - 1) | st.integers(0, 5)
    names = ["fragment", "index", "count", "first_block", "blocks", "raw_bytes"]
    changes = data.draw(st.dictionaries(st.sampled_from(names), number, min_size=1))
    changed: Any = replace(HEADER, **changes)
    try:
        header, _ = unseal(seal(changed, CHUNK.packed), run="r", plan=PLAN)
    except WireError:
        return
    assert header.first_block + header.blocks <= BLOCKS
    assert header.raw_bytes == raw_bytes(header.scheme, header.blocks)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"run": "s"}, WrongRun),
        ({"plan_digest": PLAN.digest - 1}, WrongPlan),
        ({"fragment": 2}, WrongPlan),
        ({"fragment": 1, "contribution": None}, Oversized),
        ({"scheme": "int3"}, UnknownScheme),
        *(
            ({"contribution": replace(CONTRIBUTION, **odd)}, Corrupt)
            for odd in [
                {"fragment": 1},
                {"norms": (1.0,)},
                *({"norms": (1.0, bad)} for bad in BAD),
                {"slice_tokens": (1,)},
            ]
        ),
        ({"contribution": replace(CONTRIBUTION, slice_tokens=(2**40, 0))}, Implausible),
        ({"version": 2**60, "contribution": None}, Implausible),
        ({"blocks": 4, "raw_bytes": 4 * 130}, Oversized),
        ({"blocks": 2**50, "raw_bytes": 130 * 2**50}, Oversized),
        ({"blocks": 0, "raw_bytes": 0}, Corrupt),
        ({"first_block": 1}, Corrupt),
        ({"raw_bytes": 389}, Corrupt),
        ({"raw_bytes": 391}, Oversized),
        ({"scheme": "int8"}, Corrupt),
        ({"index": 1}, Corrupt),
        ({"count": 0}, Corrupt),
        ({"count": 4}, Corrupt),
    ],
    ids=str,
)
def test_a_chunk_that_cannot_be_of_this_fragment_is_refused(
    changes: dict[str, Any], error: type[WireError]
) -> None:
    assert refused(replace(HEADER, **changes)) is error


def test_a_payload_above_what_its_blocks_can_take_is_oversized() -> None:
    assert refused(packed=bytes(packed_bound("int4", BLOCKS) + 1)) is Oversized


def test_the_state_of_an_outer_optimizer_may_stack_vectors_up_to_a_bound() -> None:
    def state(blocks: int) -> ChunkHeader:
        raw = raw_bytes("int4", blocks)
        return replace(HEADER, contribution=None, part="outer.mu", blocks=blocks, raw_bytes=raw)

    header, _ = unseal(seal(state(2 * BLOCKS), CHUNK.packed), run="r", plan=PLAN)
    assert header.blocks == 2 * BLOCKS
    assert refused(state(OUTER_STACK * BLOCKS + 1)) is Oversized


def test_an_unknown_kind_of_contribution_is_a_wrong_version() -> None:
    header: Any = wire.to_message(HEADER)
    header.contribution.MergeFromString(b"\x08\x63")  # kind = 99
    message = wire.write(FrameKind.CHUNK, header.SerializeToString(), CHUNK.packed)
    with pytest.raises(WrongVersion, match="ContributionKind 99"):
        unseal(message, run="r", plan=PLAN)
