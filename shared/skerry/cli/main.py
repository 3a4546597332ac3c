"""``skerry``: the command line. Nothing heavy is imported until a command has been parsed.

The services' own commands are handed on before anything is parsed at all, so that their ``--help``
and their errors are theirs.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from skerry.cli.plan import plan
from skerry.cli.services import HELP, become
from skerry.cli.simulate import simulate
from skerry.runtime import options
from skerry.runtime.entry import exit_on_error
from skerry.runtime.options import Sets, application

HANDED_ON = {
    "learner": ("learner", ()),
    "syncer": ("syncer", ()),
    "checkpointer": ("checkpointer", ()),
    "health-monitor": ("health-monitor", ()),
    "evaluator": ("evaluator", ()),
    "sample": ("learner", ("sample",)),
    "eval": ("learner", ("eval",)),
    "checkpoints": ("checkpointer", ("checkpoints",)),
    "lab": ("lab", ()),
}
"""Commands that another program answers: which service's, and behind which words."""


app = application(bare_shows_help=True)
ledger_app = application(bare_shows_help=True)
app.add_typer(ledger_app, name="ledger", help="Prove a run's log.")

Config = Annotated[Path | None, typer.Argument(help="TOML file.", metavar="CONFIG.toml")]
Nats = Annotated[str | None, typer.Option(help="A broker that runs already.", metavar="URL")]
Run = Annotated[str | None, typer.Option(help="Run id.", metavar="ID")]
Moment = Annotated[
    str | None,
    typer.Option(
        help="v17: every fragment at version 17; f3@17: when fragment 3 reached version 17;"
        " seq:1234: a ledger sequence; a time (ISO, or -5m). Default: now.",
        metavar="VERSION|TIME|SEQ",
    ),
]
Base = Annotated[
    Path | None,
    typer.Option(
        "--from",
        help="Begin here. Default: genesis, or the oldest checkpoint that will do.",
        metavar="CHECKPOINT",
    ),
]
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


@ledger_app.command()
def verify(
    *,
    config: options.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also rebuild what the window still holds.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Prove a run's log: nothing missing, nothing counted twice; exit code 5 if it is not so."""
    from skerry.cli.ledger import run_verify

    with exit_on_error():
        run_verify(config=config, sets=set_ or [], run=run, nats=nats, replay=replay, as_json=json)


@app.command()
def replay(  # noqa: PLR0913 - one option each
    *,
    config: options.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    to: Moment = None,
    from_: Base = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the parameters here.", metavar="FOLDER|FILE.safetensors"),
    ] = None,
    merge: Annotated[
        str | None, typer.Option(help="What if: average or rda.", metavar="METHOD")
    ] = None,
    outer: Annotated[
        str | None,
        typer.Option(help="What if: nesterov, direct or module:function.", metavar="PRESET"),
    ] = None,
    outer_lr: Annotated[float | None, typer.Option(help="What if.", metavar="LR")] = None,
    outer_momentum: Annotated[float | None, typer.Option(help="What if.", metavar="M")] = None,
    quorum: Annotated[int | None, typer.Option(help="What if.", min=1, metavar="K")] = None,
    max_staleness: Annotated[int | None, typer.Option(help="What if.", min=0, metavar="N")] = None,
    staleness_discount: Annotated[float | None, typer.Option(help="What if.", metavar="X")] = None,
    json: AsJson = False,
) -> None:
    """Rebuild the parameters of any moment from the log, bit by bit; or ask what if.

    A what-if merges the same contributions under another policy and says how far the result
    drifts; --out then holds that result.
    """
    from skerry.cli.replay import Asked, policy_of, run_replay

    with exit_on_error():
        policy = policy_of(
            merge=merge,
            outer=outer,
            outer_lr=outer_lr,
            outer_momentum=outer_momentum,
            quorum=quorum,
            max_staleness=max_staleness,
            staleness_discount=staleness_discount,
        )
        run_replay(
            config=config,
            sets=set_ or [],
            run=run,
            nats=nats,
            asked=Asked(to, from_, out, policy),
            as_json=json,
        )


@app.command(context_settings=FOR_OTHERS)
def checkpoints(context: typer.Context) -> None:
    """List, verify or restore checkpoints."""
    _hand_on("checkpoints", context.args)


@app.command(context_settings=FOR_OTHERS)
def sample(context: typer.Context) -> None:
    """Let a checkpoint write on."""
    _hand_on("sample", context.args)


@app.command(name="eval", context_settings=FOR_OTHERS)
def evaluate(context: typer.Context) -> None:
    """Measure a checkpoint on held-out text."""
    _hand_on("eval", context.args)


@app.command()
def chaos(  # noqa: PLR0913 - one option each
    *,
    config: options.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Annotated[
        str | None,
        typer.Option(help="Strike a run elsewhere, by its messages.", metavar="URL"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Draws the plan.", metavar="N")] = None,
    every_s: Annotated[float, typer.Option(help="Seconds between faults.", metavar="S")] = 5.0,
    duration_s: Annotated[float, typer.Option(help="Seconds of faults.", metavar="S")] = 120.0,
    kinds: Annotated[str, typer.Option(help="Only these, by comma.", metavar="K,...")] = "",
    targets: Annotated[str, typer.Option(help="Only these, by comma.", metavar="T,...")] = "",
    plan: Annotated[Path | None, typer.Option(help="A fault plan instead.", metavar="FILE")] = None,
    save_plan: Annotated[
        Path | None, typer.Option(help="Write the plan here.", metavar="FILE")
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write the result here.", metavar="FILE")
    ] = None,
    quiet_s: Annotated[
        float, typer.Option(help="Seconds without faults, before and after.", metavar="S")
    ] = 10.0,
    heal_s: Annotated[
        float, typer.Option(help="Time to work again, after a drawn plan.", metavar="S")
    ] = 300.0,
    goodput: Annotated[float, typer.Option(help="Least that is good enough.", metavar="G")] = 0.0,
    json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    heal: Annotated[
        bool, typer.Option("--heal", help="Only undo what a killed drill has left.")
    ] = False,
) -> None:
    """Break a run on purpose, one drill at a time; heal and check it."""
    from skerry.cli.chaos import Wanted, run_chaos

    with exit_on_error():
        run_chaos(
            Wanted(
                config=config,
                sets=tuple(set_ or ()),
                nats=nats,
                run=run,
                seed=seed,
                every_s=every_s,
                duration_s=duration_s,
                kinds=_words(kinds),
                targets=_words(targets),
                plan=plan,
                save_plan=save_plan,
                report=report,
                quiet_s=quiet_s,
                heal_s=heal_s,
                goodput=goodput,
                as_json=json,
                dry_run=dry_run,
                heal=heal,
            )
        )


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


app.command()(plan)
app.command()(simulate)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


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
