"""What a plan is asked about: tables ``plan``, ``sites.<name>`` and ``hub`` beside a run's own.

One TOML file may hold them all; a second one (``--sites``) may hold the sites alone. Later sources
win: file, sites file, ``--set``. What the user leaves open of ``OPEN`` the plan may choose.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import Field, ValidationError

from skerry.errors import ConfigError
from skerry.settings.checks import check_run
from skerry.settings.loading import read_toml, validated
from skerry.settings.models import LocalSettings, RunConfig, Table
from skerry.settings.tree import (
    Keys,
    Tree,
    annotations_of,
    explain,
    leaves,
    refuse_unknown,
    split_assignment,
)
from skerry_tools.plan.quantities import ByteRate, Count, Flops, Rate, Size, Time, unit_family

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from pydantic_core import ErrorDetails

KIND = "plan"
OPEN = ("sync.fragments", "sync.h_steps", "sync.shards")
"""Settings that a plan chooses where the user has not; all others have their defaults."""
MOST, LEAST_SHARE = 10**9, 1e-6
"""Bounds that keep figures within what a float can hold."""


class Site(Table):
    """One place with learners; its link is the one between it and the hub."""

    learners: int = Field(default=1, ge=1, le=MOST)
    """Learners at this site; they share its link."""
    chips: int = Field(default=1, ge=1, le=MOST)
    """Chips of each learner."""
    step_time: Time | None = Field(default=None, gt=0)
    """Time of one training step, pure compute; empty: from flops_per_chip and utilisation."""
    tokens_per_step: Count | None = Field(default=None, gt=0)
    """Tokens of each learner's step; empty: plan.tokens_per_step."""
    flops_per_chip: Flops | None = Field(default=None, gt=0)
    """Peak speed of a chip in the precision that is trained in."""
    utilisation: float = Field(default=0.4, ge=LEAST_SHARE, le=1)
    """Share of that peak that a step gets (MFU)."""
    up: Rate = Field(gt=0)
    """From the site to the hub, for all its learners together."""
    down: Rate | None = Field(default=None, gt=0)
    """From the hub to the site; empty: as up."""
    rtt: Time = Field(default=0.05, gt=0)
    """Round trip to the hub."""
    derating: float = Field(default=1.0, ge=LEAST_SHARE, le=1)
    """Share of up and down that training gets."""
    measured: bool = False
    """Whether up, down and rtt were measured through the broker; then nothing is derated."""
    cores: int = Field(default=1, ge=1, le=MOST)
    """Cores of each learner's host that encode and decode."""
    memory: Size | None = Field(default=None, gt=0)
    """Memory of one chip; empty: whether the learner fits is not judged."""
    price_chip_hour: float | None = Field(default=None, ge=0, le=MOST)
    """Price of one chip for one hour."""
    price_egress_gb: float | None = Field(default=None, ge=0, le=MOST)
    """Price of 1e9 bytes that leave the site."""

    @property
    def up_bits_s(self) -> float:
        """What training gets of the up-link, bit/s."""
        return self.up * (1.0 if self.measured else self.derating)

    @property
    def down_bits_s(self) -> float:
        """What training gets of the down-link, bit/s."""
        return (self.down or self.up) * (1.0 if self.measured else self.derating)


class Hub(Table):
    """Where the broker and the syncers are."""

    site: str = ""
    """The site that the hub is at: its learners reach it without a wide-area link."""
    down: Rate | None = Field(default=None, gt=0)
    """What reaches the hub from all sites together; empty: not judged."""
    up: Rate | None = Field(default=None, gt=0)
    """What leaves it to all sites together; empty: not judged."""
    write: ByteRate | None = Field(default=None, gt=0)
    """What the broker stores, all replicas of a message counted once; empty: not judged."""
    cores: int = Field(default=1, ge=1, le=MOST)
    """Cores of each syncer that encode and decode; a merge runs on one."""
    price_hour: float | None = Field(default=None, ge=0, le=MOST)
    """Price of the hub for one hour."""
    price_egress_gb: float | None = Field(default=None, ge=0, le=MOST)
    """Price of 1e9 bytes that leave the hub."""


