"""The codec stage by stage, against a memcpy: ``python tests/bench/bench_quantise.py``.

Each stage runs over one message's worth of parameters at a time, as it does between its neighbours
in a run. Whole messages, from f32 to bytes and back, are bench_codec.py's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from harness import Case, compare, memcpy, one_core, options, report
from numpy.typing import NDArray

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK, LeafSpec, Plan, plan
from skerry.algorithm.planes import Planes
from skerry.algorithm.schemes import SCHEMES
from skerry.protocol.chunks import seal, unseal
from skerry.protocol.codec import blocks_per_chunk, pack, unpack
from skerry.protocol.messages import ChunkHeader
from skerry.settings.models import SyncConfig

F32 = NDArray[np.float32]
T = TypeVar("T")
RUN = "bench"
CHUNK_BYTES = SyncConfig().chunk_bytes


def each(run: Callable[[T], object], parts: Sequence[T]) -> Callable[[], None]:
    """Return a call that does one stage for every part, and lets the outcome go."""

    def stage() -> None:
        for part in parts:
            run(part)

    return stage


def stages(scheme: str, x: F32, out: F32, layout: Plan) -> list[Case]:
    """Return the stages of one scheme, each fed with what the one before it makes."""
    size = blocks_per_chunk(scheme, CHUNK_BYTES) * BLOCK
    parts = [(x[at : at + size], out[at : at + size]) for at in range(0, x.size, size)]
    planes = [cpu().quantise(scheme, part) for part, _ in parts]
    chunks = [next(iter(pack(scheme, made, CHUNK_BYTES))) for made in planes]
    headers = [
        ChunkHeader(
            *(RUN, layout.digest, 0, 1, "ann", 1, index, len(chunks), scheme),
            *(index * size // BLOCK, chunk.blocks, chunk.raw_bytes),
        )
        for index, chunk in enumerate(chunks)
    ]
    packed = [(header, chunk.packed) for header, chunk in zip(headers, chunks, strict=True)]
    sealed = [seal(header, data) for header, data in packed]
    decoded = list(zip(planes, (target for _, target in parts), strict=True))

    def shrink(made: Planes) -> object:
        return list(pack(scheme, made, CHUNK_BYTES))

    named = {
        "quantise": each(lambda part: cpu().quantise(scheme, part[0]), parts),
        "pack": each(shrink, planes),
        "seal": each(lambda part: seal(*part), packed),
        "unseal": each(lambda data: unseal(data, run=RUN, plan=layout), sealed),
        "unpack": each(lambda part: unpack(*part), packed),
        "dequantise": each(lambda part: cpu().dequantise(scheme, *part), decoded),
    }
    return [Case(f"{scheme} {name}", run, x.nbytes) for name, run in named.items()]


def main() -> None:
    """Run the bench on one core and print it."""
    chosen = options(__doc__ or "")
    one_core()
    size = chosen.mib * 1024 * 256
    x = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(1e-3)
    out = np.zeros_like(x)
    layout = plan([LeafSpec("bench", (size,))], 1)
    cases = [memcpy(x.nbytes)]
    for scheme in SCHEMES:
        cases += stages(scheme, x, out, layout)
    results = compare(cases, chosen.rounds)
    report("quantise", "the stages of the codec one by one", results, [], chosen.json)


if __name__ == "__main__":
    main()
