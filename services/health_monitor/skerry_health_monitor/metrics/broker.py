"""What a broker says of itself on its monitoring port."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from http.client import HTTPException
from typing import Any, cast
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import structlog

from skerry.log.base import Room, Storage
from skerry.telemetry import metrics
from skerry.telemetry.metrics import Point

log = structlog.get_logger()

POLL_S = 5.0
DEADLINE_S = 2.0
MOST_NAME = 128
MOST_BYTES = 16 * 1024**2
JETSTREAM = "jsz?streams=true&consumers=true"
OPEN = "connz?state=open&limit=10000"
CLOSED = "connz?state=closed&sort=stop&limit=1000"
"""Closed connections, the newest first."""
LIES = (*(OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError, OverflowError),)
"""Errors from a broker that does not answer, or answers what it should not."""


@dataclass(frozen=True, slots=True)
class Server:
    """One broker: its figures, how full its stores are, and how far behind its readers are.

    ``lags`` are by stream, of its slowest reader.
    """

    name: str
    up: bool = False
    figures: tuple[Point, ...] = ()
    rooms: tuple[Room, ...] = ()
    lags: Mapping[str, int] = field(default_factory=dict[str, int])


def parsed(varz: Mapping[str, Any], jsz: Mapping[str, Any], name: str) -> Server:
    """Return what the two answers of a server say; raises what LIES lists if they do."""
    config = cast("Mapping[str, Any]", jsz.get("config") or {})
    api = cast("Mapping[str, Any]", jsz.get("api") or {})
    given = str(varz.get("server_name", ""))
    if given not in {"", varz.get("server_id")}:  # else it is another one after each start
        name = given
    label = (name[:MOST_NAME],)
    figures = (
        Point(metrics.BROKER_CONNECTIONS, int(varz["connections"]), label),
        Point(metrics.BROKER_SLOW_CONSUMERS, int(varz["slow_consumers"]), label),
        Point(metrics.BROKER_MEMORY, int(varz["mem"]), label),
        Point(metrics.BROKER_CPU, float(varz["cpu"]) / 100.0, label),
        Point(metrics.BROKER_API_ERRORS, int(api.get("errors", 0)), label),
        Point(metrics.BROKER_MESSAGES, int(varz["in_msgs"]), (*label, "in")),
        Point(metrics.BROKER_MESSAGES, int(varz["out_msgs"]), (*label, "out")),
        Point(metrics.BROKER_IO, int(varz["in_bytes"]), (*label, "in")),
        Point(metrics.BROKER_IO, int(varz["out_bytes"]), (*label, "out")),
    )
    rooms = (
        Room(Storage.FILE, int(jsz.get("storage", 0)), int(config.get("max_storage", 0))),
        Room(Storage.MEMORY, int(jsz.get("memory", 0)), int(config.get("max_memory", 0))),
    )
    lags: dict[str, int] = {}
    for account in jsz.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            pending = [int(c.get("num_pending", 0)) for c in stream.get("consumer_detail") or ()]
            lags[str(stream["name"])] = max(pending, default=0)
    return Server(name, up=True, figures=figures, rooms=rooms, lags=lags)


def lost(
    answers: Iterable[tuple[Mapping[str, Any], Mapping[str, Any]]], names: Collection[str]
) -> dict[str, float]:
    """Return how many seconds ago the last connection of each of these clients was closed.

    ``answers`` are the closed and the open connections of each server; who has an open one to any
    of them has lost nothing. Raises what LIES lists if they lie.
    """
    pages = list(answers)
    there = {str(held.get("name")) for _, opened in pages for held in opened["connections"]}
    found: dict[str, float] = {}
    for closed, _ in pages:
        now = datetime.fromisoformat(closed["now"])
        for held in closed["connections"]:
            name = str(held.get("name"))
            if name in names and name not in there:
                ago_s = (now - datetime.fromisoformat(held["stop"])).total_seconds()
                found[name] = min(ago_s, found.get(name, ago_s))
    return found


class Brokers:
    """Polls every broker; one that does not answer is down, and nothing else happens."""

    def __init__(self, urls: Sequence[str] = ()) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self.known = {url: Server(urlsplit(url).netloc) for url in self._urls}
        self._said: set[str] = set()

    def servers(self) -> tuple[Server, ...]:
        """Return each broker as it was when last asked."""
        return tuple(self.known.values())

    async def run(self) -> None:
        """Keep what is known of the brokers new, for ever."""
        while True:
            await self.poll()
            await asyncio.sleep(POLL_S)

    async def poll(self) -> None:
        """Ask every broker once, all at the same time."""
        asked = (asyncio.to_thread(_ask, url, self.known[url].name) for url in self._urls)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for url, answer in zip(self._urls, answers, strict=True):
            if isinstance(answer, Server):
                self.known[url] = answer
                self._said.discard(url)
            elif isinstance(answer, LIES):
                self.known[url] = Server(self.known[url].name)
                self._say(url, answer)
            else:
                raise answer

    async def lost(self, names: Collection[str]) -> dict[str, float]:
        """Return how many seconds ago each of these clients lost its last connection.

        Empty while one of the brokers does not answer.
        """
        asked = (asyncio.to_thread(_connections, url) for url in self._urls)
        what = f"connections of {', '.join(self._urls)}"
        try:
            found = lost(await asyncio.gather(*asked), names)
        except LIES as error:
            self._say(what, error)
            return {}
        self._said.discard(what)
        return found

    def _say(self, url: str, error: Exception) -> None:
        if url not in self._said:
            self._said.add(url)
            log.warning("broker_figures_missing", url=url, error=str(error))


def _connections(url: str) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """Return the closed connections, and then the open ones: one made again between is in both."""
    closed = _get(f"{url}/{CLOSED}")
    return closed, _get(f"{url}/{OPEN}")


def _ask(url: str, name: str) -> Server:
    return parsed(_get(f"{url}/varz"), _get(f"{url}/{JETSTREAM}"), name)


def _get(url: str) -> Mapping[str, Any]:
    """Return the JSON object at an address that the settings name, asked for directly."""
    opener = build_opener(ProxyHandler({}))
    with opener.open(Request(url), timeout=DEADLINE_S) as answer:  # noqa: S310 - checked to be http
        found = json.loads(answer.read(MOST_BYTES))
    if not isinstance(found, dict):
        msg = f"{url} did not answer with a JSON object."
        raise TypeError(msg)
    return cast("Mapping[str, Any]", found)
