"""Command line of the health monitor: parse first, import what is heavy afterwards."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.errors import ConfigError
from skerry.service.entry import Config, Nats, Run, Sets, answer, application, settings_from

if TYPE_CHECKING:
    from skerry.settings.local import HealthSettings

app = application()


@app.command()
def run(
    *,
    nats: Nats = None,
    run: Run = "main",
    name: Annotated[str | None, typer.Option(help="Name of this monitor.", metavar="NAME")] = None,
    config: Config = None,
    set_: Sets = None,
    until_finished: Annotated[
        bool, typer.Option("--until-finished", help="End when the run is finished.")
    ] = False,
) -> None:
    """Report learners as alive, slow or gone; serve page, JSON and metrics on health.port."""
    import os
    from pathlib import Path

    from skerry.protocol.subjects import checked_token
    from skerry.service.entry import bus_from, exit_on_error, run_service
    from skerry.service.reporting import BrokerWatch, telemetry
    from skerry_health_monitor.metrics.outlets import outlets
    from skerry_health_monitor.service import health_monitor

    link = BrokerWatch()
    holder = name or f"health-monitor-{socket.gethostname()}-{os.getpid()}"
    with exit_on_error():
        checked_token(run, "run")
        local = settings_from(nats, config, set_, service="health-monitor").local
        rows = local.telemetry.jsonl or Path(".skerry", run, "metrics.jsonl")
        sinks = outlets(local.metrics, rows, run)
        bus = bus_from(local.nats, holder, on_event=link.on_event)
        listening = listening_on(local.health)
    run_service(
        health_monitor(
            bus,
            run,
            listening,
            link=link,
            local=local,
            outlets=sinks,
            until_finished=until_finished,
        ),
        telemetry(local, "health-monitor", run, holder),
        local.alive_file,
    )


def listening_on(health: HealthSettings) -> socket.socket:
    """Return the page's socket, on a free port where its own is taken."""
    import structlog

    from skerry_health_monitor.web.server import listen

    try:
        return listen(health.host, health.port)
    except ConfigError as error:
        if error.path != "health.port":
            raise
        structlog.get_logger().warning("page_port_taken", error=str(error))
        return listen(health.host, 0)


def main() -> None:
    answer(app, "health-monitor")


if __name__ == "__main__":
    main()
