"""``skerry plan``: will it work, how long will it take, what will it cost; without JAX."""

from __future__ import annotations

import json
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skerry.errors import ConfigError
from skerry.service.entry import exit_on_error
from skerry.service.options import Sets

if TYPE_CHECKING:
    from skerry.settings.tree import Tree
    from skerry_tools.plan.figures import Json
    from skerry_tools.plan.probe import Measured
    from skerry_tools.plan.report.page import Report

INFEASIBLE = 4
"""Exit code of a plan that does not work: it was answered, and the answer is no."""
REGION = "region-"


Config = Annotated[
    Path | None, typer.Argument(help="TOML: a run's config, sites, or both.", metavar="CONFIG")
]
Sites = Annotated[Path | None, typer.Option(help="TOML with the sites.", metavar="FILE")]
Scenario = Annotated[
    str | None, typer.Option(help="One that is shipped; 'list' names them.", metavar="NAME")
]
Params = Annotated[str | None, typer.Option(help="Parameters: 12B.", metavar="N")]
Tokens = Annotated[str | None, typer.Option(help="Tokens to train on.", metavar="N")]
StepTokens = Annotated[
    str | None, typer.Option(help="Tokens of a learner's step.", hidden=True, metavar="N")
]
Regions = Annotated[
    int | None, typer.Option(help="So many equal sites, a learner each.", min=1, metavar="M")
]
Bandwidth = Annotated[str | None, typer.Option(help="Of each: '3 Gbit/s'.", metavar="RATE")]
StepTime = Annotated[str | None, typer.Option(help="Of each: '2 s'.", metavar="TIME")]
Rtt = Annotated[str | None, typer.Option(help="Of each: '50 ms'.", hidden=True, metavar="TIME")]
Chips = Annotated[int | None, typer.Option(help="Of each.", min=1, hidden=True, metavar="N")]
H = Annotated[int | None, typer.Option("-H", help="sync.h_steps.", hidden=True, metavar="H")]
P = Annotated[int | None, typer.Option("-P", help="sync.fragments.", hidden=True, metavar="P")]
K = Annotated[int | None, typer.Option("-K", help="sync.quorum.", hidden=True, metavar="K")]
Tau = Annotated[int | None, typer.Option(help="sync.overlap_steps.", hidden=True, metavar="TAU")]
Probe = Annotated[bool, typer.Option("--probe", help="Measure the link from here to the broker.")]
Site = Annotated[
    str | None, typer.Option(help="The site that --probe is run at.", hidden=True, metavar="SITE")
]
Nats = Annotated[
    str | None, typer.Option(help="The broker of --probe.", hidden=True, metavar="URL")
]
Folder = Annotated[
    Path | None, typer.Option(help="Write pictures and tables here.", metavar="FOLDER")
]
AsJson = Annotated[bool, typer.Option("--json", help="For machines.")]


@dataclass(frozen=True, slots=True)
class Asked:
    """A command line."""

    config: Path | None
    sites: Path | None
    scenario: str | None
    sets: tuple[str, ...]
    probe: bool
    site: str | None
    nats: str | None
    report: Path | None
    as_json: bool


def plan(  # noqa: PLR0913 - one option each
    config: Config = None,
    *,
    sites: Sites = None,
    scenario: Scenario = None,
    params: Params = None,
    tokens: Tokens = None,
    step_tokens: StepTokens = None,
    regions: Regions = None,
    bandwidth: Bandwidth = None,
    step_time: StepTime = None,
    rtt: Rtt = None,
    chips: Chips = None,
    h: H = None,
    p: P = None,
    k: K = None,
    tau: Tau = None,
    set_: Sets = None,
    probe: Probe = False,
    site: Site = None,
    nats: Nats = None,
    report: Folder = None,
    as_json: AsJson = False,
) -> None:
    """Say whether a run works, how long it takes, what it costs. Exit code 4: no.

    In one line: skerry plan --params 12B --regions 4 --bandwidth '3 Gbit/s' --step-time '2 s'.
    Also: -H -P -K --tau --step-tokens, --rtt --chips of each site, --site --nats of --probe.
    """
    table = {
        "plan.parameters": params,
        "plan.tokens": tokens,
        "plan.tokens_per_step": step_tokens,
        "sync.h_steps": h,
        "sync.fragments": p,
        "sync.quorum": k,
        "sync.overlap_steps": tau,
    }
    each = {"up": bandwidth, "step_time": step_time, "rtt": rtt, "chips": chips}
    with exit_on_error():
        asked = Asked(
            config=config,
            sites=sites,
            scenario=scenario,
            sets=(*_named(table), *_regions(regions, each), *(set_ or ())),
            probe=probe,
            site=site,
            nats=nats,
            report=report,
            as_json=as_json,
        )
        code = run_plan(asked)
    if code:
        raise typer.Exit(code)


