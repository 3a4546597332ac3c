"""``skerry plan`` and ``skerry simulate``: will a run work, and what failures cost; without JAX."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from skerry.errors import ConfigError
from skerry.service.entry import exit_on_error
from skerry.service.options import Sets

if TYPE_CHECKING:  # what plans and simulations import is not needed for --help
    from skerry_tools.plan.figures import Answer
    from skerry_tools.plan.simulation import Faults, Setup, SimulatedRun


def _option(help_: str, metavar: str, *names: str, least: int | None = None) -> Any:
    """Return an option; one without help is left out of the long list of --help."""
    return typer.Option(*names, help=help_, metavar=metavar, min=least, hidden=not help_)


Text: TypeAlias = str | None
Count: TypeAlias = int | None
File: TypeAlias = Path | None
Config = Annotated[
    File, typer.Argument(help="TOML: a run's config, sites, or both.", metavar="CONFIG")
]
Scenario = Annotated[
    Text,
    typer.Argument(help="A shipped scenario ('list' names them), or a TOML file.", metavar="S"),
]
Shipped = Annotated[Text, _option("One that is shipped; 'list' names them.", "NAME")]
Sites = Annotated[File, _option("TOML with the sites.", "FILE")]
Params = Annotated[Text, _option("Parameters: 12B.", "N")]
Tokens = Annotated[Text, _option("Tokens to train on.", "N")]
StepTokens = Annotated[Text, _option("", "N")]
Regions = Annotated[Count, _option("So many equal sites, a learner each.", "M", least=1)]
Bandwidth = Annotated[Text, _option("Of each: '3 Gbit/s'.", "RATE")]
StepTime = Annotated[Text, _option("Of each: '2 s'.", "TIME")]
Rtt = Annotated[Text, _option("", "TIME")]
Each = Annotated[Count, _option("", "N", least=1)]
H = Annotated[Count, _option("", "H", "-H")]
P = Annotated[Count, _option("", "P", "-P")]
Tau = Annotated[Count, _option("", "TAU")]
HiddenK = Annotated[Count, _option("", "K", "-K")]
Probe = Annotated[bool, typer.Option("--probe", help="Measure the link from here to the broker.")]
Site = Annotated[Text, _option("", "SITE")]
Nats = Annotated[Text, _option("", "URL")]
Chips = Annotated[Text, _option("fleet.chips: 2.4M.", "N")]
LayoutName = Annotated[Text, _option("decoupled, elastic or data-parallel.", "L")]
Learners = Annotated[Count, _option("sync.learners.", "M", least=1)]
K = Annotated[Count, _option("sync.quorum.", "K", "-K", least=1)]
Mtbi = Annotated[Text, _option("failures.chip_mtbi: '365 d'.", "TIME")]
Days = Annotated[float | None, _option("Of the run.", "D")]
Seed = Annotated[Count, _option("", "N", least=0)]
WithTable = Annotated[bool, typer.Option("--table", help="Also the scenario's table of goodputs.")]
FaultPlanFile = Annotated[File, _option("A fault plan of skerry chaos, on top.", "FILE")]
HiddenFile = Annotated[File, _option("", "FILE")]
Folder = Annotated[File, _option("Write charts and tables here.", "FOLDER")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(  # noqa: PLR0913 - one option each
    config: Config = None,
    *,
    sites: Sites = None,
    scenario: Shipped = None,
    params: Params = None,
    tokens: Tokens = None,
    step_tokens: StepTokens = None,
    regions: Regions = None,
    bandwidth: Bandwidth = None,
    step_time: StepTime = None,
    rtt: Rtt = None,
    chips: Each = None,
    h: H = None,
    p: P = None,
    k: HiddenK = None,
    tau: Tau = None,
    set_: Sets = None,
    probe: Probe = False,
    site: Site = None,
    nats: Nats = None,
    report: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Print whether a run works, its time and its cost. Exit code 4: it does not.

    In one line: skerry plan --params 12B --regions 4 --bandwidth '3 Gbit/s' --step-time '2 s'.
    Also: -H -P -K --tau --step-tokens, --rtt --chips of each site, --site --nats of --probe.
    """
    from skerry_tools.plan import link_probe, plan_answer
    from skerry_tools.plan.plan import make
    from skerry_tools.plan.question import question, read, shipped

    asked = {
        "plan.parameters": params, "plan.tokens": tokens, "plan.tokens_per_step": step_tokens,
        "sync.h_steps": h, "sync.fragments": p, "sync.quorum": k, "sync.overlap_steps": tau,
    }  # fmt: skip
    each = {"up": bandwidth, "step_time": step_time, "rtt": rtt, "chips": chips}
    with exit_on_error():
        known = shipped("plan")
        if scenario == "list":
            print("\n".join(known))
            return
        if scenario:
            config = _shipped(config, scenario, known)
        link = link_probe.measure_here(nats) if probe else None
        sets = [*_sets(asked), *_regions(regions, each), *(set_ or ())]
        tree = read((config, sites), sets)
        if link and not tree.values:
            found = link_probe.answer(link, site or "here")
        else:
            if link:
                link_probe.use(tree, link, site)
            found = plan_answer.answer(make(question(tree)))
        _give(found, report, as_json=as_json)
    if found.exit_code:
        raise typer.Exit(found.exit_code)


