"""Opening a store by its address: a folder, or ``s3://bucket/prefix``."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.errors import ConfigError
from skerry.store.disk import unreadable
from skerry.store.local import LocalStore

if TYPE_CHECKING:
    from skerry.store.base import Store

S3 = "s3:/"


@dataclass(frozen=True, slots=True)
class S3Access:
    """How buckets are reached; what is empty is taken from the environment, as AWS's tools do.

    ``timeout_s`` is the deadline of one request, its repetitions included.
    """

    endpoint: str = ""
    region: str = ""
    credentials: Path | None = None
    profile: str = "default"
    timeout_s: float = 60.0


FROM_ENVIRONMENT = S3Access()


def is_url(where: str | Path) -> bool:
    """Tell whether an address is one of a bucket, even if it went through a ``Path``."""
    return str(where).startswith(S3)


def normal(where: str | Path) -> str:
    """Return an address as it was typed: a ``Path`` folds the two slashes of a URL into one."""
    text = str(where)
    return f"{S3}/{text.removeprefix(S3).lstrip('/').rstrip('/')}" if is_url(text) else text


def parent_of(where: str) -> tuple[str, str]:
    """Split an address into the folder and the name of the last thing in it."""
    if is_url(where):
        folder, _, name = where.rpartition("/")
        return (where, "") if folder == S3 else (folder, name)
    path = real(where)
    return str(path.parent), path.name


def real(where: str | Path) -> Path:
    """Return where a path leads; the path as it is, where a link in it may not be followed."""
    path = Path(where)
    try:
        return path.resolve()
    except (OSError, RuntimeError):  # not ours to look at, or a link that leads to itself
        return Path(os.path.abspath(path))  # noqa: PTH100 - Path.absolute keeps ..


def open_store(where: str | Path, access: S3Access = FROM_ENVIRONMENT) -> Store:
    """Return the store whose entries lie at ``where``; nothing is read yet.

    Raises ConfigError where the address or the credentials cannot be used.
    """
    if not is_url(where):
        return LocalStore(Path(where))
    try:
        from skerry.store.s3 import S3Store
    except ImportError as error:
        msg = "Checkpoints in S3 need obstore: install it with `pip install 'skerry[s3]'`."
        raise ConfigError(msg, path="store.url") from error
    return S3Store(normal(where), access)


def folders(root: str | Path, access: S3Access = FROM_ENVIRONMENT) -> list[str]:
    """Return the addresses of the folders below ``root``, sorted: a run's each.

    Raises StoreError where that cannot be told.
    """
    if is_url(root):
        from skerry.store.s3 import S3Store

        found = open_store(root, access)
        assert isinstance(found, S3Store)
        return [found.where(name) for name in found.folders()]
    path = Path(root)
    try:
        return [str(p) for p in sorted(path.iterdir()) if p.is_dir()] if path.is_dir() else []
    except OSError as error:
        raise unreadable(path, error) from error