def run_plan(asked: Asked) -> int:
    """Answer; returns the exit code. Raises ConfigError for a question that cannot be asked."""
    from skerry_tools.plan import answer
    from skerry_tools.plan.plan import make
    from skerry_tools.plan.sites import from_tree, read

    if asked.scenario == "list":
        print("\n".join(scenarios()))
        return 0
    if asked.scenario and asked.config:
        msg = f"{asked.config} and --scenario are two questions: ask one, and --set what differs."
        raise ConfigError(msg, path="scenario")
    measured = _measured(asked) if asked.probe else None
    config = scenario_path(asked.scenario) if asked.scenario else asked.config
    tree = read(config, asked.sites, asked.sets)
    if tree.values.get("kind") == "bandwidths":
        return _show_bandwidths(tree, asked)
    if measured:
        if not tree.values:
            return _show_probe(measured, asked)
        _use(tree, measured, asked.site)
    made = make(from_tree(tree))
    _print(answer.as_json(made) if asked.as_json else answer.lines(made))
    if asked.report:
        from skerry_tools.plan.report import plan_page

        _write(plan_page.report(made), asked)
    return 0 if made.feasible else INFEASIBLE


def _show_bandwidths(tree: Tree, asked: Asked) -> int:
    from skerry_tools.plan import bandwidths

    found = bandwidths.cells(tree)
    _print(bandwidths.as_json(tree, found) if asked.as_json else bandwidths.lines(found))
    if asked.report:
        from skerry_tools.plan.report import bandwidth_page

        _write(bandwidth_page.report(tree), asked)
    return 0


def _write(pictures: Report, asked: Asked) -> None:
    from skerry_tools.plan.report.page import write

    if asked.report:
        first = write(pictures, asked.report)[0]
        if not asked.as_json:
            print(f"Pictures and tables: {first}")


def scenarios() -> list[str]:
    """Return the shipped scenarios that this command answers."""
    from skerry.settings.loading import read_toml

    folder = Path(str(resources.files("skerry_tools.plan") / "scenarios"))
    kinds = {path.stem: read_toml(path).get("kind") for path in sorted(folder.glob("*.toml"))}
    return [name for name, kind in kinds.items() if kind in {"plan", "bandwidths"}]


def scenario_path(name: str) -> Path:
    """Return the file of a shipped scenario; ConfigError names those that there are."""
    if name not in scenarios():
        msg = f'There is no scenario "{name}" for skerry plan: {", ".join(scenarios())}.'
        raise ConfigError(msg, path="scenario")
    return Path(str(resources.files("skerry_tools.plan") / "scenarios" / f"{name}.toml"))


def _named(table: dict[str, str | int | None]) -> list[str]:
    return [f"{path}={value}" for path, value in table.items() if value is not None]


def _regions(count: int | None, each: dict[str, str | int | None]) -> list[str]:
    """Return the settings of so many equal sites; ConfigError if nobody said how many."""
    given = {name: value for name, value in each.items() if value is not None}
    if count is None:
        if given:
            word = next(iter(given)).replace("_", "-").replace("up", "bandwidth")
            msg = f"--{word} is about sites of --regions: say how many there are, or --set it."
            raise ConfigError(msg, path="regions")
        return []
    return [
        f"sites.{REGION}{number + 1}.{name}={value}"
        for number in range(count)
        for name, value in {"learners": 1, **given}.items()
    ]


def _measured(asked: Asked) -> Measured:
    import asyncio

    return asyncio.run(_measure(asked))


async def _measure(asked: Asked) -> Measured:
    from skerry.service.connect import bus_from
    from skerry.settings import loading
    from skerry_tools.plan.probe import measure

    local = loading.load(None, [f"nats.url={asked.nats}"] if asked.nats else []).local
    async with bus_from(local.nats, "link-probe") as bus:
        return await measure(bus, window=local.nats.publish_window)


def _show_probe(measured: Measured, asked: Asked) -> int:
    sheet = measured.sheet()
    _print({"probe": sheet.json()} if asked.as_json else sheet.lines())
    if not asked.as_json:
        print(f"\nAs a site:\n\n{measured.toml(asked.site or 'here')}")
    return 0


def _use(tree: Tree, measured: Measured, name: str | None) -> None:
    """Put what was measured where a site's link was guessed: of the one that is named, or the only.

    ConfigError where it is not said which of several sites this is.
    """
    known = list(tree.values.get("sites", {}))
    site = name or (known[0] if len(known) == 1 else "")
    if site not in known:
        there = ", ".join(known) or "none"
        msg = f"--probe measures one site's link: say which this is by --site; there are {there}."
        raise ConfigError(msg, path="site")
    tree.values["sites"][site].pop("derating", None)
    for key, value in {
        "up": f"{measured.up_bits_s:.0f} bit/s",
        "down": f"{measured.down_bits_s:.0f} bit/s",
        "rtt": f"{measured.rtt_s * 1e3:.4f} ms",
        "measured": True,
    }.items():
        tree.put(("sites", site, key), value, "--probe")


def _print(told: list[str] | dict[str, Json]) -> None:
    if isinstance(told, list):
        print("\n".join(told))
    else:
        print(json.dumps(told, indent=2, allow_nan=False))
