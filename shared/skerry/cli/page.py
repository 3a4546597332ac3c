"""The health monitor's page: where it is, and the token to strike learners from it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
from typing import TYPE_CHECKING

from skerry.cli.cluster.place import writing
from skerry.cli.cluster.tail import last_event, size_of

if TYPE_CHECKING:
    from collections.abc import Callable, Generator

    from skerry.cli.cluster.place import Place

LOOK_S = 0.2
MONITOR = "health-monitor"


class Page:
    """Where this cluster's page will be: made before its monitor is started."""

    def __init__(self, place: Place, *, chaos: bool) -> None:
        self._place = place
        self._chaos = chaos
        self._log = place.logs / f"{MONITOR}.log"
        self._offset = size_of(self._log)

    async def tell(self, say: Callable[[str], None]) -> None:
        """Say the address once the monitor listens; with the token, where faults are allowed.

        The token stands behind a ``#``, which browsers keep to themselves.
        """
        while not (told := last_event(self._log, self._offset, "health_listening")):  # noqa: ASYNC110 - files send no event
            await asyncio.sleep(LOOK_S)
        token = ""
        if self._chaos:
            with contextlib.suppress(OSError):
                token = f"#token={self._place.token.read_text(encoding='utf-8').strip()}"
        say(f"Watch the run on {told['url']}{token}")


@contextlib.contextmanager
def token_kept(place: Place) -> Generator[None]:
    """Keep a new token in the run's folder, for its owner alone, while the context lasts."""
    try:
        with writing(place.token):
            place.token.unlink(missing_ok=True)
            handle = os.open(place.token, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "w", encoding="utf-8") as file:
                file.write(secrets.token_urlsafe(24) + "\n")
        yield
    finally:
        place.token.unlink(missing_ok=True)
