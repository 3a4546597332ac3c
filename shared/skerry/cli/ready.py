"""Check what a run needs from this machine, before anything is created or started."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import shlex
from importlib.machinery import PathFinder
from pathlib import Path
from typing import TYPE_CHECKING

from skerry import code, installing
from skerry.cli.cluster import devices
from skerry.cli.cluster.broker import find_server
from skerry.cli.cluster.cluster import INSTALLED
from skerry.cli.programs import require
from skerry.errors import ConfigError, CorpusError, StoreError
from skerry.models.axes import sizes_of
from skerry.settings import loading
from skerry.settings.checks import named_code, permissions
from skerry.settings.tree import split_assignment

if TYPE_CHECKING:
    from collections.abc import Sequence

    from skerry.settings.local import LocalSettings, Settings, StoreSettings
    from skerry.settings.models import RunConfig

MOST_DEVICES = 999_999
"""Devices assumed for a mesh whose devices are not known yet."""
READ_BYTES = 32 * 1024**2
"""Text up to this size is read whole; of larger text only the files are looked for."""
SAMPLE = 1 << 22
"""Tokens of a shard whose ids are compared with the vocabulary."""


def check(
    settings: Settings,
    nats: str | None,
    checkpoint: str | None = None,
    further: Sequence[str] = (),
) -> None:
    """Raise ConfigError, ModelError, CorpusError or StoreError for what cannot work here.

    ``further`` are the assignments that replace the end of the checkpoint's run.
    """
    for service in INSTALLED:
        require(service)
    if nats is None:
        find_server()
    devices.refuse_missing()
    sizes_of(settings.local.learner.mesh, MOST_DEVICES)
    for path, value in named_code(settings.run):
        _check_module(code.module_of(value), path)
    _check_extras(settings.local)
    if checkpoint is None:  # else it has a config of its own
        vocab = _check_model(settings.run)
        _check_data(settings.run, vocab)
    else:
        _check_checkpoint(checkpoint, settings, further)


def _check_checkpoint(where: str, settings: Settings, further: Sequence[str]) -> None:
    """Raise ConfigError for a checkpoint whose run is at its end, or whose text is not allowed."""
    from skerry.store.checkpoint import read_manifest
    from skerry.store.finding import locate

    store, name = locate(where, settings.local.store)
    checkpoint = read_manifest(store, name)
    config = loading.run_config_from_json(json.dumps(checkpoint.config))
    loading.with_own_data(config, settings.run)
    given = {split_assignment(text)[0][-1] for text in further}
    for unit, at in (("step", checkpoint.step), ("token", checkpoint.tokens)):
        key = f"{unit}s"
        end = getattr((settings.run if key in given else config).train, key)
        if end is not None and at >= end:
            msg = (
                f"{store.where(name)} is at {unit} {at}, and its run ends at {unit} {end}: say"
                f" where it goes on to, with --set train.{key}={2 * at}."
            )
            raise ConfigError(msg, path=f"train.{key}")


def left_behind(store: StoreSettings, run: str, *, fresh: bool) -> str:
    """Return how to go on from an earlier run of this name; empty if there is none.

    Empty for a ``fresh`` run, too: a person who asks for one knows that.
    """
    from skerry.store.finding import root_of, summaries

    if fresh:
        return ""
    with contextlib.suppress(StoreError, ConfigError):  # for the checkpointer to tell of
        trained = [found for found in summaries(f"{root_of(store)}/{run}", store) if found.step]
        if trained:
            last = max(trained, key=lambda found: found.step)
            assert last.checkpoint is not None  # it has a step
            config = loading.run_config_from_json(json.dumps(last.checkpoint.config))
            where = f"{shlex.quote(last.path)}{permissions(config)}"
            command = f"skerry up --fresh --run {run} --from {where}"
            return (
                f"Run {run} starts from scratch, for it has no log: `{command}` goes on from step"
                f" {last.step} of an earlier one."
            )
    return ""


def _check_extras(local: LocalSettings) -> None:
    telemetry, metrics = local.telemetry, local.metrics
    exports = telemetry.wanted
    for setting, value, module, extra in (
        ("telemetry.endpoint", exports, "opentelemetry.exporter.otlp.proto.http", "otel"),
        ("metrics.tensorboard", metrics.tensorboard, "tensorboardX", "tensorboard"),
        ("metrics.wandb", metrics.wandb, "wandb", "wandb"),
        ("store.url", local.store.url, "obstore", "s3"),
    ):
        if value and not _found(module):
            raise installing.missing(setting, module, extra)


def _check_module(module: str, path: str) -> None:
    """Raise ConfigError for a module that services, which look in this folder first, lack."""
    top = module.partition(".")[0]
    if top and not (PathFinder.find_spec(top, [""]) or PathFinder.find_spec(top)):
        msg = (
            f"{path} names module {module!r}, which is neither in this folder nor installed: give"
            " the command in the folder of its file, or install it."
        )
        raise ConfigError(msg, path=path)


def _found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _check_model(run: RunConfig) -> int | None:
    """Return the vocabulary of the built-in decoder; None for a model of the user's own."""
    from skerry.models import hf
    from skerry.models.presets import arch_of

    if run.model.factory:
        return None
    arch = arch_of(run.model)
    if run.model.path:
        hf.read_tensors(run.model.path, arch)
    return arch.vocab


def _check_data(run: RunConfig, vocab: int | None) -> None:
    from skerry.data.corpus import load_corpus
    from skerry.data.documents import find_sources
    from skerry.data.files import is_remote
    from skerry.data.source import read_source, text_files

    data = run.data
    if data.factory or data.source == "stdlib" or any(map(is_remote, data.paths)):
        return
    if data.source == "text":
        if data.tokenizer_folder:
            find_sources(data.paths, data.suffixes)
            if not Path(data.tokenizer_folder).expanduser().is_dir():
                msg = f"There is no folder {data.tokenizer_folder}: correct data.tokenizer_folder."
                raise CorpusError(msg, path="data.tokenizer_folder")
        elif sum(file.stat().st_size for file in text_files(data)) <= READ_BYTES:
            load_corpus(data)
        return
    for document in read_source(data):
        most = document.vocab or int(document.tokens[:SAMPLE].max(initial=0)) + 1
        if vocab is not None and most > vocab:
            msg = (
                f"The text has tokens up to {most - 1}, and the model's vocabulary {vocab}: set"
                f" model.vocab to its tokenizer's size, {most} or more."
            )
            raise ConfigError(msg, path="model.vocab")
