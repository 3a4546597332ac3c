"""Network namespaces for the services of a local cluster, where its run asks for them."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from skerry.cli.cluster.place import writing
from skerry.cli.cluster.wires import sweep, wired
from skerry.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Generator

    from skerry.cli.cluster.place import Place
    from skerry.cli.cluster.services import Team
    from skerry.cli.cluster.wires import Wire
    from skerry.settings.models import LocalSettings

OUTSIDE = "health-monitor"
"""Its page is for this machine's browsers."""


@contextlib.contextmanager
def namespaces(place: Place, team: Team, local: LocalSettings) -> Generator[dict[str, Wire]]:
    """Yield the cable of every service that has a namespace: all but the monitor, or none.

    ConfigError where that cannot be had.
    """
    if not team.netns:
        sweep(place.folder)
        yield {}
        return
    refuse_elsewhere(local)
    named = [name for name, service in team.kinds().items() if service != OUTSIDE]
    with contextlib.ExitStack() as stack:
        with writing(place.folder):
            wires = stack.enter_context(wired(place.folder, named))
        yield wires


def refuse_elsewhere(local: LocalSettings) -> None:
    """Raise ConfigError for an address beside the broker's: a namespace has no way to it."""
    named = {
        "store.url": local.store.url,
        "telemetry.endpoint": local.telemetry.traces_url or local.telemetry.metrics_url,
    }
    for setting, url in named.items():
        if url:
            msg = (
                f"{setting} is {url}: services in namespaces of their own reach nothing but their "
                "broker. Leave it out, or create a run without chaos.netns."
            )
            raise ConfigError(msg, path=setting)
