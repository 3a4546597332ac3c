"""A learner's devices as one mesh, and where each of its arrays lies on it.

The mesh is a setting of the machine (``learner.mesh``), never of the run: the axes ``data``,
``fsdp``, ``tensor`` and ``expert``, each with a number of devices. A model names the logical axes
of its tensors; one table maps these to the mesh. On one device everything lies there.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, TypeAlias

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding
from numpy.typing import NDArray

from skerry.algorithm.fragments import LeafSpec
from skerry.errors import ConfigError
from skerry.models.base import Frozen, path_name

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
SMALL = 1024
"""Elements below which a tensor is copied to every device."""
AUTO = "auto"
SETTING = "learner.mesh"

Split: TypeAlias = tuple[str, ...]
"""The mesh axes over which one dimension is split, outermost first."""


def sizes_of(setting: str, devices: int) -> tuple[int, int, int, int]:
    """Return the devices along each of ``AXES``: "auto" is all of them on fsdp.

    Raises ConfigError for what is no mesh, or one of more devices than there are.
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
    needed = math.prod(sizes.values())
    if needed > devices:
        msg = (
            f"{SETTING} {setting!r} needs {needed} devices and this learner has {devices}: "
            f"set {SETTING} to at most that many, or let it use more (CUDA_VISIBLE_DEVICES)."
        )
        raise ConfigError(msg, path=SETTING)
    return sizes["data"], sizes["fsdp"], sizes["tensor"], sizes["expert"]


def make_mesh(setting: str = AUTO, devices: Sequence[Any] | None = None) -> Mesh:
    """Return a learner's mesh over the first of its devices; ConfigError if they are too few."""
    devices = jax.devices() if devices is None else devices
    sizes = sizes_of(setting, len(devices))
    automatic = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(sizes, AXES, axis_types=automatic, devices=devices[: math.prod(sizes)])


def one_device() -> Mesh:
    """Return the mesh of the default device alone."""
    return make_mesh(devices=jax.devices()[:1])


def check_batch(mesh: Mesh, batch: int) -> None:
    """Raise ConfigError if the rows of a batch do not go evenly onto the mesh."""
    ways = mesh.shape["data"] * mesh.shape["fsdp"]
    if batch % ways:
        msg = (
            f"The mesh splits a batch {ways} ways (data times fsdp), and data.batch = {batch} does"
            f" not divide: set {SETTING} on this machine so that it does, such as"
            f" fsdp={math.gcd(batch, ways)}, or make the run with a multiple of {ways}."
        )
        raise ConfigError(msg, path=SETTING)


def copied(mesh: Mesh) -> NamedSharding:
    """Return the sharding of what every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def by_rows(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a batch: rows over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(("data", "fsdp")))


def flat(mesh: Mesh) -> NamedSharding:
    """Return the sharding of a vector or of rows over every device of the mesh."""
    return NamedSharding(mesh, PartitionSpec(AXES))


def shardings(model: Any, specs: Sequence[LeafSpec], mesh: Mesh) -> tuple[NamedSharding, ...]:
    """Return where each tensor lies, by the model's ``axes`` where it has them.

    An axis that the model's names leave unused, or that does not divide, splits the largest
    dimension that it divides; a small tensor, or one that nothing divides, is copied.
    """
    axes: Mapping[str, Sequence[str | None]] = getattr(model, "axes", {})
    compiled = [(re.compile(pattern), logical) for pattern, logical in axes.items()]

    def logical_of(spec: LeafSpec) -> Sequence[str | None]:
        found = [logical for pattern, logical in compiled if pattern.fullmatch(spec.name)]
        fits = bool(found) and len(found[0]) == len(spec.shape)
        return found[0] if fits else (None,) * len(spec.shape)

    return tuple(
        NamedSharding(mesh, PartitionSpec(*split(spec.shape, logical_of(spec), mesh.shape)))
        for spec in specs
    )


def frozen_shapes(model: Any, mesh: Mesh) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the leaves of a model that are not trained, by name, as shapes and where they lie."""
    specs: tuple[LeafSpec, ...] = getattr(model, "frozen", ())
    dtype = getattr(model, "frozen_dtype", "float32")
    return {
        spec.name: jax.ShapeDtypeStruct(spec.shape, dtype, sharding=place)
        for spec, place in zip(specs, shardings(model, specs, mesh), strict=True)
    }


