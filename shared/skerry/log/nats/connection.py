# pyright: basic
"""One connection to NATS that stays: dialling, fitness checks, requests and what follows a loss.

nats-py reconnects by itself after a lost connection, but gives up for good after some protocol
errors, fails its first connect at once, notices a hung server late, and leaves requests waiting
whose answer went down with the connection. This module closes those holes.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import NoRespondersError, OutboundBufferLimitError

from skerry.errors import BrokerUnavailable, BrokerUnfit
from skerry.log.nats import errors as nats_errors
from skerry.log.nats.errors import ApiError, NoAnswer
from skerry.log.nats.transport import LeanParser, WideTransport, cancellable

PING_INTERVAL_S = 5
MAX_OUTSTANDING_PINGS = 2
REDIAL_S = 0.25
FIRST_PAUSE_S = 0.02
LONGEST_PAUSE_S = 0.5
GREETING_S = 1.5
"""A server that does not greet within this time, on a connection of its own, hangs."""
ATTEMPTS_WORTH = 4
"""Calls that are safe to repeat go on for this many request timeouts."""
GIVE_UP_S = 10.0
"""After this long without a connection nats-py's own attempts are ended and we dial anew."""

Event = Callable[[str, Mapping[str, str]], None]


@dataclass(frozen=True, slots=True)
class NatsOptions:
    """How a client logs in, how long it waits, and who hears of its connection.

    Calls that are safe to repeat are repeated for ``patience_s`` (0: four request timeouts).
    ``needed_payload_bytes`` is checked against the server's ``max_payload`` at connect.
    """

    credentials: Path | None = None
    user: str = ""
    password: str = field(default="", repr=False)
    connect_timeout_s: float = 30.0
    request_timeout_s: float = 5.0
    publish_window: int = 6
    patience_s: float = 0.0
    needed_payload_bytes: int = 0
    on_event: Event | None = None

    @property
    def waits_s(self) -> float:
        return self.patience_s or ATTEMPTS_WORTH * self.request_timeout_s

    def login(self, urls: str, name: str) -> dict[str, Any]:
        """Return what nats-py needs to connect to one of these comma-separated servers."""
        servers = [u.strip() for u in urls.split(",")]
        random.shuffle(servers)
        # nats-py would shuffle at each reconnect, and might go back to the server that hangs.
        login: dict[str, Any] = {"servers": servers, "dont_randomize": True, "name": name}
        if self.credentials is not None:
            login["user_credentials"] = str(self.credentials)
        if self.user:
            login |= {"user": self.user, "password": self.password}
        return login


class Backoff:
    """Growing pauses between attempts, none of them beyond a deadline on the loop's clock."""

    def __init__(self, deadline: float | None) -> None:
        self.deadline = deadline
        self._pause = FIRST_PAUSE_S

    async def pause(self) -> bool:
        """Wait a little; False if the deadline has passed."""
        left = float("inf")
        if self.deadline is not None:
            left = self.deadline - asyncio.get_running_loop().time()
        if left <= 0:
            return False
        await asyncio.sleep(min(self._pause, left))
        self._pause = min(2 * self._pause, LONGEST_PAUSE_S)
        return True