class PlanTable(Table):
    """What is to be trained, how much, and what the baselines are like."""

    parameters: Count | None = Field(default=None, ge=1)
    """Parameters that are synchronised; empty: those of [model]."""
    active_parameters: Count | None = Field(default=None, ge=1)
    """Parameters that a token passes through; empty: all. For step times from FLOP/s."""
    layers: int = Field(default=48, ge=1, le=MOST)
    """Layers, for how well data-parallel hides its all-reduce behind the backward pass."""
    tokens: Count | None = Field(default=None, gt=0)
    """Tokens to train on; empty: 20 for each parameter."""
    tokens_per_step: Count | None = Field(default=None, gt=0)
    """Tokens of each learner's step; empty: data.seq_len * data.batch."""
    goodput: float = Field(default=1.0, ge=LEAST_SHARE, le=1)
    """Share of the time that is useful; ``skerry simulate`` predicts it."""
    utilisation_target: float = Field(default=0.9, ge=LEAST_SHARE, lt=1)
    """Where learners stop for a round (overlap_steps 0): the least utilisation that will do."""
    gradient_bits: float = Field(default=16.0, ge=1, le=64)
    """Bits per gradient value of the data-parallel baselines."""
    chip_mtbi: Time | None = Field(default=None, gt=0)
    """Mean time between interruptions of one chip; empty: the baselines do not fail."""
    recovery: Time = Field(default=600.0, gt=0)
    """From an interruption until training goes on, where all must restart."""
    resize: Time = Field(default=60.0, gt=0)
    """The pause in which elastic data-parallel shrinks or grows."""
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")
    """Of all prices."""


class Scene(Table):
    """The three tables of ours in one file."""

    plan: PlanTable = PlanTable()
    sites: dict[str, Site] = Field(default_factory=dict)
    hub: Hub = Hub()


@dataclass(frozen=True, slots=True)
class Request:
    """A question, checked; ``open`` are the settings of OPEN that the plan may choose.

    ``bare_tokens`` tells that nobody said how many tokens a step of this size has. ``source`` says
    where a scenario's figures are from, ``status`` which of them are published,
    fitted or assumed, by dotted path.
    """

    run: RunConfig
    scene: Scene
    open: frozenset[str] = frozenset()
    bare_tokens: bool = False
    source: str = ""
    status: Mapping[str, str] = field(default_factory=dict[str, str])

    @property
    def learners(self) -> int:
        """All learners of all sites (M)."""
        return sum(site.learners for site in self.scene.sites.values())


def read(config: Path | None, sites: Path | None = None, sets: Sequence[str] = ()) -> Tree:
    """Return what the files and ``--set`` hold, for ``from_tree``.

    Raises ConfigError for a file that cannot be read and a ``--set`` of a site that is in none.
    """
    tree = Tree()
    for path in (config, sites):
        if path is not None:
            tree.merge(read_toml(path), str(path))
    known = dict(cast("Mapping[str, object]", tree.values.get("sites") or {}))
    for text in sets:
        keys, value = split_assignment(text)
        if keys[0] == "sites" and len(keys) > 2 and known and keys[1] not in known:
            raise _unknown_site(keys, keys[1], known)
        tree.put(keys, _plain(value), "--set")
    return tree


def from_tree(tree: Tree) -> Request:
    """Return what a tree of settings asks, after every check."""
    check_kind(tree, KIND)
    tables = {name: tree.values.get(name, {}) for name in Scene.model_fields}
    _check_units(tables["sites"])
    scene = validated_table(Scene, tables, tree)
    asked = cast("Mapping[str, object]", tree.values.get("sync") or {})
    learners = sum(site.learners for site in scene.sites.values())
    _check_sites(scene, asked.get("learners"), learners)
    given = {f"sync.{name}" for name in asked}
    run = _run_of(tree, learners)
    return Request(
        run=run,
        scene=scene,
        open=frozenset(OPEN) - given if run.mode == "decoupled" else frozenset(),
        bare_tokens=_bare_tokens(scene, tree),
        source=str(tree.values.get("source", "")),
        status=cast("Mapping[str, str]", tree.values.get("status", {})),
    )


def _bare_tokens(scene: Scene, tree: Tree) -> bool:
    data = cast("Mapping[str, object]", tree.values.get("data") or {})
    said = scene.plan.tokens_per_step or data.keys() & {"seq_len", "batch"}
    missing = any(site.tokens_per_step is None for site in scene.sites.values())
    return scene.plan.parameters is not None and missing and not said


def check_kind(tree: Tree, wanted: str) -> None:
    """Raise ConfigError for a scenario that asks something else."""
    kind = tree.values.get("kind", wanted)
    if kind != wanted:
        msg = f'kind is "{kind}", and skerry plan answers "{KIND}" and "bandwidths": '
        msg += "try skerry simulate."
        raise ConfigError(msg, path="kind")


