"""Network namespaces for the services of a local cluster, where its run asks for them."""

from __future__ import annotations

import contextlib
import ipaddress
import os
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from skerry.chaos.wires import wired
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Mapping

    from skerry.chaos.wires import Wire
    from skerry.cli.place import Place
    from skerry.cli.services import Team
    from skerry.settings import LocalSettings

OUTSIDE = "health-monitor"
"""Its page is for this machine's browsers."""


@contextlib.asynccontextmanager
async def namespaces(
    place: Place, team: Team, local: LocalSettings
) -> AsyncGenerator[dict[str, Wire]]:
    """Yield the cable of every service that has a namespace: all but the monitor, or none.

    ConfigError where that cannot be had.
    """
    if not team.netns:
        yield {}
        return
    refuse_loopback(local, os.environ)
    named = [name for name, service in team.kinds().items() if service != OUTSIDE]
    async with wired(place.folder, named) as wires:
        yield wires


def refuse_loopback(local: LocalSettings, environ: Mapping[str, str]) -> None:
    """Raise ConfigError for an address that means something else in a namespace."""
    told, store = local.telemetry, local.store
    bucket = (store.endpoint or environ.get("AWS_ENDPOINT_URL", "")) if store.url else ""
    named = {
        "telemetry.endpoint": (told.traces_url, told.metrics_url),
        "store.endpoint": (bucket,),
    }
    for setting, urls in named.items():
        for url in urls:
            if _loopback(urlsplit(url).hostname or ""):
                msg = (
                    f"{setting} is {url}, this machine's loopback, which services in namespaces of "
                    "their own cannot reach: name another address, or leave chaos.netns out."
                )
                raise ConfigError(msg, path=setting)


def _loopback(host: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return host == "localhost"
