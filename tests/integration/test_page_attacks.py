"""Attacks on the page of a real monitor process: each is refused, and others are still answered."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from skerry.log import ledger
from skerry.log.nats.bus import NatsBus
from skerry.settings.models import RunConfig
from skerry_health_monitor.web.connections import MOST_BY_ADDRESS, REQUEST_S, TAKE_S
from skerry_health_monitor.web.server import POLICY
from tests.support.builders import checkpoint_record
from tests.support.monitor import DEADLINE_S, Running, monitor
from tests.support.nats_server import NatsServer
from tests.support.processes import call
from tests.support.scripted_run import ScriptedRun

pytestmark = pytest.mark.nats

TOKEN = "a-token-of-some-length"  # noqa: S105 - of a test
PATHS = ("/", "/api/run", "/api/stream", "/metrics", "/api/rounds/0/1", "/static/app.js")
SCRIPT = "</script><script>alert(1)</script>"


@pytest.fixture
async def running(shared_nats: NatsServer, run_id: str) -> AsyncGenerator[Running]:
    """The monitor of a run whose checkpoint has a script for a name."""
    async with NatsBus(shared_nats.url) as bus, monitor(shared_nats.url, run_id) as running:
        scripted = await ScriptedRun.begin(bus, run_id, config=RunConfig())
        await scripted.commit_all()
        record = checkpoint_record(SCRIPT, run=run_id, versions=(1, 1, 1))
        await ledger.record_checkpoint(bus, record)
        await running.until("/api/run", lambda run: run["run"]["checkpoint"])
        yield running


@asynccontextmanager
async def guarded(url: str, run: str, token: Path) -> AsyncGenerator[Running]:
    """A monitor that listens beyond the loopback."""
    sets = 'health.host="0.0.0.0"', f'health.token_file="{token}"', 'health.names="skerry.example"'
    async with monitor(url, run, *sets) as running:
        yield running


async def asked(running: Running, path: str, method: str = "GET", **headers: str) -> int:
    """Return the status of an answer, whose body is not read: one of them has no end."""
    given = {name.replace("_", "-"): value for name, value in headers.items()}
    async with (
        httpx.AsyncClient(base_url=running.url) as client,
        client.stream(method, path, headers=given) as answer,
    ):
        return answer.status_code


async def test_a_name_that_is_pointed_here_gets_nothing(running: Running) -> None:
    """DNS rebinding: the browser takes it for the attacker's own host, and says so."""
    for path in (*PATHS, "/healthz", "/api/learners/a/kill"):
        assert await asked(running, path, host="evil.example") == 421, path
    for host in ("127.0.0.1.evil.example", "localhost.evil.example:80", "x@y", "[", "a b", ""):
        assert await asked(running, "/api/run", host=host) in {400, 421}, host
    assert await asked(running, "/api/run", host="localhost:1") == 200
    assert await asked(running, "/api/run", host="[::1]") == 200


async def test_another_sites_page_gets_nothing(running: Running) -> None:
    for site in ("cross-site", "same-site"):
        for path in PATHS:
            said = {"sec_fetch_site": site, "sec_fetch_mode": "no-cors"}
            assert await asked(running, path, **said) == 403
            assert await asked(running, path, "POST", **said) == 403
        followed = {"sec_fetch_site": site, "sec_fetch_mode": "navigate"}
        assert await asked(running, "/", **followed) == 200  # a link to the page
        assert await asked(running, "/api/learners/a/kill", "POST", **followed) == 404


async def test_a_name_that_is_a_script_is_data(running: Running) -> None:
    async with httpx.AsyncClient(base_url=running.url) as client:
        for path in ("/api/rounds/0/1", "/api/run", "/metrics"):
            answer = await client.get(path)
            assert answer.headers["content-type"].split(";")[0] in {
                "application/json", "text/plain"
            }  # fmt: skip
            assert answer.headers["x-content-type-options"] == "nosniff"
            assert answer.headers["cross-origin-resource-policy"] == "same-origin"
            assert answer.headers["content-security-policy"] == POLICY
        assert (await client.get("/api/run")).json()["run"]["checkpoint"] == SCRIPT


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text(TOKEN)
    return path


