"""The codec stage by stage and as whole messages: ``python tests/bench/bench_quantise.py``.

A whole message is quantising with the check for NaN, blosc2, header and xxh3 checksum; the reading
side checks, decompresses and decodes into one output, chunk by chunk. Peers run where installed.
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np
from harness import Case, compare, memcpy, missing, one_core, options, report
from numpy.typing import NDArray

from skerry.core import quantise
from skerry.core.backend import cpu
from skerry.core.fragments import BLOCK, LeafSpec, Plan, plan
from skerry.core.quantise import SCHEMES, Planes
from skerry.wire.codec import Chunk, encode_vector, unpack
from skerry.wire.envelope import seal, unseal
from skerry.wire.messages import ChunkHeader

RUN = "bench"
CHUNK_BYTES = 524_288
PART = 1 << 20
"""Elements per call of a single stage: one message of int4."""
GOALS = {"int4": (0.25, 0.3)}


def header(layout: Plan, scheme: str, chunk: Chunk) -> ChunkHeader:
    """Return the envelope of one chunk of fragment 0."""
    return ChunkHeader(
        run=RUN,
        plan_digest=layout.digest,
        fragment=0,
        version=1,
        sender="bench",
        incarnation=1,
        index=chunk.index,
        count=chunk.count,
        scheme=scheme,
        first_block=chunk.first_block,
        blocks=chunk.blocks,
        raw_bytes=chunk.raw_bytes,
        part="params",
    )


def write(layout: Plan, scheme: str, x: NDArray[np.float32]) -> list[bytes]:
    """Encode a vector to whole messages."""
    chunks = encode_vector(scheme, x, CHUNK_BYTES)
    return [seal(header(layout, scheme, chunk), chunk.packed) for chunk in chunks]


def read(layout: Plan, messages: list[bytes], out: NDArray[np.float32]) -> None:
    """Decode whole messages into ``out``."""
    for message in messages:
        found, packed = unseal(message, run=RUN, plan=layout)
        first = found.first_block * BLOCK
        part = out[first : first + found.blocks * BLOCK]
        cpu().dequantise(found.scheme, unpack(found, packed), part)


def encode_parts(scheme: str, parts: list[NDArray[np.float32]]) -> None:
    """Quantise part by part."""
    for part in parts:
        cpu().quantise(scheme, part)


def decode_parts(scheme: str, parts: list[Planes], out: list[NDArray[np.float32]]) -> None:
    """Decode part by part."""
    for planes, target in zip(parts, out, strict=True):
        cpu().dequantise(scheme, planes, target)


def stages(x: NDArray[np.float32], out: NDArray[np.float32]) -> list[Case]:
    """Return quantise and dequantise alone, for every scheme."""
    parts = [x[i : i + PART] for i in range(0, x.size, PART)]
    targets = [out[i : i + PART] for i in range(0, x.size, PART)]
    cases: list[Case] = []
    for name in SCHEMES:
        planes = [quantise.quantise(name, part) for part in parts]
        cases += [
            Case(f"{name} quantise", partial(encode_parts, name, parts), x.nbytes),
            Case(f"{name} dequantise", partial(decode_parts, name, planes, targets), x.nbytes),
        ]
    return cases


def messages(layout: Plan, x: NDArray[np.float32], out: NDArray[np.float32]) -> list[Case]:
    """Return whole-message encode and decode, for every scheme."""
    cases: list[Case] = []
    for name in SCHEMES:
        sealed = write(layout, name, x)
        encode, decode = GOALS.get(name, (None, None))
        cases += [
            Case(
                f"{name} whole message, encode", partial(write, layout, name, x), x.nbytes, encode
            ),
            Case(
                f"{name} whole message, decode",
                partial(read, layout, sealed, out),
                x.nbytes,
                decode,
            ),
        ]
    return cases


def peers(x: NDArray[np.float32]) -> list[Case]:
    """Return what others offer for the same job, where it is installed."""
    cases: list[Case] = []
    if find_spec("bitsandbytes") is not None:
        torch: Any = import_module("torch")
        functional: Any = import_module("bitsandbytes.functional")
        torch.set_num_threads(1)
        tensor = torch.from_numpy(x)
        codes, state = functional.quantize_blockwise(tensor, blocksize=BLOCK)
        encode = partial(functional.quantize_blockwise, tensor, blocksize=BLOCK)
        cases += [
            Case("bitsandbytes 8-bit blockwise, encode", encode, x.nbytes),
            Case(
                "bitsandbytes 8-bit blockwise, decode",
                partial(functional.dequantize_blockwise, codes, state),
                x.nbytes,
            ),
        ]
    if find_spec("hivemind") is not None:
        compression: Any = import_module("hivemind.compression")
        torch = import_module("torch")
        codec, tensor = compression.Uniform8BitQuantization(), torch.from_numpy(x)
        packed = codec.compress(tensor)
        cases += [
            Case("hivemind uniform 8-bit, encode", partial(codec.compress, tensor), x.nbytes),
            Case("hivemind uniform 8-bit, decode", partial(codec.extract, packed), x.nbytes),
        ]
    return cases


def main() -> None:
    """Run the bench on one core and print it."""
    chosen = options("Codec stages and whole messages against memcpy.")
    one_core()
    size = chosen.mib * 1024 * 256
    x = np.random.default_rng(0).standard_normal(size, np.float32) * np.float32(1e-3)
    out = np.zeros_like(x)
    layout = plan([LeafSpec("bench", (size,))], 1)
    cases = [memcpy(x.nbytes), *stages(x, out), *messages(layout, x, out), *peers(x)]
    results = compare(cases, chosen.rounds)
    report("codec", [*results, *missing("hivemind", "bitsandbytes")], as_json=chosen.json)


if __name__ == "__main__":
    main()
