"""Settings: the only reader of environment and config files.

One TOML file may hold both the run's settings and the machine's. Later sources win: defaults,
file, environment (``SKERRY_A__B``), ``--set a.b=c``.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

from pydantic import BaseModel, ValidationError

from skerry import code, folders
from skerry.algorithm.presets import resolved
from skerry.errors import ConfigError
from skerry.settings.checks import (
    check_local,
    check_run,
    masked_url,
    named_code,
    refuse_data,
    refuse_secret,
)
from skerry.settings.local import LocalSettings, Settings, StoreSettings
from skerry.settings.models import OuterConfig, RunConfig
from skerry.settings.modes import clauses
from skerry.settings.tree import (
    Known,
    Tree,
    explain,
    find,
    leaves,
    parse_value,
    refuse_unknown,
    split_assignment,
    toml_text,
)

T = TypeVar("T", bound=BaseModel)

_stores: list[StoreSettings] = []

PREFIX = "SKERRY_"
CONTROL_VARIABLES = frozenset({"SKERRY_NATS_SERVER", "SKERRY_RUN", "SKERRY_DEBUG"})
"""Variables with our prefix that are not settings: the nats-server binary to start, the run to
join, and whether errors print a traceback (``--debug``)."""
OTEL_OFF = "OTEL_SDK_DISABLED"
OTEL_ENDPOINTS = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "endpoint",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "traces_endpoint",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "metrics_endpoint",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT": "logs_endpoint",
}
"""OpenTelemetry's own variables, and the setting of ``telemetry`` that each is a default for."""


def load(
    path: Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    tables: Mapping[str, object] | None = None,
) -> Settings:
    """Resolve defaults, the file, the environment and ``--set``, in that order; later ones win.

    This also allows the code and the text that these settings name in this process
    (``skerry.code``, ``skerry.folders``), and keeps how buckets are reached for ``store``.
    OpenTelemetry's own variables are defaults: any setting of ours wins over them.

    Args:
        path: A TOML file of flat tables, or None for no file.
        sets: Assignments ``table.key=value``.
        environ: The environment to read; None reads this process's.
        tables: Settings of a calling program, nested as in a file; they win over the file.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value has the wrong type or is out
            of bounds, or two settings contradict each other. One sentence names path and value.
    """
    return loaded(path, sets, environ, tables)[0]


def loaded(
    path: Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
    tables: Mapping[str, object] | None = None,
) -> tuple[Settings, Tree]:
    """Do what ``load`` does; return the settings, and the given values with their sources."""
    tree, source = Tree(), os.environ if environ is None else environ
    if source.get(OTEL_OFF, "").strip().lower() != "true":
        for name, key in OTEL_ENDPOINTS.items():
            if text := source.get(name, "").strip():
                tree.put(("telemetry", key), text, name)
    if path is not None:
        tree.merge(read_toml(path), str(path))
    tree.merge(tables or {}, "config")
    overlay(tree, leaves(RunConfig, LocalSettings), sets, environ)
    run, local = validated(RunConfig, tree), validated(LocalSettings, tree)
    check_run(run)
    check_local(local)
    named = (code.module_of(value) for _, value in named_code(run))
    code.allow((*local.allow_code, *filter(None, named)))
    folders.allow((*local.allow_data, *run.data.paths, run.data.tokenizer_folder))
    if run.model.path:
        folders.offer(run.model.path)
    _stores[:] = [local.store]
    return Settings(run=run, local=local), tree


def store() -> StoreSettings:
    """Return how to reach buckets, by the settings that this process loaded last."""
    return _stores[0] if _stores else load().local.store


def overlay(
    tree: Tree, known: Known, sets: Sequence[str], environ: Mapping[str, str] | None = None
) -> None:
    """Set values from the environment and then from ``--set`` over those of a file.

    Raises ConfigError if the tree then has a path that is not in ``known``.
    """
    given = [
        (tuple(name.removeprefix(PREFIX).lower().split("__")), text, name)
        for name, text in sorted((os.environ if environ is None else environ).items())
        if name.startswith(PREFIX) and name not in CONTROL_VARIABLES
    ]
    given += [(*split_assignment(text), "--set") for text in sets]
    for keys, text, origin in given:
        if origin == "--set" and keys == ("nats", "url"):
            refuse_secret(text)
        kind = find(known, keys)
        tree.put(keys, text if kind is None else parse_value(text, kind), origin)
    refuse_unknown(tree, known)


