"""Who may ask the page anything: by host name, by origin, and beyond the loopback by a token.

A web page that a browser has open may ask any address, this one too. It reads the answer only as
its own host, which its name server may point here (DNS rebinding): hence the check of ``Host``. A
name that stands for the loopback, or an address, no name server can claim.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from skerry.errors import ConfigError

if TYPE_CHECKING:
    from skerry.settings.local import HealthSettings

LEAST_TOKEN = 16
LOCALHOST = "localhost"
OPEN = "/healthz"
"""Asked by what starts and stops containers; it says nothing about a run."""
OURS = ("same-origin", "none")
"""What browsers say of a request that comes from this page, or from the user."""
SHARE = "share"
"""Name of a link's key, and of the cookie that keeps it; this key allows to read, and no more."""
LINK = "/api/share"
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


def refusal(status: int, why: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    """Return an error answer that says why."""
    return JSONResponse({"error": why}, status, headers)


def share_key(token: str) -> str:
    """Return the key of a shared link: made from the token, without revealing it."""
    return hmac.digest(token.encode(), b"skerry page, to read", "sha256").hex()[:32]


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
    """An ASGI application in front of another one; with an empty token it asks for none."""

    app: ASGIApp
    names: Collection[str]
    token: str = ""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answer(Request(scope), scope["path"])
        await (answer or self.app)(scope, receive, send)

    def _shared(self, request: Request) -> Response | None:
        """Return the page with the key of the link that was followed, in a cookie."""
        key = request.query_params.get(SHARE, "")
        if not hmac.compare_digest(key.encode(), share_key(self.token).encode()):
            return None
        answer = RedirectResponse("/", 303)
        answer.set_cookie(SHARE, key, httponly=True, samesite="lax")
        return answer

    def _reads(self, request: Request) -> bool:
        """Return True for a request that only reads and has the cookie of a shared link."""
        given = request.cookies.get(SHARE, "")
        known = hmac.compare_digest(given.encode(), share_key(self.token).encode())
        return known and request.method in {"GET", "HEAD"}

    def _answer(self, request: Request, path: str) -> Response | None:
        """Return the gate's own answer; None where the application answers."""
        headers = request.headers
        if not self._is_ours(headers.get("host", "")):
            return refusal(
                421, "This page is not reached by that host name: add it to health.names."
            )
        foreign = headers.get("sec-fetch-site", "none") not in OURS
        if foreign and headers.get("sec-fetch-mode") != "navigate":
            return refusal(403, "Another site's page may ask nothing here.")
        if self.token and path == "/" and (shared := self._shared(request)):
            return shared
        known = not self.token or has_token(headers, self.token, basic=True) or self._reads(request)
        if path != OPEN and not known:
            what = "This needs the token in the file that health.token_file names."
            return refusal(401, what, {"www-authenticate": REALM})
        return self._link() if path == LINK else None

    def _link(self) -> JSONResponse:
        """Return where others read this page, and inject no faults."""
        return JSONResponse({"path": f"/?{SHARE}={share_key(self.token)}" if self.token else "/"})

    def _is_ours(self, host: str) -> bool:
        """Return True for a Host header that no foreign name server can have made up."""
        try:
            name = urlsplit(f"//{host}").hostname or ""
        except ValueError:
            return False
        return name in {LOCALHOST, *self.names} or _address(name)
