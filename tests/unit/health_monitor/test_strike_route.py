"""Who may strike: nobody without the token, whatever else the request says."""

from __future__ import annotations

from typing import cast

import httpx
import pytest
from starlette.applications import Starlette

from skerry_health_monitor.web.strikes import Striker, strike_route

TOKEN = "a-token-of-24-characters"  # noqa: S105 - of this test


class Untouchable:
    """A striker that must never be asked."""

    def __getattr__(self, name: str) -> object:
        msg = f"the striker was asked for {name}"
        raise AssertionError(msg)


@pytest.mark.parametrize(
    "header",
    ["", "Bearer", "Bearer ", "Bearer wrong", f"Basic {TOKEN}", f"Bearer {TOKEN}x", TOKEN],
)
async def test_without_the_token_nothing_is_done(header: str) -> None:
    route = strike_route(cast("Striker", Untouchable()), TOKEN, lambda: True)
    transport = httpx.ASGITransport(Starlette(routes=[route]))
    async with httpx.AsyncClient(transport=transport, base_url="http://monitor") as client:
        path = route.path.format(name="a", action="kill")
        answer = await client.post(path, headers={"authorization": header})
    assert answer.status_code == 401