def validated(model: type[T], tree: Tree) -> T:
    """Build one model from its own tables of the tree, strictly: true is not a number."""
    own = {name: tree.values[name] for name in model.model_fields if name in tree.values}
    try:
        return model.model_validate_json(json.dumps(own, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise explain(first, tree.origin(tuple(str(part) for part in first["loc"]))) from None


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds; ConfigError where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        why = f"is not valid TOML: {error}"
        if isinstance(error, OSError):
            why = f"cannot be read: {error.strerror or error}"
        elif isinstance(error, UnicodeDecodeError):
            why = f"is not UTF-8 text (byte {error.start})"
        msg = f"The config file {path} {why}."
        raise ConfigError(msg, path=str(path)) from error


def run_config_from_json(text: str, release: str = "") -> RunConfig:
    """Return the RunConfig that a run record holds; ConfigError if it cannot be one.

    ``release`` is the version of skerry that wrote it; the error advises to use that one.
    """
    tree = Tree()
    try:
        tree.merge(cast("dict[str, object]", json.loads(text)), "the run record")
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        msg = f"The config in the run record is not a JSON object: {error}."
        raise ConfigError(msg) from error
    try:
        refuse_unknown(tree, leaves(RunConfig))
        config = validated(RunConfig, tree)
        check_run(config)
    except ConfigError as error:
        if not release:
            raise
        msg = f"{error} The run was created by skerry {release}: use that release."
        raise ConfigError(msg, path=error.path, nearest=error.nearest) from error
    return config


def decided(config: RunConfig) -> RunConfig:
    """Return the config with its outer optimizer spelt out, as a run's record holds it.

    A later release may choose another optimizer for ``auto``; a run that has begun keeps its own.
    """
    given = config.outer
    if given.preset != "auto":
        return config
    _, numbers = resolved(given.preset, config.sync.h_steps)
    lr = numbers.lr if given.lr is None else given.lr
    momentum = numbers.momentum if given.momentum is None else given.momentum
    preset = "nesterov" if momentum else "direct"
    outer = OuterConfig(preset=preset, lr=lr, momentum=momentum or None)
    return config.model_copy(update={"outer": outer})


OWN_DATA = (
    *("source", "factory", "options", "tokenizer_folder", "field", "paths", "weights"),
    *("suffixes", "token_dtype"),
)
"""Settings of ``data`` that say what one machine reads; the others hold for the whole run."""


def with_own_data(config: RunConfig, given: RunConfig, *, reads: bool = True) -> RunConfig:
    """Return a run's config with this machine's own data, if ``given`` names some.

    Raises ConfigError if this machine's data are bytes and the run's are tokens, or vice versa; if
    ``given`` names none and the caller ``reads`` the run's own, also what ``refuse_data`` raises.
    """
    own = given.data
    if not (own.paths or own.factory):
        if reads:
            refuse_data(config.data)
        return config
    if own.of_bytes != config.data.of_bytes:
        kinds = "tokens", "bytes"
        msg = (
            f"data.source names text that is read as {kinds[own.of_bytes]}, and this run trains on"
            f" {kinds[config.data.of_bytes]}: prepare it, or name a tokenizer, as the run has it;"
            " another run takes --run NAME."
        )
        raise ConfigError(msg, path="data.source")
    mine = config.data.model_copy(update={name: getattr(own, name) for name in OWN_DATA})
    return config.model_copy(update={"data": mine})


def to_json(config: BaseModel) -> str:
    """Return a config as JSON with sorted keys: equal configs give equal text."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def to_toml(settings: Settings) -> str:
    """Return both parts as one TOML file that ``load`` reads back to an equal value."""
    return toml_text(_values(settings))


def _values(settings: Settings) -> dict[str, Any]:
    return {**settings.run.model_dump(mode="json"), **settings.local.model_dump(mode="json")}


ADDRESSES = "url", "endpoint", "metrics.broker"
"""Ends of the settings that are addresses, which may hold a password."""


class SettingOrigin(NamedTuple):
    """A setting, its value as in JSON, and what set it."""

    setting: str
    value: Any
    origin: str


def origins(settings: Settings, tree: Tree) -> list[SettingOrigin]:
    """Return every setting with its source, which may be the mode or the default; no secrets."""
    values, run = _values(settings), settings.run
    by_mode = {c.path for c in clauses(run.mode, run.sync.learners) if c.value is not None}
    rows: list[SettingOrigin] = []
    for keys in leaves(RunConfig, LocalSettings):
        path = ".".join(keys)
        other = f'mode "{run.mode}"' if path in by_mode else "default"
        value = _shown(path, reduce(getitem, keys, values))
        rows.append(SettingOrigin(path, value, tree.origin(keys) or other))
    return rows


def _shown(path: str, value: Any) -> Any:
    """Return the value of a setting, without the password if it is an address."""
    return masked_url(value) if isinstance(value, str) and path.endswith(ADDRESSES) else value


def differences(mine: BaseModel, theirs: BaseModel) -> tuple[str, ...]:
    """Return the dotted paths of the settings in which two configs of one kind differ, sorted."""
    paths = sorted(leaves(type(mine)))
    return tuple(
        ".".join(keys)
        for keys in paths
        if reduce(getattr, keys, mine) != reduce(getattr, keys, theirs)
    )


def child_environment(
    extra: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment of a child process that reads its settings from a file.

    It is ours without settings but with control variables; ``extra`` adds what is not set there.
    """
    source = os.environ if environ is None else environ
    kept = {k: v for k, v in source.items() if not k.startswith(PREFIX) or k in CONTROL_VARIABLES}
    return {**extra, **kept}


def control_variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return one of CONTROL_VARIABLES, or None where it is unset or empty."""
    return (os.environ if environ is None else environ).get(name) or None


def secret_in(path: Path | None, setting: str) -> str:
    """Return the secret in a file, empty without a path; ConfigError if it cannot be read."""
    if path is None:
        return ""
    try:
        return path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "it is not text"
        msg = f"{setting} is {path}, which cannot be read ({why}): name a file that you may read."
        raise ConfigError(msg, path=setting) from error
