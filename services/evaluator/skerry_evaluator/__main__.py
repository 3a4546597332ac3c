"""Command line of the evaluator: parse first, import what is heavy afterwards."""

from __future__ import annotations

from typing import Annotated

import typer

from skerry.service.options import Config, Nats, Run, Sets, answer, application, settings_from

app = application()

AsJson = Annotated[bool, typer.Option("--json", help="One JSON object per checkpoint.")]


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    nats: Nats = None,
    run: Run = "main",
    name: Annotated[
        str | None, typer.Option(help="Its name; by default the host's.", metavar="NAME")
    ] = None,
    config: Config = None,
    set_: Sets = None,
) -> None:
    """Evaluate a run's global model on held-out text, as it goes along and at its end.

    It needs the run's text and model code, runs at low priority, and on the CPU unless
    JAX_PLATFORMS says otherwise. eval.every_s and eval.batches of the run say how often and on how
    much text.
    """
    if context.invoked_subcommand is not None:
        return
    import os
    import socket

    from skerry.protocol.subjects import checked_token
    from skerry.service.connect import bus_from
    from skerry.service.entry import exit_on_error, run_service
    from skerry.service.logs import broker_event
    from skerry.service.priority import yield_to_others
    from skerry.service.telemetry import telemetry
    from skerry_evaluator import service

    holder = name or f"evaluator-{socket.gethostname().partition('.')[0]}"
    with exit_on_error():
        checked_token(run, "run")
        local = settings_from(nats, config, set_, service="evaluator").local
        bus = bus_from(local.nats, holder, on_event=broker_event)
    yield_to_others(service.NICENESS)
    # A second process on an accelerator would take memory that its learner counts on.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    run_service(
        service.evaluator(bus, run, holder, local.shutdown_s),
        telemetry(local, "evaluator", run, holder),
    )


@app.command(name="eval")
def evaluate(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Folders or s3:// addresses.", metavar="CHECKPOINT")
    ],
    batches: Annotated[
        int | None,
        typer.Option(help="Held-out batches at most; default: its run's.", min=1, metavar="N"),
    ] = None,
    set_: Sets = None,
    *,
    json: AsJson = False,
) -> None:
    """Measure held-out loss, in nats per token and bits per byte, and perplexity."""
    from skerry.service.entry import exit_on_error
    from skerry_evaluator.commands import print_verdicts

    with exit_on_error():
        print_verdicts(checkpoints, batches=batches, as_json=json, sets=set_ or [])


@app.command()
def sample(
    checkpoint: Annotated[
        str, typer.Argument(help="Its folder or s3:// address.", metavar="CHECKPOINT")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.", metavar="TEXT")] = "def ",
    tokens: Annotated[int, typer.Option(help="Tokens to write.", min=1, metavar="N")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0: always the likeliest.", min=0, metavar="T")
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="Equal seeds write equal text.", metavar="N")] = 0,
    set_: Sets = None,
    *,
    json: AsJson = False,
) -> None:
    """Let a checkpoint continue a prompt."""
    from skerry.service.entry import exit_on_error
    from skerry_evaluator.commands import print_sample

    with exit_on_error():
        print_sample(
            checkpoint,
            prompt=prompt,
            count=tokens,
            temperature=temperature,
            seed=seed,
            as_json=json,
            sets=set_ or [],
        )


def main() -> None:
    answer(app, "evaluator", also=("eval", "sample"))


if __name__ == "__main__":
    main()
