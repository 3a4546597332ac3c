"""The messages that tests/golden/*.bin hold, and the command that writes those files.

STOP before you run ``python tests/golden/regenerate.py --yes``: these bytes are what running
clusters and stored logs hold. A difference means that old and new releases cannot read each other.
That needs a new scheme id or a new wire version (see frame.proto), unless only the compressor's
choice of bytes changed and every *old* file still decodes to the same values, which
``test_golden_chunks_decode`` proves before you overwrite anything: copy the old files to
``earlier/`` first, where the test goes on proving it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import BLOCK, Fragment, LeafSpec, Plan, Slice
from skerry.algorithm.quantise_numpy import quantise
from skerry.algorithm.schemes import SCHEMES
from skerry.protocol import messages as m
from skerry.protocol import records
from skerry.protocol.chunks import seal
from skerry.protocol.codec import pack
from skerry.protocol.records import Record

HERE = Path(__file__).resolve().parent
RUN = "golden"
BLOCKS = 12
LEAVES = (LeafSpec("blocks.0.w", (8, 256)), LeafSpec("embed", (1000,), embedding=True))
PLAN = Plan(
    leaves=LEAVES,
    fragments=(Fragment(0, (Slice(0, 0, 2048), Slice(1, 0, 1000))),),
    digest=0x0123_4567_89AB_CDEF,
)


def vector() -> NDArray[np.float32]:
    """Return f32 (12*256,) by integer arithmetic alone: near-Gaussian blocks, then odd ones."""
    state = np.arange(BLOCKS * BLOCK * 8, dtype=np.uint64)
    for shift in (33, 29, 32):
        state = (state ^ (state >> np.uint64(shift))) * np.uint64(0xFF51_AFD7_ED55_8CCD)
    uniform = (state >> np.uint64(56)).astype(np.int64).reshape(-1, 8)
    x = ((uniform.sum(axis=1) - 1020) / 2.0**20).astype(np.float32).reshape(BLOCKS, BLOCK)
    x[8] = 0
    x[9] = np.float32(2.0**-140)
    x[10, 1:] = 0
    x[11] *= np.float32(2.0**100)
    return x.reshape(-1)


def contribution() -> m.ContributionHeader:
    return m.ContributionHeader(
        *(m.ContributionKind.OUTER_GRADIENT, "ann", 3, 41, 0, 6, 7, 168, 24, 98_304, 512, 608),
        *(2.25, 1_700_000_000_000_000_000),
        norms=(0.125, 3.5),
        trace_parent="00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
    )


def header(scheme: str) -> m.ChunkHeader:
    """Return the header of the one chunk that holds the whole vector."""
    raw = BLOCKS * (SCHEMES[scheme].code_bytes + 2 * SCHEMES[scheme].has_scales)
    return m.ChunkHeader(
        *(RUN, PLAN.digest, 0, 6, "ann", 3, 0, 1, scheme, 0, BLOCKS, raw),
        identity=41,
        contribution=contribution(),
    )


def chunk(scheme: str) -> bytes:
    (packed,) = pack(scheme, quantise(scheme, vector()), 1 << 20)
    return seal(header(scheme), packed.packed)


def commit() -> m.Commit:
    return m.Commit(
        *(RUN, PLAN.digest, 0, 7, 168, m.CommitOrigin.ROUND, "syncer-a", 9, 10, 11),
        *(1.5, 0.1),
        consumed=(
            m.Consumed("ann", 3, 41, 100, 104, 6, 0, 168, 24, 98_304, 512, 608, 0.75, 2.25),
            m.Consumed(
                *("bob", 1, 12, 105, 109, 5, 1, 160, 16, 65_536, 900, 964, 0.25, 2.5),
                *(16, 3.5, 0.75, 0.125, 2**63 + 9, -0.5),
            ),
        ),
        refused=(m.Refused(m.RefusalCause.TOO_STALE, "eve", 2, 7, 4096, 96, 128),),
        contrib_floor=109,
        progress=(m.LearnerProgress("ann", 3, 41, 4_000_000, 608),),
        params_digest=0xFEDC_BA98_7654_3210,
        master_digest=1,
        final=True,
        trace_id="0af7651916cd43dd8448eb211c80319c",
        merge_s=0.5,
        reason=m.CloseReason.GRACE_OVER,
        source="/data/c-6",
        source_version=6,
        previous=2**64 - 3,
    )


def examples() -> list[Record]:
    """Return one record of each kind, with every field set."""
    return [
        m.RunRecord(
            *(RUN, '{"train":{"steps":10}}', LEAVES, 1, 1, PLAN.digest, 5, "0.1.0"),
            *(m.RunState.FINISHED, "s3://bucket/checkpoint"),
        ),
        m.MemberRecord(RUN, "ann", 3, "host-1", 6, 2, 608, 168, m.InnerState.WARM, 12, (99, 7)),
        m.Round(RUN, PLAN.digest, 0, 7, 168, 8, "syncer-a", final=True, trace_id="0af7", attempt=1),
        m.Pulse(
            *(RUN, "ann", 3, m.LearnerPhase.TRAINING, 9, 168, 144, 589_824, 608, 2.25, 0.5),
            *(72.0, 80.0, 1_000_000, 2_000_000, 41, (7, 6, 7), 1, 2),
            *(1.5, 2.5, 3.5, 4.5, 9_000_000, 8_000_000, 5.5, 6.5),
        ),
        commit(),
        m.Manifest(
            commit(), (m.Part("delta", "int4", 77, (m.ChunkRef(200, 5000, 2**63),), 9, 3, 2),), 1
        ),
        m.Fence(RUN, 2, "syncer-a", 10),
        m.SyncerPulse(RUN, "syncer-a", "5f3a", 12, "host-2", (0, 2), (9, 10)),
        m.Start(RUN, "ann", 3, 13, 1),
        m.Quarantine(RUN, "eve", m.QuarantineReason.OPPOSED, "syncer-a", 17, released=True),
        m.Drill(RUN, "process 7 on host-3", 15, 16),
        m.CheckpointRecord(RUN, "/data/c-7", "ab" * 16, (7, 6), 168, 589_824, 11, 123_456, 77),
        m.Evaluation(
            RUN, "eve", 168, 589_824, (7, 6), 1.25, 3.5, 1.75, 8192, 2**63 + 5, 14, "text"
        ),
    ]


def samples() -> dict[str, bytes]:
    """Return every golden file's name and bytes as this release makes them."""
    chunks = {f"chunk_{scheme}.bin": chunk(scheme) for scheme in SCHEMES}
    return chunks | {f"{type(r).__name__}.bin": records.encode(r) for r in examples()}


def main() -> int:
    if sys.argv[1:] != ["--yes"]:
        print(__doc__)
        return 2
    for name, data in samples().items():
        (HERE / name).write_bytes(data)
        print(f"wrote {name}: {len(data)} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
