"""Remove the addresses of other brokers from what a broker sends, so that no client goes there.

A server of a cluster sends every client, at first and whenever its cluster changes, the addresses
of the others. A service that a fault cuts off would go round the proxy.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any, cast

WITH_PAYLOAD = (b"MSG ", b"HMSG ")
"""These lines end with the size of what follows them."""
VERBS = (*WITH_PAYLOAD, b"INFO ", b"PING", b"PONG", b"+OK", b"-ERR")
PEERS = ("connect_urls", "ws_connect_urls")
END = b"\r\n"
MOST_LINE_BYTES = 1024**2
MOST_DIGITS = 12


@dataclass(slots=True)
class PeerFilter:
    """One connection's bytes from its broker; what is not NATS in the clear passes as it is."""

    _held: bytes = field(default=b"", init=False)
    _skip: int = field(default=0, init=False)
    _foreign: bool = field(default=False, init=False)

    def without_peers(self, data: bytes) -> bytes:
        """Return what to pass on; the beginning of a line waits for its end.

        Payloads are stepped over by their size: what looks like a line in there is none.
        """
        if self._foreign:
            return data
        data, self._held = self._held + data, b""
        passed: list[bytes] = []
        begin, at = 0, self._skip
        while at < len(data):
            line = _line(data, at)
            size = _payload_bytes(line)
            if size is None:
                self._foreign = True
                at = len(data)
            elif not line.endswith(END):
                self._held = line
                data = data[:at]
            else:
                if line.startswith(b"INFO "):
                    passed += [data[begin:at], _filtered(line)]
                    begin = at + len(line)
                at += len(line) + size
        self._skip = at - len(data)
        return b"".join((*passed, data[begin:]))

    def rest(self) -> bytes:
        """Return what still waits for the end of its line: nothing more comes."""
        rest, self._held = self._held, b""
        return rest


def _line(data: bytes, at: int) -> bytes:
    """Return the line that begins here, or as much of it as there is."""
    end = data.find(END, at)
    return data[at:] if end < 0 else data[at : end + len(END)]


def _payload_bytes(line: bytes) -> int | None:
    """Return how many bytes follow a line, as far as it is known; None if it is not NATS."""
    if line.startswith(WITH_PAYLOAD) and line.endswith(END):
        size = line[: -len(END)].rpartition(b" ")[2]
        return int(size) + len(END) if size.isdigit() and len(size) <= MOST_DIGITS else None
    known = any(line.startswith(verb) or verb.startswith(line) for verb in VERBS)
    return 0 if known and len(line) <= MOST_LINE_BYTES else None


def _filtered(line: bytes) -> bytes:
    """Return an INFO without the addresses of others; one that cannot be read as it is."""
    try:
        info = cast("dict[str, Any]", json.loads(line[len(b"INFO ") :]))
        if not any(name in info for name in PEERS):
            return line
        kept = {name: value for name, value in info.items() if name not in PEERS}
    except (ValueError, TypeError, AttributeError):
        return line
    return b"INFO " + json.dumps(kept, separators=(",", ":")).encode() + END
