"""Checkpoints as where a replay begins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from skerry.errors import ConfigError, RunMismatch, StoreError
from skerry.store.checkpoint import fragments, read_manifest
from skerry.store.finding import FROM_ENVIRONMENT, locate, normal, parent_of, summaries
from skerry_tools.audit.replay import Base

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    import numpy as np
    from numpy.typing import NDArray

    from skerry.settings.models import StoreSettings
    from skerry.store.checkpoint import SavedFragment
    from skerry_tools.audit.log import RunLog
    from skerry_tools.audit.moment import Survey

    Saved = Iterator[tuple[SavedFragment, Mapping[str, NDArray[np.float32]]]]


class CheckpointBases:
    """The fragments of one checkpoint, read and verified one by one as they are asked for."""

    def __init__(
        self, where: str | Path, log: RunLog, access: StoreSettings = FROM_ENVIRONMENT
    ) -> None:
        """Open a checkpoint, or the newest one of a run's folder.

        Raises StoreError where there is none, RunMismatch for one of another model.
        """
        store, name = locate(where, access)
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


def usable(
    folder: str | Path, log: RunLog, found: Survey, access: StoreSettings = FROM_ENVIRONMENT
) -> str | None:
    """Return the oldest checkpoint from which the window reaches the moment asked for, or None.

    Looks where the run was restored from, in its own ``folder``, and wherever its ledger says that
    checkpoints were written, in this order. Where nothing is found and one of those places could
    not be read, raises what went wrong there.
    """
    trouble: ConfigError | StoreError | None = None
    for place in _places(folder, log, found.folders):
        try:
            listed = summaries(place, access)
        except (ConfigError, StoreError) as error:
            trouble = trouble or error
            continue
        for candidate in listed:
            if candidate.checkpoint and _reaches(candidate.checkpoint.versions, log, found):
                return candidate.path
    if trouble is not None:
        raise trouble
    return None


def _places(folder: str | Path, log: RunLog, recorded: Sequence[str]) -> list[str]:
    """Return the folders that may hold checkpoints of a run, each of them once."""
    origin = log.record.restored_from
    begun = [parent_of(normal(origin))[0]] if origin else []
    return list(dict.fromkeys([*begun, normal(folder), *recorded]))


def _reaches(versions: Sequence[int], log: RunLog, found: Survey) -> bool:
    """Return True if the window leads from these versions to the moment asked for."""
    return len(versions) == len(log.plan.fragments) and all(
        found.reach[index].base <= version <= found.versions[index]
        for index, version in enumerate(versions)
        if index in found.reach
    )
