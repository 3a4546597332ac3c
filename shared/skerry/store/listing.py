"""Finding checkpoints in a store: by folder, oldest first, damaged ones told apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from skerry.errors import StoreError
from skerry.store.base import NAME
from skerry.store.checkpoint import read_manifest
from skerry.store.opening import (
    FROM_ENVIRONMENT,
    S3Access,
    folders,
    is_url,
    normal,
    open_store,
    parent_of,
    real,
)

if TYPE_CHECKING:
    from skerry.store.base import Store


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


def summaries(folder: str | Path, access: S3Access = FROM_ENVIRONMENT) -> list[Summary]:
    """Return the checkpoints of one run's folder, oldest first; only manifests are checked."""
    return _summaries(open_store(folder, access), parent_of(normal(folder))[1])


def all_summaries(
    root: str | Path, run: str | None = None, access: S3Access = FROM_ENVIRONMENT
) -> list[Summary]:
    """Return the checkpoints below ``store.path``, of one run or of all, oldest first.

    Those of a run that was created later come behind.
    """
    if run is not None:
        return summaries(f"{normal(root)}/{run}", access)
    found = [s for folder in folders(root, access) for s in summaries(folder, access)]
    return sorted(found, key=_age)


def locate(where: str | Path, access: S3Access = FROM_ENVIRONMENT) -> tuple[Store, str]:
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
    return Summary(
        name=name,
        path=store.where(name),
        run=found.run,
        index=found.index,
        step=found.step,
        tokens=found.tokens,
        created_ns=found.created_ns,
        size_bytes=found.size_bytes,
        versions=found.versions,
        ledger_sequence=found.ledger_sequence,
        run_created_ns=found.run_created_ns,
    )


def _age(summary: Summary) -> tuple[int, int, int, str]:
    """Order by ``Checkpoint.age``; what cannot be read comes first and is never the newest."""
    return summary.run_created_ns, summary.index, summary.ledger_sequence, summary.name
