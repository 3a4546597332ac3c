"""Command line of the learner: parse first, import what is heavy afterwards."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

STARTED_S = time.monotonic()

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.callback(invoke_without_command=True)
def run(
    context: typer.Context,
    nats: Annotated[str | None, typer.Option(help="Broker address.", metavar="URL")] = None,
    run: Annotated[str, typer.Option(envvar="SKERRY_RUN", help="Run id.")] = "main",
    name: Annotated[str | None, typer.Option(help="Name of this learner; the host's.")] = None,
    config: Annotated[Path | None, typer.Option(help="TOML file.", metavar="FILE")] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Override one setting.", metavar="A.B=C")
    ] = None,
) -> None:
    """Train one island. Creates the run where there is none, else takes the run's config."""
    if context.invoked_subcommand is not None:
        return
    import socket

    from skerry import settings
    from skerry.runtime.connect import bus_from
    from skerry.runtime.entry import exit_on_error, run_service
    from skerry.runtime.logs import configure

    learner_name = name or socket.gethostname().partition(".")[0]
    overrides = [*(set_ or []), *([f'nats.url="{nats}"'] if nats else [])]
    with exit_on_error():
        given = settings.load(config, overrides)
        configure(given.local.log_level, service="learner")
        bus = bus_from(given.local.nats, learner_name)
    from skerry_learner.service import learner

    run_service(
        learner(
            bus,
            run,
            learner_name,
            given.run,
            shutdown_s=given.local.shutdown_s,
            started_s=STARTED_S,
        )
    )


@app.command(name="eval")
def evaluate(
    checkpoints: Annotated[list[Path], typer.Argument(help="Checkpoint folders.")],
    batches: Annotated[int, typer.Option(help="Held-out batches at most.", min=1)] = 32,
    json: Annotated[bool, typer.Option("--json", help="One JSON object per line.")] = False,  # noqa: FBT002
) -> None:
    """Print the held-out loss of checkpoints, in nats per token and bits per byte."""
    from skerry.runtime.entry import exit_on_error
    from skerry_learner.judging.commands import print_verdicts

    with exit_on_error():
        print_verdicts(checkpoints, batches=batches, as_json=json)


@app.command()
def sample(
    checkpoint: Annotated[Path, typer.Argument(help="A checkpoint folder.")],
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "def ",
    tokens: Annotated[int, typer.Option(help="Tokens to write.", min=1)] = 200,
    temperature: Annotated[float, typer.Option(help="0: always the likeliest.", min=0)] = 0.7,
    seed: Annotated[int, typer.Option(help="Equal seeds write equal text.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,  # noqa: FBT002
) -> None:
    """Let a checkpoint continue a prompt."""
    from skerry.runtime.entry import exit_on_error
    from skerry_learner.judging.commands import print_sample

    with exit_on_error():
        print_sample(
            checkpoint,
            prompt=prompt,
            count=tokens,
            temperature=temperature,
            seed=seed,
            as_json=json,
        )


def main() -> None:
    app()


if __name__ == "__main__":
    main()
