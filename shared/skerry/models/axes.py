"""A mesh's axes, and how they split tensors: arithmetic only, without JAX.

The mesh is a setting of the machine (``learner.mesh``), never of the run: the axes ``data``,
``fsdp``, ``tensor`` and ``expert``, each with a number of devices. A model names the logical axes
of its tensors; one table maps these to the mesh.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, TypeAlias

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ConfigError

AXES = ("data", "fsdp", "tensor", "expert")
RULES: Mapping[str, str] = MappingProxyType(
    {
        "embed": "fsdp",
        "heads": "tensor",
        "kv_heads": "tensor",
        "mlp": "tensor",
        "vocab": "tensor",
        "experts": "expert",
    }
)
"""The mesh axis over which a logical axis is split; ``layers``, like any other, is not."""

SHARDED = ("fsdp", "tensor", "expert")
"""The axes that split parameters; over ``data`` they are copied."""
BY_ROWS = ("data", "fsdp")
"""The axes over which the rows of a batch are split."""
SMALL = 1024
"""Elements below which a tensor is copied to every device."""
AUTO = "auto"
SETTING = "learner.mesh"

Split: TypeAlias = tuple[str, ...]
"""The mesh axes over which one dimension is split, outermost first."""
LogicalAxes: TypeAlias = Mapping[str, Sequence[str | None]]
"""The logical axis of each dimension, by a pattern that matches a tensor's whole name."""


class MeshSizes(NamedTuple):
    """Devices along each of ``AXES``."""

    data: int = 1
    fsdp: int = 1
    tensor: int = 1
    expert: int = 1

    @property
    def devices(self) -> int:
        return math.prod(self)

    @property
    def rows(self) -> int:
        """Number of parts into which the mesh splits a batch."""
        return self.data * self.fsdp


def sizes_of(setting: str, devices: int) -> MeshSizes:
    """Return the devices along each of ``AXES``: "auto" is all of them on fsdp.

    Raises ConfigError for a setting that is not a mesh, or needs more devices than there are.
    """
    if setting == AUTO:
        setting = f"fsdp={devices}"
    sizes: dict[str, int] = dict.fromkeys(AXES, 1)
    for part in setting.replace(" ", "").split(","):
        found = re.fullmatch(r"([a-z]+)=([1-9][0-9]{0,5})", part)
        if found is None or found[1] not in sizes:
            msg = (
                f"{SETTING} {setting!r} is not a mesh: write auto, or devices by axis such as"
                f" data=2,fsdp=4; the axes are {', '.join(AXES)}."
            )
            raise ConfigError(msg, path=SETTING)
        sizes[found[1]] = int(found[2])
    made = MeshSizes(**sizes)
    if made.devices > devices:
        msg = (
            f"{SETTING} {setting!r} needs {made.devices} devices and this learner has {devices}: "
            f"set {SETTING} to at most that many, or let it use more (CUDA_VISIBLE_DEVICES)."
        )
        raise ConfigError(msg, path=SETTING)
    return made


def check_batch(sizes: MeshSizes, batch: int) -> None:
    """Raise ConfigError if the mesh does not split the rows of a batch evenly."""
    if batch % sizes.rows:
        msg = (
            f"The mesh splits a batch {sizes.rows} ways (data times fsdp), and data.batch = {batch}"
            f" does not divide: set {SETTING} on this machine so that it does, such as"
            f" fsdp={math.gcd(batch, sizes.rows)}, or make the run with a multiple of {sizes.rows}."
        )
        raise ConfigError(msg, path=SETTING)


def splits(
    leaves: Sequence[LeafSpec], axes: LogicalAxes, sizes: Mapping[str, int]
) -> tuple[tuple[Split | None, ...], ...]:
    """Return how each tensor is split, by a model's logical axes where they match its name.

    A mesh axis that these leave unused, or that does not divide their dimension, splits the largest
    dimension that it divides; a small tensor, or one that no axis divides, is copied.
    """
    compiled = [(re.compile(pattern), logical) for pattern, logical in axes.items()]

    def logical_of(leaf: LeafSpec) -> Sequence[str | None]:
        found = [logical for pattern, logical in compiled if pattern.fullmatch(leaf.name)]
        fits = bool(found) and len(found[0]) == len(leaf.shape)
        return found[0] if fits else (None,) * len(leaf.shape)

    return tuple(split(leaf.shape, logical_of(leaf), sizes) for leaf in leaves)


def split(
    shape: Sequence[int], logical: Sequence[str | None], sizes: Mapping[str, int]
) -> tuple[Split | None, ...]:
    """Return for each dimension the mesh axes over which it is split, None for none."""
    ways_of: list[Split] = [() for _ in shape]
    left = [axis for axis in SHARDED if sizes[axis] > 1] if math.prod(shape) >= SMALL else []

    def divides(dimension: int, axis: str) -> bool:
        ways = math.prod(sizes[one] for one in ways_of[dimension]) * sizes[axis]
        return shape[dimension] % ways == 0

    for dimension, name in enumerate(logical):
        axis = RULES.get(name or "", "")
        if axis in left and divides(dimension, axis):
            ways_of[dimension] = (axis,)
            left.remove(axis)
    for axis in left:
        largest = sorted(range(len(shape)), key=lambda d: (bool(ways_of[d]), -shape[d]))
        for dimension in [d for d in largest if divides(d, axis)][:1]:
            ways_of[dimension] += (axis,)
    return tuple(names or None for names in ways_of)


def held_elements(leaves: Sequence[LeafSpec], axes: LogicalAxes, sizes: MeshSizes) -> int:
    """Return how many elements of the trained tensors each device of a mesh holds."""
    trained = [leaf for leaf in leaves if leaf.trainable]
    ways = sizes._asdict()
    return sum(
        leaf.size // math.prod(ways[axis] for names in found for axis in names or ())
        for leaf, found in zip(trained, splits(trained, axes, ways), strict=True)
    )
