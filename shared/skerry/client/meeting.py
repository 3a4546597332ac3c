"""Where the processes of one learner find each other before it begins.

The first one listens, and the others come and say whose they are. Nothing here knows of JAX.
"""

from __future__ import annotations

import errno
import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import structlog

from skerry.errors import ConfigError
from skerry.settings.models import LearnerSettings

log = structlog.get_logger()

HELLO_S = 5.0
RETRY_S = 0.5
MOST_HELLO = 4096
WILDCARD = "0.0.0.0"  # noqa: S104 - compared with, not listened on


@dataclass(frozen=True, slots=True)
class Group:
    """A learner's processes, as settings of each machine say."""

    processes: int
    process: int
    host: str
    port: int

    @classmethod
    def of(cls, local: LearnerSettings | None) -> Group | None:
        """Return the group that a process belongs to, None for a learner of one process.

        Raises ConfigError for settings that make none.
        """
        if local is None or local.processes == 1:
            return None
        host, _, port = local.coordinator.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            msg = (
                f"learner.coordinator is {local.coordinator!r}: a learner of {local.processes}"
                " processes needs the host and port where the first one listens, such as"
                " 10.0.0.1:7077."
            )
            raise ConfigError(msg, path="learner.coordinator")
        if local.process >= local.processes:
            msg = (
                f"learner.process is {local.process}: with {local.processes} processes it counts"
                f" from 0 to {local.processes - 1}."
            )
            raise ConfigError(msg, path="learner.process")
        return cls(local.processes, local.process, host.strip("[]"), int(port))


def gather(group: Group, run: str, learner: str) -> tuple[dict[int, socket.socket], str]:
    """Wait until every other process has come; returns their connections and an address for JAX's.

    Raises ConfigError where the port is taken.
    """
    try:
        server = _listening(group.host, group.port)
    except OSError as error:
        msg = (
            f"Port {group.port} of learner.coordinator cannot be listened on ({error.strerror}):"
            " choose a free one, the same for every process."
        )
        raise ConfigError(msg, path="learner.coordinator") from error
    come: dict[int, socket.socket] = {}
    log.info("waits_for_processes", port=group.port, processes=group.processes)
    with server:
        while len(come) < group.processes - 1:
            connection, _ = server.accept()
            with suppress(OSError, ValueError, TypeError, KeyError):
                process = _welcomed(connection, group, run, learner)
                come[process] = connection
                continue
            connection.close()
    with _listening(group.host, 0) as free:
        address = f"{group.host}:{free.getsockname()[1]}"
    for connection in come.values():
        connection.sendall(json.dumps({"address": address}).encode() + b"\n")
    return come, address


def own(address: str) -> bool:
    """Return True for a host and port at which this machine, and not all of it, can listen."""
    host, _, _ = address.rpartition(":")
    with _listening(host, 0) as found:
        return str(found.getsockname()[0]) != WILDCARD


def _listening(host: str, port: int) -> socket.socket:
    """Listen where the others come, and nowhere else if that address is this machine's own."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port))


def _welcomed(connection: socket.socket, group: Group, run: str, learner: str) -> int:
    """Return the number of a process that says it is of this learner; ValueError if it is not."""
    connection.settimeout(HELLO_S)
    hello = json.loads(_line(connection))
    process, said = int(hello["process"]), (hello["run"], hello["learner"], hello["processes"])
    if said != (run, learner, group.processes) or not 0 < process < group.processes:
        msg = (
            f"This process is {process} of {said[2]} of learner {said[1]!r} in run {said[0]!r}, and"
            f" the first one is of {group.processes} of {learner!r} in {run!r}: give all of them"
            " the same run, name and learner.processes."
        )
        connection.sendall(json.dumps({"refused": msg}).encode() + b"\n")
        raise ValueError(msg)
    return process


def come(group: Group, run: str, learner: str) -> tuple[socket.socket, str]:
    """Connect to the first process, waiting for it; returns the connection and JAX's address.

    Raises ConfigError if it is the first process of something else.
    """
    hello = {"process": group.process, "processes": group.processes}
    hello_line = json.dumps(hello | {"run": run, "learner": learner}).encode() + b"\n"
    log.info("waits_for_first_process", address=f"{group.host}:{group.port}")
    while True:
        answer: dict[str, Any] = {}
        with suppress(OSError, ValueError):
            connection = socket.create_connection((group.host, group.port), timeout=HELLO_S)
            connection.sendall(hello_line)
            connection.settimeout(None)  # the others may come whenever they like
            answer = json.loads(_line(connection))
            if "address" in answer:
                return connection, str(answer["address"])
            connection.close()
        if "refused" in answer:
            raise ConfigError(str(answer["refused"]), path="learner.processes")
        time.sleep(RETRY_S)


def _line(connection: socket.socket) -> bytes:
    """Read one short line, and not a byte more; ValueError if there is none."""
    line = b""
    while not line.endswith(b"\n"):
        byte = connection.recv(1)
        if not byte or len(line) >= MOST_HELLO:
            msg = "no line"
            raise ValueError(msg)
        line += byte
    return line
