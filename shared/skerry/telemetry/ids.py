"""Ids of traces and spans that every service computes alike: one sync round is one trace.

Nobody hands out a trace id. It is a hash of (run, fragment, version), so whoever takes part in a
round knows where it belongs, whatever message was lost or came first; a span's id is a hash of its
trace and of what the span is about. Whether a trace is kept is read off its id by OpenTelemetry's
own ratio rule, so all services keep the same ones. The text form is W3C Trace Context, version 00.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

TRACE_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
LONGEST_PARENT = 256
"""Characters of a trace parent that are looked at: one of a later version may be longer than ours.
"""
SAMPLED = 1
ROUND, TURN, SPAN = b"skerry.round", b"skerry.turn", b"skerry.span"


@dataclass(frozen=True, slots=True)
class SpanContext:
    """One span's place: 32 and 16 hexadecimal digits, and whether its trace is kept."""

    trace_id: str
    span_id: str
    sampled: bool = False

    @property
    def trace_parent(self) -> str:
        """The W3C text form."""
        return f"00-{self.trace_id}-{self.span_id}-{int(self.sampled):02x}"


@lru_cache(maxsize=4096)
def trace_id(run: str, fragment: int, version: int, created_ns: int = 0) -> str:
    """Return the trace of the round that makes ``version`` of a fragment: 32 hexadecimal digits.

    ``created_ns`` is when the run was created: a run that was begun anew under the same id is
    another run, and shares no trace with the one before.
    """
    return _hash(ROUND, 16, run, str(created_ns), str(fragment), str(version))


def turn_id(run: str, created_ns: int, name: str, began_ns: int) -> str:
    """Return the trace of what somebody does with the global state outside of any round."""
    return _hash(TURN, 16, run, str(created_ns), name, str(began_ns))


def span_id(trace: str, *what: str | int) -> str:
    """Return the id of a span of a trace, by what it is about: 16 hexadecimal digits.

    Without ``what`` it is that of the trace's root.
    """
    return _hash(SPAN, 8, trace, *(str(part) for part in what))


def sampled(trace: str, ratio: float) -> bool:
    """Tell whether a trace is kept at this ratio: OpenTelemetry's ``TraceIdRatioBased``.

    A trace that is kept at one ratio is kept at every higher one.
    """
    return int(trace[16:], 16) < round(ratio * 2**64)


def parse(text: str) -> SpanContext | None:
    """Return the place that a W3C trace parent names; None for anything that is none.

    It may come from anybody: nothing of a wrong length, case or version is believed.
    """
    found = TRACE_PARENT.fullmatch(text) if len(text) <= LONGEST_PARENT else None
    if found is None:
        return None
    version, trace, span, flags, rest = found.groups()
    known = version == "00"
    if version == "ff" or (known and rest) or not int(trace, 16) or not int(span, 16):
        return None
    return SpanContext(trace, span, bool(int(flags, 16) & SAMPLED))


def _hash(person: bytes, size: int, *parts: str) -> str:
    """Return that many bytes in hexadecimal, never all zero, which names nothing."""
    text = "".join(f"{len(part)}:{part}" for part in parts)
    found = blake2b(text.encode(), digest_size=size, person=person).hexdigest()
    return found if found.strip("0") else _hash(person, size, *parts, "again")
