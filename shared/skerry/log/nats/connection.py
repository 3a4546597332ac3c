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
import ssl
from collections import deque
from collections.abc import Callable, Container, Mapping
from typing import Any

from nats.aio.msg import Msg
from nats.aio.subscription import Subscription
from nats.errors import Error as NatsError

from skerry.errors import BrokerUnavailable, BrokerUnfit, Denied
from skerry.log.client import NoAnswer, Retries
from skerry.log.nats.fast import FastClient, new_client, server_info
from skerry.log.nats.fitness import check, is_refusal, refusal, region_of, remedy
from skerry.log.nats.jetstream import NO_FOLDER, error_of, is_transient
from skerry.log.nats.login import NatsOptions, inbox_prefix, login_of, tls_of
from skerry.log.nats.session import NatsSession, cancellable
from skerry.settings.checks import masked_url
from skerry.tasks import now_s

PING_INTERVAL_S = 5
MAX_OUTSTANDING_PINGS = 2
REDIAL_S = 0.25
GREETING_S = 1.5
"""A server that does not greet a new connection within this time hangs."""
GIVE_UP_S = 10.0
"""After this long without a connection nats-py's own attempts are ended and we dial again."""


class NatsInbox:
    """The messages on a subject of its own, as they come, until its connection is lost."""

    def __init__(self, connection: Connection) -> None:
        self.subject = ""
        self._connection = connection
        self._arrived: deque[Msg] = deque()
        self._wake = asyncio.Event()
        self._lost = False
        self._denied: Denied | None = None
        self._subscription: Subscription | None = None

    async def open(self) -> None:
        """Begin to take messages."""
        self._connection.lost.add(self.lose)
        client = (await self._connection.ready(None)).client
        self.subject = client.new_inbox()
        with cancellable():
            self._subscription = await client.subscribe(
                self.subject, cb=self._arrive, pending_msgs_limit=0, pending_bytes_limit=0
            )

    async def next(self, timeout_s: float | None = None) -> Msg | None:
        """Return the next message, None once the connection is lost.

        Raises TimeoutError if none came, Denied if the broker refused the request for them.
        """
        while not self._arrived:
            if self._denied is not None:
                raise self._denied
            if self._lost:
                return None
            self._wake.clear()
            async with asyncio.timeout(timeout_s):
                await self._wake.wait()
        return self._arrived.popleft()

    async def close(self) -> None:
        """Take no more messages."""
        self._connection.lost.discard(self.lose)
        if self._subscription is not None:
            with contextlib.suppress(NatsError, OSError):
                await self._subscription.unsubscribe()

    def deny(self, error: Denied) -> None:
        """End the messages with an error, after those that have come."""
        self._denied = error
        self._wake.set()

    def lose(self) -> None:
        """End the messages after those that have come."""
        self._lost = True
        self._wake.set()

    async def _arrive(self, msg: Msg) -> None:
        self._arrived.append(msg)
        self._wake.set()


