"""Files of a corpus that lie in a bucket: copied once, found again by what they hold."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

from skerry.errors import CorpusError, SkerryError
from skerry.settings import loading
from skerry.settings.models import STORE_KINDS, store_kinds

COPIES = Path(".skerry/data")


def is_remote(named: str) -> bool:
    """Return True for the address of a bucket."""
    scheme, mark, _ = named.partition("://")
    return bool(mark) and scheme in store_kinds()


def copies(url: str, suffixes: Sequence[str], folder: Path = COPIES) -> list[Path]:
    """Return local copies of the object at ``url``, or of those with these suffixes below it.

    An object is copied once for each of its contents (its ETag); a copy appears when it is whole.
    How the bucket is reached say ``SKERRY_STORE__...`` and what every cloud tool reads. Raises
    CorpusError where something cannot be read.
    """
    scheme = url.partition("://")[0]
    try:
        adapter = import_module(f"{STORE_KINDS}.{scheme}")
    except ImportError as error:
        msg = (
            f"Text at {scheme}:// needs {error.name}: install it with"
            f" `pip install 'skerry[{scheme}]'`."
        )
        raise CorpusError(msg, path="data.paths") from error
    access = loading.load(None).local.store
    try:
        found: list[Path] = adapter.copies(url, access, folder, tuple(suffixes))
    except OSError as error:
        msg = f"Cannot copy {url} to {folder}: {error.strerror or error}. Free or mend that disk."
        raise CorpusError(msg, path="data.paths") from error
    except SkerryError as error:
        raise CorpusError(str(error), path="data.paths") from error
    if not found:
        msg = f"{url} names no object that ends in {', '.join(suffixes)}: correct data.paths."
        raise CorpusError(msg, path="data.paths")
    return found
