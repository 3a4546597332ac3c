"""Faults asked for on the page: only with the token, and carried out by the cluster itself."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette

from skerry.errors import ConfigError
from skerry.service.control import CONTROL, listening
from skerry_health_monitor.web.faults import fault_route, inject
from skerry_health_monitor.web.gate import read_token

TOKEN = "a-token-of-24-characters"  # noqa: S105 - of this test
ALLOWED = {"authorization": f"Bearer {TOKEN}"}


@dataclass
class Cluster:
    """Answers orders on a control socket, and notes them."""

    orders: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])

    async def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        self.orders.append(order)
        if order["name"] == "syncer":
            msg = "There is no learner 'syncer' in this cluster."
            raise ConfigError(msg)
        return {"said": "It has begun."}


@asynccontextmanager
async def page(folder: Path, *, allowed: bool = True) -> AsyncGenerator[httpx.AsyncClient]:
    route = fault_route(partial(inject, folder), TOKEN, lambda: allowed)
    transport = httpx.ASGITransport(Starlette(routes=[route]))
    async with httpx.AsyncClient(transport=transport, base_url="http://monitor") as client:
        yield client


async def test_what_is_asked_for_is_passed_on_to_the_cluster(tmp_path: Path) -> None:
    cluster = Cluster()
    async with listening(tmp_path / CONTROL, cluster.answer), page(tmp_path) as client:
        for action in ("pause", "heal"):
            path = f"/api/learners/learner-1/{action}"
            answer = await client.post(path, headers=ALLOWED, json={"duration_s": 2.5})
            assert (answer.status_code, answer.json()) == (200, {"said": "It has begun."})
    assert cluster.orders == [
        {"op": "fault", "name": "learner-1", "fault": "pause", "duration_s": 2.5},
        {"op": "heal", "name": "learner-1"},
    ]


@pytest.mark.parametrize(
    ("running", "name", "words"),
    [(True, "syncer", "no learner 'syncer'"), (False, "learner-1", "is it still running?")],
)
async def test_a_refusal_says_why(tmp_path: Path, running: bool, name: str, words: str) -> None:
    control = tmp_path / (CONTROL if running else "another.sock")
    async with listening(control, Cluster().answer), page(tmp_path) as client:
        path = f"/api/learners/{name}/kill"
        answer = await client.post(path, headers=ALLOWED, json={"duration_s": 1})
    assert answer.status_code == 409
    assert words in answer.json()["error"]


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN],
)
async def test_without_the_token_nothing_is_done(tmp_path: Path, header: str) -> None:
    async with page(tmp_path) as client:
        answer = await client.post("/api/learners/a/kill", headers={"authorization": header})
    assert answer.status_code == 401


@pytest.mark.parametrize(
    ("allowed", "action", "body", "status"),
    [
        (False, "kill", b'{"duration_s": 1}', 403),
        (True, "explode", b'{"duration_s": 1}', 404),
        (True, "kill", b'{"duration_s": 0}', 409),
        (True, "kill", b'{"duration_s": 301}', 409),
        (True, "kill", b'{"duration_s": NaN}', 409),
        (True, "kill", b"[" * 1024, 409),
        (True, "kill", b"", 409),
        (True, "kill", b"{}", 409),
        (True, "kill", b"[1]", 409),
        (True, "kill", b'{"duration_s": 1}' + b" " * 2000, 409),
    ],
)
async def test_a_request_that_is_not_allowed_or_not_understood_is_refused(
    tmp_path: Path, allowed: bool, action: str, body: bytes, status: int
) -> None:
    async def chunked() -> AsyncGenerator[bytes]:  # its header says no length
        yield body

    async with page(tmp_path, allowed=allowed) as client:
        path = f"/api/learners/learner-1/{action}"
        answer = await client.post(path, headers=ALLOWED, content=chunked())
    assert answer.status_code == status


@pytest.mark.parametrize(
    ("content", "words"), [(None, "cannot be read"), (b"\xff", "cannot be read"), (b"x", "shorter")]
)
def test_an_unfit_token_file_is_one_sentence(
    tmp_path: Path, content: bytes | None, words: str
) -> None:
    if content is not None:
        (tmp_path / "token").write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        read_token(tmp_path / "token")