async def test_beyond_the_loopback_everything_needs_the_token(
    shared_nats: NatsServer, run_id: str, token: Path
) -> None:
    async with (
        guarded(shared_nats.url, run_id, token) as running,
        httpx.AsyncClient(base_url=running.url) as client,
    ):
        assert (await client.get("/healthz")).json() == {"ok": True, "status": "waiting"}
        for path in PATHS:
            answer = await client.get(path)
            assert (answer.status_code, answer.headers["www-authenticate"][:5]) == (401, "Basic")
            for kind in ("Basic", "Bearer"):
                for given in ("x", "Og==", "=", "////", TOKEN[:-1]):
                    said = {"authorization": f"{kind} {given}"}
                    assert await asked(running, path, **said) == 401, said
        assert (await client.get("/", auth=("me", TOKEN))).status_code == 200
        assert await asked(running, "/metrics", authorization=f"Bearer {TOKEN}") == 200
        named = {"host": "skerry.example:8787", "authorization": f"Bearer {TOKEN}"}
        assert await asked(running, "/", **named) == 200


async def test_beyond_the_loopback_it_does_not_start_without_a_token(
    shared_nats: NatsServer, run_id: str
) -> None:
    given = ("--nats", shared_nats.url, "--run", run_id, "--set", 'health.host="0.0.0.0"')
    ended = call(sys.executable, "-m", "skerry_health_monitor", *given)
    assert ended.returncode == 2
    assert "health.token_file" in ended.stderr.splitlines()[-1]


async def opened(running: Running, sent: bytes = b"") -> tuple[Any, asyncio.StreamWriter]:
    host, port = running.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
    writer.write(sent)
    return reader, writer


def held(running: Running) -> int:
    """Return how many connections the monitor holds."""
    port = int(running.url.rpartition(":")[2])
    found = psutil.Process(running.process.pid).net_connections("tcp")
    return sum(c.status == "ESTABLISHED" and c.laddr.port == port for c in found)


async def test_hundreds_of_idle_connections_keep_nobody_out(running: Running) -> None:
    async with AsyncExitStack() as stack:
        for number in range(600):  # shells give this process 1,024 files
            _, writer = await opened(running, b"GET / HTTP/1.1\r\nHost: lo" * (number % 2))
            stack.callback(writer.close)
            if number % 100 == 99:
                assert await asked(running, "/api/run") == 200
                assert held(running) <= MOST_BY_ADDRESS
        spent = psutil.Process(running.process.pid).cpu_times().user
        assert await asked(running, "/api/run") == 200
        assert psutil.Process(running.process.pid).cpu_times().user - spent < 1.0


async def ended(reader: Any, within_s: float) -> None:
    with suppress(ConnectionError):
        async with asyncio.timeout(within_s + DEADLINE_S):
            while await reader.read(1024):
                pass


SLOW = {
    "nothing": b"",
    "half a head": b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ",
    "half a body": b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9\r\n\r\nx",
    "half of a second head": b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\nGET / HT",
}


@pytest.mark.drill
async def test_whoever_sends_no_whole_request_is_cut_off(running: Running) -> None:
    """One byte a second keeps no connection either."""

    async def dripping(sent: bytes) -> None:
        reader, writer = await opened(running, sent)
        drip = asyncio.create_task(_drip(writer))
        await ended(reader, REQUEST_S)
        drip.cancel()
        writer.close()

    await asyncio.gather(*map(dripping, SLOW.values()))


async def _drip(writer: asyncio.StreamWriter) -> None:
    with suppress(ConnectionError):
        while True:
            writer.write(b"x")
            await writer.drain()
            await asyncio.sleep(1.0)


@pytest.mark.drill
async def test_whoever_takes_no_answer_is_cut_off(running: Running) -> None:
    """Answers that are never read fill the transport: others get theirs, then it hangs up."""
    page = b"GET /static/vendor/uPlot.iife.min.js HTTP/1.1\r\nHost: localhost\r\n\r\n"
    _, writer = await opened(running, page * 400)
    async with asyncio.timeout(TAKE_S + DEADLINE_S):
        while held(running):
            assert await asked(running, "/healthz") == 200
            await asyncio.sleep(0.5)
    writer.close()
