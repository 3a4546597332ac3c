"""Checkpoints as where a replay begins."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from skerry.audit.replayed import Base
from skerry.errors import RunMismatch
from skerry.store.checkpoint import fragments, read_manifest
from skerry.store.listing import locate, summaries

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from skerry.audit.log import Log
    from skerry.audit.survey import Survey
    from skerry.store.listing import Summary
    from skerry.store.manifest import SavedFragment

    Saved = Iterator[tuple[SavedFragment, Mapping[str, NDArray[np.float32]]]]


class CheckpointBases:
    """The fragments of one checkpoint, read and verified one by one as they are asked for."""

    def __init__(self, path: Path, log: Log) -> None:
        """Open a checkpoint, or the newest one of a run's folder.

        Raises StoreError where there is none, RunMismatch for one of another model.
        """
        store, name = locate(path)
        self.origin = store.where(name)
        checkpoint = read_manifest(store, name)
        if checkpoint.plan_digest != log.plan.digest:
            msg = (
                f"{self.origin} holds other parameters than run {log.run!r}: name a checkpoint of"
                " that run."
            )
            raise RunMismatch(msg)
        self._saved: Saved = iter(fragments(store, name))

    def __call__(self, fragment: int) -> Base | None:
        """Return a fragment's base; fragments have to be asked for in their order."""
        for saved, vectors in self._saved:
            if saved.commit.fragment == fragment:
                return Base(saved.commit.version, vectors, self.origin)
        return None


def usable(folder: Path, log: Log, found: Survey) -> Path | None:
    """Return the oldest checkpoint from which the window reaches the moment asked for, or None.

    Looks at the checkpoint that the run was restored from, and at those in its own ``folder``.
    """
    origin = Path(log.record.restored_from) if log.record.restored_from else None
    folders = [origin.parent] if origin is not None and origin.is_dir() else []
    for candidate in [s for at in (*folders, folder) for s in _in(at)]:
        if len(candidate.versions) == len(log.plan.fragments) and all(
            found.reach[index].base <= version <= found.versions[index]
            for index, version in enumerate(candidate.versions)
            if index in found.reach
        ):
            return Path(candidate.path)
    return None


def _in(folder: Path) -> list[Summary]:
    if not folder.is_dir():
        return []
    return [summary for summary in summaries(folder) if not summary.error]
