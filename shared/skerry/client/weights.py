"""Initial parameters from a folder of Hugging Face weights, read fragment by fragment."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec, Plan, Slice
from skerry.errors import ModelError, RunMismatch
from skerry.models import hf
from skerry.models.adapters import digest_of
from skerry.models.hf import LazyTensor
from skerry.models.presets import arch_of
from skerry.settings.models import ModelConfig


@dataclass(frozen=True, slots=True)
class FolderWeights:
    """A folder's weights as outer gradients relative to zero; at most a fragment is in memory."""

    plan: Plan
    tensors: Mapping[str, LazyTensor]

    @classmethod
    def of(cls, folder: str, model: ModelConfig, plan: Plan) -> FolderWeights:
        """Open the folder of a run's first weights.

        Raises ModelError for a folder that cannot be read or has other tensors than the plan,
        RunMismatch if its weights are not those that the run was created with.
        """
        found = digest_of(folder)
        if found != model.weights:
            msg = (
                f"{folder} has other weights ({found}) than this run begins with"
                f" ({model.weights}): name a copy of that folder, or none."
            )
            raise RunMismatch(msg)
        tensors = hf.read_tensors(Path(folder).expanduser(), arch_of(model))
        for leaf in plan.leaves:
            if leaf.name not in tensors or tensors[leaf.name].shape != leaf.shape:
                msg = f"{folder} has no tensor {leaf.name} of shape {leaf.shape} to begin with."
                raise ModelError(msg, path="model.path")
        return cls(plan, tensors)

    def genesis(self, fragment: int) -> NDArray[np.float32]:
        """Return the fragment's values relative to zero, negated: f32 (padded_size,)."""
        cut = self.plan.fragments[fragment]
        vector = np.zeros(cut.padded_size, np.float32)
        for piece, offset in zip(cut.slices, cut.offsets, strict=False):
            leaf = self.plan.leaves[piece.leaf]
            values = _read(self.tensors[leaf.name], leaf, piece)
            np.subtract(np.float32(0), values, out=vector[offset : offset + piece.size])
        return vector


def _read(tensor: LazyTensor, leaf: LeafSpec, piece: Slice) -> NDArray[np.float32]:
    """Return a slice of a leaf; only the rows that hold it are read."""
    if not leaf.shape:
        return tensor.read(()).reshape(-1)
    row = math.prod(leaf.shape[1:])
    first, last = piece.start // row, -(-piece.stop // row)
    rest = tuple(slice(0, size) for size in leaf.shape[1:])
    rows = tensor.read((slice(first, last), *rest)).reshape(-1)
    return rows[piece.start - first * row : piece.stop - first * row]
