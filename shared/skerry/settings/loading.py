"""Settings: the only reader of environment and config files.

One TOML file may hold both the run's settings and the machine's. Later sources win: defaults,
file, environment (``SKERRY_A__B``), ``--set a.b=c``.
"""

from __future__ import annotations

import json
import os
import tomllib
from typing import TYPE_CHECKING, Any, TypeVar, cast

from pydantic import BaseModel, ValidationError

from skerry import code
from skerry.algorithm.presets import Sgd, formerly, resolved
from skerry.errors import ConfigError
from skerry.settings.checks import check_local, check_run, masked_url, named_code
from skerry.settings.models import (
    LocalSettings,
    OuterConfig,
    RunConfig,
    Settings,
)
from skerry.settings.tree import (
    Keys,
    Leaf,
    Tree,
    annotations_of,
    explain,
    find,
    flat,
    leaves,
    parse_value,
    refuse_unknown,
    split_assignment,
    toml_text,
)

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

T = TypeVar("T", bound=BaseModel)

PREFIX = "SKERRY_"
CONTROL_VARIABLES = frozenset({"SKERRY_NATS_SERVER", "SKERRY_RUN"})
"""Variables of ours that are no settings: the nats-server binary to start, the run to join."""
RETIRED = (("chaos", "netns"),)
"""Settings that old runs and checkpoints may have, and that nothing reads any more."""
OTEL_OFF = "OTEL_SDK_DISABLED"
OTEL_ENDPOINTS = {
    "OTEL_EXPORTER_OTLP_ENDPOINT": "endpoint",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "traces_endpoint",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "metrics_endpoint",
}
"""OpenTelemetry's own variables, and the setting of ``telemetry`` that each is a default for."""


def load(
    path: Path | None = None,
    sets: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> Settings:
    """Resolve defaults, the file, the environment and ``--set``, in that order; later ones win.

    The code that these settings name is thereby allowed in this process (``skerry.code``).
    OpenTelemetry's own variables are defaults: any setting of ours wins over them.

    Args:
        path: A TOML file of flat tables, or None for no file.
        sets: Assignments ``table.key=value``.
        environ: The environment to read; None reads this process's.

    Raises:
        ConfigError: The file cannot be read, a key is unknown, a value has the wrong type or is out
            of bounds, or two settings contradict each other. One sentence names path and value.
    """
    known = leaves(_tables())
    tree = Tree()
    for keys, text, origin in _from_opentelemetry(environ):
        tree.put(keys, text, origin)
    if path is not None:
        tree.merge(read_toml(path), str(path))
    overlay(tree, known, sets, environ)
    run = validated(RunConfig, tree)
    local = validated(LocalSettings, tree)
    check_run(run)
    check_local(local)
    named = (code.module_of(value) for _, value in named_code(run))
    code.allow((*local.allow_code, *filter(None, named)))
    return Settings(run=run, local=local)


def overlay(
    tree: Tree, known: list[Leaf], sets: Sequence[str], environ: Mapping[str, str] | None = None
) -> None:
    """Put the environment and then ``--set`` over what a file said.

    Raises ConfigError for what is in the tree then and is not known.
    """
    for keys, text, origin in (*_from_environ(environ), *_from_sets(sets)):
        leaf = find(known, keys)
        tree.put(keys, parse_value(text, leaf.annotation) if leaf else text, origin)
    refuse_unknown(tree, known)


def run_config_from_json(text: str, release: str = "") -> RunConfig:
    """Return the RunConfig that a run record holds; ConfigError if it is none of ours.

    ``release`` is the one that wrote it, which the error then advises to use.
    """
    try:
        return _run_config(text)
    except ConfigError as error:
        if not release:
            raise
        msg = f"{error} The run was created by skerry {release}: use that release."
        raise ConfigError(msg, path=error.path, nearest=error.nearest) from error


def _run_config(text: str) -> RunConfig:
    tree = Tree()
    try:
        fields = cast("dict[str, dict[str, object]]", json.loads(text))
        for table, key in RETIRED:
            fields.get(table, {}).pop(key, None)
        tree.merge(fields, "the run record")
    except (ValueError, AttributeError, TypeError) as error:
        msg = f"The config in the run record is no JSON object: {error}."
        raise ConfigError(msg) from error
    refuse_unknown(tree, leaves(annotations_of(RunConfig)))
    config = validated(RunConfig, tree)
    check_run(config)
    return _spelt_out(config, formerly(config.sync.h_steps))


def decided(config: RunConfig) -> RunConfig:
    """Return the config with its outer optimizer spelt out, as a run's record holds it.

    What ``auto`` means follows what is known; a run that has begun keeps its optimizer.
    """
    _, numbers = resolved(config.outer.preset, config.sync.h_steps)
    return _spelt_out(config, numbers)


def _spelt_out(config: RunConfig, numbers: Sgd) -> RunConfig:
    given = config.outer
    if given.preset != "auto":
        return config
    lr = numbers.lr if given.lr is None else given.lr
    momentum = numbers.momentum if given.momentum is None else given.momentum
    preset = "nesterov" if momentum else "direct"
    outer = OuterConfig(preset=preset, lr=lr, momentum=momentum or None)
    return config.model_copy(update={"outer": outer})


def to_json(config: BaseModel) -> str:
    """Return a config as JSON with sorted keys: equal configs give equal text."""
    return json.dumps(config.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))


