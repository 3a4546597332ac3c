"""What hivemind and bitsandbytes make of the same job: f32 to bytes on the wire, and back.

They run where they install, and are no dependency of ours: ``pip install hivemind bitsandbytes
'numpy<2.4'`` (hivemind 1.1.12 does not decode with a later numpy). hivemind's averaging cuts a
vector into parts of 512 KiB on the wire and makes a protobuf message of each, so that is timed;
bitsandbytes has no message, so its codes and scales are joined to bytes, block size as ours. Each
side runs on the thread and core of the bench.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from harness import Case, Result
from numpy.typing import NDArray

F32 = NDArray[np.float32]
BLOCK = 256
PART_BYTES = 1 << 19
PARAMETERS, STEPS = 0.02, 1e-4
"""Standard deviations, as bench_codec.py's: 16 bits are for parameters, fewer for differences."""


WORST = 0.25
"""The relative L2 error from which on a peer is not doing the same job, but failing."""


class Codec(NamedTuple):
    """One codec of a peer: a part of a vector to bytes, and bytes to a part of ``size``."""

    name: str
    part: int
    sigma: float
    encode: Callable[[F32], bytes]
    decode: Callable[[bytes, int], F32]


def hivemind() -> Iterator[Codec]:
    """Yield the codecs that hivemind's averaging offers."""
    torch: Any = import_module("torch")
    package: Any = import_module("hivemind.compression")
    proto: Any = import_module("hivemind.proto.runtime_pb2")

    def encode(kind: int, x: F32) -> bytes:
        sent: bytes = package.serialize_torch_tensor(torch.from_numpy(x), kind).SerializeToString()
        return sent

    def decode(sent: bytes, size: int) -> F32:
        found: F32 = package.deserialize_torch_tensor(proto.Tensor.FromString(sent)).numpy()
        return found

    half = partial(encode, proto.FLOAT16)
    yield Codec("hivemind float16", PART_BYTES // 2, PARAMETERS, half, decode)
    for name, kind in (("uniform", proto.UNIFORM_8BIT), ("blockwise", proto.BLOCKWISE_8BIT)):
        send = partial(encode, kind)
        yield Codec(f"hivemind {name} 8-bit", PART_BYTES, STEPS, send, decode)


def bitsandbytes() -> Iterator[Codec]:
    """Yield bitsandbytes' blockwise 8-bit codec and NF4."""
    torch: Any = import_module("torch")
    package: Any = import_module("bitsandbytes.functional")
    nf4 = partial(package.quantize_4bit, quant_type="nf4")
    _, codebook = package.quantize_blockwise(torch.zeros(BLOCK), blocksize=BLOCK)
    _, table = nf4(torch.zeros(BLOCK), blocksize=BLOCK)

    def encode(quantise: Callable[..., tuple[Any, Any]], x: F32) -> bytes:
        codes, state = quantise(torch.from_numpy(x), blocksize=BLOCK)
        return b"".join((state.absmax.numpy().data, codes.numpy().data))

    def parts(sent: bytes, size: int) -> tuple[Any, Any]:
        scales = torch.frombuffer(sent, dtype=torch.float32, count=size // BLOCK)
        return torch.frombuffer(sent, dtype=torch.uint8, offset=scales.nbytes), scales

    def eight(sent: bytes, size: int) -> F32:
        codes, scales = parts(sent, size)
        state = {"absmax": scales, "code": codebook.code, "blocksize": BLOCK}
        found: F32 = package.dequantize_blockwise(codes, **state).numpy()
        return found

    def four(sent: bytes, size: int) -> F32:
        codes, scales = parts(sent, size)
        state = {"shape": torch.Size((size,)), "dtype": torch.float32, "blocksize": BLOCK}
        kept = package.QuantState(absmax=scales, code=table.code, quant_type="nf4", **state)
        found: F32 = package.dequantize_4bit(codes[:, None], kept).numpy().ravel()
        return found

    whole = partial(encode, package.quantize_blockwise)
    yield Codec("bitsandbytes blockwise 8-bit", PART_BYTES, STEPS, whole, eight)
    yield Codec("bitsandbytes NF4", 2 * PART_BYTES, STEPS, partial(encode, nf4), four)


def measured(codec: Codec, noise: F32) -> tuple[list[Case], Result]:
    """Return what to time of a codec and its size on the wire; RuntimeError above WORST."""
    x = noise * np.float32(codec.sigma)
    parts = [x[at : at + codec.part] for at in range(0, x.size, codec.part)]
    sent = [codec.encode(part) for part in parts]

    def send() -> None:
        for part in parts:
            codec.encode(part)

    def receive() -> None:
        for part, message in zip(parts, sent, strict=True):
            codec.decode(message, part.size)

    got = np.concatenate([codec.decode(m, p.size) for m, p in zip(sent, parts, strict=True)])
    error = float(np.linalg.norm(got - x) / np.linalg.norm(x))
    if not error < WORST:
        msg = f"{codec.name} does not come back: relative error {error}"
        raise RuntimeError(msg)
    note = f"{8 * sum(map(len, sent)) / x.size:.2f} bits per parameter, error {error:.4f}"
    named = ((f"{codec.name} send", send), (f"{codec.name} receive", receive))
    cases = [Case(name, run, x.nbytes) for name, run in named]
    return cases, Result(f"{codec.name} size", 0.0, 0.0, note=note)


def all_peers(noise: F32) -> tuple[list[Case], list[Result]]:
    """Return what to time of every peer, and a line for each that is absent or fails here."""
    cases, notes = list[Case](), list[Result]()
    peers: Iterable[Callable[[], Iterator[Codec]]] = (hivemind, bitsandbytes)
    for peer in peers:
        if find_spec(peer.__name__) is None or find_spec("torch") is None:
            notes.append(Result(peer.__name__, 0.0, 0.0, note="not installed"))
            continue
        import_module("torch").set_num_threads(1)
        warnings.simplefilter("ignore")  # theirs, about buffers that nobody writes to
        try:
            for codec in peer():
                timed, size = measured(codec, noise)
                cases += timed
                notes.append(size)
        except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
            why = f"fails here: {type(error).__name__}: {error}"[:100]
            notes.append(Result(peer.__name__, 0.0, 0.0, note=why))
    return cases, notes
