"""Stores by their address, and the checkpoints in them, oldest first.

An address is a local folder, or a URL whose scheme names the adapter.
"""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

from skerry.errors import ConfigError, StoreError
from skerry.protocol.subjects import checked_token
from skerry.settings.models import STORE_KINDS, StoreSettings, store_kinds
from skerry.store.base import NAME
from skerry.store.checkpoint import Checkpoint, read_manifest
from skerry.store.local import LocalStore

if TYPE_CHECKING:
    from skerry.store.base import Store

FROM_ENVIRONMENT = StoreSettings()
"""What is not said about a remote store is taken from the environment."""
URL = re.compile(r"([a-z][a-z0-9]*):/+(.*?)/*", re.DOTALL)


class Summary(NamedTuple):
    """One line of a list of checkpoints; ``error`` says why there is no manifest to read."""

    name: str
    path: str
    run: str
    checkpoint: Checkpoint | None
    error: str = ""

    @property
    def step(self) -> int:
        """The checkpoint's step; 0 for an unreadable one."""
        return self.checkpoint.step if self.checkpoint else 0

    @property
    def age(self) -> tuple[int, int, int, str]:
        """What orders as ``Checkpoint.age``; an unreadable one is never the newest."""
        return (*(self.checkpoint.age if self.checkpoint else (0, -1, 0)), self.name)


class _Adapter(Protocol):
    """What the module of a store has."""

    def open_store(self, url: str, access: StoreSettings) -> Store: ...


def is_url(where: str | Path) -> bool:
    """Return True for the URL of a store, even if it went through a ``Path``."""
    return _url(where) is not None


def normal(where: str | Path) -> str:
    """Return an address as it was typed: a ``Path`` folds the two slashes of a URL into one."""
    url = _url(where)
    return f"{url[1]}://{url[2]}" if url else str(where)


def _url(where: str | Path) -> re.Match[str] | None:
    found = URL.fullmatch(str(where))
    return found if found is not None and found[1] in store_kinds() else None


def parent_of(where: str) -> tuple[str, str]:
    """Split an address into its folder and its last name, which is empty for a bucket's root."""
    if is_url(where):
        folder, _, name = where.rpartition("/")
        return (where, "") if folder.endswith(":/") else (folder, name)
    path = _real(where)
    return str(path.parent), path.name


def _real(where: str | Path) -> Path:
    """Return where a path leads; the path as it is if a link in it may not be followed."""
    path = Path(where)
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # not ours to look at, or a link that leads to itself
        return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps ..


def open_store(where: str | Path, access: StoreSettings = FROM_ENVIRONMENT) -> Store:
    """Return the store whose entries are at ``where``, reached as ``access`` says.

    Nothing is read yet. Raises ConfigError for an address or credentials that cannot be used.
    """
    url = _url(where)
    if url is None:
        return LocalStore(Path(where))
    scheme = url[1]
    try:
        adapter = cast("_Adapter", import_module(f"{STORE_KINDS}.{scheme}"))
    except ImportError as error:
        msg = (
            f"Checkpoints in {scheme.upper()} need {error.name}: "
            f"install it with `pip install 'skerry[{scheme}]'`."
        )
        raise ConfigError(msg, path="store.url") from error
    return adapter.open_store(normal(where), access)


def root_of(settings: StoreSettings) -> str:
    """Return the address that has a folder for every run."""
    return normal(settings.url) if settings.url else str(_real(settings.path))


def store_of(settings: StoreSettings, run: str) -> Store:
    """Return the store of a run's checkpoints; ConfigError if its settings cannot be used."""
    return open_store(f"{root_of(settings)}/{checked_token(run, 'run')}", settings)


def summaries(folder: str | Path, access: StoreSettings = FROM_ENVIRONMENT) -> list[Summary]:
    """Return the checkpoints of one run's folder, oldest first; only manifests are checked."""
    return _summaries(open_store(folder, access), parent_of(normal(folder))[1])


def all_summaries(
    root: str | Path, run: str | None = None, access: StoreSettings = FROM_ENVIRONMENT
) -> list[Summary]:
    """Return the checkpoints below ``root``, of one run or of all, oldest first.

    Those of a run that was created later come after all of an earlier one.
    """
    store = open_store(root, access)
    runs = store.folders() if run is None else [run]
    found = [s for name in runs for s in summaries(store.where(name), access)]
    return sorted(found, key=lambda summary: summary.age)


def locate(where: str | Path, access: StoreSettings = FROM_ENVIRONMENT) -> tuple[Store, str]:
    """Return store and name of a checkpoint, or of the newest one in a run's folder.

    Raises StoreError when there is none.
    """
    address = normal(where)
    folder, name = parent_of(address)
    beside = open_store(folder, access)
    if NAME.fullmatch(name) and name in beside.names():
        return beside, name
    inside = open_store(address if is_url(address) else _real(address), access)
    readable = [found for found in _summaries(inside, name) if found.checkpoint]
    if not readable:
        msg = (
            f"There is no checkpoint at {address} that this release reads: name one that "
            "`skerry checkpoints list` shows, or a folder of some."
        )
        raise StoreError(msg)
    return inside, readable[-1].name


def _summaries(store: Store, run: str) -> list[Summary]:
    found: list[Summary] = []
    for name in store.names():
        try:
            checkpoint = read_manifest(store, name)
        except StoreError as error:
            found.append(Summary(name, store.where(name), run, None, str(error)))
        else:
            found.append(Summary(name, store.where(name), checkpoint.run, checkpoint))
    return sorted(found, key=lambda summary: summary.age)