def to_toml(settings: Settings) -> str:
    """Return both parts as one TOML file that ``load`` reads back to an equal value."""
    return toml_text(
        {**settings.run.model_dump(mode="json"), **settings.local.model_dump(mode="json")}
    )


def differences(mine: BaseModel, theirs: BaseModel) -> tuple[str, ...]:
    """Return the dotted paths at which two configs of one kind differ, sorted."""
    left, right = dict(flat(mine.model_dump())), dict(flat(theirs.model_dump()))
    missing = object()
    return tuple(
        ".".join(keys)
        for keys in sorted(left.keys() | right.keys())
        if left.get(keys, missing) != right.get(keys, missing)
    )


def masked(settings: Settings) -> dict[str, object]:
    """Return every setting by dotted path, fit for a log: passwords in addresses are hidden."""
    plain = {
        **settings.run.model_dump(mode="json"),
        **settings.local.model_dump(mode="json"),
        "nats": {
            **settings.local.nats.model_dump(mode="json"),
            "url": ",".join(masked_url(url) for url in settings.local.nats.url.split(",")),
        },
        "telemetry": {
            **settings.local.telemetry.model_dump(mode="json"),
            **{
                name: masked_url(getattr(settings.local.telemetry, name))
                for name in OTEL_ENDPOINTS.values()
            },
        },
    }
    return {".".join(keys): value for keys, value in flat(plain)}


def child_environment(
    extra: Mapping[str, str], environ: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the environment for a child that gets its settings by file: ours less its settings.

    ``extra`` fills in what the user has not set; control variables are passed on.
    """
    source = os.environ if environ is None else environ
    kept = {k: v for k, v in source.items() if not k.startswith(PREFIX) or k in CONTROL_VARIABLES}
    return {**extra, **kept}


def control_variable(name: str, environ: Mapping[str, str] | None = None) -> str | None:
    """Return one of CONTROL_VARIABLES, or None where it is unset or empty."""
    if name not in CONTROL_VARIABLES:
        msg = f"{name} is no control variable."
        raise KeyError(msg)
    return (os.environ if environ is None else environ).get(name) or None


def _tables() -> dict[str, object]:
    return {**annotations_of(RunConfig), **annotations_of(LocalSettings)}


def read_toml(path: Path) -> dict[str, Any]:
    """Return what a TOML file holds; ConfigError where it cannot be read."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        msg = f"The config file {path} cannot be read: {error.strerror or error}."
        raise ConfigError(msg, path=str(path)) from error
    except UnicodeDecodeError as error:
        msg = f"The config file {path} is not UTF-8 text (byte {error.start})."
        raise ConfigError(msg, path=str(path)) from error
    except tomllib.TOMLDecodeError as error:
        msg = f"The config file {path} is not valid TOML: {error}."
        raise ConfigError(msg, path=str(path)) from error


def _from_environ(environ: Mapping[str, str] | None) -> Iterator[tuple[Keys, str, str]]:
    for name, text in sorted((os.environ if environ is None else environ).items()):
        if name.startswith(PREFIX) and name not in CONTROL_VARIABLES:
            yield tuple(name.removeprefix(PREFIX).lower().split("__")), text, name


def _from_opentelemetry(environ: Mapping[str, str] | None) -> Iterator[tuple[Keys, str, str]]:
    source = os.environ if environ is None else environ
    if source.get(OTEL_OFF, "").strip().lower() == "true":
        return
    for name, key in OTEL_ENDPOINTS.items():
        if text := source.get(name, "").strip():
            yield ("telemetry", key), text, name


def _from_sets(sets: Sequence[str]) -> Iterator[tuple[Keys, str, str]]:
    for text in sets:
        keys, value = split_assignment(text)
        yield keys, value, "--set"


def validated(model: type[T], tree: Tree) -> T:
    """Build one part from the tables that are its own: strictly, so that true is no number."""
    own = {name: tree.values[name] for name in model.model_fields if name in tree.values}
    try:
        return model.model_validate_json(json.dumps(own, default=str), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        raise explain(first, tree.origin(tuple(str(part) for part in first["loc"]))) from None
