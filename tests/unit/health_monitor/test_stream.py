"""The stream of events: whole first, then what changes; who does not read is cut off."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from typing import Any

import pytest
from starlette.applications import Starlette

from skerry_health_monitor.web import connections, stream
from skerry_health_monitor.web.connections import PageProtocol
from skerry_health_monitor.web.server import listen, serve_http
from skerry_health_monitor.web.stream import (
    MOST_CLIENTS,
    MOST_WAITING,
    Client,
    Hub,
    PageFrame,
    difference,
    pause_s,
    stream_route,
)
from tests.support.builders import background, until

DEADLINE_S = 20.0


@dataclass
class Source:
    """A picture that the test changes."""

    sections: dict[str, dict[str, Any]] | None
    epoch: object = "first"
    marks: list[list[Any]] = field(default_factory=list[list[Any]])

    def frame(self) -> PageFrame:
        held = None if self.sections is None else {k: dict(v) for k, v in self.sections.items()}
        return PageFrame(
            self.epoch, held, lambda after: [m for m in self.marks if m[0] > after], {"now_s": 1}
        )


def told(client: Client) -> tuple[str, Any]:
    """Return the name and the data of the next event."""
    message = client.waiting.popleft().decode()
    name, data = message.removesuffix("\n\n").split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def joined(hub: Hub) -> Client:
    client = hub.join()
    assert client is not None
    return client


def test_a_difference_names_what_to_set_and_what_to_remove() -> None:
    before = {"a": {"x": 1, "y": 2}, "b": {"z": 3}}
    now = {"a": {"x": 1, "y": 5, "new": 6}, "b": {}}
    assert difference(before, now) == {
        "a": {"set": {"y": 5, "new": 6}, "del": []},
        "b": {"set": {}, "del": ["z"]},
    }
    assert difference(now, now) == {}


async def test_whoever_comes_gets_the_whole_and_then_changes() -> None:
    source = Source({"run": {"step": 1}}, marks=[[1, 0, 0.5, False]])
    hub = Hub(source.frame, asyncio.Event())
    client = joined(hub)
    name, data = told(client)
    assert (name, data["sections"], data["marks"]) == (
        "whole",
        {"run": {"step": 1}},
        [[1, 0, 0.5, False]],
    )
    assert source.sections is not None
    source.sections["run"]["step"] = 2
    source.marks.append([2, 0, 0.7, True])
    hub.close()
    name, data = told(client)
    assert (name, data["sections"]) == ("change", {"run": {"set": {"step": 2}, "del": []}})
    assert data["marks"] == [[2, 0, 0.7, True]]
    assert told(client)[0] == "end"
    assert await anext(client, None) is None


async def test_one_who_comes_later_does_not_make_others_miss_a_change() -> None:
    source = Source({"run": {"step": 1}})
    hub = Hub(source.frame, asyncio.Event())
    first = joined(hub)
    told(first)
    assert source.sections is not None
    source.sections["run"]["step"] = 2
    second = joined(hub)
    assert told(second)[1]["sections"] == {"run": {"step": 2}}
    assert told(first)[1]["sections"] == {"run": {"set": {"step": 2}, "del": []}}


async def test_a_new_session_with_the_log_is_told_whole() -> None:
    source = Source(None, epoch=None)
    hub = Hub(source.frame, asyncio.Event())
    client = joined(hub)
    assert told(client)[0] == "waiting"
    source.sections, source.epoch = {"run": {"step": 1}}, "session"
    hub.close()
    assert told(client)[0] == "whole"


async def test_changes_are_pushed_when_something_has_changed() -> None:
    source, changed = Source({"run": {"step": 1}}), asyncio.Event()
    hub = Hub(source.frame, changed)
    async with background(hub.run()):
        client = joined(hub)
        assert await anext(client, None) is not None
        assert source.sections is not None
        source.sections["run"]["step"] = 2
        changed.set()
        message = await asyncio.wait_for(anext(client, None), DEADLINE_S)
    assert message is not None
    assert b'"step":2' in message


async def test_where_nothing_changes_a_beat_says_that_somebody_is_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "BEAT_S", 0.05)
    monkeypatch.setattr(stream, "LOOK_S", 0.01)
    monkeypatch.setattr(stream, "PUSH_S", 0.01)
    hub = Hub(Source({"run": {"step": 1}}).frame, asyncio.Event())
    async with background(hub.run()):
        client = joined(hub)
        heard = [await asyncio.wait_for(anext(client, None), DEADLINE_S) for _ in range(3)]
    assert [message.split(b"\n")[0] for message in heard if message] == [
        b"event: whole", b"event: beat", b"event: beat"
    ]  # fmt: skip


@pytest.mark.parametrize(("took_s", "pause"), [(0.001, 0.3), (0.02, 0.4), (0.5, 0.8)])
def test_pictures_that_cost_more_come_less_often_but_no_later_than_that(
    took_s: float, pause: float
) -> None:
    assert pause_s(took_s) == pytest.approx(pause)


async def test_a_queue_that_is_full_is_dropped_and_the_others_go_on() -> None:
    source = Source({"run": {"step": 0}})
    hub = Hub(source.frame, asyncio.Event())
    slow, quick = joined(hub), joined(hub)
    assert source.sections is not None
    for step in range(1, MOST_WAITING + 2):
        source.sections["run"]["step"] = step
        hub._push()
        quick.waiting.clear()
    assert (slow.ended, quick.ended) == (True, False)
    assert hub.clients == {quick}
    assert not slow.waiting


async def test_no_more_clients_than_there_is_room_for() -> None:
    hub = Hub(Source({}).frame, asyncio.Event())
    for _ in range(MOST_CLIENTS):
        joined(hub)
    assert hub.join() is None


async def test_a_browser_that_stops_reading_loses_its_connection(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lost = asyncio.Event()
    monkeypatch.setattr(connections, "TAKE_S", 0.1)
    monkeypatch.setattr(PageProtocol, "connection_lost", lambda *_: lost.set())
    source, changed = Source({"run": {"text": ""}}), asyncio.Event()
    hub = Hub(source.frame, changed)
    app = Starlette(routes=[stream_route(hub)])
    listening = listen("127.0.0.1", 0)
    async with background(serve_http(app, listening, hub.close)):
        with socket.create_connection(listening.getsockname()) as reader:
            reader.sendall(b"GET /api/stream HTTP/1.1\r\nHost: x\r\n\r\n")
            await until(lambda: hub.clients)
            assert source.sections is not None
            for number in range(200):
                source.sections["run"]["text"] = f"{number:1000000}"
                hub._push()
                await asyncio.sleep(0)
            await asyncio.wait_for(lost.wait(), DEADLINE_S)
            assert not hub.clients


def test_numbers_that_json_does_not_know_never_leave() -> None:
    source = Source({"run": {"loss": float("nan")}})
    hub = Hub(source.frame, asyncio.Event())
    with pytest.raises(ValueError, match="JSON"):
        hub.join()