class Connection:
    """A connection that is dialled once, checked, and kept for as long as the bus is open."""

    def __init__(self, urls: str, name: str, options: NatsOptions) -> None:
        self.urls = masked_url(urls)
        """The addresses without their passwords, as errors name them."""
        self.options = options
        self.reason = "no connection"
        self.region = ""
        """The region whose broker has answered us, '' where that is the hub."""
        self.closing = False
        self.lost: set[Callable[[], None]] = set()
        """Callbacks for the loss of all that the server held for this connection."""
        self._name = name
        self._servers = [url.strip() for url in urls.split(",")]
        self._session: NatsSession | None = None
        self._look: asyncio.Task[None] | None = None
        self._up = asyncio.Event()
        self._dialling = asyncio.Lock()
        self._down_since: float | None = None

    @property
    def max_payload(self) -> int:
        return 1024**2 if self._session is None else self._session.client.max_payload

    @property
    def clustered(self) -> bool:
        """Whether the server that we are connected to is one of a cluster."""
        session = self._session
        return session is not None and bool(server_info(session.client).get("cluster"))

    async def close(self) -> None:
        """End the connection; requests that wait and followers end too."""
        self.closing = True
        if self._look is not None:
            self._look.cancel()
        self._drop()
        if self._session is not None:
            await self._session.client.close()

    def unavailable(self, seconds: float, refused: str = "") -> BrokerUnavailable:
        """Return the error for a server that does not answer, or cannot act, with what to do."""
        if is_refusal(self.reason):
            return BrokerUnavailable(refusal(self.urls, self.options), url=self.urls)
        reached = self._session is not None and self._session.client.is_connected
        if self.region and (reached or self._session is None):
            return BrokerUnavailable(
                f"The broker of region {self.region} at {self.urls} has not reached the hub for"
                f" {seconds:.3g} s ({refused or self.reason}): mend its link (its log says what is"
                " wrong), or start the hub.",
                url=self.urls,
            )
        if refused or (reached and self.clustered):
            reason = refused or self.reason
            return BrokerUnavailable(
                f"The NATS cluster at {self.urls} could not act for {seconds:.3g} s ({reason}):"
                " bring back the nodes that are down; it needs more than half of its nodes, and as"
                " many as log.replicas.",
                url=self.urls,
            )
        return BrokerUnavailable(
            f"No NATS server answered at {self.urls} for {seconds:.3g} s ({self.reason}): start one"
            " (`skerry up` does), or set nats.url to where it is.",
            url=self.urls,
        )

    async def request(
        self,
        subject: str,
        payload: bytes,
        *,
        deadline: float,
        headers: dict[str, str] | None = None,
    ) -> Msg:
        """Send one request and return its answer; NoAnswer if there was none in time."""
        session = await self.ready(deadline)
        timeout_s = max(0.001, min(self.options.request_timeout_s, deadline - now_s()))
        try:
            return await session.ask(subject, payload, timeout_s, headers)
        except NoAnswer as e:
            if e.sent:
                self.suspect()
            raise

    async def api(
        self,
        name: str,
        body: Mapping[str, Any] | None = None,
        *,
        about: str = "a request",
        empty_for: Container[int] = (),
        deadline: float | None = None,
    ) -> dict[str, Any]:
        """Call the JetStream API until there is an answer; {} for an error code in ``empty_for``.

        Raises an error ``about`` the call for other codes, and BrokerUnavailable once the deadline
        has passed, which may be infinite; None: the usual patience of a call.
        """
        began, options = now_s(), self.options
        retries = Retries(began + options.waits_s if deadline is None else deadline)
        data, refused = b"" if body is None else json.dumps(body).encode(), ""
        while True:
            try:
                until = min(retries.deadline, now_s() + options.waits_s)
                answer = await self.request(f"$JS.API.{name}", data, deadline=until)
                reply: dict[str, Any] = json.loads(answer.data)
                if (error := reply.get("error")) is None:
                    return reply
                if error.get("err_code", 0) in empty_for:
                    return {}
                is_race = error.get("err_code") == NO_FOLDER and not refused
                if not (is_transient(error) or is_race):
                    raise error_of(error, about)
                refused = error.get("description", "")
            except NoAnswer as e:
                self.reason = str(e)
            if not await retries.pause():
                raise self.unavailable(now_s() - began, refused)

    def suspect(self) -> None:
        """Find out whether a silent server hangs, and leave it for another of its cluster then.

        Pings would show it too, but much later; and sent more often they would cut off learners
        whose slow links are busy with what they send. A greeting needs no room in that queue.
        """
        session, looking = self._session, self._look is not None and not self._look.done()
        others = self.clustered and not self.region  # its broker is alone, but greets as a cluster
        if session is not None and others and not self.closing and not looking:
            self._look = asyncio.create_task(_leave_hung(self, session), name="look-at-broker")

    async def ready(self, deadline: float | None) -> NatsSession:
        """Return a session that is connected, dialling again where nats-py has given up.

        Raises BrokerUnavailable or, for a server that cannot carry a run, BrokerUnfit.
        """
        began = now_s()
        while True:
            session = self._session
            if self.closing:
                msg = "The bus is closed."
                raise BrokerUnavailable(msg, url=self.urls)
            if session is not None and session.client.is_connected:
                return session
            try:
                async with asyncio.timeout_at(deadline):
                    await self._wait_up(session)
            except TimeoutError as e:
                raise self.unavailable(now_s() - began) from e

    async def _wait_up(self, session: NatsSession | None) -> None:
        """Wait for nats-py to reconnect; dial again when it does not or has given up for good."""
        if session is not None and not session.client.is_closed:
            self._down_since = self._down_since or now_s()
            self._up.clear()
            try:
                patience_s = 0.0 if is_refusal(self.reason) else GIVE_UP_S
                async with asyncio.timeout_at(self._down_since + patience_s):
                    await self._up.wait()
            except TimeoutError:
                with cancellable():
                    await session.client.close()
            return
        async with self._dialling:
            if self._session is session:
                self._session = await self._dial()
                self.reason = "no answer"
                self._down_since = None
                if session is not None:
                    self.options.on_event("reconnected", {})

    async def _dial(self) -> NatsSession:
        """Connect until it works, for as long as the caller waits.

        Raises BrokerUnfit, also for a refused login. A login that was taken before is first tried
        for a while, over all callers: the broker may still be learning of a renewed key.
        """
        retries, options = Retries(), self.options
        patience_s = options.login_patience_s if self._session is not None else 0.0
        self._down_since = self._down_since or now_s()
        while True:
            try:
                return await self._dialled()
            except (OSError, NatsError, NoAnswer) as e:
                self.reason = str(e)
                if not (unfit := remedy(e, self.urls, options)):
                    self._down_since = now_s()  # the server is away, and has refused nothing yet
                elif now_s() >= self._down_since + patience_s:
                    raise BrokerUnfit(unfit) from e
            await retries.pause()

    async def _dialled(self) -> NatsSession:
        """Connect once; any error leaves nothing behind."""
        options, login = self.options, login_of(self.options)
        servers = random.sample(self._servers, len(self._servers))
        client = new_client(needs_tls=options.needs_tls or "tls://" in self.urls)
        session = NatsSession(client, self.urls, login)
        try:
            with cancellable():
                await client.connect(
                    servers=servers,
                    # Shuffled by nats-py, it could go back to the server that hangs.
                    dont_randomize=True,
                    name=self._name,
                    **login.given,
                    inbox_prefix=inbox_prefix(options, login.name),
                    tls=tls_of(options),
                    tls_handshake_first=options.handshake_first,
                    **self._hooks(session),
                    allow_reconnect=False,
                    connect_timeout=max(1, int(min(5.0, options.connect_timeout_s))),
                    reconnect_time_wait=REDIAL_S,  # type: ignore[arg-type] # says int, takes float
                    max_reconnect_attempts=-1,
                    ping_interval=PING_INTERVAL_S,
                    max_outstanding_pings=MAX_OUTSTANDING_PINGS,
                    pending_size=0,
                )
                client.options["allow_reconnect"] = True
                await session.open()
                self.region = region_of(session)
                await check(session, self.urls, options.request_timeout_s)
        except BaseException as e:
            with contextlib.suppress(OSError, NatsError, AssertionError), cancellable():
                await client.close()
            ended = isinstance(e, (ConnectionError, ssl.SSLError))
            ours = ended and not isinstance(e, ssl.SSLCertVerificationError)
            if ours and server_info(client).get("tls_verify"):
                msg = "it asks for a certificate, and refused nats.cert_file or the lack of one"
                raise NatsError(msg) from e
            raise
        return session

    def _hooks(self, session: NatsSession) -> dict[str, Any]:
        """Return what nats-py calls when a session's connection changes."""

        async def note(error: Exception) -> None:
            self.reason = str(error) or type(error).__name__
            session.deny(self.reason)
            if is_refusal(self.reason):  # nats-py would repeat the same login
                self._up.set()
            self.options.on_event("error", {"error": self.reason})

        async def down() -> None:
            if self._session is session and not self.closing:
                self.reason = str(session.client.last_error or self.reason)
                self.options.on_event("disconnected", {"reason": self.reason})
                self._drop()

        async def up() -> None:
            self.options.on_event("reconnected", {})
            self._down_since = None
            self._drop()

        return {"error_cb": note, "disconnected_cb": down, "reconnected_cb": up}

    def _drop(self) -> None:
        """End all waits for answers and messages on a connection that is gone."""
        if self._session is not None:
            self._session.drop()
        for callback in tuple(self.lost):
            callback()
        self._up.set()


async def _leave_hung(connection: Connection, session: NatsSession) -> None:
    """Cut the connection to a server that does not greet on another one."""
    client = session.client
    if (url := client.connected_url) is None:
        return
    try:
        async with asyncio.timeout(GREETING_S):
            reader, writer = await asyncio.open_connection(url.hostname, url.port)
            try:
                await reader.readexactly(1)
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        # nats-py's own client cannot be cut off: there only its pings find a hung server.
        if client.connected_url == url and isinstance(client, FastClient):
            connection.reason = "the server hangs"
            client.abort()
