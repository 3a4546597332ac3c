"""``skerry``: the command line. Nothing heavy is imported until a command has been parsed.

The services' own commands are handed on before anything is parsed at all, so that their ``--help``
and their errors are theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skerry.cli.cluster.services import HELP, become
from skerry.service import options
from skerry.service.entry import exit_on_error
from skerry.service.options import Sets, application

HANDED_ON = {
    "learner": ("learner", ()),
    "syncer": ("syncer", ()),
    "checkpointer": ("checkpointer", ()),
    "health-monitor": ("health-monitor", ()),
    "evaluator": ("evaluator", ()),
    "sample": ("evaluator", ("sample",)),
    "eval": ("evaluator", ("eval",)),
    "checkpoints": ("checkpointer", ("checkpoints",)),
    "lab": ("lab", ()),
    **{name: ("tools", (name,)) for name in ("plan", "simulate", "ledger", "replay", "chaos")},
}
"""Commands that another program answers: which service's, and behind which words."""


app = application(bare_shows_help=True)

Config = Annotated[Path | None, typer.Argument(help="TOML file.", metavar="CONFIG.toml")]
Nats = Annotated[str | None, typer.Option(help="A broker that runs already.", metavar="URL")]
Run = Annotated[str | None, typer.Option(help="Run id.", metavar="ID")]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]
FOR_OTHERS: dict[str, Any] = {
    "allow_extra_args": True,
    "ignore_unknown_options": True,
    "help_option_names": [],
}


def _version(wanted: bool) -> None:  # noqa: FBT001 - typer's callback
    if wanted:
        from importlib.metadata import version

        print(f"skerry {version('skerry')}")
        raise typer.Exit


