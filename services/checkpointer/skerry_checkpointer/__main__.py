"""The command line of the checkpointer; it parses before it imports anything heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from skerry.service.entry import (
    AsJson,
    Config,
    Nats,
    Run,
    Sets,
    answer,
    application,
    settings_from,
)

app = application()
checkpoints = application(bare_shows_help=True)
app.add_typer(
    checkpoints, name="checkpoints", help="List, verify and restore checkpoints.", hidden=True
)

hub = application(bare_shows_help=True)
app.add_typer(hub, name="hub", help="Make a region's broker the hub.", hidden=True)

OneRun = Annotated[str | None, typer.Option(help="Only this run's.", metavar="ID")]
Name = Annotated[str | None, typer.Option(help="Name of this checkpointer.", metavar="NAME")]
Where = Annotated[
    str, typer.Argument(metavar="CHECKPOINT", help="Folder or s3:// address; of a run: its newest.")
]
Replace = Annotated[
    bool, typer.Option("--replace", help="Put back what the run's log lost or has older.")
]
Exact = Annotated[bool, typer.Option("--exact", help="Go back to each fragment's newest snapshot.")]


@app.callback(invoke_without_command=True, subcommand_metavar="")
def run_by_default(
    context: typer.Context,
    nats: Nats = None,
    run: Run = "main",
    name: Name = None,
    config: Config = None,
    set_: Sets = None,
) -> None:
    """Write verified checkpoints of a run until it is finished."""
    if context.invoked_subcommand is not None:
        return
    import os
    import socket

    from skerry.service.entry import bus_from, exit_on_error, run_service
    from skerry.service.reporting import broker_event, telemetry
    from skerry.store.finding import store_of
    from skerry_checkpointer.service import checkpointer

    holder = name or f"checkpointer-{socket.gethostname()}-{os.getpid()}"
    with exit_on_error():
        local = settings_from(nats, config, set_, service="checkpointer").local
        store = store_of(local.store, run)
        bus = bus_from(local.nats, holder, on_event=broker_event)
    run_service(
        checkpointer(bus, run, store, local.shutdown_s, stays=local.stays),
        telemetry(local, "checkpointer", run, holder),
        local.alive_file,
    )


@checkpoints.command()
def restore(
    checkpoint: Where,
    nats: Nats = None,
    run: Run = "main",
    config: Config = None,
    set_: Sets = None,
    *,
    replace: Replace = False,
    exact: Exact = False,
) -> None:
    """Start a run from a checkpoint, or put back what a run's log has lost.

    In a log without the run, versions go on where the checkpoint's end. First stop all processes
    that still work on a run of that name whose log is gone. ``--set train.steps=…``,
    ``train.duration_s`` and ``train.tokens`` set its end, ``log.replicas`` how many brokers store
    it; all else stays as in the checkpoint.

    A run goes on from the parameters that learners had last. Where ``sync.snapshot_every`` is above
    1, its outer optimizer may be some versions older. --exact goes back to those versions instead:
    to the syncer's own state, bit by bit, without the rounds since.

    Use --replace if the log has the run but lost a part of it, or was rolled back. Stop the run
    first. Each fragment that the log has in an older version, or that cannot be read any more, is
    committed from the checkpoint: as the version after the newest that the ledger knows, "restored
    from … at version …". Members and cursors stay. Fragments that are newer than the checkpoint
    stay, too; if there are any and nothing is lost, the command is refused.
    """
    from skerry.service.entry import bus_from, exit_on_error, run_service
    from skerry_checkpointer import commands

    with exit_on_error():
        extends, machine = commands.split_sets(set_ or [])
        local = settings_from(nats, config, machine).local
        bus = bus_from(local.nats, "restore")
    run_service(
        commands.print_restored(
            bus, checkpoint, run, extends, local.store, put_back=replace, exact=exact
        )
    )


@checkpoints.command("list")
def list_command(
    run: OneRun = None, config: Config = None, set_: Sets = None, *, as_json: AsJson = False
) -> None:
    """List the checkpoints below store.path or store.url, oldest first."""
    from skerry.service.entry import exit_on_error
    from skerry_checkpointer import commands

    with exit_on_error():
        commands.print_list(settings_from(None, config, set_).local.store, run, as_json=as_json)


@checkpoints.command()
def verify(
    checkpoint: Where, config: Config = None, set_: Sets = None, *, as_json: AsJson = False
) -> None:
    """Check every byte and every vector of a checkpoint."""
    from skerry.service.entry import exit_on_error
    from skerry_checkpointer import commands

    with exit_on_error():
        commands.print_verified(
            checkpoint, settings_from(None, config, set_).local.store, as_json=as_json
        )


@hub.command()
def promote(
    region: Annotated[str, typer.Argument(help="A region that is a standby.", metavar="REGION")],
    nats: Nats = None,
    set_: Sets = None,
    keys: Annotated[
        Path, typer.Option("--keys", help="Folder of the hub's keys.", metavar="FOLDER")
    ] = Path("keys"),
) -> None:
    """Save a run from a region's standby after its hub is gone; print what to do next.

    --nats names the region's broker. The command writes a checkpoint of what that broker has into
    the store, and hands the region's learners to the new hub. It is refused while the hub answers.
    """
    from skerry.service.entry import exit_on_error
    from skerry_checkpointer.promote import run_promote

    with exit_on_error():
        run_promote(region, nats, set_ or [], keys)


@app.command(hidden=True)
def export(
    checkpoint: Where,
    out: Annotated[Path, typer.Option(help="New folder for the model.", metavar="FOLDER")],
    to: Annotated[
        Literal["hf", "peft", "tensors"],
        typer.Option(help="A model, peft adapters, or tensors alone.", metavar="FORM"),
    ] = "hf",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Copy tokenizer files from this folder.", metavar="FOLDER"),
    ] = None,
    dtype: Annotated[
        Literal["float32", "bfloat16", "float16"] | None,
        typer.Option(help="Type of the weights; default: the model's own.", metavar="TYPE"),
    ] = None,
    config: Config = None,
    set_: Sets = None,
) -> None:
    """Write a checkpoint's model as a folder that transformers loads."""
    from skerry.service.entry import exit_on_error

    with exit_on_error():
        from skerry.models.export import FORMS

        access = settings_from(None, config, set_).local.store
        where = FORMS[to](checkpoint, out, access, source=tokenizer, dtype=dtype)
        loads = {"hf": "AutoModelForCausalLM.from_pretrained", "peft": "PeftModel.from_pretrained"}
        print(f"Wrote {where}: {loads.get(to, 'safetensors')} loads it.")


def main() -> None:
    answer(app, "checkpointer", also=("checkpoints", "hub", "export"))


if __name__ == "__main__":
    main()
