"""Loopback ports for servers whose ports others must know before they start."""

from __future__ import annotations

import random
import socket
from contextlib import suppress

OURS = range(10_000, 32_768)
"""Those from 32768 on the kernel may give to any connection before their server starts."""


def free_ports(count: int) -> list[int]:
    """Return different ports that nothing listens on."""
    found: set[int] = set()
    while len(found) < count:
        port = random.SystemRandom().choice(OURS)
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            found.add(port)
    return list(found)


def free_port() -> int:
    return free_ports(1)[0]
