"""Opening a store by its address: a local folder, or a URL whose scheme names the adapter."""

from __future__ import annotations

import os
import re
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from skerry.errors import ConfigError
from skerry.protocol.subjects import checked_token
from skerry.settings.models import STORE_KINDS, StoreSettings, store_kinds
from skerry.store.local import LocalStore

if TYPE_CHECKING:
    from skerry.store.base import Store

FROM_ENVIRONMENT = StoreSettings()
"""What is not said about a remote store is taken from the environment."""
URL = re.compile(r"([a-z][a-z0-9]*):/+(.*?)/*", re.DOTALL)


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


def parent_of(where: str) -> tuple[str, str]:
    """Split an address into its folder and its last name, which is empty for a bucket's root."""
    if is_url(where):
        folder, _, name = where.rpartition("/")
        return (where, "") if folder.endswith(":/") else (folder, name)
    path = real(where)
    return str(path.parent), path.name


def real(where: str | Path) -> Path:
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


def _url(where: str | Path) -> re.Match[str] | None:
    """Match an address whose scheme is that of a store."""
    found = URL.fullmatch(str(where))
    return found if found is not None and found[1] in store_kinds() else None


def root_of(settings: StoreSettings) -> str:
    """Return the address that has a folder for every run."""
    return normal(settings.url) if settings.url else str(real(settings.path))


def store_of(settings: StoreSettings, run: str) -> Store:
    """Return the store of a run's checkpoints; ConfigError if its settings cannot be used."""
    return open_store(f"{root_of(settings)}/{checked_token(run, 'run')}", settings)
