# pyright: basic
"""One nats-py client, and the requests that wait for its answers or for the broker's refusals.

nats-py's own requests take any answer with the header ``Status: 503`` for "no responders", even a
stored message, and a refusal of the broker only reaches a callback, in lower case.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Generator
from itertools import count

from nats.aio.client import Client
from nats.aio.msg import Msg
from nats.errors import Error as NatsError
from nats.errors import OutboundBufferLimitError

from skerry.errors import Denied
from skerry.log.client import NoAnswer
from skerry.log.nats.jetstream import status_of
from skerry.log.nats.login import Login

VIOLATION = re.compile(r'violation for (publish|subscription) to "([^"]*)"', re.IGNORECASE)


@contextlib.contextmanager
def cancellable() -> Generator[None]:
    """Cancel the running task after all if nats-py swallowed a cancellation, result or not."""
    task = asyncio.current_task()
    before = task.cancelling() if task is not None else 0
    try:
        yield
    finally:
        if task is not None and task.cancelling() > before:
            raise asyncio.CancelledError


class NatsSession:
    """One nats-py client, what it logged in with, and the requests that wait for their answers."""

    def __init__(self, client: Client, urls: str, login: Login) -> None:
        self.client = client
        self.login = login
        self._urls = urls
        self._inbox = ""
        self._numbers = count()
        self._waiting: dict[str, asyncio.Future[Msg | None]] = {}
        self._heard: dict[str, list[tuple[str, Callable[[Denied], None]]]] = {}
        self._deaf: Denied | None = None

    async def open(self) -> None:
        """Begin to listen for answers; raises NatsError for a client that was refused."""
        if not self.client.is_connected:  # nats-py's connect returns all the same
            raise self.client.last_error or NatsError("the broker closed the connection at once")
        self._inbox = self.client.new_inbox()
        inbox = f"{self._inbox}.*"
        await self.client.subscribe(
            inbox, cb=self._arrive, pending_msgs_limit=0, pending_bytes_limit=0
        )

    async def ask(
        self, subject: str, payload: bytes, timeout_s: float, headers: dict[str, str] | None = None
    ) -> Msg:
        """Send one request and return its answer.

        Raises NoAnswer if there was none in time, Denied if the login may not send it.
        """
        number = str(next(self._numbers))
        waiting = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                with cancellable(), self.hearing(subject, _failing(waiting)):
                    await self.client.publish(
                        subject, payload, f"{self._inbox}.{number}", headers=headers
                    )
                    answer: Msg | None = await waiting
        except OutboundBufferLimitError as e:
            raise NoAnswer(str(e), sent=False) from e
        except (TimeoutError, NatsError) as e:
            raise NoAnswer(str(e) or "no answer in time") from e
        finally:
            del self._waiting[number]
        if answer is None:
            raise NoAnswer(reason="connection lost")
        if status_of(answer) == "503":
            raise NoAnswer(reason="no responders", sent=False)
        return answer

    @contextlib.contextmanager
    def hearing(self, subject: str, refused: Callable[[Denied], None]) -> Generator[None]:
        """Call ``refused`` where the broker says that this login may not publish there."""
        if self._deaf is not None:
            raise self._deaf
        key, hears = subject.lower(), (subject, refused)
        self._heard.setdefault(key, []).append(hears)
        try:
            yield
        finally:
            self._heard[key].remove(hears)
            if not self._heard[key]:
                del self._heard[key]

    def deny(self, text: str) -> None:
        """Pass a refusal, in the broker's own words, on to the requests that it concerns."""
        if (found := VIOLATION.search(text)) is None:
            return
        verb, subject = found.group(1).lower(), found.group(2)
        refusal = f"The broker at {self._urls} does not let {self.login}"
        if verb == "publish":
            for asked, refused in tuple(self._heard.get(subject.lower(), ())):
                msg = (
                    f"{refusal} publish on {asked}: use a key for this run and name, of a role that"
                    " may, or have its permissions widened."
                )
                refused(Denied(msg, subject=asked))
        elif subject.lower().startswith(self._inbox.lower()):
            msg = (
                f"{refusal} listen for answers on {subject}: allow it that, or set"
                " nats.inbox_prefix to where it may."
            )
            self._deaf = Denied(msg, subject=subject)
            for waiting in self._waiting.values():
                _failing(waiting)(self._deaf)

    def drop(self) -> None:
        """End all waits for answers on a connection that is gone."""
        for waiting in self._waiting.values():
            if not waiting.done():
                waiting.set_result(None)

    async def _arrive(self, msg: Msg) -> None:
        waiting = self._waiting.get(msg.subject.rpartition(".")[2])
        if waiting is not None and not waiting.done():
            waiting.set_result(msg)


def _failing(waiting: asyncio.Future[Msg | None]) -> Callable[[Denied], None]:
    """Return a callback that fails a request if it still waits."""

    def fail(error: Denied) -> None:
        if not waiting.done():
            waiting.set_exception(error)

    return fail
