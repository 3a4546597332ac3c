"""Stores by their address, and the checkpoints in them, oldest first.

An address is a local folder, or a URL whose scheme names the adapter.
"""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from skerry import installing
from skerry.errors import ConfigError, StoreError
from skerry.protocol.subjects import checked_token
from skerry.settings.local import STORE_KINDS, StoreSettings, store_kinds
from skerry.store.base import NAME, Store
from skerry.store.checkpoint import Checkpoint, read_manifest
from skerry.store.local import LocalStore

FROM_ENVIRONMENT = StoreSettings()
"""Access to a remote store by what its client finds in the environment."""


class Summary(NamedTuple):
    """One line of a list of checkpoints; ``error`` says why its manifest cannot be read."""

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
        """Sort key as ``Checkpoint.age``, then the name; an unreadable one is never the newest."""
        run_created_ns, index, sequence = self.checkpoint.age if self.checkpoint else (0, -1, 0)
        return run_created_ns, index, sequence, self.name


def is_url(where: str | Path) -> bool:
    scheme, mark, _ = str(where).partition("://")
    return bool(mark) and scheme in store_kinds()


def _whole(where: str | Path) -> str:
    """Return a URL without a slash at its end, or a path with its links resolved."""
    if not is_url(where):
        return os.path.realpath(where)
    scheme, mark, rest = str(where).partition("://")
    return f"{scheme}{mark}{rest.rstrip('/')}"


def open_store(where: str | Path, access: StoreSettings = FROM_ENVIRONMENT) -> Store:
    """Return the store whose entries are at ``where``; ``access`` has endpoint and credentials.

    Nothing is read yet. Raises ConfigError for an address or credentials that cannot be used.
    """
    if not is_url(where):
        return LocalStore(Path(where))
    scheme = str(where).partition("://")[0]
    try:
        adapter = import_module(f"{STORE_KINDS}.{scheme}")
    except ImportError as error:
        msg = (
            f"Checkpoints in {scheme.upper()} need {error.name}: "
            f"install it with `{installing.command(extra=scheme)}`."
        )
        raise ConfigError(msg, path="store.url") from error
    store: Store = adapter.open_store(_whole(where), access)
    return store


def root_of(settings: StoreSettings) -> str:
    """Return the address below which every run has a folder."""
    return _whole(settings.url or settings.path)


def store_of(settings: StoreSettings, run: str) -> Store:
    """Return the store of a run's checkpoints; ConfigError if its settings cannot be used."""
    return open_store(f"{root_of(settings)}/{checked_token(run, 'run')}", settings)


def summaries(folder: str | Path, access: StoreSettings = FROM_ENVIRONMENT) -> list[Summary]:
    """Return the checkpoints of one run's folder, oldest first; only manifests are checked."""
    store, run = open_store(folder, access), _whole(folder).rpartition("/")[2]
    found: list[Summary] = []
    for name in store.names():
        try:
            checkpoint = read_manifest(store, name)
        except StoreError as error:
            found.append(Summary(name, store.where(name), run, None, str(error)))
        else:
            found.append(Summary(name, store.where(name), checkpoint.run, checkpoint))
    return sorted(found, key=lambda summary: summary.age)


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

    Raises StoreError if there is none, or if one that cannot be read may be newer because its name
    has a later step.
    """
    address = _whole(where)
    folder, _, name = address.rpartition("/")
    if NAME.fullmatch(name) and not folder.endswith(":/"):  # else it is a bucket
        beside = open_store(folder or "/", access)
        if name in beside.names():
            return beside, name
    found = summaries(address, access)
    readable = [one.name for one in found if one.checkpoint]
    if not readable:
        msg = (
            f"There is no checkpoint at {address} that this release reads: name one that "
            "`skerry checkpoints list` shows, or a folder of some."
        )
        raise StoreError(msg)
    store = open_store(address, access)
    for one in reversed(found):
        if one.checkpoint is None and one.name > readable[-1]:
            msg = f"{one.error} {store.where(readable[-1])} can be read: name it, then."
            raise StoreError(msg)
    return store, readable[-1]
