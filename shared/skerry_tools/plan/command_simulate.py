"""``skerry simulate``: what failures cost a run before it is begun; without JAX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.service.entry import exit_on_error
from skerry.service.options import Sets

if TYPE_CHECKING:
    from skerry_tools.plan.figures import Json
    from skerry_tools.plan.scenario import Request
    from skerry_tools.plan.simulate import Outcome, Struck


@dataclass(frozen=True, slots=True)
class Asked:
    """A command line."""

    scenario: str | None
    sets: tuple[str, ...] = ()
    faults: Path | None = None
    save_faults: Path | None = None
    table: bool = False
    calibrate: str | None = None
    against: str | None = None
    metrics: Path | None = None
    nats: str | None = None
    save_scenario: Path | None = None
    report: Path | None = None
    as_json: bool = False


def simulate(  # noqa: PLR0913 - one option each
    scenario: Annotated[
        str | None,
        typer.Argument(help="A shipped scenario ('list' names them), or a TOML file.", metavar="S"),
    ] = None,
    *,
    chips: Annotated[str | None, typer.Option(help="fleet.chips: 2.4M.", metavar="N")] = None,
    layout: Annotated[
        str | None, typer.Option(help="decoupled, elastic or data-parallel.", metavar="L")
    ] = None,
    learners: Annotated[int | None, typer.Option(help="sync.learners.", min=1, metavar="M")] = None,
    k: Annotated[int | None, typer.Option("-K", help="sync.quorum.", min=1, metavar="K")] = None,
    mtbi: Annotated[
        str | None, typer.Option(help="failures.chip_mtbi: '365 d'.", metavar="TIME")
    ] = None,
    days: Annotated[float | None, typer.Option(help="Of the run.", metavar="D")] = None,
    seed: Annotated[
        int | None, typer.Option(help="Of all chance.", hidden=True, min=0, metavar="N")
    ] = None,
    set_: Sets = None,
    table: Annotated[
        bool, typer.Option("--table", help="Also the scenario's table of goodputs.")
    ] = False,
    faults: Annotated[
        Path | None, typer.Option(help="A fault plan of skerry chaos, on top.", metavar="FILE")
    ] = None,
    save_faults: Annotated[
        Path | None,
        typer.Option(help="Write what failed as such a plan.", hidden=True, metavar="FILE"),
    ] = None,
    calibrate: Annotated[
        str | None, typer.Option(help="Learn from this run, and tell it again.", metavar="RUN")
    ] = None,
    against: Annotated[
        str | None, typer.Option(help="Tell this other run instead.", hidden=True, metavar="RUN")
    ] = None,
    metrics: Annotated[
        Path | None,
        typer.Option(help="The calibrating run's metrics.jsonl.", hidden=True, metavar="FILE"),
    ] = None,
    nats: Annotated[
        str | None, typer.Option(help="Its broker.", hidden=True, metavar="URL")
    ] = None,
    save_scenario: Annotated[
        Path | None,
        typer.Option(help="Write what was asked as a scenario.", hidden=True, metavar="FILE"),
    ] = None,
    report: Annotated[
        Path | None, typer.Option(help="Write pictures and tables here.", metavar="FOLDER")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="For machines.")] = False,
) -> None:
    """Say what failures cost: goodput, uptime(K), time to N tokens.

    Also: --seed, --save-faults, --save-scenario; --against --metrics --nats of --calibrate.
    """
    named = {
        "fleet.chips": chips,
        "fleet.layout": layout,
        "sync.learners": learners,
        "sync.quorum": k,
        "failures.chip_mtbi": mtbi,
        "simulation.days": days,
        "simulation.seed": seed,
    }
    sets = [f"{path}={value}" for path, value in named.items() if value is not None]
    with exit_on_error():
        run_simulate(
            Asked(
                scenario=scenario,
                sets=(*(set_ or ()), *sets),
                faults=faults,
                save_faults=save_faults,
                table=table,
                calibrate=calibrate,
                against=against,
                metrics=metrics,
                nats=nats,
                save_scenario=save_scenario,
                report=report,
                as_json=as_json,
            )
        )


def run_simulate(asked: Asked) -> None:
    """Answer. Raises ConfigError for a question that cannot be asked."""
    from skerry_tools.plan import outcome, scenario, sweep
    from skerry_tools.plan.simulate import simulate as simulated

    if asked.scenario == "list":
        for name, path in scenario.shipped().items():
            print(f"{name}: {scenario.read(str(path)).source}")
        return
    if asked.calibrate is not None:
        _predict(asked, asked.calibrate)
        return
    request = scenario.read(asked.scenario, asked.sets)
    _write_scenario(asked, request)
    struck = _struck(asked, request)
    found = simulated(request, struck)
    whole = asked.table or asked.report is not None
    cells = sweep.table(request) if whole and request.scene.sweep.chips else []
    _save(asked, found, request.scene.simulation.seed)
    if asked.as_json:
        _print(outcome.as_json(request, found, cells))
    else:
        print("\n".join(outcome.lines(request, found, cells)))
    if asked.report is not None:
        from skerry_tools.plan.report import simulated as pictures
        from skerry_tools.plan.report.page import write

        told = pictures.report(request, found, cells, sweep.swings(request), struck)
        written = write(told, asked.report)
        if not asked.as_json:
            print(f"Pictures and tables: {written[0]}")


def _predict(asked: Asked, run: str) -> None:
    """Learn from a run, tell it or another one again, and say how far off that is."""
    from skerry.cli.cluster.team import Team
    from skerry_tools.chaos.plan import load
    from skerry_tools.plan import prediction, tape
    from skerry_tools.plan.calibrated import evidence_of

    learnt, config = evidence_of(run, asked.nats, asked.metrics)
    told = learnt
    if asked.against is not None:
        told, config = evidence_of(asked.against, asked.nats, None)
    faults = None
    if asked.faults is not None:
        faults = tape.read(load(asked.faults), Team(len(told.joined_s)).kinds())
    found = prediction.predict(learnt, told, config, asked.sets, faults)
    _write_scenario(asked, prediction.scenario_of(learnt, config, asked.sets))
    if asked.as_json:
        _print(prediction.as_json(found))
    else:
        print("\n".join(prediction.lines(found)))
    if asked.report is not None:
        from skerry_tools.plan.report import simulated as pictures
        from skerry_tools.plan.report.page import write

        written = write(
            pictures.report(found.request, found.outcome, struck=found.struck), asked.report
        )
        if not asked.as_json:
            print(f"Pictures and tables: {written[0]}")


def _write_scenario(asked: Asked, request: Request) -> None:
    if asked.save_scenario is None:
        return
    from skerry.errors import ConfigError
    from skerry_tools.plan.scenario import as_toml

    try:
        asked.save_scenario.write_text(as_toml(request), encoding="utf-8")
    except OSError as error:
        msg = f"{asked.save_scenario} cannot be written ({error.strerror}): name another file."
        raise ConfigError(msg, path=str(asked.save_scenario)) from error


def _struck(asked: Asked, request: Request) -> Struck:
    from skerry_tools.plan import tape
    from skerry_tools.plan.simulate import NOTHING

    if asked.faults is None:
        return NOTHING
    from skerry.cli.cluster.team import Team
    from skerry_tools.chaos.plan import load

    return tape.read(load(asked.faults), Team(request.learners).kinds())


def _save(asked: Asked, found: Outcome, seed: int) -> None:
    if asked.save_faults is None:
        return
    from skerry_tools.chaos.plan import dump
    from skerry_tools.plan import tape

    dump(tape.of(found, seed), asked.save_faults)


def _print(told: dict[str, Json]) -> None:
    print(json.dumps(told, indent=2))
