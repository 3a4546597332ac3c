"""A simulation's file read and checked: tables of ``scene`` beside a run's config, in one TOML.

``[sync]`` and the other tables of a run mean what they mean to the run itself, so that the config
that will run is the one that is simulated. ``source`` and ``[status]`` say of a shipped scenario
where its values are from, and which are published, fitted or assumed.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from skerry.errors import ConfigError
from skerry.settings.checks import check_run
from skerry.settings.loading import read_toml, validated
from skerry.settings.models import LocalSettings, RunConfig, Table
from skerry.settings.tree import (
    Tree,
    annotations_of,
    explain,
    leaves,
    refuse_unknown,
    split_assignment,
    toml_text,
)
from skerry_tools.plan.scene import Away, Scene

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry_tools.plan.sited import Seat, Seated

KIND = "simulation"
KINDS = {KIND, "plan"}
"""A plan's file can be simulated, too."""
STATUSES = ("published", "fitted", "assumed", "derived")
DEFAULT = "goodput-table"
MOST_FAILURES = 2e7
"""About a minute of work."""


@dataclass(frozen=True, slots=True)
class Request:
    """A question, checked."""

    scene: Scene
    run: RunConfig
    seats: tuple[Seat, ...] = ()
    """The learners one by one, where sites say so; empty: they are equal."""
    feasible: bool = True
    """Whether the links of the sites carry it."""
    name: str = ""
    source: str = ""
    status: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def learners(self) -> int:
        """How many islands there are: M, or one where all chips train in step."""
        return self.run.sync.learners if self.scene.fleet.layout == "decoupled" else 1

    def struck(self, away: Away) -> tuple[int, ...]:
        """Return which learners are away then, by number."""
        if away.learners:
            return away.learners
        numbers = range(self.learners)
        return tuple(n for n in numbers if not away.site or self.seats[n].site == away.site)


def shipped() -> dict[str, Path]:
    """Return the simulations that come with Skerry, by name."""
    folder = Path(str(resources.files("skerry_tools.plan"))) / "scenarios"
    found: dict[str, Path] = {}
    for path in sorted(folder.glob("*.toml")):
        if read_toml(path).get("kind") in KINDS:
            found[path.stem] = path
    return found


def read(named: str | None, sets: Sequence[str] = ()) -> Request:
    """Return what a file, or a shipped scenario by name, asks, with ``--set`` on top.

    ConfigError with the path of the first thing that is wrong.
    """
    tree = Tree()
    name = named or DEFAULT
    path = _path(name)
    tree.merge(read_toml(path), str(path))
    for text in sets:
        keys, value = split_assignment(text)
        tree.put(keys, _plain(value), "--set")
    return from_tree(tree, path.stem)


def from_tree(tree: Tree, name: str = "") -> Request:
    """Return what a tree of settings asks, after every check."""
    tables = {key: tree.values[key] for key in Scene.model_fields if key in tree.values}
    scene = _scene(tables, tree)
    there = _seated(tree) if "sites" in tree.values else None
    request = Request(
        scene=scene if there is None else _with_plan(scene, there, tree),
        run=_run_of(tree) if there is None else there.run,
        seats=() if there is None or scene.fleet.layout != "decoupled" else there.seats,
        feasible=there is None or there.feasible,
        name=name,
        source=str(tree.values.get("source", "")),
        status=cast("Mapping[str, str]", tree.values.get("status", {})),
    )
    _check(request)
    return request


def _seated(tree: Tree) -> Seated:
    from skerry_tools.plan.sited import seated

    return seated(tree, {*Scene.model_fields, "kind"})