def simulate(  # noqa: PLR0913 - one option each
    scenario: Scenario = None,
    *,
    chips: Chips = None,
    layout: LayoutName = None,
    learners: Learners = None,
    k: K = None,
    mtbi: Mtbi = None,
    days: Days = None,
    seed: Seed = None,
    set_: Sets = None,
    table: WithTable = False,
    faults: FaultPlanFile = None,
    save_faults: HiddenFile = None,
    report: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Print what failures cost: goodput, uptime(K), time to N tokens.

    Also: --seed, --save-faults.
    """
    from skerry_tools.plan import simulation_answer
    from skerry_tools.plan.simulation import simulate as simulated

    given = {
        "fleet.chips": chips, "fleet.layout": layout, "sync.learners": learners, "sync.quorum": k,
        "failures.chip_mtbi": mtbi, "simulation.days": days, "simulation.seed": seed,
    }  # fmt: skip
    sets = [*(set_ or ()), *_sets(given)]
    with exit_on_error():
        if scenario == "list":
            print("\n".join(simulation_answer.listed()))
            return
        asked = simulation_answer.setup_of(scenario, sets)
        on_top = _faults(faults, asked)
        outcome = simulated(asked, on_top)
        _save_faults(outcome, save_faults)
        sweep = table or report is not None
        found = simulation_answer.answer(outcome, sweep=sweep)
        _give(found, report, as_json=as_json)


def _give(found: Answer, report: Path | None, *, as_json: bool) -> None:
    text = list(found.text)
    if report:
        from skerry_tools.plan.report import write

        text.append(f"Charts and tables: {write(found, report)}")
    print(json.dumps(found.json, indent=2, allow_nan=False) if as_json else "\n".join(text))


def _shipped(config: Path | None, scenario: str, known: dict[str, Path]) -> Path:
    if config:
        msg = f"{config} and --scenario are two questions: ask one, and --set what differs."
        raise ConfigError(msg, path="scenario")
    if scenario not in known:
        msg = f'There is no scenario "{scenario}" for skerry plan: {", ".join(known)}.'
        raise ConfigError(msg, path="scenario")
    return known[scenario]


def _sets(asked: dict[str, str | int | None] | dict[str, str | float | None]) -> list[str]:
    return [f"{path}={value}" for path, value in asked.items() if value is not None]


def _regions(count: int | None, each: dict[str, str | int | None]) -> list[str]:
    """Return the settings of so many equal sites; ConfigError where their number is missing."""
    given = _sets(each)
    if count is None and given:
        word = given[0].partition("=")[0].replace("_", "-").replace("up", "bandwidth")
        msg = f"--{word} is about sites of --regions: give their number, or --set it."
        raise ConfigError(msg, path="regions")
    names = [f"sites.region-{number + 1}" for number in range(count or 0)]
    return [f"{name}.{one}" for name in names for one in ("learners=1", *given)]


def _faults(path: Path | None, asked: Setup) -> Faults:
    from skerry_tools.chaos.plan import load
    from skerry_tools.plan.fault_plans import faults_of, services
    from skerry_tools.plan.simulation import NO_FAULTS

    return NO_FAULTS if path is None else faults_of(load(path), services(len(asked.learners)))


def _save_faults(outcome: SimulatedRun, path: Path | None) -> None:
    if path is not None:
        from skerry_tools.chaos.plan import dump
        from skerry_tools.plan.fault_plans import plan_of

        dump(plan_of(outcome), path)