class Connection:
    """A connection that is dialled once, checked, and kept for as long as the bus is open."""

    def __init__(self, urls: str, name: str, options: NatsOptions) -> None:
        self.urls = urls
        self.options = options
        self.closing = False
        self._name = name
        self.lost: set[Callable[[], None]] = set()
        """Called whenever what the server held for this connection is gone."""
        self._client: Client | None = None
        self._look: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._dialling = asyncio.Lock()
        self._in_flight: set[asyncio.Timeout] = set()
        self._reason = "no connection"
        self._down_since: float | None = None

    @property
    def max_payload(self) -> int:
        return 1024**2 if self._client is None else self._client.max_payload

    @property
    def clustered(self) -> bool:
        """Whether the server that we are connected to is one of a cluster."""
        client = self._client
        return client is not None and bool(client._server_info.get("cluster"))  # noqa: SLF001

    async def open(self) -> None:
        """Connect and check the server; BrokerUnavailable or BrokerUnfit say what is wrong."""
        await self.ready(asyncio.get_running_loop().time() + self.options.connect_timeout_s)

    async def close(self) -> None:
        """End the connection; requests that wait and followers end too."""
        self.closing = True
        if self._look is not None:
            self._look.cancel()
        self._drop()
        self._up.set()
        if self._client is not None:
            await self._client.close()

    async def ready(self, deadline: float | None) -> Client:
        """Return a connected client, dialling anew where nats-py has given up."""
        started = asyncio.get_running_loop().time()
        while True:
            client = self._client
            if self.closing:
                msg = "The bus is closed."
                raise BrokerUnavailable(msg, url=self.urls)
            if client is not None and client.is_connected:
                return client
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wait_up(client)
            except TimeoutError as e:
                raise self.unavailable(asyncio.get_running_loop().time() - started) from e

    def unavailable(self, seconds: float) -> BrokerUnavailable:
        """Return the error for a deadline that has passed."""
        return nats_errors.unavailable(self.urls, seconds, self._reason)

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        deadline: float,
        headers: dict[str, str] | None = None,
    ) -> Msg:
        """Send one request and return its answer; NoAnswer if there was none in time."""
        client = await self.ready(deadline)
        left = deadline - asyncio.get_running_loop().time()
        timeout = max(0.001, min(self.options.request_timeout_s, left))
        try:
            async with asyncio.timeout(None) as scope:
                self._in_flight.add(scope)
                try:
                    with cancellable():
                        return await client.request(subject, payload, timeout, headers=headers)
                finally:
                    self._in_flight.discard(scope)
        except (NoRespondersError, OutboundBufferLimitError) as e:
            raise NoAnswer(str(e), sent=False) from e
        except (TimeoutError, NatsError) as e:
            self.suspect()
            raise NoAnswer(str(e) or "connection lost", sent=True) from e

    async def api(
        self, name: str, body: Mapping[str, Any] | None = None, *, deadline: float | None = None
    ) -> dict[str, Any]:
        """Call the JetStream API, again until there is an answer.

        Raises ApiError for an error answer, BrokerUnavailable once the deadline has passed.
        """
        now = asyncio.get_running_loop().time
        start, backoff, refused = now(), Backoff(deadline), ""
        data = b"" if body is None else json.dumps(body).encode()
        while True:
            try:
                until = now() + self.options.request_timeout_s if deadline is None else deadline
                answer = await self.request(f"$JS.API.{name}", data, deadline=until)
                reply: dict[str, Any] = json.loads(answer.data)
                error = reply.get("error")
                if error is None:
                    return reply
                if not nats_errors.transient(error):
                    raise ApiError(
                        error["code"], error.get("err_code", 0), error.get("description", "")
                    )
                refused = error.get("description", "")
            except NoAnswer as e:
                self._reason = str(e)
            if not await backoff.pause():
                if refused:
                    raise nats_errors.leaderless(self.urls, now() - start, refused)
                raise self.unavailable(now() - start)

    def suspect(self) -> None:
        """Have a silent server looked at: one that hangs is left for another of its cluster.

        Pings would tell too, but much later; and asked more often they would cut off learners whose
        slow links are busy with what they send. A greeting needs no room in that queue.
        """
        if self.clustered and not self.closing and (self._look is None or self._look.done()):
            self._look = asyncio.create_task(self._leave_hung(), name="look-at-broker")

    async def _leave_hung(self) -> None:
        client = self._client
        if client is None or client.connected_url is None:
            return
        url, transport = client.connected_url, client._transport  # noqa: SLF001
        try:
            async with asyncio.timeout(GREETING_S):
                reader, writer = await asyncio.open_connection(url.hostname, url.port)
                try:
                    await reader.readexactly(1)
                finally:
                    writer.close()
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            if client.connected_url == url and isinstance(transport, WideTransport):
                self._reason = "the server hangs"
                transport.abort()

    async def _wait_up(self, client: Client | None) -> None:
        """Wait for nats-py to reconnect; dial anew when it does not or has given up for good."""
        now = asyncio.get_running_loop().time()
        if client is not None and not client.is_closed:
            self._down_since = self._down_since or now
            self._up.clear()
            try:
                async with asyncio.timeout_at(self._down_since + GIVE_UP_S):
                    await self._up.wait()
            except TimeoutError:
                await client.close()
            return
        async with self._dialling:
            if self._client is client:
                self._client = await self._dial()
                self._down_since = None
                if client is not None:
                    self._tell("reconnected", {})

    async def _dial(self) -> Client:
        """Connect until it works; the caller bounds the time."""
        backoff = Backoff(None)
        while True:
            client = Client()
            client._ps = LeanParser(client)  # noqa: SLF001
            if not self.urls.startswith("ws"):
                client._transport = WideTransport()  # noqa: SLF001
            try:
                with cancellable():
                    await self._connect(client)
                    await self._check(client)
            except BrokerUnfit:
                await client.close()
                raise
            except (OSError, NatsError) as e:
                await self._abandon(client, str(e))
            except asyncio.CancelledError:
                await self._abandon(client, self._reason)
                raise
            else:
                return client
            await backoff.pause()

    async def _connect(self, client: Client) -> None:
        await client.connect(
            **self.options.login(self.urls, self._name),
            allow_reconnect=False,
            connect_timeout=max(1, int(min(5.0, self.options.connect_timeout_s))),
            reconnect_time_wait=REDIAL_S,  # type: ignore[arg-type]
            max_reconnect_attempts=-1,
            ping_interval=PING_INTERVAL_S,
            max_outstanding_pings=MAX_OUTSTANDING_PINGS,
            pending_size=0,
            error_cb=self._note,
            disconnected_cb=self._went_down(client),
            closed_cb=self._went_down(client),
            reconnected_cb=self._came_up,
        )
        client.options["allow_reconnect"] = True

    async def _abandon(self, client: Client, reason: str) -> None:
        self._reason = reason
        with contextlib.suppress(OSError, NatsError, AssertionError):
            await client.close()
        if "authorization" in reason.lower() or "authentication" in reason.lower():
            raise nats_errors.refused_login(self.urls, reason)

    async def _check(self, client: Client) -> None:
        """Refuse a server that cannot carry a run."""
        url, version = self.urls, client.connected_server_version
        if (version.major, version.minor) < nats_errors.MIN_VERSION:
            text = f"{version.major}.{version.minor}.{version.patch}"
            raise nats_errors.too_old(url, text)
        try:
            answer = await client.request("$JS.API.INFO", timeout=self.options.request_timeout_s)
        except NoRespondersError as e:
            raise nats_errors.no_jetstream(url, "its API has no responder") from e
        error = json.loads(answer.data).get("error")
        if error is not None and not nats_errors.transient(error):
            raise nats_errors.no_jetstream(url, error.get("description", "refused"))
        if client.max_payload < self.options.needed_payload_bytes:
            raise nats_errors.small_payload(
                url, client.max_payload, self.options.needed_payload_bytes
            )

    async def _note(self, error: Exception) -> None:
        self._reason = str(error) or type(error).__name__
        self._tell("error", {"error": self._reason})

    def _went_down(self, client: Client) -> Callable[[], Awaitable[None]]:
        async def hook() -> None:
            if client is self._client and not self.closing:
                self._tell("disconnected", {"reason": self._reason})
                self._drop()

        return hook

    async def _came_up(self) -> None:
        self._tell("reconnected", {})
        self._down_since = None
        self._up.set()
        self._call_lost()

    def _drop(self) -> None:
        """End what waits for an answer on a connection that is gone."""
        now = asyncio.get_running_loop().time()
        scopes, self._in_flight = self._in_flight, set()
        for scope in scopes:
            scope.reschedule(now)
        self._call_lost()
        self._up.set()

    def _call_lost(self) -> None:
        for callback in tuple(self.lost):
            callback()

    def _tell(self, event: str, fields: Mapping[str, str]) -> None:
        if self.options.on_event is not None:
            self.options.on_event(event, fields)
