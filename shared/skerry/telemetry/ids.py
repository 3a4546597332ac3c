"""Ids of traces and spans that every service computes alike: one sync round is one trace.

No trace id is handed out. It is a hash of (run, fragment, version), so every service that takes
part in a round knows its trace, whatever message was lost or came first; a span's id is a hash of
its trace and of what the span is about. Whether a trace is kept is read off its id by
OpenTelemetry's own ratio rule, so all services keep the same traces.
"""

from __future__ import annotations

from functools import lru_cache
from hashlib import blake2b

ROUND, TURN, SPAN = b"skerry.round", b"skerry.turn", b"skerry.span"


@lru_cache(maxsize=4096)
def trace_id(run: str, fragment: int, version: int, created_ns: int = 0) -> str:
    """Return the trace of the round that makes ``version`` of a fragment: 32 hexadecimal digits.

    ``created_ns`` is when the run was created: a second run of the same id has traces of its own.
    """
    return _hash(ROUND, 16, run, str(created_ns), str(fragment), str(version))


def turn_id(run: str, created_ns: int, name: str, began_ns: int) -> str:
    """Return the trace of what a service does with the global state outside of any round."""
    return _hash(TURN, 16, run, str(created_ns), name, str(began_ns))


def span_id(trace: str, *what: str | int) -> str:
    """Return the id of a span of a trace, by what it is about: 16 hexadecimal digits.

    Without ``what`` it is that of the trace's root.
    """
    return _hash(SPAN, 8, trace, *map(str, what))


def sampled(trace: str, ratio: float) -> bool:
    """Return True if a trace is kept at this ratio: OpenTelemetry's ``TraceIdRatioBased``.

    A trace that is kept at one ratio is kept at every higher one.
    """
    return int(trace[16:], 16) < round(ratio * 2**64)


def _hash(person: bytes, size: int, *parts: str) -> str:
    """Return that many bytes in hexadecimal, never all zero, which is no valid id."""
    text = "".join([f"{len(part)}:{part}" for part in parts])
    digest = blake2b(text.encode(), digest_size=size, person=person).hexdigest()
    return digest if digest.strip("0") else _hash(person, size, *parts, "again")