@app.callback()
def root(
    *,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """Train one model on many islands of compute, over a durable NATS JetStream log."""


@app.command()
def demo(
    *,
    summary: Annotated[
        Path | None, typer.Option(help="Write the results here as JSON.", metavar="FILE")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--fresh", help="Go on, or start anew (default).")
    ] = False,
    duration_s: Annotated[
        float | None, typer.Option(help="Seconds of training.", metavar="S")
    ] = None,
    set_: Sets = None,
) -> None:
    """Train on this machine; watch a learner die and return."""
    from skerry.cli.demo import run_demo

    with exit_on_error():
        run_demo(summary=summary, resume=resume, duration_s=duration_s, sets=set_ or [])


@app.command()
def up(  # noqa: PLR0913 - one option each
    config: Config = None,
    *,
    set_: Sets = None,
    run: Annotated[str, typer.Option(envvar="SKERRY_RUN", help="Run id.", metavar="ID")] = "main",
    from_: Annotated[
        Path | None, typer.Option("--from", help="Start from this.", metavar="CHECKPOINT")
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Discard the run's log, or go on (default).")
    ] = False,
    learners: Annotated[
        int | None, typer.Option(help="Learners to start.", min=1, metavar="N")
    ] = None,
    syncers: Annotated[
        int, typer.Option(help="Syncers: they share the shards.", min=1, metavar="N")
    ] = 1,
    checkpointers: Annotated[
        int, typer.Option(help="Checkpointers to start.", min=1, metavar="N")
    ] = 1,
    evaluator: Annotated[
        bool, typer.Option("--evaluator/--no-evaluator", help="Follow its held-out loss.")
    ] = True,
    nats: Nats = None,
) -> None:
    """Run a whole cluster on this machine to its end."""
    from skerry.cli.up import Counts, run_up

    with exit_on_error():
        run_up(
            config=config,
            sets=set_ or [],
            run=run,
            checkpoint=from_,
            fresh=fresh,
            counts=Counts(learners, syncers, checkpointers, int(evaluator)),
            nats=nats,
        )


@app.command(context_settings=FOR_OTHERS)
def learner(context: typer.Context) -> None:
    """Run one learner."""
    _hand_on("learner", context.args)


@app.command(context_settings=FOR_OTHERS)
def syncer(context: typer.Context) -> None:
    """Run a syncer; further ones stand by."""
    _hand_on("syncer", context.args)


@app.command(context_settings=FOR_OTHERS)
def checkpointer(context: typer.Context) -> None:
    """Run the checkpointer."""
    _hand_on("checkpointer", context.args)


@app.command(context_settings=FOR_OTHERS)
def evaluator(context: typer.Context) -> None:
    """Run an evaluator: held-out loss as the run goes along."""
    _hand_on("evaluator", context.args)


@app.command(name="health-monitor", context_settings=FOR_OTHERS)
def health_monitor(context: typer.Context) -> None:
    """Run the health monitor."""
    _hand_on("health-monitor", context.args)


@app.command()
def status(
    *,
    config: options.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    json: AsJson = False,
) -> None:
    """Show how a run is going."""
    from skerry.cli.status import run_status

    with exit_on_error():
        run_status(config=config, sets=set_ or [], run=run, nats=nats, once=once, as_json=json)


@app.command()
def top(
    *,
    config: options.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    once: Annotated[bool, typer.Option("--once", help="Show it once.")] = False,
    json: Annotated[bool, typer.Option("--json", help="One line a second.")] = False,
) -> None:
    """Watch a run closely: learners, rounds, time; q ends it."""
    from skerry.cli.top import run_top

    with exit_on_error():
        run_top(config=config, sets=set_ or [], run=run, nats=nats, once=once, as_json=json)


@app.command(context_settings=FOR_OTHERS)
def checkpoints(context: typer.Context) -> None:
    """List, verify or restore checkpoints."""
    _hand_on("checkpoints", context.args)


@app.command(context_settings=FOR_OTHERS)
def sample(context: typer.Context) -> None:
    """Generate text from a checkpoint."""
    _hand_on("sample", context.args)


@app.command(name="eval", context_settings=FOR_OTHERS)
def evaluate(context: typer.Context) -> None:
    """Measure a checkpoint on held-out text."""
    _hand_on("eval", context.args)


@app.command(context_settings=FOR_OTHERS)
def plan(context: typer.Context) -> None:
    """Plan a run: will it work, how long does it take, what does it cost."""
    _hand_on("plan", context.args)


@app.command(context_settings=FOR_OTHERS)
def simulate(context: typer.Context) -> None:
    """Simulate a fleet's failures and the goodput that is left."""
    _hand_on("simulate", context.args)


@app.command(context_settings=FOR_OTHERS)
def ledger(context: typer.Context) -> None:
    """Prove a run's log."""
    _hand_on("ledger", context.args)


@app.command(context_settings=FOR_OTHERS)
def replay(context: typer.Context) -> None:
    """Rebuild the parameters of any moment from the log, bit by bit; or ask what if."""
    _hand_on("replay", context.args)


@app.command(context_settings=FOR_OTHERS)
def chaos(context: typer.Context) -> None:
    """Break a run on purpose, one drill at a time; heal and check it."""
    _hand_on("chaos", context.args)


@app.command(context_settings=FOR_OTHERS)
def lab(context: typer.Context) -> None:
    """Train a whole cluster in one process, on virtual time."""
    _hand_on("lab", context.args)


@app.command()
def doctor(
    *,
    config: options.Config = None,
    set_: Sets = None,
    nats: Nats = None,
    json: AsJson = False,
) -> None:
    """Check this machine; each line comes with its fix."""
    from skerry.cli.doctor_report import run_doctor

    with exit_on_error():
        run_doctor(config=config, sets=set_ or [], nats=nats, as_json=json)


def _hand_on(name: str, rest: list[str]) -> None:
    service, words = HANDED_ON[name]
    if name == "checkpoints" and (not rest or rest[0].startswith("-")) and not HELP & {*rest}:
        words = (*words, "list")
    if name == "checkpoints" and rest[:1] == ["restore"] and not HELP & {*rest}:
        from skerry.cli.restore import restore_here

        code = restore_here(rest[1:])
        if code is not None:
            sys.exit(code)
    become(service, [*words, *rest])


def main() -> None:
    """Answer the command line of this process."""
    if len(sys.argv) > 1 and sys.argv[1] in HANDED_ON:
        with exit_on_error():
            _hand_on(sys.argv[1], sys.argv[2:])
    app(prog_name="skerry")


if __name__ == "__main__":
    main()
