"""Who may ask the page anything: by host name, by origin, and beyond the loopback by a token.

A web page that a browser has open may ask any address, this one too. It reads the answer only as
its own host, which its name server may point here (DNS rebinding): hence the check of ``Host``. A
name that stands for the loopback, or an address, no name server can claim.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from skerry.settings.models import HealthSettings

LEAST_TOKEN = 16
LOCALHOST = "localhost"
OPEN = "/healthz"
"""Asked by what starts and stops containers; it says nothing about a run."""
OURS = ("same-origin", "none")
"""What browsers say of a request that comes from this page, or from the user."""
REALM = 'Basic realm="skerry: any name, and the token as password", charset="UTF-8"'


def read_token(path: Path) -> str:
    """Return the token that a file holds; ConfigError for one that cannot be used."""
    try:
        token = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        msg = f"health.token_file is {path}, which cannot be read: name a file that you may read."
        raise ConfigError(msg, path="health.token_file") from error
    if len(token) < LEAST_TOKEN:
        msg = f"The token in {path} is shorter than {LEAST_TOKEN} characters: make a longer one."
        raise ConfigError(msg, path="health.token_file")
    return token


def has_token(headers: Headers, token: str, *, basic: bool = False) -> bool:
    """Return True for a request with this token: as Bearer, or as the password of Basic.

    A browser sends Basic along with what other sites ask of it, and Bearer never.
    """
    kind, _, given = headers.get("authorization", "").partition(" ")
    if basic and kind.lower() == "basic":
        with suppress(ValueError, binascii.Error):
            kind, given = "bearer", base64.b64decode(given).decode().partition(":")[2]
    return kind.lower() == "bearer" and hmac.compare_digest(given.encode(), token.encode())


def gate_for(app: ASGIApp, health: HealthSettings) -> Gate:
    """Return the gate before the page; ConfigError beyond the loopback without a token's file."""
    if _address(health.host, loopback=True) or health.host == LOCALHOST:
        return Gate(app, health.names)
    if health.token_file is None:
        msg = (
            f"health.host is {health.host}, where others reach the page and /metrics: name a file "
            f"with a token of {LEAST_TOKEN} characters or more with --set health.token_file=…, or "
            "listen on 127.0.0.1."
        )
        raise ConfigError(msg, path="health.token_file")
    return Gate(app, health.names, read_token(health.token_file))


def _address(text: str, *, loopback: bool = False) -> bool:
    """Return True for an IP address, or for one of the loopback only."""
    with suppress(ValueError):
        address = ip_address(text)
        return address.is_loopback or not loopback
    return False


@dataclass(frozen=True, slots=True)
class Gate:
    """An ASGI application before another one; an empty token: none is asked for."""

    app: ASGIApp
    names: Collection[str]
    token: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(Headers(scope=scope), scope["path"])
        await (refusal or self.app)(scope, receive, send)

    def _refusal(self, headers: Headers, path: str) -> JSONResponse | None:
        if not self._is_ours(headers.get("host", "")):
            what = "This page is not reached by that host name: add it to health.names."
            return JSONResponse({"error": what}, 421)
        foreign = headers.get("sec-fetch-site", "none") not in OURS
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            return JSONResponse({"error": "Another site's page may ask nothing here."}, 403)
        if self.token and path != OPEN and not has_token(headers, self.token, basic=True):
            what = "This needs the token in the file that health.token_file names."
            return JSONResponse({"error": what}, 401, {"www-authenticate": REALM})
        return None

    def _is_ours(self, host: str) -> bool:
        """Return True for a Host header that no foreign name server can have made up."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in {LOCALHOST, *self.names} or _address(name)
