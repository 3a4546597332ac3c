"""The page's files and routes: nothing from elsewhere, nothing run that others wrote."""

from __future__ import annotations

import re
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from skerry.log.memory import MemoryBroker
from skerry.settings.local import HealthSettings
from skerry.settings.models import ModelConfig, RunConfig
from skerry_health_monitor.service import Monitor, page_of
from skerry_health_monitor.web.faults import Inject
from skerry_health_monitor.web.gate import Gate
from skerry_health_monitor.web.sections import _model
from skerry_health_monitor.web.server import FILES, listen, serve_http
from tests.support.builders import background, until
from tests.support.scripted_run import ScriptedRun

DEADLINE_S = 20.0
TOKEN = "a-token-of-some-length"  # noqa: S105 - of a test
OWN = [path for path in FILES.rglob("*") if path.is_file() and "vendor" not in path.parts]


async def no_fault(name: str, action: str, duration_s: float) -> str:
    raise AssertionError((name, action, duration_s))


@asynccontextmanager
async def served(
    scripted: ScriptedRun, health: HealthSettings | None = None, faults: Inject | None = None
) -> AsyncGenerator[httpx.AsyncClient]:
    monitor = Monitor(scripted.bus, "run", until_finished=False)
    listening = listen("127.0.0.1", 0)
    hub, app = page_of(monitor, health or HealthSettings(), faults)
    serving = serve_http(app, listening, hub.close)
    url = f"http://127.0.0.1:{listening.getsockname()[1]}"
    async with background(monitor.follow(), serving), httpx.AsyncClient(base_url=url) as client:
        feed = monitor.feed
        await until(lambda: feed.model and feed.model.history.timeline.rounds, DEADLINE_S)
        yield client


async def begun(*, chaos: bool = False) -> ScriptedRun:
    config = RunConfig.model_validate({"chaos": {"allow": chaos}})
    scripted = await ScriptedRun.begin(MemoryBroker().connect(), config=config)
    await scripted.commit_all()
    return scripted


async def test_the_page_and_its_files_come_with_a_policy_that_forbids_other_hosts() -> None:
    async with served(await begun()) as client:
        index = await client.get("/")
        assert (index.status_code, index.headers["content-type"][:9]) == (200, "text/html")
        policy = index.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        named = set(re.findall(r'(?:src|href)="(/static/[^"]+)"', index.text))
        for path in named:
            assert (await client.get(path)).status_code == 200, path
        assert (await client.get("/static/../page.py")).status_code == 404


@pytest.mark.parametrize("path", OWN, ids=lambda path: path.name)
def test_no_file_of_the_page_names_another_host_or_makes_markup_of_text(path: Path) -> None:
    text = path.read_text()
    hosts = set(re.findall(r"https?://([^/\s\"'`]+)", text))
    assert hosts <= {"www.w3.org"}
    forbidden = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function|style="
    assert re.search(forbidden, text) is None


def test_every_module_is_loaded_before_it_is_asked_for() -> None:
    index = (FILES / "index.html").read_text()
    modules = {path.name for path in FILES.glob("*.js")}
    assert {name for name in modules if f"/static/{name}" not in index} == set()


def test_the_chart_library_comes_with_its_licence() -> None:
    vendor = FILES / "vendor"
    assert "Permission is hereby granted" in (vendor / "uPlot-LICENSE.txt").read_text()
    assert "uPlot (v1." in (vendor / "uPlot.iife.min.js").read_text()[:200]


async def test_a_round_leads_to_its_ledger_record() -> None:
    scripted = await begun()
    for _ in range(3):
        await scripted.commit_all()
    async with served(scripted) as client:
        told = (await client.get("/api/rounds/2/3")).json()
        assert (told["fragment"], told["version"], told["reason"]) == (2, 3, "all_arrived")
        assert told["plan_digest"] == f"{scripted.plan.digest:016x}"
        record = await scripted.bus.get("SKERRY_run_LEDGER", told["ledger_sequence"])
        assert record is not None
        assert record.subject == "skerry.run.ledger.commit.2"


@pytest.mark.parametrize(
    "path", ["0/99", "7/1", "0/0", "x/1", "0/-1", "0/²", "0/" + "9" * 20, "0/" + "9" * 5000]
)
async def test_a_round_that_never_was_is_not_found(path: str) -> None:
    async with served(await begun()) as client:
        answer = await client.get(f"/api/rounds/{path}")
    assert (answer.status_code, "no version" in answer.json()["error"]) == (404, True)


@pytest.fixture
def health(tmp_path: Path) -> HealthSettings:
    file = tmp_path / "token"
    file.write_text(TOKEN)
    return HealthSettings(token_file=file)


KNOWN = {"authorization": f"Bearer {TOKEN}"}


async def test_a_run_that_allows_no_faults_suffers_none(health: HealthSettings) -> None:
    async with served(await begun(), health, no_fault) as client:
        answer = await client.post("/api/learners/a/kill", headers=KNOWN, json={"duration_s": 1})
        assert (await client.get("/api/learners/a/kill")).status_code in {404, 405}
    assert answer.status_code == 403


async def test_without_a_token_file_there_is_no_such_route() -> None:
    async with served(await begun(chaos=True), HealthSettings(), no_fault) as client:
        answer = await client.post("/api/learners/a/kill", headers=KNOWN, json={"duration_s": 1})
    assert answer.status_code == 404


async def test_a_shared_link_reads_the_page_and_does_nothing_else() -> None:
    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await JSONResponse({"here": scope["path"]})(scope, receive, send)

    transport = httpx.ASGITransport(Gate(app, (), TOKEN))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        assert (await client.get("/api/share")).status_code == 401
        holder = {"authorization": f"Bearer {TOKEN}"}
        link = (await client.get("/api/share", headers=holder)).json()["path"]
        assert TOKEN not in link
        assert (await client.get(link[:-1] + "x")).status_code == 401
        followed = await client.get(link)
        assert (followed.status_code, followed.headers["location"]) == (303, "/")
        assert "HttpOnly" in followed.headers["set-cookie"]
        assert (await client.get("/api/run")).json() == {"here": "/api/run"}
        assert (await client.post("/api/learners/a/kill")).status_code == 401
    open_gate = httpx.ASGITransport(Gate(app, ()))
    async with httpx.AsyncClient(transport=open_gate, base_url="http://localhost") as client:
        assert (await client.get("/api/share")).json() == {"path": "/"}


def test_a_model_is_named_by_what_the_settings_make_of_it() -> None:
    named = ModelConfig.model_validate({"preset": "nano", "layers": 6, "d_model": 96})
    assert _model(ModelConfig()) == "nano"
    assert _model(named) == "nano with layers 6, d_model 96"
