"""Command line of the syncer: parse first, import what is heavy afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from skerry.runtime.options import Config, Nats, Run, Sets, answer, application

app = application()


@app.command()
def run(
    nats: Nats = None,
    run: Run = "main",
    name: Annotated[str | None, typer.Option(help="Name of this syncer.", metavar="NAME")] = None,
    config: Config = None,
    set_: Sets = None,
) -> None:
    """Open rounds, merge what arrives, commit. Takes the run's config from the ledger."""
    import os
    import socket

    from skerry import settings
    from skerry.runtime.connect import bus_from
    from skerry.runtime.entry import exit_on_error, run_service
    from skerry.runtime.logs import broker_event, configure
    from skerry_syncer.service import syncer

    holder = name or f"syncer-{socket.gethostname()}-{os.getpid()}"
    overrides = [*(set_ or []), *([f'nats.url="{nats}"'] if nats else [])]
    with exit_on_error():
        local = settings.load(config, overrides).local
        configure(local.log_level, service="syncer")
    bus = bus_from(local.nats, holder, on_event=broker_event)
    run_service(syncer(bus, run, holder, local.shutdown_s))


def main() -> None:
    answer(app, "syncer")


if __name__ == "__main__":
    main()
