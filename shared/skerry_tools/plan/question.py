"""A question read and checked: files, a shipped scenario and ``--set`` become settings and tables.

Later sources win: file, sites file, ``--set``. The run's own tables mean what they mean to the run,
so that the config that will run is the one that is planned and simulated.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn, cast

from skerry.errors import ConfigError
from skerry.models.presets import OWN
from skerry.protocol.messages import MOST_LEARNERS
from skerry.settings.checks import check_run
from skerry.settings.loading import read_toml, validated
from skerry.settings.local import LocalSettings
from skerry.settings.models import ModelConfig, RunConfig
from skerry.settings.tree import Tree, leaves, refuse_unknown, split_assignment
from skerry_tools.plan.measured import DEFAULT, Speeds
from skerry_tools.plan.tables import DAY_S, MOST, ScenarioTables, SiteTable

CHOICES = {
    "h_steps": (24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024),
    "fragments": (8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256),
    "shards": (1, 2, 4, 8, 16, 32, 64),
}
"""What a plan chooses among where the user has not; other settings have their defaults."""
COMMAND_LINE = "the command line"
MOST_FAILURES = 2e7
MOST_EVENTS = 2e6
"""Most checkpoints and outages of all learners. Each limit is about a minute of work."""


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked: the run's settings and our tables, both valid.

    ``open`` are those of CHOICES that a plan may choose; ``bare_tokens``: the tokens of a step are
    the defaults of [data], though the model is not a built-in one.
    """

    run: RunConfig
    tables: ScenarioTables
    open: frozenset[str] = frozenset()
    speeds: Speeds = DEFAULT
    bare_tokens: bool = False

    @property
    def learners(self) -> int:
        """Islands that train on their own: M, or one where all chips train in step."""
        return self.run.sync.learners if self.tables.fleet.layout == "decoupled" else 1

    def changed(self, sync: Mapping[str, int], **tables: object) -> Question:
        """Return the question with these settings of [sync] and these tables replaced."""
        run = self.run.model_copy(update={"sync": self.run.sync.model_copy(update=sync)})
        return replace(self, run=run, tables=self.tables.model_copy(update=tables))


