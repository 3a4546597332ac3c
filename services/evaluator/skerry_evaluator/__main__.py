"""The evaluator's command line: it parses before it imports anything heavy."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skerry.service.entry import Config, Nats, Run, Sets, answer, application, settings_from

app = application()


@app.callback(invoke_without_command=True, subcommand_metavar="")
def run(
    context: typer.Context,
    nats: Nats = None,
    run: Run = "main",
    name: Annotated[
        str | None,
        typer.Option(help="Name of this evaluator; default: the host's.", metavar="NAME"),
    ] = None,
    config: Config = None,
    set_: Sets = None,
) -> None:
    """Evaluate a run's global model on held-out text, while it trains and at its end.

    It needs the run's text and model code. It runs at low priority, on the CPU unless JAX_PLATFORMS
    names another device. The run's eval.every_s and eval.batches set how often and on how much
    text.
    """
    if context.invoked_subcommand is not None:
        return
    import os
    import socket

    from skerry.protocol.subjects import checked_token
    from skerry.service.entry import bus_from, exit_on_error, run_service
    from skerry.service.reporting import broker_event, telemetry
    from skerry.service.shell import yield_to_others
    from skerry_evaluator import service

    holder = name or f"evaluator-{socket.gethostname().partition('.')[0]}"
    with exit_on_error():
        checked_token(run, "run")
        given = settings_from(nats, config, set_, service="evaluator")
        local = given.local
        bus = bus_from(local.nats, holder, on_event=broker_event)
    yield_to_others(service.NICENESS)
    # On an accelerator it would take memory that the learner there counts on.
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    run_service(
        service.evaluator(bus, run, holder, given),
        telemetry(local, "evaluator", run, holder),
        local.alive_file,
    )


@app.command(name="eval", hidden=True)  # commands of ``skerry`` itself
def evaluate(
    checkpoints: Annotated[
        list[str], typer.Argument(help="Folders or s3:// addresses.", metavar="CHECKPOINT")
    ],
    batches: Annotated[
        int | None,
        typer.Option(help="Held-out batches at most; default: the run's.", min=1, metavar="N"),
    ] = None,
    text: Annotated[
        list[str] | None,
        typer.Option(
            help="Measure on this text's held-out part; default: the run's.", metavar="PATH"
        ),
    ] = None,
    tasks: Annotated[
        str, typer.Option(help="Run these tasks with lm-evaluation-harness.", metavar="A,B")
    ] = "",
    tokenizer: Annotated[
        Path | None,
        typer.Option(help="Tokenizer folder, for --text or --tasks.", metavar="FOLDER"),
    ] = None,
    set_: Sets = None,
    *,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON object for each.")] = False,
) -> None:
    """Measure held-out loss, in nats per token and bits per byte, and perplexity."""
    from skerry.errors import ConfigError
    from skerry.service.entry import exit_on_error
    from skerry.settings.checks import refuse_run_settings

    with exit_on_error(cleans_up=False):
        refuse_run_settings(set_ or (), *(["data.field"] if text else ()))
        if tasks:
            from skerry_evaluator.harness import judge

            if text or batches or json:
                msg = "--tasks has its own text and output: leave --text, --batches and --json out."
                raise ConfigError(msg, path="tasks")
            access = settings_from(None, None, set_).local.store
            for checkpoint in checkpoints:
                judge(checkpoint, tasks, tokenizer, access)
            return
        from skerry_evaluator.checkpoints import print_scores

        print_scores(
            checkpoints,
            batches=batches,
            text=text or (),
            tokenizer=tokenizer,
            as_json=json,
            sets=set_ or [],
        )


@app.command(hidden=True)
def sample(
    checkpoint: Annotated[
        str, typer.Argument(help="Folder or s3:// address.", metavar="CHECKPOINT")
    ],
    prompt: Annotated[str, typer.Option(help="Text to continue.", metavar="TEXT")] = "def ",
    tokens: Annotated[int, typer.Option(help="Tokens to write.", min=1, metavar="N")] = 200,
    temperature: Annotated[
        float, typer.Option(help="0 takes the likeliest token.", min=0, metavar="T")
    ] = 0.7,
    seed: Annotated[int, typer.Option(help="The same seed writes the same text.", metavar="N")] = 0,
    tokenizer: Annotated[
        Path | None, typer.Option(help="Folder with tokenizer.json.", metavar="FOLDER")
    ] = None,
    set_: Sets = None,
    *,
    chat: Annotated[bool, typer.Option("--chat", help="Answer each line of stdin.")] = False,
) -> None:
    """Continue a prompt with a checkpoint's model, or talk with it."""
    import io
    import sys

    from skerry.service.entry import exit_on_error
    from skerry.settings.checks import refuse_run_settings

    with exit_on_error(cleans_up=False):
        refuse_run_settings(set_ or ())
        if chat:
            from skerry_evaluator.chat import print_chat

            lines = io.TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace")
            print_chat(checkpoint, lines, tokens, temperature, seed, tokenizer, set_ or [])
            return
        from skerry_evaluator.checkpoints import print_sample

        print_sample(checkpoint, prompt, tokens, temperature, seed, tokenizer, set_ or [])


def main() -> None:
    answer(app, "evaluator", also=("eval", "sample"), computes=True)


if __name__ == "__main__":
    main()
