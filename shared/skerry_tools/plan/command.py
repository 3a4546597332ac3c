"""``skerry plan`` and ``skerry simulate``: will a run work, and what failures cost; without JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from skerry.errors import ConfigError
from skerry.service.entry import Sets, exit_on_error


def _option(help_: str, metavar: str, *names: str) -> Any:
    """Return an option; one without help is left out of the long list of --help."""
    return typer.Option(*names, help=help_, metavar=metavar, hidden=not help_)


Text: TypeAlias = str | None
Count: TypeAlias = int | None
Scenario = Annotated[
    Text,
    typer.Argument(help="TOML: a config, sites, or both; or a shipped scenario.", metavar="S"),
]
Sites = Annotated[Path | None, _option("TOML with the sites.", "FILE")]
Params = Annotated[Text, _option("Parameters: 12B.", "N")]
Tokens = Annotated[Text, _option("Tokens to train on.", "N")]
StepTokens = Annotated[Text, _option("", "N")]
Regions = Annotated[
    Count, typer.Option(help="So many equal sites, a learner each.", metavar="M", min=1)
]
Bandwidth = Annotated[Text, _option("Of each: '3 Gbit/s'.", "RATE")]
StepTime = Annotated[Text, _option("Of each: '2 s'.", "TIME")]
H = Annotated[Count, _option("", "H", "-H")]
P = Annotated[Count, _option("", "P", "-P")]
K = Annotated[Count, _option("", "K", "-K")]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def plan(  # noqa: PLR0913 - one option each
    scenario: Scenario = None,
    *,
    sites: Sites = None,
    params: Params = None,
    tokens: Tokens = None,
    step_tokens: StepTokens = None,
    regions: Regions = None,
    bandwidth: Bandwidth = None,
    step_time: StepTime = None,
    h: H = None,
    p: P = None,
    k: K = None,
    set_: Sets = None,
    as_json: AsJson = False,
) -> None:
    """Print whether a run works, its time and its cost. Exit code 4: it does not.

    In one line: skerry plan --params 12B --regions 4 --bandwidth '3 Gbit/s' --step-time '2 s'.
    Also: -H -P -K --step-tokens.
    """
    from skerry_tools.plan.plan import make
    from skerry_tools.plan.plan_answer import answer
    from skerry_tools.plan.question import find, question, read

    asked = {
        "plan.parameters": params, "plan.tokens": tokens, "plan.tokens_per_step": step_tokens,
        "sync.h_steps": h, "sync.fragments": p, "sync.quorum": k,
    }  # fmt: skip
    with exit_on_error():
        each = _sets(up=bandwidth, step_time=step_time)
        if regions is None and each:
            msg = "--bandwidth and --step-time are about sites of --regions: give their number."
            raise ConfigError(msg, path="regions")
        names = [f"sites.region-{number + 1}" for number in range(regions or 0)]
        equal = [f"{name}.{one}" for name in names for one in ("learners=1", *each)]
        files = (find(scenario) if scenario else None, sites)
        made = make(question(read(files, [*_sets(**asked), *equal, *(set_ or ())])))
        found = answer(made)
        print(found.json()) if as_json else found.print()
    if not made.feasible:
        raise typer.Exit(4)


def simulate(scenario: Scenario = None, *, set_: Sets = None, as_json: AsJson = False) -> None:
    """Print what failures cost: goodput, uptime(K), time to N tokens.

    Other chips, learners, days: --set fleet.chips=1e6, sync.learners=4, simulation.days=7.
    """
    from skerry_tools.plan import simulation_answer
    from skerry_tools.plan.simulation import simulate as simulated

    with exit_on_error():
        found = simulation_answer.answer(
            simulated(simulation_answer.setup_of(scenario, set_ or ()))
        )
        print(found.json()) if as_json else found.print()


def _sets(**asked: str | int | None) -> list[str]:
    return [f"{path}={value}" for path, value in asked.items() if value is not None]
