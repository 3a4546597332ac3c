"""What a fragment costs on the wire, message by message: ``python tests/bench/bench_codec.py``.

Sending is what a learner does: quantise with the check for NaN, zstd, header, checksum, one message
per chunk, let go once it is sent. Receiving is what the syncer does: every check of the envelope,
assembling in one set of planes, decoding to f32. Beside speed this shows the bits per parameter on
the wire and the most memory that sending takes. hivemind's and bitsandbytes' codecs do the same
beside ours where they install (peers.py). bench_quantise.py times the stages one by one.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from functools import partial

import numpy as np
from harness import Case, Goal, Result, compare, goals, memcpy, one_core, options, report
from numpy.typing import NDArray
from peers import all_peers

from skerry.algorithm.backend import cpu
from skerry.algorithm.fragments import BLOCK, LeafSpec, Plan, plan
from skerry.algorithm.schemes import SCHEMES
from skerry.protocol.chunks import PlaneAssembler, seal, unseal
from skerry.protocol.codec import pack
from skerry.protocol.messages import ChunkHeader
from skerry.settings.models import SyncConfig

F32 = NDArray[np.float32]
RUN = "bench"
CHUNK_BYTES = SyncConfig().chunk_bytes
SIGMA = dict.fromkeys(SCHEMES, 1e-4) | {"f32": 0.02, "bf16": 0.02}
"""Trained parameters for the schemes of global fragments, Adam's steps for the others."""
GOALS = {"int4": (0.25, 0.3)}
"""Sending and receiving, as part of memcpy's speed."""
BITS = {"int4": 3.6, "bf16": 11.0}
"""The most bits per parameter, of contributions and of global fragments."""


def messages(layout: Plan, scheme: str, x: F32) -> Iterator[bytes]:
    """Yield the sealed messages of a vector, each made when it is asked for."""
    for c in pack(scheme, cpu().quantise(scheme, x), CHUNK_BYTES):
        header = ChunkHeader(
            *(RUN, layout.digest, 0, 1, "ann", 1, c.index, c.count, scheme),
            *(c.first_block, c.blocks, c.raw_bytes),
        )
        yield seal(header, c.packed)


def send(layout: Plan, scheme: str, x: F32) -> int:
    """Make every message and let it go; returns the bytes that would have been sent."""
    return sum(map(len, messages(layout, scheme, x)))


def receive(layout: Plan, scheme: str, sent: list[bytes], out: F32) -> None:
    """Check and assemble messages and decode them into ``out``."""
    assembler = PlaneAssembler(scheme, out.size // BLOCK)
    for message in sent:
        assembler.add(*unseal(message, run=RUN, plan=layout))
    cpu().dequantise(scheme, assembler.planes, out)


def peak_bytes(layout: Plan, scheme: str, x: F32) -> int:
    """Return the most memory that sending takes beside the vector itself."""
    tracemalloc.start()
    try:
        send(layout, scheme, x)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def ours(scheme: str, noise: F32) -> tuple[list[Case], Result, list[Goal]]:
    """Return what to time of a scheme, its size, and the goal for that if there is one."""
    x = noise * np.float32(SIGMA[scheme])
    layout = plan([LeafSpec("w", (x.size,))], 1)
    sent, out = list(messages(layout, scheme, x)), np.empty_like(x)
    receive(layout, scheme, sent, out)
    bound = SCHEMES[scheme].relative_error * np.abs(x).max() + SCHEMES[scheme].absolute_error
    if np.abs(out - x).max() > bound:
        msg = f"{scheme} does not come back within its error bound"
        raise RuntimeError(msg)
    speed = GOALS.get(scheme, (None, None))
    error = float(np.linalg.norm(out - x) / np.linalg.norm(x))
    bits, peak = 8 * sum(map(len, sent)) / x.size, peak_bytes(layout, scheme, x) / 2**20
    cases = [
        Case(f"{scheme} send", partial(send, layout, scheme, x), x.nbytes, speed[0]),
        Case(f"{scheme} receive", partial(receive, layout, scheme, sent, out), x.nbytes, speed[1]),
    ]
    note = f"{bits:.2f} bits per parameter, error {error:.4f}, {peak:.1f} MiB to send"
    size = Result(f"{scheme} size", 0.0, 0.0, note=note)
    if scheme not in BITS:
        return cases, size, []
    return cases, size, [Goal(f"codec: {scheme} size", BITS[scheme], bits, "bits", at_most=True)]


def main() -> None:
    """Run the bench on one core and print it."""
    wanted = options(__doc__ or "")
    one_core()
    noise = np.random.default_rng(0).standard_normal(wanted.mib << 18, np.float32)
    cases, sizes, bounds = [memcpy(noise.nbytes)], list[Result](), list[Goal]()
    for scheme in SCHEMES:
        timed, size, bound = ours(scheme, noise)
        cases += timed
        sizes.append(size)
        bounds += bound
    others, notes = all_peers(noise)
    results = compare([*cases, *others], wanted.rounds)
    title = "whole messages, and how their speed compares with memcpy's"
    found = [*goals("codec", cases, results), *bounds]
    report("codec", title, [*results, *sizes, *notes], found, wanted.json)


if __name__ == "__main__":
    main()
