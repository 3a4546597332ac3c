"""Finding checkpoints in a store: by folder, oldest first, unreadable ones with the reason."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from skerry.errors import StoreError
from skerry.store.base import NAME
from skerry.store.checkpoint import read_manifest
from skerry.store.opening import FROM_ENVIRONMENT, is_url, normal, open_store, parent_of, real

if TYPE_CHECKING:
    from pathlib import Path

    from skerry.settings.models import StoreSettings
    from skerry.store.base import Store


FROM_MANIFEST = (
    *("run", "index", "step", "tokens", "created_ns", "size_bytes", "versions"),
    *("ledger_sequence", "run_created_ns"),
)


@dataclass(frozen=True, slots=True)
class Summary:
    """One line of a list of checkpoints; ``error`` says why a manifest cannot be read."""

    name: str
    path: str
    run: str
    index: int = -1
    step: int = 0
    tokens: int = 0
    created_ns: int = 0
    size_bytes: int = 0
    versions: tuple[int, ...] = ()
    ledger_sequence: int = 0
    run_created_ns: int = 0
    error: str = ""


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
    return sorted(found, key=_age)


def locate(where: str | Path, access: StoreSettings = FROM_ENVIRONMENT) -> tuple[Store, str]:
    """Return store and name of a checkpoint, or of the newest one in a run's folder.

    Raises StoreError when there is none.
    """
    address = normal(where)
    folder, name = parent_of(address)
    beside = open_store(folder, access)
    if NAME.fullmatch(name) and name in beside.names():
        return beside, name
    inside = open_store(address if is_url(address) else real(address), access)
    readable = [found for found in _summaries(inside, name) if not found.error]
    if not readable:
        msg = (
            f"There is no checkpoint at {address}: name one that "
            "`skerry checkpoints list` shows, or a folder of some."
        )
        raise StoreError(msg)
    return inside, readable[-1].name


def _summaries(store: Store, run: str) -> list[Summary]:
    return sorted((_summary(store, name, run) for name in store.names()), key=_age)


def _summary(store: Store, name: str, run: str) -> Summary:
    try:
        found = read_manifest(store, name)
    except StoreError as error:
        return Summary(name, store.where(name), run, error=str(error))
    facts = {key: getattr(found, key) for key in FROM_MANIFEST}
    return Summary(name, store.where(name), **facts)


def _age(summary: Summary) -> tuple[int, int, int, str]:
    """Return a key that orders as ``Checkpoint.age``; an unreadable one is never the newest."""
    return summary.run_created_ns, summary.index, summary.ledger_sequence, summary.name