def frozen_leaves(model: Any, mesh: Mesh | None = None) -> Frozen:
    """Return the leaves of a model that are not trained, each device with its own part of them."""
    shapes = frozen_shapes(model, mesh or one_device())
    return model.frozen_leaves({n: s.sharding for n, s in shapes.items()}) if shapes else {}


def split(
    shape: Sequence[int], logical: Sequence[str | None], sizes: Mapping[str, int]
) -> tuple[Split | None, ...]:
    """Return for each dimension the mesh axes over which it is split, None for none."""
    splits: list[Split] = [() for _ in shape]
    left = [axis for axis in SHARDED if sizes[axis] > 1] if math.prod(shape) >= SMALL else []

    def divides(dimension: int, axis: str) -> bool:
        ways = math.prod(sizes[one] for one in splits[dimension]) * sizes[axis]
        return shape[dimension] % ways == 0

    for dimension, name in enumerate(logical):
        axis = RULES.get(name or "", "")
        if axis in left and divides(dimension, axis):
            splits[dimension] = (axis,)
            left.remove(axis)
    for axis in left:
        largest = sorted(range(len(shape)), key=lambda d: (bool(splits[d]), -shape[d]))
        for dimension in [d for d in largest if divides(d, axis)][:1]:
            splits[dimension] += (axis,)
    return tuple(names or None for names in splits)


def with_params(state: Any, specs: Sequence[LeafSpec], places: Sequence[NamedSharding]) -> Any:
    """Return where each tensor of an optimizer's state lies: with the parameter that it is of.

    ``state`` holds arrays or their shapes; ``places`` are those of ``specs``. A tensor is of the
    parameter whose name ends its own and whose shape it has; any other, such as a count, is copied.
    """
    known = {(s.name, s.shape): place for s, place in zip(specs, places, strict=True)}
    elsewhere = NamedSharding(places[0].mesh, PartitionSpec())

    def place_of(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        parts = path_name(path).split(".")
        ends = ((".".join(parts[start:]), tuple(leaf.shape)) for start in range(len(parts)))
        return next((known[end] for end in ends if end in known), elsewhere)

    return jax.tree_util.tree_map_with_path(place_of, state)


def put(values: NDArray[Any], place: Sharding) -> jax.Array:
    """Return a copy of a host's values on the devices, each of which is given its own part only."""
    parts = [
        jax.device_put(values[index], device, may_alias=False)
        for device, index in place.addressable_devices_indices_map(values.shape).items()
    ]
    return jax.make_array_from_single_device_arrays(values.shape, place, parts)


def held_bytes(shapes: Any, places: Any = None) -> int:
    """Return the bytes of a tree of arrays, or of their shapes, on each device of the mesh."""

    def held(leaf: Any, place: NamedSharding) -> int:
        return math.prod(place.shard_shape(tuple(leaf.shape))) * int(leaf.dtype.itemsize)

    places = jax.tree.map(lambda leaf: leaf.sharding, shapes) if places is None else places
    return sum(jax.tree.leaves(jax.tree.map(held, shapes, places)))


def check_memory(mesh: Mesh, needed: int) -> None:
    """Raise ConfigError if a device cannot hold ``needed`` bytes of training state.

    Activations come on top. Nothing is raised where a device does not say what it has, as a CPU.
    """
    for device in mesh.local_devices:
        limit = (device.memory_stats() or {}).get("bytes_limit", 0)
        if limit and needed > limit:
            msg = (
                f"Parameters, their gradients, moments and anchors need {needed:,} bytes on each of"
                f" {mesh.size} devices, and device {device.id} has {limit:,}: give this learner"
                f" more devices ({SETTING} with a larger fsdp), or the run a smaller model."
            )
            raise ConfigError(msg, path=SETTING)
