"""Where the page is, and the token that only its owner reads."""

from __future__ import annotations

import asyncio
import json
import stat
from pathlib import Path

import pytest

from skerry.cli.cluster.place import Place
from skerry.cli.cluster.services import Team, stages
from skerry.cli.page import Page, token_kept


@pytest.fixture
def place(tmp_path: Path) -> Place:
    place = Place("run", tmp_path)
    place.logs.mkdir(parents=True)
    return place


def listens(place: Place, port: int) -> None:
    told = {"event": "health_listening", "url": f"http://127.0.0.1:{port}/", "port": port}
    with (place.logs / "health-monitor.log").open("a") as log:
        log.write(json.dumps(told) + "\n")


async def said(page: Page) -> str:
    heard: list[str] = []
    await asyncio.wait_for(page.tell(heard.append), 20)
    (sentence,) = heard
    return sentence


async def test_the_address_is_that_of_this_start_and_no_earlier_one(place: Place) -> None:
    listens(place, 1)
    page = Page(place, chaos=False)
    listens(place, 2)
    assert await said(page) == "Watch the run on http://127.0.0.1:2/"


async def test_where_faults_are_allowed_the_token_stands_behind_it(place: Place) -> None:
    with token_kept(place):
        page = Page(place, chaos=True)
        listens(place, 3)
        token = place.token.read_text().strip()
        assert (await said(page)).endswith(f"http://127.0.0.1:3/#token={token}")
        assert len(token) >= 32
        assert stat.S_IMODE(place.token.stat().st_mode) == 0o600
    assert not place.token.exists()


def test_each_start_has_a_token_of_its_own(place: Place) -> None:
    tokens: set[str] = set()
    for _ in range(2):
        with token_kept(place):
            tokens.add(place.token.read_text())
    assert len(tokens) == 2


@pytest.mark.parametrize("chaos", [True, False])
def test_only_the_monitor_of_a_run_that_allows_faults_is_told_of_the_cluster(
    place: Place, chaos: bool
) -> None:
    commands = [c for stage in stages(place, Team(1, chaos=chaos), "nats://x", {}) for c in stage]
    told = {c.name for c in commands if any("health.token_file" in word for word in c.argv)}
    assert told == ({"health-monitor"} if chaos else set())
