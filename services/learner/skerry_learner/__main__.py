"""Command line of the learner: parse first, import what is heavy afterwards."""

from __future__ import annotations

import sys
import time
from contextlib import nullcontext
from functools import partial
from typing import Annotated

import typer

from skerry.service.entry import (
    AllowCode,
    Config,
    FromHf,
    Nats,
    Run,
    Sets,
    answer,
    application,
    assignments,
    settings_from,
)

STARTED_S = time.monotonic()

app = application()


@app.callback(invoke_without_command=True, subcommand_metavar="")
def run_by_default(
    context: typer.Context,
    nats: Nats = None,
    run: Run = "main",
    name: Annotated[
        str | None, typer.Option(help="Name of this learner; default: the host's.", metavar="NAME")
    ] = None,
    config: Config = None,
    set_: Sets = None,
    from_hf: FromHf = None,
    allow_code: AllowCode = None,
) -> None:
    """Train one island; create the run if there is none, else use the run's own config."""
    if context.invoked_subcommand is not None:
        return
    import socket

    from skerry.client.meeting import Group
    from skerry.protocol.subjects import checked_token
    from skerry.service.entry import bus_from, exit_on_error, run_service
    from skerry.service.reporting import broker_event, telemetry

    learner_name = name or socket.gethostname().partition(".")[0]
    with exit_on_error(cleans_up=False):
        checked_token(run, "run")
        checked_token(learner_name, "learner")
        given = settings_from(
            nats, config, assignments(set_, allow_code, from_hf), service="learner"
        )
        bus = bus_from(given.local.nats, learner_name, on_event=broker_event)
        group, crew = Group.of(given.local.learner), None
        if group is not None:
            from skerry.client.jax_processes import Crew

            crew = Crew.of(group, run, learner_name)
    from skerry_learner.following import follow
    from skerry_learner.service import learner, step_back

    local = given.local
    settled = partial(step_back, local.learner.nice)
    with nullcontext() if crew is None else crew.computing():
        if crew is not None and crew.follower is not None:
            following = follow(bus, crew.follower, given.run, local.learner, settled=settled)
            run_service(following, alive=local.alive_file)
            return
        over = run_service(
            learner(
                *(bus, run, learner_name, given.run),
                shutdown_s=local.shutdown_s,
                started_s=STARTED_S,
                local=local.learner,
                settled=settled,
                lead=None if crew is None else crew.lead,
            ),
            telemetry(local, "learner", run, learner_name),
            local.alive_file,
        )
    if not over:
        sys.exit(local.learner.stopped_code)


@app.command(hidden=True)  # a command of ``skerry`` itself
def create(
    run: Annotated[str, typer.Argument(help="Run id.", metavar="RUN")],
    nats: Nats = None,
    config: Config = None,
    set_: Sets = None,
    from_hf: FromHf = None,
    allow_code: AllowCode = None,
) -> None:
    """Create a run that learners then join.

    It trains nothing and needs no text: for brokers where learners may not create runs.
    """
    from skerry.protocol.subjects import checked_token
    from skerry.service.entry import bus_from, exit_on_error, run_service

    with exit_on_error(cleans_up=False):
        checked_token(run, "run")
        given = settings_from(
            nats, config, assignments(set_, allow_code, from_hf), service="learner"
        )
        bus = bus_from(given.local.nats, "create")
    from skerry_learner.work import create_run

    run_service(create_run(bus, run, given.run), alive=given.local.alive_file)


def main() -> None:
    answer(app, "learner", also=("create",), computes=True)


if __name__ == "__main__":
    main()
