"""Command line of the syncer: parse first, import what is heavy afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from skerry.service.entry import Config, Nats, Run, Sets, answer, application, settings_from

app = application()


@app.command()
def run(
    nats: Nats = None,
    run: Run = "main",
    name: Annotated[str | None, typer.Option(help="Name of this syncer.", metavar="NAME")] = None,
    config: Config = None,
    set_: Sets = None,
) -> None:
    """Open rounds, merge what arrives, commit; stand by while another syncer does.

    Start as many as you like, on any machines. When one dies, hangs or is cut off, another takes
    over within sync.lease_s and about a second; the first stands by when it is back. With
    sync.shards above 1 they share the fragments evenly. The run's config comes from the ledger.
    """
    import os
    import re
    import socket

    from skerry.service.entry import bus_from, exit_on_error, run_service
    from skerry.service.reporting import broker_event, telemetry
    from skerry_syncer.service import syncer

    machine = re.sub(r"[^A-Za-z0-9_-]", "-", socket.gethostname())[:40]
    holder = name or f"syncer-{machine}-{os.getpid()}"
    with exit_on_error():
        local = settings_from(nats, config, set_, service="syncer").local
        bus = bus_from(local.nats, holder, on_event=broker_event)
    run_service(
        syncer(bus, run, holder, local.shutdown_s, stays=local.stays),
        telemetry(local, "syncer", run, holder),
        local.alive_file,
    )


def main() -> None:
    answer(app, "syncer", computes=True)


if __name__ == "__main__":
    main()