def _run_of(tree: Tree, learners: int) -> RunConfig:
    """Return the run's own settings; a machine's settings in the same file are left alone."""
    known = {**annotations_of(RunConfig), **annotations_of(LocalSettings)}
    theirs = {*Scene.model_fields, "source", "status", "kind"}
    own = Tree()
    for keys, origin in tree.origins.items():
        if keys[0] not in theirs:
            value: Any = tree.values
            for key in keys:
                value = value[key]
            own.put(keys, value, origin)
    own.put(("sync", "learners"), learners, "the sites")
    refuse_unknown(own, leaves(known))
    run = validated(RunConfig, own)
    check_run(run)
    for name in ("h_steps", "fragments", "overlap_steps"):
        count = getattr(run.sync, name)
        if count > MOST:
            msg = f"sync.{name} is {count}, but plans reckon with at most {MOST}: lower it."
            raise ConfigError(msg, path=f"sync.{name}")
    return run


def _check_sites(scene: Scene, learners: object, total: int) -> None:
    if not scene.sites:
        msg = (
            "sites is empty: name at least one, as [sites.a] with up and step_time, or say "
            "--regions, --bandwidth and --step-time."
        )
        raise ConfigError(msg, path="sites")
    if scene.hub.site and scene.hub.site not in scene.sites:
        raise _unknown_site(("hub", "site"), scene.hub.site, scene.sites)
    if learners is not None and learners != total:
        msg = f"sync.learners is {learners} but the sites have {total} learners: leave it out."
        raise ConfigError(msg, path="sync.learners")
    for name, site in scene.sites.items():
        if site.step_time is None and site.flops_per_chip is None:
            path = f"sites.{name}.step_time"
            msg = f"{path} is missing: give it, or flops_per_chip (and utilisation) of its chips."
            raise ConfigError(msg, path=path)
        if site.measured and site.derating < 1:
            path = f"sites.{name}.derating"
            msg = f"{path} is {site.derating} but the site is measured: leave one of them out."
            raise ConfigError(msg, path=path)


def _check_units(sites: object) -> None:
    """Refuse a site whose up is in bits and whose down is in bytes: one of them is a slip."""
    if not isinstance(sites, Mapping):
        return
    for name, site in cast("Mapping[str, object]", sites).items():
        if not isinstance(site, Mapping):
            continue
        rates = cast("Mapping[str, object]", site)
        up, down = rates.get("up"), rates.get("down")
        if isinstance(up, str) and isinstance(down, str) and unit_family(up) != unit_family(down):
            path = f"sites.{name}.down"
            msg = (
                f'{path} is "{down}" but up is "{up}": one is in {unit_family(down)}, the other in '
                f"{unit_family(up)}; write both in one unit."
            )
            raise ConfigError(msg, path=path)


def _unknown_site(keys: Keys, name: str, known: Mapping[str, object]) -> ConfigError:
    path = ".".join(keys)
    near = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
    msg = f'{path} names the site "{name}", which is not among the sites: {hint}'
    return ConfigError(msg, path=path, nearest=near[0] if near else "")


T = TypeVar("T", bound=Table)


def validated_table(model: type[T], values: Mapping[str, object], tree: Tree, at: Keys = ()) -> T:
    """Build a table of ours, found at ``at``; ConfigError names the first path that is wrong."""
    try:
        return model.model_validate_json(json.dumps(values, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        keys = (*at, *(str(part) for part in first["loc"]))
        if first["type"] == "extra_forbidden":
            raise _unknown_key(keys) from None
        if first["type"] == "missing":
            msg = f"{'.'.join(keys)} is missing: give it a value."
            raise ConfigError(msg, path=".".join(keys)) from None
        raise _explained(first, tree, keys) from None


def _explained(first: ErrorDetails, tree: Tree, keys: Keys) -> ConfigError:
    """As for any other setting; a quantity's own sentence goes without a preamble."""
    told = explain({**first, "loc": keys}, tree.origin(keys))
    text = str(told).replace("but it is refused: ", "but it ")
    return ConfigError(text, path=told.path)


def _unknown_key(keys: Keys) -> ConfigError:
    tables: dict[str, type[Table]] = {"plan": PlanTable, "sites": Site, "hub": Hub}
    known = list(tables[keys[0]].model_fields) if keys[0] in tables else list(tables)
    near = difflib.get_close_matches(keys[-1], known, n=1, cutoff=0.5)
    hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known)}."
    msg = f"{'.'.join(keys)} is not a setting: {hint}"
    return ConfigError(msg, path=".".join(keys), nearest=near[0] if near else "")


def _plain(text: str) -> Any:
    """Read a value of ``--set`` as JSON where it is, else as text."""
    try:
        return json.loads(text)
    except ValueError:
        return text