def shipped() -> dict[str, Path]:
    """Return the scenarios that come with Skerry, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "scenarios").iterdir())}


def find(named: str) -> Path:
    """Return a shipped scenario, or a file; ConfigError where it is neither."""
    known, path = shipped(), Path(named)
    if named not in known and not path.exists() and path.suffix != ".toml":
        refuse(f"{named} is no scenario, neither shipped nor a file: there are {', '.join(known)}.")
    return known.get(named, path)


def read(paths: Iterable[Path | None], sets: Sequence[str] = ()) -> Tree:
    """Return what the files and ``--set`` hold.

    Raises ConfigError for a file that cannot be read and a ``--set`` of a site that is in none.
    """
    tree = Tree()
    for path in paths:
        if path is not None:
            tree.merge(read_toml(path), str(path))
    known = _table(tree, "sites")
    for text in sets:
        keys, value = split_assignment(text)
        if keys[0] == "sites" and len(keys) > 2 and known and keys[1] not in known:
            _refuse_site(".".join(keys), keys[1], known)
        try:
            tree.put(keys, json.loads(value), COMMAND_LINE)
        except ValueError:
            tree.put(keys, value, COMMAND_LINE)
    return tree


def question(tree: Tree) -> Question:
    """Return what a tree of settings asks; ConfigError names the first path that is wrong."""
    known, sites = leaves(RunConfig, LocalSettings, ScenarioTables), _table(tree, "sites")
    if len(sites) > MOST_LEARNERS:
        refuse(f"sites has {len(sites)} sites, but a run has at most {MOST_LEARNERS} learners.")
    for site in sites:
        known |= leaves(SiteTable, prefix=("sites", site))
    refuse_unknown(tree, known)
    tables, asked = validated(ScenarioTables, tree), dict(_table(tree, "sync"))
    if tables.sites:
        _check_sites(tables, sites)
        learners = sum(site.learners for site in tables.sites.values())
        if (count := asked.get("learners", learners)) != learners:
            refuse(
                f"sync.learners is {count} but the sites have {learners} learners: leave it out."
            )
        tree.put(("sync", "learners"), learners, "the sites")
    run = validated(RunConfig, tree)
    check_run(run)
    if tables.plan.parameters is not None:  # the model is none of the presets
        run = run.model_copy(update={"train": run.for_model(ModelConfig(preset=OWN)).train})
    tokens = tables.plan.tokens_per_step or _table(tree, "data").keys() & {"seq_len", "batch"}
    some_bare = any(site.tokens_per_step is None for site in tables.sites.values())
    return Question(
        run=run,
        tables=tables,
        open=frozenset(CHOICES) - asked.keys() if run.mode == "decoupled" else frozenset(),
        bare_tokens=tables.plan.parameters is not None and some_bare and not tokens,
    )


def check_plan(asked: Question) -> None:
    """Raise ConfigError for a question that a plan cannot answer."""
    if not asked.tables.sites:
        names = "[sites.a] with up and step_time, or give --regions, --bandwidth and --step-time."
        refuse(f"sites is empty: name at least one, as {names}")
    most = {"learners": MOST_LEARNERS, "h_steps": MOST, "fragments": MOST, "overlap_steps": MOST}
    for name, limit in most.items():
        if (count := getattr(asked.run.sync, name)) > limit:
            refuse(f"sync.{name} is {count}, but plans take at most {limit}: lower it.")


def check_simulation(asked: Question) -> None:
    """Raise ConfigError for a question that cannot be simulated."""
    tables, days, chips = asked.tables, asked.tables.simulation.days, asked.tables.fleet.chips
    run_s = days * DAY_S
    each = {"checkpoints.every": (tables.checkpoints.every, tables.checkpoints.cost_s)}
    each |= {f"outages.{n}.every": (away.every, 0) for n, away in enumerate(tables.outages)}
    for path, (every, longer) in each.items():
        if every is not None and run_s / (every + longer) * asked.learners > MOST_EVENTS:
            least = run_s * asked.learners / MOST_EVENTS
            text = f"{path} is {every:g} s, too often in {days:g} days: give at least"
            refuse(f"{text} {least:.3g} s, or fewer simulation.days.")
    if chips < asked.learners:
        refuse(f"fleet.chips is {chips:g}, fewer than the {asked.learners} learners: give more.")
    sites = tables.sites if tables.fleet.layout == "decoupled" else {}
    for index, away in enumerate(tables.outages):
        path = f"outages.{index}"
        if away.site and away.site not in sites:
            _refuse_site(f"{path}.site", away.site, sites)
        if wrong := [one for one in away.learners if not 0 <= one < asked.learners]:
            most = asked.learners - 1
            refuse(f"{path}.learners names {wrong[0]}, but learners go from 0 to {most}.")
        if away.every is not None and away.every <= away.lasts:
            more = f"give more than {away.lasts:g} s."
            refuse(f"{path}.every is no longer than what it repeats: {more}")
    failures = chips / tables.failures.chip_mtbi * run_s
    if failures > MOST_FAILURES:
        many = f"simulation.days is {days:g}, in which the chips could fail {failures:.3g} times"
        refuse(f"{many}: at most {MOST_FAILURES:g} are simulated, so give fewer days.")


def refuse(sentence: str, nearest: str = "") -> NoReturn:
    """Raise ConfigError; the sentence begins with the path of its setting."""
    raise ConfigError(sentence, path=sentence.partition(" ")[0], nearest=nearest)


def _check_sites(tables: ScenarioTables, raw: Mapping[str, Mapping[str, object]]) -> None:
    if tables.hub.site and tables.hub.site not in tables.sites:
        _refuse_site("hub.site", tables.hub.site, tables.sites)
    bits = dict[bool, str]()
    for name, site in tables.sites.items():
        step = f"sites.{name}.step_time"
        if site.step_time is None and site.flops_per_chip is None:
            refuse(f"{step} is missing: give it, or flops_per_chip (and utilisation) of its chips.")
        if site.step_time and site.flops_per_chip:
            refuse(
                f"{step} says how long a step takes, and so does flops_per_chip: give one of them."
            )
        for way in ("up", "down"):
            rate, path = str(raw[name].get(way, raw[name]["up"])).strip(), f"sites.{name}.{way}"
            bits.setdefault(rate.endswith("B/s"), f"{path} is {rate}")
            if len(bits) > 1:
                text = f'{path} is "{rate}" but {next(iter(bits.values()))}: one is in bits'
                refuse(f"{text}, the other in bytes; write all in one unit.")


def _refuse_site(path: str, name: str, known: Collection[str]) -> NoReturn:
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}."
    text = f'{path} names the site "{name}", which is not among the sites: {hint}'
    refuse(text, near[0] if near else "")


def _table(tree: Tree, name: str) -> Mapping[str, Any]:
    found: object = tree.values.get(name)
    return cast("Mapping[str, Any]", found) if isinstance(found, Mapping) else {}
