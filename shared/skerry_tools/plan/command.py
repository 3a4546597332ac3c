"""``skerry plan`` and ``skerry simulate``: will a run work, and what failures cost; without JAX."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer

from skerry.service.entry import AsJson, Sets, exit_on_error

if TYPE_CHECKING:
    from skerry_tools.plan.question import Question


def _option(help_: str, metavar: str, *names: str, least: int | None = None) -> Any:
    """Return an option; one without help is left out of the long list of --help."""
    return typer.Option(*names, help=help_, metavar=metavar, hidden=not help_, min=least)


Text: TypeAlias = str | None
Count: TypeAlias = int | None
Scenario = Annotated[
    Text,
    typer.Argument(help="TOML: a config, sites, or both; or a shipped scenario.", metavar="S"),
]


def plan(  # noqa: PLR0913 - one option each
    scenario: Scenario = None,
    *,
    sites: Annotated[Path | None, _option("TOML file with the sites.", "FILE")] = None,
    params: Annotated[Text, _option("Parameters: '12B'.", "N")] = None,
    model: Annotated[Text, _option("Or a preset: '12b'.", "NAME")] = None,
    from_hf: Annotated[Text, _option("Or a model's folder.", "DIR", "--from-hf")] = None,
    tokens: Annotated[Text, _option("Tokens to train on.", "N")] = None,
    step_tokens: Annotated[Text, _option("", "N")] = None,
    regions: Annotated[Count, _option("Equal sites, one learner each.", "M", least=1)] = None,
    chips: Annotated[Text, _option("Chips of each learner.", "N")] = None,
    bandwidth: Annotated[Text, _option("Of each site: '3 Gbit/s'.", "RATE")] = None,
    step_time: Annotated[Text, _option("Of each step: '2 s'.", "TIME")] = None,
    h: Annotated[Count, _option("", "H", "-H")] = None,
    p: Annotated[Count, _option("", "P", "-P")] = None,
    k: Annotated[Count, _option("", "K", "-K")] = None,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure this machine and use its speed.")
    ] = False,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Print whether a run works, its time and its cost; exit code 4 if it does not.

    Further options: -H -P -K --step-tokens.
    """
    from skerry.protocol.messages import MOST_LEARNERS
    from skerry_tools.plan.plan import make
    from skerry_tools.plan.plan_answer import answer
    from skerry_tools.plan.question import find, question, read, refuse

    asked = {
        "plan.parameters": params, "model.preset": model, "model.path": from_hf,
        "plan.tokens": tokens, "plan.tokens_per_step": step_tokens,
        "sync.h_steps": h, "sync.fragments": p, "sync.quorum": k,
    }  # fmt: skip
    with exit_on_error():
        each = _sets(chips=chips, up=bandwidth, step_time=step_time)
        if regions is None and each:
            refuse("--bandwidth, --step-time and --chips are about --regions: give their number.")
        if regions is not None and regions > MOST_LEARNERS:
            most = f"at most {MOST_LEARNERS} learners"
            refuse(f"--regions is {regions}, but a run has {most}: lower it.")
        if sum(named is not None for named in (params, model, from_hf)) > 1:
            refuse("--params, --model and --from-hf each say what is trained: give one of them.")
        names = [f"sites.region-{number + 1}" for number in range(regions or 0)]
        equal = [f"{name}.{one}" for name in names for one in ("learners=1", *each)]
        files = (find(scenario) if scenario else None, sites)
        found = question(read(files, [*_sets(**asked), *equal, *(set_ or ())]))
        made = make(measured_here(found) if measure else found)
        said = answer(made)
        print(said.json()) if as_json else said.print()
    if not made.feasible:
        raise typer.Exit(4)


def simulate(scenario: Scenario = None, *, set_: Sets = None, as_json: AsJson = False) -> None:
    """Print what failures cost: goodput, uptime(K), time to N tokens.

    Other chips, learners, days: --set fleet.chips=1e6, sync.learners=4, simulation.days=7.
    """
    from skerry_tools.plan.simulation import simulate as simulated
    from skerry_tools.plan.simulation_answer import answer, setup_of

    with exit_on_error():
        found = answer(simulated(setup_of(scenario, set_ or ())))
        print(found.json()) if as_json else found.print()


def measured_here(asked: Question) -> Question:
    """Return the question with this machine's speeds; a ``hub.write`` that is given stays."""
    from skerry_tools.plan.measure import measure

    speeds, write = measure(asked.run.sync, asked.learners)
    hub = asked.tables.hub
    if "write" not in hub.model_fields_set:
        hub = hub.model_copy(update={"write": write})
    return replace(asked.changed({}, hub=hub), speeds=speeds)


def _sets(**asked: str | int | None) -> list[str]:
    return [f"{path}={value}" for path, value in asked.items() if value is not None]
