"""What a broker tells of itself on its monitoring port."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from datetime import datetime
from http.client import HTTPException
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit
from urllib.request import ProxyHandler, Request, build_opener

import structlog

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping, Sequence

log = structlog.get_logger()

DEADLINE_S = 2.0
MOST_BYTES = 16 * 1024**2
JETSTREAM = "jsz?streams=true&consumers=true"
OPEN = "connz?state=open&limit=10000"
CLOSED = "connz?state=closed&sort=stop&limit=1000"
"""The newest first."""
LIES = (*(OSError, HTTPException, ValueError, KeyError, TypeError, AttributeError, OverflowError),)
"""What comes of a broker that does not answer, or answers what it should not."""


@dataclass(frozen=True, slots=True)
class Server:
    """One broker; counters since it was started. ``lags`` are by stream, of its slowest reader."""

    name: str
    up: bool = False
    connections: int = 0
    slow_consumers: int = 0
    memory_bytes: int = 0
    cores: float = 0.0
    in_messages: int = 0
    out_messages: int = 0
    in_bytes: int = 0
    out_bytes: int = 0
    api_errors: int = 0
    held_memory_bytes: int = 0
    held_file_bytes: int = 0
    most_memory_bytes: int = 0
    most_file_bytes: int = 0
    lags: Mapping[str, int] = field(default_factory=dict[str, int])


def parsed(varz: Mapping[str, Any], jsz: Mapping[str, Any], name: str) -> Server:
    """Return what the two answers of a server say; raises what LIES lists if they do."""
    config = cast("Mapping[str, Any]", jsz.get("config") or {})
    api = cast("Mapping[str, Any]", jsz.get("api") or {})
    given = str(varz.get("server_name", ""))
    return Server(
        # One without a name says its id, and has another one each time it is started.
        name=given if given not in {"", varz.get("server_id")} else name,
        up=True,
        connections=int(varz["connections"]),
        slow_consumers=int(varz["slow_consumers"]),
        memory_bytes=int(varz["mem"]),
        cores=float(varz["cpu"]) / 100.0,
        in_messages=int(varz["in_msgs"]),
        out_messages=int(varz["out_msgs"]),
        in_bytes=int(varz["in_bytes"]),
        out_bytes=int(varz["out_bytes"]),
        api_errors=int(api.get("errors", 0)),
        held_memory_bytes=int(jsz.get("memory", 0)),
        held_file_bytes=int(jsz.get("storage", 0)),
        most_memory_bytes=int(config.get("max_memory", 0)),
        most_file_bytes=int(config.get("max_storage", 0)),
        lags=_lags(jsz),
    )


def _lags(jsz: Mapping[str, Any]) -> dict[str, int]:
    """Return by stream what its slowest reader has not been given yet."""
    found: dict[str, int] = {}
    for account in jsz.get("account_details") or ():
        for stream in account.get("stream_detail") or ():
            pending = [int(c.get("num_pending", 0)) for c in stream.get("consumer_detail") or ()]
            found[str(stream["name"])] = max(pending, default=0)
    return found


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

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(url.rstrip("/") for url in urls)
        self._servers = {url: Server(urlsplit(url).netloc) for url in self._urls}
        self._said: set[str] = set()

    def servers(self) -> tuple[Server, ...]:
        """Return each broker as it was when last asked."""
        return tuple(self._servers.values())

    async def poll(self) -> None:
        """Ask every broker once, all at the same time."""
        asked = (asyncio.to_thread(_ask, url, self._servers[url].name) for url in self._urls)
        answers = await asyncio.gather(*asked, return_exceptions=True)
        for url, answer in zip(self._urls, answers, strict=True):
            if isinstance(answer, Server):
                self._servers[url] = answer
                self._said.discard(url)
            elif isinstance(answer, LIES):
                self._servers[url] = Server(self._servers[url].name)
                self._say(url, answer)
            else:
                raise answer

    async def lost(self, names: Collection[str]) -> dict[str, float]:
        """Return how many seconds ago each of these clients lost its last connection.

        None has, as far as is known, while one of the brokers does not answer.
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
