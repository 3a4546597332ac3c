"""Finding checkpoints on a disk: by folder, newest first, damaged ones told apart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skerry.errors import StoreError
from skerry.store.base import MANIFEST
from skerry.store.checkpoint import read_manifest
from skerry.store.local import LocalStore


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
    error: str = ""


def summaries(folder: Path) -> list[Summary]:
    """Return the checkpoints of one run's folder, oldest first; only manifests are checked."""
    store = LocalStore(folder)
    return sorted((_summary(store, name) for name in store.names()), key=_age)


def all_summaries(root: Path, run: str | None = None) -> list[Summary]:
    """Return the checkpoints below ``store.path``, of one run or of all, oldest first."""
    if run is not None:
        return summaries(root / run)
    folders = sorted(p for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    return sorted((s for folder in folders for s in summaries(folder)), key=_age)


def locate(path: Path) -> tuple[LocalStore, str]:
    """Return store and name of a checkpoint folder, or of the newest one inside a run's folder.

    Raises StoreError when there is none.
    """
    if (path / MANIFEST).is_file():
        whole = path.resolve()
        return LocalStore(whole.parent), whole.name
    readable = [summary for summary in summaries(path) if not summary.error]
    if not readable:
        msg = (
            f"There is no checkpoint at {path}: name a folder that holds {MANIFEST}; "
            "`skerry checkpoints list` shows them."
        )
        raise StoreError(msg)
    return LocalStore(path.resolve()), readable[-1].name


def _summary(store: LocalStore, name: str) -> Summary:
    run = Path(store.where(name)).parent.name
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
    )


def _age(summary: Summary) -> tuple[int, int, str]:
    return summary.created_ns, summary.index, summary.name
