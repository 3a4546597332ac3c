"""Command line of the tools: parse first, import what is heavy afterwards.

``skerry plan``, ``simulate``, ``ledger``, ``replay`` and ``chaos`` are handed on to this program.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skerry.service import entry
from skerry.service.entry import AsJson, Nats, Sets, answer, application, exit_on_error
from skerry_tools.plan.command import plan, simulate

app = application(bare_shows_help=True)
ledger_app = application(bare_shows_help=True)
app.add_typer(ledger_app, name="ledger", help="Verify a run's log.")

Run = Annotated[
    str | None, typer.Option(envvar="SKERRY_RUN", help="Run id; default: the newest.", metavar="ID")
]


@ledger_app.command()
def verify(
    *,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    replay: Annotated[
        bool, typer.Option("--replay", help="Also rebuild what the window still holds.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Verify that a run's log lacks nothing and counts nothing twice; exit code 5 if not."""
    from skerry.cli.local_log import RunChoice
    from skerry_tools.audit.command import run_verify

    with exit_on_error():
        run_verify(RunChoice(config, set_ or (), run, nats), rebuilds=replay, as_json=json)


@app.command()
def replay(  # noqa: PLR0913 - one option each
    *,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
    to: Annotated[
        str | None, typer.Option(help="v17, seq:1234 or a time [now].", metavar="VERSION|TIME|SEQ")
    ] = None,
    from_: Annotated[
        str | None, typer.Option("--from", help="Start from this one.", metavar="CHECKPOINT")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the parameters here.", metavar="FOLDER|FILE.safetensors"),
    ] = None,
    merge: Annotated[
        str | None, typer.Option(help="What if: sync.merge.", metavar="METHOD")
    ] = None,
    outer: Annotated[
        str | None,
        typer.Option(help="What if: outer.preset.", metavar="PRESET"),
    ] = None,
    outer_lr: Annotated[float | None, typer.Option(help="What if: outer.lr.", metavar="LR")] = None,
    outer_momentum: Annotated[
        float | None, typer.Option(help="What if: outer.momentum.", metavar="M")
    ] = None,
    max_staleness: Annotated[
        int | None, typer.Option(help="What if: sync.max_staleness.", min=0, metavar="N")
    ] = None,
    staleness_discount: Annotated[
        float | None, typer.Option(help="What if: sync.staleness_discount.", metavar="X")
    ] = None,
    json: AsJson = False,
) -> None:
    """Rebuild the parameters of any moment from the log; or ask what if.

    A what-if merges the same contributions under another policy and says how far it drifts.
    """
    from skerry.cli.local_log import RunChoice
    from skerry_tools.audit.command import run_replay
    from skerry_tools.audit.whatif import WhatIfPolicy

    with exit_on_error():
        policy = WhatIfPolicy(
            merge, outer, outer_lr, outer_momentum, max_staleness, staleness_discount
        )
        choice = RunChoice(config, set_ or (), run, nats)
        run_replay(choice, policy, to=to, origin=from_, out=out, as_json=json)


New = Annotated[str | None, typer.Option("--as", help="Id of the new run.", metavar="ID")]
Base = Annotated[str | None, typer.Option("--from", help="Replay from here.", metavar="CHECKPOINT")]


@app.command()
def fork(
    *,
    at: Annotated[str, typer.Option(help="v17, seq:1234 or a time.", metavar="VERSION|TIME|SEQ")],
    without: Annotated[
        str | None, typer.Option(help="Leave out what this learner sent.", metavar="NAME")
    ] = None,
    as_: New = None,
    from_: Base = None,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
) -> None:
    """Write a checkpoint of a past moment, or as it would be without a learner."""
    from skerry.cli.local_log import RunChoice
    from skerry_tools.audit.fork import run_fork

    with exit_on_error():
        choice = RunChoice(config, set_ or (), run, nats)
        run_fork(choice, at, name=as_, without=without, origin=from_)


@app.command()
def rewind(
    *,
    at: Annotated[str, typer.Option(help="v17, seq:1234 or a time.", metavar="VERSION|TIME|SEQ")],
    as_: New = None,
    from_: Base = None,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Nats = None,
) -> None:
    """Write a checkpoint of a past moment, from which `skerry up --from` goes on."""
    fork(at=at, as_=as_, from_=from_, config=config, set_=set_, run=run, nats=nats)


@app.command()
def chaos(  # noqa: PLR0913 - one option each
    *,
    config: entry.Config = None,
    set_: Sets = None,
    run: Run = None,
    nats: Annotated[
        str | None,
        typer.Option(help="Strike a run elsewhere, by messages only.", metavar="URL"),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Seed that draws the plan.", metavar="N")] = None,
    every_s: Annotated[float, typer.Option(help="Seconds between faults.", metavar="S")] = 5.0,
    duration_s: Annotated[
        float | None,
        typer.Option(help="Seconds of faults (120), or of a --once pause (5).", metavar="S"),
    ] = None,
    kinds: Annotated[str, typer.Option(help="Only these faults.", metavar="K,...")] = "",
    targets: Annotated[str, typer.Option(help="Only these services.", metavar="T,...")] = "",
    plan: Annotated[Path | None, typer.Option(help="Run this fault plan.", metavar="FILE")] = None,
    quiet_s: Annotated[
        float, typer.Option(help="Seconds without faults, before and after.", metavar="S")
    ] = 10.0,
    heal_s: Annotated[
        float, typer.Option(help="Seconds to recover, after a drawn plan.", metavar="S")
    ] = 300.0,
    goodput: Annotated[float, typer.Option(help="Least goodput that passes.", metavar="G")] = 0.0,
    json: AsJson = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show the plan.")] = False,
    heal: Annotated[
        bool, typer.Option("--heal", help="Only undo what a killed drill left behind.")
    ] = False,
    once: Annotated[
        tuple[str, str] | None,
        typer.Option(help="Only kill, pause or stop this process, now.", metavar="FAULT NAME"),
    ] = None,
) -> None:
    """Break a run on purpose, one drill at a time; heal and check it."""
    from skerry_tools.chaos.command import ChaosOptions, run_chaos

    with exit_on_error():
        run_chaos(
            ChaosOptions(
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
                quiet_s=quiet_s,
                heal_s=heal_s,
                goodput=goodput,
                as_json=json,
                dry_run=dry_run,
                heal=heal,
                once=once,
            )
        )


app.command()(plan)
app.command()(simulate)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())


def main() -> None:
    answer(app)


if __name__ == "__main__":
    main()
