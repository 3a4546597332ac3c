"""What a stranger says where a learner's processes meet ends and delays none of them."""

from __future__ import annotations

import socket
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress

import pytest

from skerry.client import meeting
from skerry.client.meeting import Group, come, gather


@contextmanager
def listener() -> Generator[tuple[socket.socket, ThreadPoolExecutor, Group]]:
    """Yield a stranger's connection to a first process that waits for one other."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        group = Group(2, 0, "127.0.0.1", free.getsockname()[1], "secret")
    with ThreadPoolExecutor(2) as threads:
        gathered = threads.submit(gather, group, "run", "a")
        stranger = None
        while stranger is None and not gathered.done():
            try:
                stranger = socket.create_connection((group.host, group.port), 20.0)
            except ConnectionRefusedError:
                continue
        assert stranger is not None
        with stranger:
            stranger.recv(4096)
            yield stranger, threads, group
        connections, address = gathered.result(20.0)
        assert connections.keys() == {1}
        assert address
        connections[1].close()


def other(group: Group) -> str:
    connection, address = come(Group(2, 1, group.host, group.port, "secret"), "run", "a")
    connection.close()
    return address


@pytest.mark.parametrize(
    "line",
    [
        b"[" * 4000,
        b'{"process": 1e999, "nonce": "", "proof": ""}',
        b'{"process": 1, "nonce": "", "proof": "\xc3\xa9"}',
        b"null",
        b"\xff",
    ],
)
def test_a_line_that_is_no_hello_is_passed_over(line: bytes) -> None:
    with listener() as (stranger, threads, group):
        stranger.sendall(line + b"\n")
        assert threads.submit(other, group).result(20.0)


def test_who_never_ends_its_line_is_waited_for_no_longer_than_for_a_hello(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(meeting, "HELLO_S", 0.5)
    with listener() as (stranger, threads, group):
        came = threads.submit(other, group)
        while not came.done():
            with suppress(OSError):  # it has hung up
                stranger.sendall(b" ")
            wait([came], 0.05)
        assert came.result(20.0)