def _with_plan(scene: Scene, there: Seated, tree: Tree) -> Scene:
    """Return the scene with what the plan says and the scene itself does not."""

    def missing(table: str, key: str) -> bool:
        return (table, key) not in tree.origins

    chips = sum(seat.chips for seat in there.seats)
    steps = sorted(seat.step_s for seat in there.seats)
    timing: dict[str, object] = {"step": steps[len(steps) // 2]}
    if missing("timing", "commit_s"):
        timing["commit_s"] = there.commit_s
    if missing("timing", "tokens") and there.table.tokens is not None:
        timing["tokens"] = there.table.tokens
    told: dict[str, object] = {
        "fleet": scene.fleet.model_copy(update={"chips": float(chips)}),
        "timing": scene.timing.model_copy(update=timing),
    }
    if missing("failures", "chip_mtbi") and there.table.chip_mtbi is not None:
        mtbi = {"chip_mtbi": there.table.chip_mtbi}
        told["failures"] = scene.failures.model_copy(update=mtbi)
    return scene.model_copy(update=told)


def of_run(run: RunConfig, learners: int, sets: Sequence[str], name: str) -> Request:
    """Return a simulation of a real run's config with so many learners, and these settings."""
    tree = Tree()
    for text in sets:
        keys, value = split_assignment(text)
        tree.put(keys, _plain(value), name)
    tree.put(("sync", "learners"), learners, name)
    own = from_tree(tree, name)
    quorum = min(run.sync.quorum, learners)
    sync = run.sync.model_copy(update={"learners": learners, "quorum": quorum})
    return replace(own, run=run.model_copy(update={"sync": sync}))


def as_toml(request: Request) -> str:
    """Return a question as a file that asks it again.

    ConfigError for one about sites: its own file is such a file.
    """
    if request.seats:
        msg = f"{request.name} is about sites and a file already: copy it."
        raise ConfigError(msg, path="sites")
    tables = request.scene.model_dump(mode="json", exclude_defaults=True)
    away = {name: tables.pop(name) for name in ("outages", "preemptions") if name in tables}
    sync = request.run.sync.model_dump(mode="json", exclude_defaults=True)
    told = [toml_text({"kind": KIND, "source": request.source, **tables, "sync": sync})]
    told += [f"\n[[{name}]]\n{toml_text(one)}" for name, found in away.items() for one in found]
    rows = [f"{json.dumps(path)} = {json.dumps(text)}\n" for path, text in request.status.items()]
    return "".join([*told, "\n[status]\n" if rows else "", *rows])


def _path(name: str) -> Path:
    known = shipped()
    if name in known:
        return known[name]
    path = Path(name)
    if path.exists() or path.suffix == ".toml":
        return path
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
    msg = f"There is no scenario {name!r}, neither shipped nor as a file: {hint}"
    raise ConfigError(msg, path=name, nearest=near[0] if near else "")


def _run_of(tree: Tree) -> RunConfig:
    """Return the run's own settings; a machine's settings in the same file are left alone."""
    known = {**annotations_of(RunConfig), **annotations_of(LocalSettings)}
    theirs = {*Scene.model_fields, "kind", "source", "status", "plan", "sites", "hub"}
    own = Tree()
    for keys, origin in tree.origins.items():
        if keys[0] not in theirs:
            value: Any = tree.values
            for key in keys:
                value = value[key]
            own.put(keys, value, origin)
    refuse_unknown(own, leaves({**known, **annotations_of(Scene)}))
    run = validated(RunConfig, own)
    check_run(run)
    return run


def _scene(tables: Mapping[str, object], tree: Tree) -> Scene:
    try:
        return Scene.model_validate_json(json.dumps(tables, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        keys = tuple(str(part) for part in first["loc"])
        path = ".".join(keys)
        if first["type"] == "extra_forbidden":
            table = annotations_of(Scene).get(keys[0])
            inner = table if isinstance(table, type) and issubclass(table, Table) else Away
            known = list((inner if len(keys) > 1 else Scene).model_fields)
            name = str(first["loc"][-1])
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
            msg = f"{path} is not a setting: {hint}"
            raise ConfigError(msg, path=path, nearest=near[0] if near else "") from None
        if first["type"] == "missing":
            msg = f"{path} is missing: it has no default."
            raise ConfigError(msg, path=path) from None
        told = explain(first, tree.origin(keys))
        text = str(told).replace("but it is refused: ", "but it ")
        raise ConfigError(text, path=path) from None


def _check(request: Request) -> None:
    scene, sync = request.scene, request.run.sync
    learners = request.learners
    if scene.fleet.layout == "decoupled" and sync.quorum > sync.learners:
        msg = f"sync.quorum is {sync.quorum}, but there are only {sync.learners} learners (M)."
        raise ConfigError(msg, path="sync.quorum")
    if scene.fleet.chips < learners:
        few = f"fleet.chips is {scene.fleet.chips:g}"
        msg = f"{few}, fewer than the {learners} learners: give more."
        raise ConfigError(msg, path="fleet.chips")
    for kind, all_away in (("outages", scene.outages), ("preemptions", scene.preemptions)):
        for index, away in enumerate(all_away):
            _check_away(f"{kind}.{index}", away, request)
    _check_failures(scene)
    for row, values in scene.sweep.published.items():
        if len(values) != len(scene.sweep.chips):
            path = f"sweep.published.{row}"
            msg = f"{path} has {len(values)} values for {len(scene.sweep.chips)} numbers of chips."
            raise ConfigError(msg, path=path)
    for path, status in request.status.items():
        if not status.startswith(STATUSES):
            msg = f"status.{path} is {status!r}: begin it with one of {', '.join(STATUSES)}."
            raise ConfigError(msg, path=f"status.{path}")


def _check_failures(scene: Scene) -> None:
    rate_s = scene.fleet.chips / scene.failures.chip_mtbi
    if rate_s * scene.simulation.days * 86400.0 > MOST_FAILURES:
        msg = (
            f"simulation.days is {scene.simulation.days:g}, in which the chips could fail "
            f"{rate_s * scene.simulation.days * 86400.0:.3g} times: at most {MOST_FAILURES:g} are "
            "simulated, so give fewer days."
        )
        raise ConfigError(msg, path="simulation.days")


def _check_away(path: str, away: Away, request: Request) -> None:
    learners, known = request.learners, sorted({seat.site for seat in request.seats})
    if away.site and away.site not in known:
        near = difflib.get_close_matches(away.site, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}."
        msg = f'{path}.site names "{away.site}", which is not among the sites: {hint}'
        raise ConfigError(msg, path=f"{path}.site", nearest=near[0] if near else "")
    beyond = [n for n in away.learners if not 0 <= n < learners]
    if beyond:
        msg = f"{path}.learners names {beyond[0]}, but learners go from 0 to {learners - 1}."
        raise ConfigError(msg, path=f"{path}.learners")
    if away.every is not None and away.every <= away.lasts:
        msg = f"{path}.every is no longer than what it repeats: give more than {away.lasts:g} s."
        raise ConfigError(msg, path=f"{path}.every")


def _plain(text: str) -> Any:
    """Read a value of ``--set`` as JSON where it is, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
