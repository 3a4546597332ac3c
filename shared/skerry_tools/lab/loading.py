"""From a file, the environment and the command line to a scenario.

A scenario's file is a run's file with more tables: any run's settings are a scenario of equal
islands that never fail. Its settings may stand at the top or below ``run``.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from skerry.errors import ConfigError
from skerry.settings import loading
from skerry.settings.checks import check_run
from skerry.settings.models import LocalSettings, RunConfig
from skerry.settings.tree import Tree, leaves
from skerry_tools.lab.scenario import REFERENCE, LabScenario, check

RUN = "run"
DEFAULTS: Mapping[tuple[str, str], object] = {
    ("data", "seq_len"): 64,
    ("data", "batch"): 4,
    ("train", "steps"): 500,
}
"""Defaults of a lab run, beside the small reference model."""


def load(
    path: Path | None = None,
    sets: Sequence[str] = (),
    *,
    learners: int | None = None,
    seed: int | None = None,
    environ: Mapping[str, str] | None = None,
) -> LabScenario:
    """Resolve defaults, the file (TOML or JSON), the environment and ``--set``; later ones win.

    Raises ConfigError with the path of what is wrong, and where it comes from.
    """
    tree = Tree()
    if path is not None:
        tree.merge(_read(path), str(path))
        tree.origins.setdefault(("name",), "")
        tree.values.setdefault("name", path.stem)
    own = {keys: kind for keys, kind in leaves(LabScenario).items() if keys[0] != RUN}
    loading.overlay(tree, own | leaves(RunConfig, LocalSettings), sets, environ)
    if seed is not None:
        tree.put(("seed",), seed, "--seed")
    _put_learners(tree, learners)
    _put_defaults(tree)
    run = loading.validated(RunConfig, tree)
    check_run(run)
    scenario = loading.validated(LabScenario, tree).model_copy(update={RUN: run})
    check(scenario)
    return scenario


def _put_learners(tree: Tree, learners: int | None) -> None:
    """Lay the run out for as many learners as were asked for, or as the islands are at the start.

    An island that is no table is for the validation to refuse.
    """
    islands = tree.values.get("islands")
    if learners is not None and islands:
        msg = "--learners is for islands that are all alike: leave it out, or islands."
        raise ConfigError(msg, path="islands")
    if learners is not None:
        tree.put(("sync", "learners"), learners, "--learners")
    elif isinstance(islands, list) and ("sync", "learners") not in tree.origins:
        first = [
            island
            for island in cast("list[object]", islands)
            if isinstance(island, dict) and not cast("dict[str, Any]", island).get("joins")
        ]
        tree.put(("sync", "learners"), max(1, len(first)), "islands")


def _put_defaults(tree: Tree) -> None:
    if not tree.values.get("model"):
        tree.merge({"model": REFERENCE.model_dump(mode="json", exclude_unset=True)}, "")
    for keys, value in DEFAULTS.items():
        if keys not in tree.origins:
            tree.put(keys, value, "")


def _read(path: Path) -> dict[str, Any]:
    """Return what a file holds, with the tables below ``run`` moved to the top."""
    values = _read_json(path) if path.suffix == ".json" else loading.read_toml(path)
    run = values.pop(RUN, {})
    if not isinstance(run, dict):
        msg = f"{RUN} (from {path}) is a table of settings: give it as [{RUN}.sync] and so on."
        raise ConfigError(msg, path=RUN)
    twice = sorted(cast("dict[str, Any]", run).keys() & values.keys())
    if twice:
        msg = f"{twice[0]} (from {path}) is there twice, also below {RUN}: give it once."
        raise ConfigError(msg, path=twice[0])
    return {**values, **cast("dict[str, Any]", run)}


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise _unreadable(path, f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise _unreadable(path, f"is not valid JSON: {error}") from error
    if not isinstance(values, dict):
        raise _unreadable(path, f"is no JSON object: it begins with {str(values)[:20]!r}")
    return cast("dict[str, Any]", values)


def _unreadable(path: Path, why: str) -> ConfigError:
    return ConfigError(f"The scenario {path} {why}.", path=str(path))
