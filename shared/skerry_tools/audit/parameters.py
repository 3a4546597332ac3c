"""Writing rebuilt parameters as safetensors, a fragment at a time."""

from __future__ import annotations

import contextlib
import itertools
import os
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from skerry.algorithm.fragments import scatter
from skerry.errors import StoreError
from skerry.store import tensorfile
from skerry.store.checkpoint import PARAMS_FILE

if TYPE_CHECKING:
    from collections.abc import Generator

    from numpy.typing import NDArray

    from skerry.algorithm.fragments import Fragment, Plan

SUFFIX = ".safetensors"


class Parameters:
    """A file of f32 tensors by leaf name, mapped into memory: ``add`` fills in one fragment."""

    def __init__(self, path: Path, plan: Plan, metadata: dict[str, str]) -> None:
        shapes = {leaf.name: leaf.shape for leaf in plan.leaves}
        head = tensorfile.header(shapes, metadata)
        with path.open("wb") as file:
            file.write(head)
            file.truncate(len(head) + tensorfile.ITEM * plan.parameters)
        self._flat = np.memmap(path, np.dtype("<f4"), "r+", len(head), (plan.parameters,))
        sizes = [prod(shape) for shape in shapes.values()]
        ends = np.cumsum([0, *sizes])
        self._leaves = [self._flat[int(a) : int(b)] for a, b in itertools.pairwise(ends)]

    def add(self, fragment: Fragment, vector: NDArray[np.float32]) -> None:
        """Write one fragment's parameters in their places."""
        scatter(fragment, vector, self._leaves)

    def flush(self) -> None:
        self._flat.flush()


def file_of(out: Path) -> Path:
    """Return where the parameters go: ``out`` itself if it names a file, or a file inside it."""
    return out if out.suffix == SUFFIX else out / PARAMS_FILE


@contextlib.contextmanager
def parameters(out: Path, plan: Plan, metadata: dict[str, str]) -> Generator[Parameters]:
    """Write a parameters file that appears whole at the end, or not at all.

    Raises StoreError where it cannot be written.
    """
    final = file_of(out)
    draft = final.with_name(f".{final.name}.{os.getpid()}")
    try:
        try:
            final.parent.mkdir(parents=True, exist_ok=True)
            written = Parameters(draft, plan, metadata)
            yield written
            written.flush()
            with draft.open("rb+") as file:
                os.fsync(file.fileno())
            draft.replace(final)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            msg = f"{final} cannot be written ({error.strerror}): name another place with --out."
            raise StoreError(msg) from error
    finally:
        draft.unlink(missing_ok=True)
