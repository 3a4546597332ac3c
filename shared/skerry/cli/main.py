"""``skerry``: the command line. Nothing heavy is imported until a command has been parsed.

Commands of other programs are passed on before anything is parsed at all, so that their ``--help``
and their errors are their own.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from skerry.cli import keys, region
from skerry.cli.cluster import devices
from skerry.cli.programs import (
    COMMANDS,
    PROGRAMS,
    SERVICES,
    argv_of,
    computing,
    require,
)
from skerry.service import entry, interrupts
from skerry.service.clusters import ROOT
from skerry.service.entry import (
    DEBUG,
    AllowCode,
    AsJson,
    FromHf,
    Nats,
    Sets,
    answer,
    application,
    assignments,
    exit_on_error,
)

HELP = frozenset({"-h", "--help"})

app = application(bare_shows_help=True, completes=True)
config_app = application(bare_shows_help=True)

Config = Annotated[Path | None, typer.Argument(help="The run's settings.", metavar="CONFIG.toml")]
Run = Annotated[
    str | None, typer.Option(envvar="SKERRY_RUN", help="Run id; default: the newest.", metavar="ID")
]


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
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error, in any position.")
    ] = False,
) -> None:
    """Train one model on many islands of compute, over a durable NATS JetStream log."""


@app.command()
def demo(
    *,
    summary: Annotated[
        Path | None, typer.Option(help="Write the results here as JSON.", metavar="FILE")
    ] = None,
    set_: Sets = None,
) -> None:
    """Train on this machine; watch a learner die and return."""
    from skerry.cli.demo import run_demo

    with exit_on_error():
        run_demo(summary=summary, sets=set_ or [])


@app.command()
def init(
    text: Annotated[
        Path | None, typer.Argument(help="Folder or file with your text.", metavar="TEXT")
    ] = None,
    *,
    out: Annotated[Path, typer.Option(help="File to write.", metavar="FILE")] = Path("run.toml"),
    learners: Annotated[
        int | None, typer.Option(help="Number of learners.", min=1, metavar="N")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an existing file.")] = False,
) -> None:
    """Write a run.toml for this machine and your text."""
    with exit_on_error():
        from skerry.cli.config import run_init

        run_init(text, out=out, learners=learners, force=force)


@config_app.command()
def show(
    config: Config = None,
    *,
    set_: Sets = None,
    given: Annotated[bool, typer.Option("--given", help="Leave out the defaults.")] = False,
    json: AsJson = False,
) -> None:
    """Print all settings, each with what set it: default, file, environment or --set."""
    with exit_on_error():
        from skerry.cli.config import run_config_show

        run_config_show(config, set_ or (), given=given, as_json=json)


@app.command()
def up(  # noqa: PLR0913 - typer makes an option of each parameter
    config: Config = None,
    *,
    as_option: Annotated[
        Path | None, typer.Option("--config", hidden=True, metavar="CONFIG.toml")
    ] = None,  # as other commands take it
    set_: Sets = None,
    run: Annotated[str, typer.Option(envvar="SKERRY_RUN", help="Run id.", metavar="ID")] = "main",
    from_: Annotated[
        str | None,
        typer.Option("--from", help="Start from this checkpoint.", metavar="CHECKPOINT"),
    ] = None,
    fresh: Annotated[
        bool, typer.Option("--fresh/--resume", help="Discard the run's log, or go on (default).")
    ] = False,
    learners: Annotated[
        int | None, typer.Option(help="Learners to start.", min=1, metavar="N")
    ] = None,
    syncers: Annotated[
        int, typer.Option(help="Syncers to start; they share the shards.", min=1, metavar="N")
    ] = 1,
    checkpointers: Annotated[
        int, typer.Option(help="Checkpointers to start.", min=1, metavar="N")
    ] = 1,
    evaluator: Annotated[
        bool, typer.Option("--evaluator/--no-evaluator", help="Measure held-out loss too.")
    ] = True,
    nats: Nats = None,
    from_hf: FromHf = None,
    allow_code: AllowCode = None,
) -> None:
    """Run a whole cluster on this machine until the run ends."""
    from skerry.cli.cluster.cluster import Team
    from skerry.cli.up import run_up

    with exit_on_error(cleans_up=False):
        run_up(
            config=config or as_option,
            sets=assignments(set_, allow_code, from_hf),
            run=run,
            checkpoint=from_,
            fresh=fresh,
            team=Team(learners or 0, syncers, checkpointers, int(evaluator)),
            nats=nats,
        )


def status(
    *,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    json: AsJson = False,
) -> None:
    """Show how a run is going now."""
    from skerry.cli.local_log import RunChoice
    from skerry.cli.viewer import run_viewer

    with exit_on_error():
        run_viewer(RunChoice(config, set_ or (), run, nats), as_json=json, live=False)


def top(
    *,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON line each second.")] = False,
) -> None:
    """Watch a run: learners, rounds, time; q quits."""
    from skerry.cli.local_log import RunChoice
    from skerry.cli.viewer import run_viewer

    with exit_on_error():
        run_viewer(RunChoice(config, set_ or (), run, nats), as_json=json, live=True)


def doctor(
    *,
    config: entry.Config = None,
    set_: Sets = None,
    nats: Nats = None,
    json: AsJson = False,
) -> None:
    """Check this machine; each line comes with its fix."""
    from skerry.cli.doctor import run_doctor

    with exit_on_error():
        run_doctor(config=config, sets=set_ or [], nats=nats, as_json=json)


def quarantine(
    learner: Annotated[str, typer.Argument(help="Name of the learner.", metavar="NAME")],
    *,
    release: Annotated[bool, typer.Option("--release", help="Merge what it sends again.")] = False,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
) -> None:
    """Stop merging what a learner sends, until it is released."""
    from skerry.cli.local_log import RunChoice
    from skerry.cli.quarantine import run_quarantine

    with exit_on_error():
        run_quarantine(learner, RunChoice(config, set_ or (), run, nats), release=release)


def pass_on(command: str, rest: list[str]) -> None:
    """Turn this process into the program that answers a command."""
    asks_for_help = bool(HELP & {*rest})
    if command == "checkpoints" and not asks_for_help:
        if not rest or rest[0].startswith("-"):
            rest = ["list", *rest]
        elif rest[0] == "restore":
            from skerry.cli.local_log import restore_here

            code = restore_here(rest[1:])
            if code is not None:
                sys.exit(code)
    program = COMMANDS[command]
    require(program)
    if PROGRAMS[program].compiles and not asks_for_help:
        with exit_on_error(), suppress(OSError):
            devices.refuse_missing()
            for name, value in computing(ROOT / "cache").items():  # the next start is sooner
                os.environ.setdefault(name, value)
    become = argv_of(command, *rest)
    with interrupts.held():
        os.execv(become[0], become)  # noqa: S606 - becoming the command is the point


def _listed(*programs: str) -> None:
    """Have ``skerry --help`` list the commands of other programs; ``main`` passes them on."""

    def answer(context: typer.Context) -> None:
        pass_on(str(context.info_name), context.args)

    unparsed = {
        "allow_extra_args": True,
        "ignore_unknown_options": True,
        "help_option_names": list[str](),
    }
    for program in programs:
        for name, line in PROGRAMS[program].commands.items():
            app.command(name=name, help=line, context_settings=unparsed)(answer)


_listed(*SERVICES)
app.command()(status)
app.command()(top)
app.command()(quarantine)
_listed("data", "tools", "lab")
app.command()(doctor)
app.add_typer(config_app, name="config", help="Show settings and where they come from.")
app.add_typer(keys.app, name="keys", help="Make, renew and revoke the keys of a broker.")
app.add_typer(region.app, name="region", help="Give a region a broker of its own, with a cache.")


def main() -> None:
    """Answer the command line of this process."""
    if "--debug" in sys.argv:
        sys.argv.remove("--debug")
        os.environ[DEBUG] = "1"
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        with exit_on_error():
            pass_on(sys.argv[1], sys.argv[2:])
    answer(app)


if __name__ == "__main__":
    main()
