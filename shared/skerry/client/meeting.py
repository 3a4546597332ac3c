"""How the processes of one learner find each other before it begins.

The first one listens; the others connect and name their learner. Nothing here depends on JAX or
torch.
"""

from __future__ import annotations

import errno
import hmac
import json
import secrets
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import structlog

from skerry import installing
from skerry.client.processes import FollowingProcess, LeadProcess
from skerry.errors import ConfigError
from skerry.settings import loading
from skerry.settings.local import LearnerSettings

log = structlog.get_logger()

HELLO_S = 5.0
RETRY_S = 0.5
GONE_S = 15
"""A first process whose machine says nothing for so long is looked for while others are awaited."""
MOST_HELLO = 4096
NO_HELLO = (OSError, ValueError, TypeError, KeyError, OverflowError, RecursionError)
"""Errors that a line from a stranger may raise."""
WILDCARD = "0.0.0.0"  # noqa: S104 - compared with, not listened on


@dataclass(frozen=True, slots=True)
class Group:
    """A learner's processes, as the settings of each machine name them.

    Each proves to the other that it knows the ``secret``, without sending it.
    """

    processes: int
    process: int
    host: str
    port: int
    secret: str = field(default="", repr=False)

    @classmethod
    def of(cls, local: LearnerSettings | None) -> Group | None:
        """Return the group that a process belongs to, None for a learner of one process.

        Raises ConfigError for settings that do not name a group.
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
        secret = loading.secret_in(local.secret_file, "learner.secret_file")
        return cls(local.processes, local.process, host.strip("[]"), int(port), secret)


def meet(
    share: Callable[[str], str], at: str, place: tuple[int, int], run: str, learner: str
) -> LeadProcess | FollowingProcess:
    """Connect processes that can already share a text: ``share`` gives all of them the first's.

    ``at`` is the host at which the others reach the first one, ``place`` this process's number and
    how many there are. ``learner`` may be empty in all but the first.
    """
    process, processes = place
    if process:
        host, port, secret = json.loads(share(""))
        group = Group(processes, process, host, port, secret)
        return FollowingProcess(come(group, run, learner)[0], number=process)
    with _listening(at, 0) as server:
        group = Group(processes, 0, at, server.getsockname()[1], secrets.token_hex())
        share(json.dumps([at, group.port, group.secret]))
        return LeadProcess(_all_come(server, group, run, learner)[0])


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
    with server:
        return _all_come(server, group, run, learner)


def _all_come(
    server: socket.socket, group: Group, run: str, learner: str
) -> tuple[dict[int, socket.socket], str]:
    come: dict[int, tuple[socket.socket, str]] = {}
    log.info("waits_for_processes", port=group.port, processes=group.processes)
    while len(come) < group.processes - 1:
        connection, _ = server.accept()
        with suppress(*NO_HELLO):
            process, nonce = _welcomed(connection, group, run, learner)
            come[process] = connection, nonce
            continue
        connection.close()
    with _listening(group.host, 0) as free:
        address = f"{group.host}:{free.getsockname()[1]}"
    for connection, nonce in come.values():
        _say(connection, address=address, proof=_proof(group, nonce, address))
    return {process: connection for process, (connection, _) in come.items()}, address


def _proof(group: Group, *said: object) -> str:
    """Return a proof, over what was ``said``, that only a process with the secret can make."""
    return hmac.new(group.secret.encode(), json.dumps(said).encode(), "sha256").hexdigest()


def _release() -> str:
    """Return the releases that have to be the same, for all processes compile the same step."""
    found = {name: installing.version_of(name) for name in ("skerry", "jax")}
    return ", ".join(f"{name} {number}" for name, number in found.items() if number)


def _say(connection: socket.socket, **said: object) -> None:
    connection.sendall(json.dumps(said).encode() + b"\n")


def own(address: str) -> bool:
    """Return True if the host of ``host:port`` is an address of this machine, not a wildcard."""
    host, _, _ = address.rpartition(":")
    with _listening(host, 0) as found:
        return str(found.getsockname()[0]) != WILDCARD


def _listening(host: str, port: int) -> socket.socket:
    """Listen at the coordinator's address only if that is this machine's own, else at every one."""
    try:
        return socket.create_server((host, port))
    except OSError as error:
        if not isinstance(error, socket.gaierror) and error.errno != errno.EADDRNOTAVAIL:
            raise
        return socket.create_server(("", port))


def _welcomed(connection: socket.socket, group: Group, run: str, learner: str) -> tuple[int, str]:
    """Return the number and the nonce of a process; ValueError if it is not of this learner."""
    challenge = secrets.token_hex(16)
    _say(connection, nonce=challenge)
    hello = json.loads(_line(connection))
    process, nonce, theirs = int(hello["process"]), str(hello["nonce"]), str(hello["proof"])
    said = (hello["run"], hello["learner"] or learner, hello["processes"])
    release = hello.get("release", "an earlier release")
    msg = ""
    if not hmac.compare_digest(theirs, _proof(group, challenge, nonce, process)):
        msg = (
            "This process does not know the secret of the first one: give all of them the same"
            " learner.secret_file."
        )
    elif said != (run, learner, group.processes) or not 0 < process < group.processes:
        msg = (
            f"This process is {process} of {said[2]} of learner {said[1]!r} in run {said[0]!r}, and"
            f" the first one is of {group.processes} of {learner!r} in {run!r}: give all of them"
            " the same run, name and learner.processes."
        )
    elif release != (ours := _release()):
        msg = (
            f"This process runs {release}, and the first one {ours}: install the same releases for"
            " all processes of a learner."
        )
    if msg:
        _say(connection, refused=msg)
        raise ValueError(msg)
    return process, nonce


def come(group: Group, run: str, learner: str) -> tuple[socket.socket, str]:
    """Connect to the first process, waiting for it; returns the connection and JAX's address.

    Raises ConfigError if it is the first process of another learner.
    """
    log.info("waits_for_first_process", address=f"{group.host}:{group.port}")
    while True:
        answer: dict[str, Any] = {}
        with suppress(*NO_HELLO), ExitStack() as stack:
            connected = socket.create_connection((group.host, group.port), timeout=HELLO_S)
            connection = stack.enter_context(connected)
            _find_gone(connection)
            nonce, challenge = secrets.token_hex(16), json.loads(_line(connection))["nonce"]
            _say(
                connection,
                process=group.process,
                processes=group.processes,
                run=run,
                learner=learner,
                release=_release(),
                nonce=nonce,
                proof=_proof(group, challenge, nonce, group.process),
            )
            # the others come whenever they like
            answer = json.loads(_line(connection, patient=True))
            address = str(answer.get("address", ""))
            if hmac.compare_digest(str(answer.get("proof", "")), _proof(group, nonce, address)):
                stack.pop_all()
                return connection, address
        if "refused" in answer:
            raise ConfigError(str(answer["refused"]), path="learner.processes")
        time.sleep(RETRY_S)


def _find_gone(connection: socket.socket) -> None:
    """Have the system find a first process whose machine is gone: nothing is said until all come.

    Where it does not say how soon, that takes hours.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in {"TCP_KEEPIDLE": GONE_S, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}.items():
        if (option := getattr(socket, name, None)) is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _line(connection: socket.socket, *, patient: bool = False) -> bytes:
    """Read one short line, and not a byte more; ValueError or TimeoutError if none comes."""
    line, until_s = b"", time.monotonic() + HELLO_S
    while not line.endswith(b"\n"):
        connection.settimeout(None if patient else max(0.001, until_s - time.monotonic()))
        byte = connection.recv(1)
        if not byte or len(line) >= MOST_HELLO:
            msg = "no line"
            raise ValueError(msg)
        line += byte
    return line
