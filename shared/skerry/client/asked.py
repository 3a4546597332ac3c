"""The settings that a user's training loop gives, and the config of its run."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import NoneType
from typing import TypeAlias, cast

import structlog

from skerry.algorithm.fragments import LeafSpec
from skerry.client.loop_thread import LoopThread
from skerry.errors import ConfigError, ModelError
from skerry.models.presets import OWN, arch_of
from skerry.models.tensors import leaf_specs_of
from skerry.protocol.subjects import checked_token
from skerry.service.clusters import running
from skerry.service.entry import bus_from
from skerry.service.reporting import configure
from skerry.service.shell import arrive
from skerry.settings import loading
from skerry.settings.local import NatsSettings, Settings
from skerry.settings.models import ModelConfig, RunConfig

Config: TypeAlias = RunConfig | Mapping[str, object] | Path | str | None


def settings_of(url: str | None, run: str, config: Config) -> Settings:
    """Return the settings in ``config``; as in services, the environment wins over them.

    If nothing names a broker, it is that of the run's cluster in this folder, if one runs.
    """
    given = cast("object", config)  # a program may give anything
    if not isinstance(given, (RunConfig, Mapping, Path, str, NoneType)):
        msg = (
            f"config is {given!r:.80}, which holds no settings: give a dict of tables, such as"
            ' {"train": {"steps": 5000}}, or the path of a TOML file.'
        )
        raise ConfigError(msg, path="config")
    environ = os.environ | ({"SKERRY_NATS__URL": url} if url else {})
    if isinstance(config, (str, Path)):
        found = loading.load(Path(config), environ=environ)
    else:
        if isinstance(config, RunConfig):
            config = config.model_dump(mode="json", exclude_unset=True)
        found = loading.load(environ=environ, tables=config)
    nats = found.local.nats
    if nats.url == NatsSettings().url and not url:
        for cluster in running():
            if cluster.run == run:
                nats = cluster.reached_with(nats)
                return Settings(run=found.run, local=found.local.model_copy(update={"nats": nats}))
    return found


def with_units(leaves: Iterable[LeafSpec], units: Mapping[str, int] | None) -> tuple[LeafSpec, ...]:
    """Return leaves with the ``units`` of some by name; ConfigError for an unknown name."""
    sizes, known = dict(units or {}), tuple(leaves)
    names = {leaf.name for leaf in known}
    if strange := sizes.keys() - names:
        few = ", ".join(sorted(names)[:8])
        msg = f"units names {min(strange)!r}, and no parameter is called that: there are {few}."
        raise ConfigError(msg)
    return tuple(replace(leaf, unit=sizes.get(leaf.name, leaf.unit)) for leaf in known)


def model_of_leaves(
    named: ModelConfig, leaves: tuple[LeafSpec, ...], text: str = ""
) -> ModelConfig:
    """Return a loop's model as a run's record names it: a known config, or the loop's own.

    The config is that of the settings, or ``text``, a config.json, if the loop's tensors are those
    of that model.
    """
    if named.factory or named.path or named.lora_rank:
        return named
    for model in (named, ModelConfig(config=text)) if text else (named,):
        with suppress(ModelError):
            if leaf_specs_of(arch_of(model)) == leaves:
                return model
    return ModelConfig(preset=OWN)


def config_of(url: str | None = None, *, run: str = "main", config: Config = None) -> RunConfig:
    """Return a run's config as the ledger holds it; waits for a run that is yet to be created.

    ``url`` and ``config`` are as for ``join``: with ``data.paths``, this machine reads those.
    """
    settings = settings_of(url, checked_token(run, "run"), config)
    thread = LoopThread("skerry")

    async def read() -> RunConfig:
        async with bus_from(settings.local.nats, "config") as bus:
            record = await arrive(bus, run)
        found = loading.run_config_from_json(record.config_json, record.skerry_version)
        return loading.with_own_data(found, settings.run, reads=False)

    if not structlog.is_configured():
        configure(settings.local.log_level, service="learner")
    try:
        return thread.result(read())
    finally:
        thread.close()
